"""The connection pool: isolation, edits, idle connections, reconnects."""

import asyncio
import os
import socket
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import OperationalError
from django.utils import timezone

from catalog.audit import SYSTEM
from servers.connections import calls as upstream_calls
from servers.connections import coordination, pool
from servers.connections.calls import CallTarget
from servers.connections.pool import Pool, PoolWatcher
from servers.errors import UpstreamError
from servers.models import Server
from servers.registration import actions as server_actions
from servers.sync.listener import Listener
from sessions_app.sessions import lifecycle
from tests.support.factories import make_program, make_session
from tests.support.upstream_calls import in_flight
from tests.support.upstreams.running import http_spec, stdio_spec
from tests.support.waiting import scaled, wait_for

SOON = 20  # seconds, for operations that should take none
with_database = pytest.mark.django_db(transaction=True)


def run(scenario):
    async def in_time():
        async with asyncio.timeout(scaled(50)):
            return await scenario()

    return asyncio.run(in_time())


class Specs(PoolWatcher):
    """Returns fixed connection settings and counts the connection attempts."""

    def __init__(self, **specs):
        self.specs = {int(name.removeprefix("n")): spec for name, spec in specs.items()}
        self.attempts = 0

    async def spec(self, server_id):
        self.attempts += 1
        return self.specs.get(server_id)


class DatabaseDown(Specs):
    """Cannot record failures."""

    async def failed(self, server_id, generation, error):
        raise OperationalError("database is locked")


@asynccontextmanager
async def pooled(watcher=Specs, **specs):
    own = Pool(watcher(**specs))
    try:
        yield own
    finally:
        await own.close()


