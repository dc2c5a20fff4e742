"""Key revocation cancels running calls, trials and connections, on every path."""

import asyncio
import gc
from typing import Any

import pytest

from catalog.audit import SYSTEM, Actor
from catalog.models import Tool
from servers.connections import calls as upstream_calls
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys
from sessions_app.dispatch import dispatcher, key_revocation
from sessions_app.ledger import writer as ledger_writer
from sessions_app.mcp import sessions as mcp_sessions
from sessions_app.models import Agent, ApiKey, Call
from tests.sessions_app.mcp.test_tool_calls import LEGACY, MODERN, Door
from tests.sessions_app.sessions.test_endpoint import Web, agent, in_database
from tests.support.waiting import scaled, wait_for
from toolcrib.lib.errors import ToolcribError

__all__ = ["agent"]
LATER = {"tool_name": "raw__later", "arguments": {"seconds": 50}}


def revoke() -> None:
    api_keys.revoke(ApiKey.objects.get(scope="agent"), actor=SYSTEM)


def disable() -> None:
    agent_actions.set_enabled(Agent.objects.get(), False, actor=SYSTEM)


def run_with_lifespan(scenario: Any, door: Door) -> Any:
    """Run a scenario with the parts that the lifespan starts."""

    async def run() -> Any:
        async with (
            asyncio.timeout(scaled(20)),
            ledger_writer.run_writer(),
            key_revocation.watch_revocations(),
            upstream_calls.call_pool(),
            door.endpoint.run(),
        ):
            return await scenario()

    return asyncio.run(run())


async def wait_for_running_calls(many: int = 1) -> None:
    rows = Call.objects.filter(state="sent", tool_name="raw__later")
    await in_database(wait_for, lambda: rows.count() == many, what="calls are running")


@pytest.mark.parametrize(
    ("way", "act"), [("rest", revoke), ("rest", disable), (MODERN, revoke), (LEGACY, revoke)]
)
def test_a_running_call_is_cancelled_when_its_key_is_revoked(way, act, agent, caplog):
    web = Web(agent.key, agent.open().id, cached=True)
    door = Door(agent.key, way, cached=True)

    async def call(seconds: int) -> tuple[int, Any]:
        arguments = {"seconds": seconds}
        if way == "rest":
            answer = await web.call({**LATER, "arguments": arguments})
        else:
            answer = await door.call("raw__later", arguments)
        if answer.status == 200:
            return answer.status, None
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json["error"]
        return answer.status, error if way == "rest" else error["data"]

    async def scenario():
        await call(0)
        running = asyncio.create_task(call(50))
        await wait_for_running_calls()
        await in_database(act)
        response = await running
        # A cancelled request does not wait for the ledger, which is written afterwards.
        await in_database(wait_for, lambda: not dispatcher._in_flight, what="no call is in flight")
        return response

    status, error = run_with_lifespan(scenario, door)
    assert (status, error["code"]) == (401, "unauthorized")
    assert error["message"] == "This key was revoked or has expired."
    row = Call.objects.latest("pk")
    assert (row.state, row.error_code) == ("unknown", "key_revoked")
    assert "Whether the tool ran is not known" in row.error_message
    assert not key_revocation.running
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_tried_tool_is_cancelled_with_its_token_and_other_calls_continue(agent):
    admin, _ = api_keys.create_key("trier", "admin", actor=SYSTEM)
    tool = Tool.objects.get(name="later")
    web = Web(agent.key, agent.open().id, cached=True)
    door = Door(agent.key, MODERN, cached=True)

    async def scenario():
        actor = Actor("token", admin.name, admin.pk)
        trial = asyncio.create_task(dispatcher.try_tool(tool, {"seconds": 50}, actor=actor))
        other = asyncio.create_task(web.call({**LATER, "arguments": {"seconds": 2}}))
        await wait_for_running_calls(2)
        await in_database(api_keys.revoke, admin, actor=SYSTEM)
        with pytest.raises(key_revocation.KeyRevoked):
            await trial
        return await other

    assert run_with_lifespan(scenario, door).status == 200
    assert set(Call.objects.values_list("state", flat=True)) == {"unknown", "succeeded"}


class RegisteredWork:
    """Work of a key that records when it is ended."""

    def __init__(self, key: int) -> None:
        self.key, self.ended = key, asyncio.Event()

    def end(self, reason: ToolcribError) -> None:
        self.ended.set()


def test_an_unavailable_database_cancels_nothing_and_is_checked_again(agent, monkeypatch):
    from django.db import OperationalError

    failed = asyncio.Event()
    valid_keys = api_keys.valid_keys

    def failing(keys: Any) -> Any:
        monkeypatch.setattr(api_keys, "valid_keys", valid_keys)
        loop.call_soon_threadsafe(failed.set)
        raise OperationalError("no answer")

    async def scenario():
        nonlocal loop
        loop = asyncio.get_running_loop()
        work = RegisteredWork((await in_database(ApiKey.objects.get)).pk)
        key_revocation.running.add(work)
        await failed.wait()
        assert not work.ended.is_set()
        await in_database(revoke)
        await work.ended.wait()
        key_revocation.running.discard(work)

    loop: Any = None
    monkeypatch.setattr(api_keys, "valid_keys", failing)
    run_with_lifespan(scenario, Door(agent.key, MODERN, cached=True))


def test_the_stream_of_a_handshake_connection_ends_when_its_key_is_revoked(agent):
    door = Door(agent.key, LEGACY, cached=True)

    async def scenario():
        headers = {"mcp-session-id": await door.connect()}
        stream = asyncio.create_task(door.send(None, headers, method="GET"))
        opened = lambda: door.endpoint.streams.notifications  # noqa: E731
        await asyncio.to_thread(wait_for, opened, what="the stream is open")
        await in_database(revoke)
        ended = await stream
        assert not door.endpoint.streams.requests
        return ended, await door.call()

    mcp_sessions.clear_caches()
    ended, call = run_with_lifespan(scenario, door)
    assert (ended.status, call.status) == (200, 401)
    assert not key_revocation.running
