"""Key revocation cancels running calls, trials and connections, on every path."""

import asyncio
import gc
import json
from typing import Any

import pytest

from catalog.audit import SYSTEM, Actor
from catalog.models import Tool
from servers.connections import calls as upstream_calls
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys
from sessions_app.dispatch import authorization_cache, dispatcher, key_revocation
from sessions_app.ledger import batch_writer
from sessions_app.mcp import server as mcp_server
from sessions_app.models import Agent, AgentSession, ApiKey, Call
from tests.sessions_app.fast_path.test_mcp_call import Door, request
from tests.sessions_app.fast_path.test_rest_call import Web, agent, in_database
from tests.support.waiting import scaled, wait_for
from toolcrib.lib.errors import ToolcribError

__all__ = ["agent"]
LATER = {"tool_name": "raw__later", "arguments": {"seconds": 50}}
WAYS = ["rest short", "rest ordinary", "mcp short", "mcp ordinary"]


def revoke() -> None:
    api_keys.revoke(ApiKey.objects.get(scope="agent"), actor=SYSTEM)


def disable() -> None:
    agent_actions.disable(Agent.objects.get(), actor=SYSTEM)


def run_with_lifespan(scenario: Any, door: Door) -> Any:
    """Run a scenario with the parts that the lifespan starts."""

    async def run() -> Any:
        async with (
            asyncio.timeout(scaled(20)),
            batch_writer.run_writer(),
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
    ("way", "act"), [*((way, revoke) for way in WAYS), ("rest short", disable)]
)
def test_a_running_call_is_cancelled_when_its_key_is_revoked(way, act, agent, caplog, monkeypatch):
    protocol, _, how = way.partition(" ")
    if how != "short":
        monkeypatch.setattr(authorization_cache, "load", lambda *_: None)
    web = Web(agent.key, agent.open().id, way="cached" if how == "short" else "ordinary")
    door = Door(agent.key, short=how == "short")
    message = request("raw__later", LATER["arguments"])

    async def rest() -> tuple[int, Any]:
        answer = await web.call(LATER)
        assert answer.short is web.short
        assert answer.headers["www-authenticate"] == "Bearer"
        return answer.status, answer.json["error"]

    async def mcp() -> tuple[int, Any]:
        status, body = await door.ask(message)
        assert door.ways[-1] == how
        assert json.loads(body)["id"] is None
        return status, json.loads(body)["error"]["data"]

    async def scenario():
        short = {"seconds": 0}
        if protocol == "rest":
            await web.call({**LATER, "arguments": short})
        else:
            await door.ask(request("raw__later", short))
        call = asyncio.create_task(rest() if protocol == "rest" else mcp())
        await wait_for_running_calls()
        await in_database(act)
        response = await call
        # A cancelled request does not wait for the ledger, which is written afterwards.
        await in_database(wait_for, lambda: not dispatcher._in_flight, what="no call is in flight")
        return response

    status, error = run_with_lifespan(scenario, door)
    assert (status, error["code"]) == (401, "unauthorized")
    assert error["message"] == "This key was revoked or has expired."
    row = Call.objects.latest("pk")
    assert (row.state, row.error_code) == ("unknown", "key_revoked")
    assert "Whether the tool ran is not known" in row.error_message
    assert not key_revocation._registered
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_tried_tool_is_cancelled_with_its_token_and_other_calls_continue(agent):
    admin, _ = api_keys.create_key("trier", "admin", actor=SYSTEM)
    tool = Tool.objects.get(name="later")
    web = Web(agent.key, agent.open().id)
    door = Door(agent.key, short=True)

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
    valid_keys = key_revocation._valid_keys

    def failing(keys: Any) -> Any:
        monkeypatch.setattr(key_revocation, "_valid_keys", valid_keys)
        loop.call_soon_threadsafe(failed.set)
        raise OperationalError("no answer")

    async def scenario():
        nonlocal loop
        loop = asyncio.get_running_loop()
        work = RegisteredWork((await in_database(ApiKey.objects.get)).pk)
        key_revocation.register(work)
        await failed.wait()
        assert not work.ended.is_set()
        await in_database(revoke)
        await work.ended.wait()
        key_revocation.unregister(work)

    loop: Any = None
    monkeypatch.setattr(key_revocation, "_valid_keys", failing)
    run_with_lifespan(scenario, Door(agent.key, short=True))


def test_a_handshake_connection_is_closed_when_its_key_is_revoked(agent):
    door = Door(agent.key, short=True)
    server: mcp_server.ToolcribMcpServer = door.endpoint.server
    listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}

    async def scenario():
        connection_id = await door.shake()
        assert (await door.send(listing, mcp_session_id=connection_id))[0] == 200
        session = await in_database(AgentSession.objects.get)
        assert (session.state, len(server.connections)) == ("open", 1)
        await in_database(revoke)
        closed = lambda: not server.connections and not door.endpoint.manager._server_instances  # noqa: E731
        await in_database(wait_for, closed, what="the connection is closed")
        await in_database(session.refresh_from_db)
        assert session.state == "closed"
        return (await door.send(listing, mcp_session_id=connection_id))[0]

    assert run_with_lifespan(scenario, door) == 401
    assert not key_revocation._registered
