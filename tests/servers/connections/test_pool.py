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
from tests.support.upstreams.running import http_spec, stdio_spec
from tests.support.waiting import wait_for

SOON = 20  # seconds, for what should take none
with_database = pytest.mark.django_db(transaction=True)


def run(scenario):
    async def in_time():
        async with asyncio.timeout(50):
            return await scenario()

    return asyncio.run(in_time())


class Specs(PoolWatcher):
    """Knows servers by heart."""

    def __init__(self, **specs):
        self.specs = {int(name.removeprefix("n")): spec for name, spec in specs.items()}
        self.dials = 0

    async def spec(self, server_id):
        self.dials += 1
        return self.specs.get(server_id)


class Unheard(Specs):
    """Has a database that takes no notes."""

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
    """A spec of a server that nothing listens for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return http_spec(f"http://127.0.0.1:{port}/mcp")


async def ask(server, tool, session="", **arguments):
    isolation = "per_session" if session else "shared"
    target = CallTarget(server.pk, server.slug, server.generation, isolation, session)
    return await upstream_calls.call(target, tool, arguments, timeout=SOON)


async def count(server, session=""):
    """Return how often a workshop was asked, and its process."""
    outcome = await ask(server, "count", session)
    return outcome.structured["count"], outcome.structured["pid"]


@asynccontextmanager
async def listening():
    """Calls go over the connections of a listener."""
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


# --- Whose connection it is -------------------------------------------------------------------


@with_database
def test_sessions_of_an_isolated_server_have_a_process_each_which_ends_with_them():
    async def scenario():
        async with upstream_calls.call_pool():
            first, one = await count(server, "ses_1")
            again, two = await count(server, "ses_2")
            assert (first, again) == (1, 1)
            assert one != two
            assert await count(server, "ses_1") == (2, one)
            await upstream_calls.forget_session("ses_1")
            await until(lambda: is_gone(one), "the process of the session that ended is gone")
            assert await count(server, "ses_2") == (2, two)
            assert (await count(server, "ses_1"))[0] == 1
        await until(lambda: is_gone(two), "and so is the other, when all ends")

    make_session(session_id="ses_1")
    make_session(session_id="ses_2")
    server = make_program("workshop", isolation="per_session")
    run(scenario)


@with_database
def test_sessions_of_a_shared_server_share_its_process():
    async def scenario():
        async with upstream_calls.call_pool():
            _, one = await count(server)
            assert await count(server) == (2, one)
            await upstream_calls.forget_session("")  # no session: nothing is closed
            assert await count(server) == (3, one)

    server = make_program("workshop", connection_policy="on_demand")
    run(scenario)


@with_database
@pytest.mark.parametrize("session", ["", "ses_1"])
def test_a_connection_that_only_calls_needed_closes_when_idle_but_not_during_a_call(
    session, settings
):
    settings.IDLE_DISCONNECT = settings.SESSION_DISCONNECT = 0.6

    async def scenario():
        async with upstream_calls.call_pool():
            _, one = await count(server, session)
            waited = await ask(server, "wait", session, seconds=2)
            assert waited.state == "succeeded"
            assert await count(server, session) == (2, one)
            await until(lambda: is_gone(one), "the idle process is gone")
            assert upstream_calls._pool().owners == {}
            first, two = await count(server, session)
            assert first == 1
            assert two != one

    make_session(session_id="ses_1")
    server = make_program("workshop", connection_policy="on_demand")
    run(scenario)


@with_database
def test_a_session_keeps_its_own_connection_for_longer_than_others_are_kept(settings):
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
def test_a_session_that_ends_by_itself_takes_its_connections_along(end, pooling):
    async def scenario():
        async with pooling():
            _, one = await count(server, "ses_1")
            _, other = await count(server, "ses_2")
            await asyncio.to_thread(over)
            await until(lambda: is_gone(one), "the process of the session that ended is gone")
            assert await count(server, "ses_2") == (2, other)

    def over():
        if end == "expired":
            assert lifecycle.expire_idle() == 1
        else:
            ending.delete()

    ending = make_session(session_id="ses_1", started=timezone.now() - timedelta(days=2))
    make_session(session_id="ses_2")
    server = make_program("workshop", isolation="per_session")
    run(scenario)


@with_database
def test_a_call_is_not_cut_off_by_the_end_of_its_session():
    async def scenario():
        async with upstream_calls.call_pool():
            _, one = await count(server, "ses_1")
            slow = asyncio.create_task(ask(server, "wait", "ses_1", seconds=2, name="old"))
            await until(lambda: upstream_calls.in_flight(server.pk) == 1, "the call is out")
            await asyncio.to_thread(lifecycle.close_session, session)
            await until(lambda: not upstream_calls._pool().owners, "its end was seen")
            assert (await slow).structured == {"seconds": 2, "name": "old"}
            await until(lambda: is_gone(one), "the process is gone")

    session = make_session(session_id="ses_1")
    server = make_program("workshop", isolation="per_session")
    run(scenario)


@with_database
def test_sessions_past_those_that_may_have_their_own_connection_are_told_what_to_do(settings):
    settings.SESSION_CONNECTIONS = 1

    async def scenario():
        async with upstream_calls.call_pool():
            assert (await count(server, "ses_1"))[0] == 1
            refused = await ask(server, "count", "ses_2")
            assert (refused.state, refused.code) == ("not_sent", "busy")
            assert "All 1 connections that sessions may have" in refused.message
            assert "Close sessions" in refused.hint
            assert (await count(other, "ses_2"))[0] == 1
            assert (await count(server))[0] == 1  # the shared one is nobody's own
            assert (await count(server, "ses_1"))[0] == 2
            await upstream_calls.forget_session("ses_1")
            assert (await count(server, "ses_2"))[0] == 1

    make_session(session_id="ses_1")
    make_session(session_id="ses_2")
    server = make_program("workshop", isolation="per_session")
    other = make_program("workshop", isolation="per_session")
    run(scenario)


@with_database
def test_a_question_that_fails_is_no_end_of_the_looks(caplog, monkeypatch):
    asked = []

    def stumble(sessions):
        asked.append(sessions)
        raise KeyError("odd")

    async def scenario():
        async with upstream_calls.call_pool():
            _, one = await count(server, "ses_1")
            await until(lambda: len(asked) > 1, "it is asked again")
            coordination.set_open_sessions_source(lifecycle.open_sessions)
            await until(lambda: is_gone(one), "the process of no session is gone")

    monkeypatch.setattr(coordination, "_knows", stumble)
    server = make_program("workshop", isolation="per_session")
    run(scenario)
    assert "KeyError: 'odd'" in caplog.text


@with_database
def test_the_listener_keeps_its_own_connections_and_lends_them_to_calls(settings):
    settings.IDLE_DISCONNECT = 0.1

    async def scenario():
        listener = Listener()
        running = asyncio.create_task(listener.run())
        try:
            await until(lambda: (kept.pk, "") in listener.pool.owners, "the listener dialled")
            _, one = await count(kept)
            _, other = await count(visited)
            assert pool.process_pool() is listener.pool
            assert len(listener.pool.owners) == 2
            await until(lambda: is_gone(other), "what only the call needed is closed")
            assert await count(kept) == (2, one)
        finally:
            running.cancel()
            await asyncio.wait({running})

    kept = make_program("workshop")
    visited = make_program("workshop", connection_policy="on_demand")
    run(scenario)


@with_database
def test_a_look_that_goes_wrong_is_no_end_of_the_listener(caplog):
    looks = []

    def stumble():
        looks.append(1)
        if len(looks) == 1:
            raise KeyError("odd")

    async def scenario():
        listener = Listener(on_look=stumble)
        running = asyncio.create_task(listener.run())
        try:
            await until(lambda: len(looks) > 1 or running.done(), "it looks again")
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
def test_a_call_in_flight_ends_on_the_old_connection_while_the_next_takes_the_new_one():
    async def scenario():
        async with upstream_calls.call_pool():
            _, one = await count(server)
            slow = asyncio.create_task(ask(server, "wait", seconds=2, name="old"))
            await until(lambda: upstream_calls.in_flight(server.pk) == 1, "the call is out")
            await asyncio.to_thread(edit)
            _, two = await count(server)
            assert two != one
            assert (await slow).structured == {"seconds": 2, "name": "old"}
            await until(lambda: is_gone(one), "the old process is gone")

    def edit():
        server_actions.set_credentials(server, "env", {"REGION": None}, actor=SYSTEM)
        server.refresh_from_db()

    server = make_program("workshop")
    run(scenario)


@with_database
@pytest.mark.parametrize("act", ["an edit", "the end of its session"])
def test_a_connection_that_is_let_go_lasts_until_its_calls_have_ended(act, monkeypatch):
    monkeypatch.setattr(pool, "DRAIN", 0.0)

    async def scenario():
        async with upstream_calls.call_pool():
            _, one = await count(server, "ses_1")
            slow = asyncio.create_task(ask(server, "wait", "ses_1", seconds=2, name="old"))
            await until(lambda: upstream_calls.in_flight(server.pk) == 1, "the call is out")
            if act == "an edit":
                await asyncio.to_thread(Server.objects.update, generation=2)
            else:
                await upstream_calls.forget_session("ses_1")
            assert (await slow).structured == {"seconds": 2, "name": "old"}
            await until(lambda: is_gone(one), "the old process is gone")

    make_session(session_id="ses_1")
    server = make_program("workshop", isolation="per_session")
    run(scenario)


@with_database
def test_a_call_planned_before_an_edit_goes_to_the_server_as_it_is_now():
    async def scenario():
        async with upstream_calls.call_pool():
            outcome = await ask(server, "count")
            assert outcome.state == "succeeded"
            owner = upstream_calls._pool().owners[server.pk, ""]
            assert owner.generation == 7
            assert (await ask(server, "count")).structured["count"] == 2

    server = make_program("workshop")  # of generation 1
    Server.objects.update(generation=7)
    run(scenario)


def test_a_call_and_a_look_that_find_the_same_edit_replace_the_connection_once():
    async def scenario():
        async with pooled(n1=stdio_spec("raw_calls")) as own:
            first = await own.owner_for_call(1, "", 1)
            await first.connection_for_call()
            own.watcher.specs[1] = replace(first.spec, generation=2)
            _, second = await asyncio.gather(own.keep({1: 2}), own.owner_for_call(1, "", 2))
            assert second is not first
            assert own.owners == {(1, ""): second}
            await second.connection_for_call()
            assert first.task.done()
            assert own.watcher.dials == 3  # two, and the question which edit is newer

    run(scenario)


@with_database
def test_disabling_a_server_ends_its_connections():
    async def scenario():
        async with upstream_calls.call_pool():
            _, one = await count(server, "ses_1")
            await asyncio.to_thread(Server.objects.update, enabled=False)
            await until(lambda: is_gone(one), "the process is gone")
            outcome = await ask(server, "count", "ses_1")
            assert (outcome.state, outcome.code) == ("not_sent", "disabled")

    make_session(session_id="ses_1")
    server = make_program("workshop")
    run(scenario)


def test_keeping_leaves_connections_that_calls_opened_alone():
    async def scenario():
        async with pooled(n1=stdio_spec("raw_calls"), n2=stdio_spec("raw_calls")) as own:
            await own.keep({1: 1}, {1: 1, 2: 1})
            for session in ("", "ses_1"):
                owner = await own.owner_for_call(2, session, 1)
                await owner.connection_for_call()
            await own.keep({1: 1}, {1: 1, 2: 1})
            assert set(own.owners) == {(1, ""), (2, ""), (2, "ses_1")}
            await own.keep({1: 1}, {1: 1})
            assert set(own.owners) == {(1, "")}

    run(scenario)


# --- Dialling again ---------------------------------------------------------------------------


async def dial(own):
    owner = await own.owner_for_call(1, "", 1)
    with pytest.raises(UpstreamError) as caught:
        await owner.connection_for_call()
    return caught.value


def test_after_three_failures_calls_are_answered_at_once_until_the_pause_is_over():
    async def scenario():
        async with pooled(n1=refused()) as own:
            for _ in range(3):
                assert (await dial(own)).code == "refused"
            owner = own.owners[1, ""]
            assert own.watcher.dials == 3
            errors = await asyncio.gather(*(dial(own) for _ in range(20)))
            assert own.watcher.dials == 3
            assert {error.code for error in errors} == {"refused"}
            assert all("connect again in" in error.hint for error in errors)
            await until(lambda: own.watcher.dials == 4, "the owner itself tries again")
            await until(lambda: owner.pause_ends is not None, "and pauses")
            assert owner.pause_ends > time.monotonic() + 1

    run(scenario)


def test_pauses_are_kept_also_where_a_failure_cannot_be_noted(caplog):
    async def scenario():
        async with pooled(Unheard, n1=refused()) as own:
            for _ in range(3):
                assert (await dial(own)).code == "refused"
            assert "connect again in" in (await dial(own)).hint
            assert own.watcher.dials == 3

    run(scenario)
    assert "database is locked" in caplog.text


def test_calls_that_come_together_share_one_dial():
    async def scenario():
        async with pooled(n1=refused()) as own:
            await asyncio.gather(*(dial(own) for _ in range(20)))
            assert own.watcher.dials == 1

    run(scenario)


def test_a_server_that_comes_back_is_used_at_once():
    async def scenario():
        async with pooled(n1=refused()) as own:
            await dial(own)
            own.watcher.specs[1] = stdio_spec("raw_calls")
            owner = await own.owner_for_call(1, "", 1)
            assert not (await owner.connection_for_call()).closed.is_set()

    run(scenario)


def test_losses_with_a_healthy_time_between_never_add_up(monkeypatch):
    monkeypatch.setattr(pool, "HEALTHY_AFTER", 0.0)

    async def scenario():
        async with pooled(n1=stdio_spec("raw_calls")) as own:
            owner = await own.owner_for_call(1, "", 1)
            for _ in range(5):
                connection = await owner.connection_for_call()
                connection._link.lose()
                await owner.lost.wait()
            assert owner.failures == 1
            assert owner.wait <= 2 * pool.FIRST_WAIT

    run(scenario)


def test_a_pool_closes_while_a_server_keeps_it_waiting():
    async def scenario():
        async with pooled(n1=stdio_spec("raw_stdio", "--do", "hang")) as own:
            owner = await own.owner_for_call(1, "", 1)
            waiting = asyncio.create_task(owner.connection_for_call())
            await until(lambda: own.watcher.dials == 1, "the dial began")
            async with asyncio.timeout(SOON):
                await own.close()
            assert owner.task.cancelled()
            with pytest.raises(UpstreamError) as caught:
                await waiting
            assert caught.value.code == "closed"

    run(scenario)


def test_work_for_the_pool_may_come_from_another_loop():
    async def scenario():
        async with pooled(n1=stdio_spec("raw_calls")) as own:

            async def loop_of_work():
                return asyncio.get_running_loop()

            found = await asyncio.to_thread(lambda: asyncio.run(own.elsewhere(loop_of_work())))
            assert found is own.loop

    run(scenario)