def refused():
    """Return the settings of a server on a closed port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return http_spec(f"http://127.0.0.1:{port}/mcp")


async def ask(server, tool, session="", **arguments):
    isolation = "per_session" if session else "shared"
    target = CallTarget(server.pk, server.slug, server.generation, isolation, session)
    return await upstream_calls.call(target, tool, arguments, timeout=SOON)


async def count(server, session=""):
    """Return the number of calls of a workshop, and its process id."""
    outcome = await ask(server, "count", session)
    return outcome.structured["count"], outcome.structured["pid"]


@asynccontextmanager
async def listening():
    """Make calls over the connections of a listener."""
    listener = Listener()
    running = asyncio.create_task(listener.run())
    try:
        await until(lambda: pool.process_pool() is listener.pool, "the listener runs")
        yield
    finally:
        running.cancel()
        await asyncio.wait({running})


async def until(check, what):
    await asyncio.to_thread(wait_for, check, SOON, what=what, every=0.01)


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# --- Sharing and isolation --------------------------------------------------------------------


@with_database
def test_sessions_of_an_isolated_server_have_their_own_process_which_ends_with_them():
    async def scenario():
        async with upstream_calls.call_pool():
            first_count, first_pid = await count(server, "ses_1")
            second_count, second_pid = await count(server, "ses_2")
            assert (first_count, second_count) == (1, 1)
            assert first_pid != second_pid
            assert await count(server, "ses_1") == (2, first_pid)
            await upstream_calls.forget_session("ses_1")
            await until(lambda: is_gone(first_pid), "the process of the ended session is gone")
            assert await count(server, "ses_2") == (2, second_pid)
            assert (await count(server, "ses_1"))[0] == 1
        await until(lambda: is_gone(second_pid), "the other process is gone")

    make_session(session_id="ses_1")
    make_session(session_id="ses_2")
    server = make_program("workshop", isolation="per_session")
    run(scenario)


@with_database
def test_sessions_of_a_shared_server_share_its_process():
    async def scenario():
        async with upstream_calls.call_pool():
            _, pid = await count(server)
            assert await count(server) == (2, pid)
            await upstream_calls.forget_session("")  # no session: nothing is closed
            assert await count(server) == (3, pid)

    server = make_program("workshop", connection_policy="on_demand")
    run(scenario)


@with_database
@pytest.mark.parametrize("session", ["", "ses_1"])
def test_a_connection_opened_for_calls_closes_when_idle_but_not_during_a_call(session, settings):
    settings.IDLE_DISCONNECT = settings.SESSION_DISCONNECT = 0.6

    async def scenario():
        async with upstream_calls.call_pool():
            _, pid = await count(server, session)
            waited = await ask(server, "wait", session, seconds=2)
            assert waited.state == "succeeded"
            assert await count(server, session) == (2, pid)
            await until(lambda: is_gone(pid), "the idle process is gone")
            assert upstream_calls.current_pool().owners == {}
            new_count, new_pid = await count(server, session)
            assert new_count == 1
            assert new_pid != pid

    make_session(session_id="ses_1")
    server = make_program("workshop", connection_policy="on_demand")
    run(scenario)


@with_database
def test_a_connection_of_a_session_may_be_idle_for_longer_than_a_shared_one(settings):
    settings.IDLE_DISCONNECT = 0.1

    async def scenario():
        async with upstream_calls.call_pool():
            _, own = await count(server, "ses_1")
            _, shared = await count(server)
            await until(lambda: is_gone(shared), "the idle process is gone")
            assert await count(server, "ses_1") == (2, own)

    make_session(session_id="ses_1")
    server = make_program("workshop")
    run(scenario)


@with_database
@pytest.mark.parametrize("pooling", [upstream_calls.call_pool, listening])
@pytest.mark.parametrize("end", ["expired", "deleted"])
def test_the_connections_of_an_expired_or_deleted_session_are_closed(end, pooling):
    async def scenario():
        async with pooling():
            _, pid = await count(server, "ses_1")
            _, other = await count(server, "ses_2")
            await asyncio.to_thread(end_session)
            await until(lambda: is_gone(pid), "the process of the ended session is gone")
            assert await count(server, "ses_2") == (2, other)

    def end_session():
        if end == "expired":
            assert lifecycle.expire_idle() == 1
        else:
            ending.delete()

    ending = make_session(session_id="ses_1", started=timezone.now() - timedelta(days=2))
    make_session(session_id="ses_2")
    server = make_program("workshop", isolation="per_session")
    run(scenario)


@with_database
def test_a_running_call_survives_the_end_of_its_session():
    async def scenario():
        async with upstream_calls.call_pool():
            _, old_pid = await count(server, "ses_1")
            slow = asyncio.create_task(ask(server, "wait", "ses_1", seconds=2, name="old"))
            await until(lambda: in_flight(server.pk) == 1, "the call is out")
            await asyncio.to_thread(lifecycle.close_session, session)
            await until(lambda: not upstream_calls.current_pool().owners, "the end was noticed")
            assert (await slow).structured == {"seconds": 2, "name": "old"}
            await until(lambda: is_gone(old_pid), "the process is gone")

    session = make_session(session_id="ses_1")
    server = make_program("workshop", isolation="per_session")
    run(scenario)


@with_database
def test_too_many_session_connections_are_rejected_with_a_hint(settings):
    settings.SESSION_CONNECTIONS = 1

    async def scenario():
        async with upstream_calls.call_pool():
            assert (await count(server, "ses_1"))[0] == 1
            rejected = await ask(server, "count", "ses_2")
            assert (rejected.state, rejected.code) == ("not_sent", "busy")
            assert "All 1 session connections" in rejected.message
            assert "Close sessions" in rejected.hint
            assert (await count(other, "ses_2"))[0] == 1
            assert (await count(server))[0] == 1  # the shared connection belongs to no session
            assert (await count(server, "ses_1"))[0] == 2
            await upstream_calls.forget_session("ses_1")
            assert (await count(server, "ses_2"))[0] == 1

    make_session(session_id="ses_1")
    make_session(session_id="ses_2")
    server = make_program("workshop", isolation="per_session")
    other = make_program("workshop", isolation="per_session")
    run(scenario)


@with_database
def test_maintenance_continues_after_an_exception(caplog, monkeypatch):
    polls = []

    def fail(sessions):
        polls.append(sessions)
        raise KeyError("odd")

    async def scenario():
        async with upstream_calls.call_pool():
            _, pid = await count(server, "ses_1")
            await until(lambda: len(polls) > 1, "it polls again")
            coordination.set_open_sessions_source(lifecycle.open_sessions)
            await until(lambda: is_gone(pid), "the process of the unknown session is gone")

    monkeypatch.setattr(coordination, "_open_sessions", fail)
    server = make_program("workshop", isolation="per_session")
    run(scenario)
    assert "KeyError: 'odd'" in caplog.text


@with_database
def test_calls_share_the_persistent_connections_of_the_listener(settings):
    settings.IDLE_DISCONNECT = 0.1

    async def scenario():
        listener = Listener()
        running = asyncio.create_task(listener.run())
        try:
            await until(lambda: (always.pk, "") in listener.pool.owners, "the listener connects")
            _, pid = await count(always)
            _, other = await count(on_demand)
            assert pool.process_pool() is listener.pool
            assert len(listener.pool.owners) == 2
            await until(lambda: is_gone(other), "the connection of the call is closed")
            assert await count(always) == (2, pid)
        finally:
            running.cancel()
            await asyncio.wait({running})

    always = make_program("workshop")
    on_demand = make_program("workshop", connection_policy="on_demand")
    run(scenario)


@with_database
def test_the_listener_continues_after_an_exception(caplog):
    polls = []

    def fail_once():
        polls.append(1)
        if len(polls) == 1:
            raise KeyError("odd")

    async def scenario():
        listener = Listener(on_poll=fail_once)
        running = asyncio.create_task(listener.run())
        try:
            await until(lambda: len(polls) > 1 or running.done(), "it polls again")
            assert (await count(server))[0] == 1
        finally:
            running.cancel()
            await asyncio.wait({running})
        assert running.cancelled()

    server = make_program("workshop")
    run(scenario)
    assert "KeyError: 'odd'" in caplog.text


# --- Edits ------------------------------------------------------------------------------------


@with_database
def test_a_running_call_ends_on_the_old_connection_while_the_next_uses_the_new_one():
    async def scenario():
        async with upstream_calls.call_pool():
            _, old_pid = await count(server)
            slow = asyncio.create_task(ask(server, "wait", seconds=2, name="old"))
            await until(lambda: in_flight(server.pk) == 1, "the call is out")
            await asyncio.to_thread(edit)
            _, new_pid = await count(server)
            assert new_pid != old_pid
            assert (await slow).structured == {"seconds": 2, "name": "old"}
            await until(lambda: is_gone(old_pid), "the old process is gone")

    def edit():
        server_actions.set_credentials(server, "env", {"REGION": None}, actor=SYSTEM)
        server.refresh_from_db()

    server = make_program("workshop")
    run(scenario)


@with_database
@pytest.mark.parametrize("event", ["an edit", "the end of its session"])
def test_a_retired_connection_stays_open_until_its_calls_have_ended(event, monkeypatch):
    monkeypatch.setattr(pool, "DRAIN_GRACE", 0.0)

    async def scenario():
        async with upstream_calls.call_pool():
            _, old_pid = await count(server, "ses_1")
            slow = asyncio.create_task(ask(server, "wait", "ses_1", seconds=2, name="old"))
            await until(lambda: in_flight(server.pk) == 1, "the call is out")
            if event == "an edit":
                await asyncio.to_thread(Server.objects.update, generation=2)
            else:
                await upstream_calls.forget_session("ses_1")
            assert (await slow).structured == {"seconds": 2, "name": "old"}
            await until(lambda: is_gone(old_pid), "the old process is gone")

    make_session(session_id="ses_1")
    server = make_program("workshop", isolation="per_session")
    run(scenario)


@with_database
def test_a_call_planned_before_an_edit_uses_the_current_settings():
    async def scenario():
        async with upstream_calls.call_pool():
            outcome = await ask(server, "count")
            assert outcome.state == "succeeded"
            owner = upstream_calls.current_pool().owners[server.pk, ""]
            assert owner.generation == 7
            assert (await ask(server, "count")).structured["count"] == 2

    server = make_program("workshop")  # of generation 1
    Server.objects.update(generation=7)
    run(scenario)


def test_a_call_and_the_maintenance_that_notice_the_same_edit_replace_the_connection_once():
    async def scenario():
        async with pooled(n1=stdio_spec("raw_calls")) as own:
            first = await own.owner_for_call(1, "", 1)
            await first.connection_for_call()
            own.watcher.specs[1] = replace(first.spec, generation=2)
            _, second = await asyncio.gather(
                own.maintain({1: 2}, {1: 2}, ()), own.owner_for_call(1, "", 2)
            )
            assert second is not first
            assert own.owners == {(1, ""): second}
            await second.connection_for_call()
            assert first.task.done()
            assert own.watcher.attempts == 3  # two, and a query for the newer generation

    run(scenario)


@with_database
def test_disabling_a_server_closes_its_connections():
    async def scenario():
        async with upstream_calls.call_pool():
            _, old_pid = await count(server, "ses_1")
            await asyncio.to_thread(Server.objects.update, enabled=False)
            await until(lambda: is_gone(old_pid), "the process is gone")
            outcome = await ask(server, "count", "ses_1")
            assert (outcome.state, outcome.code) == ("not_sent", "disabled")

    make_session(session_id="ses_1")
    server = make_program("workshop")
    run(scenario)


def test_maintenance_does_not_close_connections_that_calls_opened():
    async def scenario():
        async with pooled(n1=stdio_spec("raw_calls"), n2=stdio_spec("raw_calls")) as own:
            await own.maintain({1: 1}, {1: 1, 2: 1}, ())
            for session in ("", "ses_1"):
                owner = await own.owner_for_call(2, session, 1)
                await owner.connection_for_call()
            await own.maintain({1: 1}, {1: 1, 2: 1}, ())
            assert set(own.owners) == {(1, ""), (2, ""), (2, "ses_1")}
            await own.maintain({1: 1}, {1: 1}, ())
            assert set(own.owners) == {(1, "")}

    run(scenario)


# --- Reconnecting -----------------------------------------------------------------------------


async def fail_to_connect(own):
    owner = await own.owner_for_call(1, "", 1)
    with pytest.raises(UpstreamError) as caught:
        await owner.connection_for_call()
    return caught.value


def test_after_three_failures_calls_fail_fast_until_the_next_attempt():
    async def scenario():
        async with pooled(n1=refused()) as own:
            for _ in range(3):
                assert (await fail_to_connect(own)).code == "refused"
            owner = own.owners[1, ""]
            assert own.watcher.attempts == 3
            errors = await asyncio.gather(*(fail_to_connect(own) for _ in range(20)))
            assert own.watcher.attempts == 3
            assert {error.code for error in errors} == {"refused"}
            assert all("reconnects in" in error.hint for error in errors)
            await until(lambda: own.watcher.attempts == 4, "the owner reconnects")
            await until(lambda: owner.retry_at is not None, "and waits")
            assert owner.retry_at > time.monotonic() + 1

    run(scenario)


def test_the_backoff_continues_when_a_failure_cannot_be_recorded(caplog):
    async def scenario():
        async with pooled(DatabaseDown, n1=refused()) as own:
            for _ in range(3):
                assert (await fail_to_connect(own)).code == "refused"
            assert "reconnects in" in (await fail_to_connect(own)).hint
            assert own.watcher.attempts == 3

    run(scenario)
    assert "database is locked" in caplog.text


def test_concurrent_calls_share_one_connection_attempt():
    async def scenario():
        async with pooled(n1=refused()) as own:
            await asyncio.gather(*(fail_to_connect(own) for _ in range(20)))
            assert own.watcher.attempts == 1

    run(scenario)


def test_a_server_that_is_reachable_again_is_used_at_once():
    async def scenario():
        async with pooled(n1=refused()) as own:
            await fail_to_connect(own)
            own.watcher.specs[1] = stdio_spec("raw_calls")
            owner = await own.owner_for_call(1, "", 1)
            assert not (await owner.connection_for_call()).closed.is_set()

    run(scenario)


def test_failures_do_not_add_up_when_the_connection_was_healthy_in_between(monkeypatch):
    monkeypatch.setattr(pool, "HEALTHY_AFTER", 0.0)

    async def scenario():
        async with pooled(n1=stdio_spec("raw_calls")) as own:
            owner = await own.owner_for_call(1, "", 1)
            for _ in range(5):
                connection = await owner.connection_for_call()
                connection._state.mark_dead()
                await owner.lost.wait()
            assert owner.failures == 1
            assert owner.backoff <= 2 * pool.FIRST_BACKOFF

    run(scenario)


def test_a_pool_closes_while_a_server_hangs_in_the_handshake():
    async def scenario():
        async with pooled(n1=stdio_spec("raw_stdio", "--do", "hang")) as own:
            owner = await own.owner_for_call(1, "", 1)
            waiting = asyncio.create_task(owner.connection_for_call())
            await until(lambda: own.watcher.attempts == 1, "the attempt started")
            async with asyncio.timeout(scaled(SOON)):
                await own.close()
            assert owner.task.cancelled()
            with pytest.raises(UpstreamError) as caught:
                await waiting
            assert caught.value.code == "closed"

    run(scenario)


def test_coroutines_run_on_the_loop_of_the_pool_from_another_loop():
    async def scenario():
        async with pooled(n1=stdio_spec("raw_calls")) as own:

            async def loop_of_work():
                return asyncio.get_running_loop()

            loop = await asyncio.to_thread(lambda: asyncio.run(own.run_on_loop(loop_of_work())))
            assert loop is own.loop

    run(scenario)
