"""A call over MCP on the fast path and through the SDK: the same responses and the same errors."""

import asyncio
import json
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.models import Tool
from catalog.tools.actions import hold
from servers.connections import calls as upstream_calls
from sessions_app.agents import api_keys, rate_limits
from sessions_app.dispatch import authorization_cache
from sessions_app.fast_path import mcp_call
from sessions_app.ledger import batch_writer
from sessions_app.mcp.endpoint import Endpoint
from sessions_app.models import AgentSession, ApiKey, Call
from sessions_app.sessions import lifecycle
from sessions_app.sessions.loading import MIN_IDLE_SECONDS
from tests.sessions_app.fast_path.test_rest_call import CONTENT, agent, in_database
from tests.support.waiting import scaled
from toolcrib.lib import json_codec

__all__ = ["agent"]
VERSION, LEGACY = "2026-07-28", "2025-11-25"
META = {
    "io.modelcontextprotocol/protocolVersion": VERSION,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "tests", "version": "1"},
}


def request(name: str = "raw__say", arguments: Any = None, **fields: Any) -> dict[str, Any]:
    given = {"result": CONTENT} if arguments is None else arguments
    params = {"name": name, "arguments": given, "_meta": {**META, **fields.pop("meta", {})}}
    return {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params, **fields}


class Door:
    """`/mcp` as it is served; `ways` records which path each request took."""

    def __init__(self, key: str, *, short: bool) -> None:
        self.key, self.short = key, short
        self.endpoint = Endpoint()
        self.ways: list[str] = []

    async def ask(self, message: Any = None, **headers: str) -> tuple[int, bytes]:
        """Send a call with the modern protocol version."""
        if not self.short:
            authorization_cache.clear()
            mcp_call._rolling.clear()
        message = request() if message is None else message
        given = {
            "mcp-protocol-version": VERSION,
            "mcp-method": "tools/call",
            "mcp-name": message["params"]["name"],
        }
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        status, _, body = await self._exchange(message, given | named)
        return status, body

    async def shake(self) -> str:
        """Do the handshake; return the id of the connection."""
        hello = {"protocolVersion": LEGACY, "capabilities": {}}
        hello["clientInfo"] = {"name": "tests", "version": "1"}
        message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
        _, headers, _ = await self._exchange(message, {})
        known = headers["mcp-session-id"]
        await self.send(
            {"jsonrpc": "2.0", "method": "notifications/initialized"}, mcp_session_id=known
        )
        return known

    async def send(self, message: Any, **headers: str) -> tuple[int, bytes]:
        """Send any message."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        status, _, body = await self._exchange(message, given)
        return status, body

    async def _exchange(
        self, message: Any, more: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        raw = json.dumps(message).encode()
        given = {
            "host": "localhost",
            "authorization": f"Bearer {self.key}",
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
            "content-length": str(len(raw)),
        }
        given |= more
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/mcp",
            "raw_path": b"/mcp",
            "query_string": b"",
            "headers": [(name.encode(), text.encode()) for name, text in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "scheme": "http",
            "http_version": "1.1",
        }
        incoming = [{"type": "http.request", "body": raw, "more_body": False}]
        messages: list[dict[str, Any]] = []
        way = "short"

        async def receive() -> Any:
            if incoming:
                return incoming.pop()
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            messages.append(message)

        async def ordinary(*args: Any) -> None:
            nonlocal way
            way = "ordinary"
            await self.endpoint(*args)

        await mcp_call.call(scope, receive, send, ordinary)
        self.ways.append(way)
        names = {name.decode(): text.decode() for name, text in messages[0]["headers"]}
        return (
            messages[0]["status"],
            names,
            b"".join(part.get("body", b"") for part in messages[1:]),
        )


@pytest.fixture(params=["short", "ordinary"])
def run(agent, request):
    def run(scenario: Any) -> Any:
        async def inside() -> Any:
            door = Door(agent.key, short=request.param == "short")
            async with (
                asyncio.timeout(scaled(60)),
                batch_writer.run_writer(),
                upstream_calls.call_pool(),
                door.endpoint.run(),
            ):
                return door, await scenario(door)

        return asyncio.run(inside())

    return run


def test_both_paths_give_the_same_responses_and_rows(run):
    async def scenario(door):
        return [await door.ask() for _ in range(3)]

    door, answers = run(scenario)
    assert door.ways == ["ordinary", *["short" if door.short else "ordinary"] * 2]
    assert len({json.dumps(json.loads(body), sort_keys=True) for _, body in answers}) == 1
    status, body = answers[-1]
    assert status == 200
    result = json.loads(body)["result"]
    assert result["content"] == [{"type": "text", "text": "done"}]
    assert (result["isError"], result["resultType"]) == (False, "complete")
    rows = list(Call.objects.values("tool_name", "path", "state", "implicit_load", "session_id"))
    assert rows == [rows[0]] * 3
    assert (rows[0]["path"], rows[0]["state"]) == ("native", "succeeded")
    assert AgentSession.objects.get().calls == 3


ODD = {
    "any script": {"content": [{"type": "text", "text": 'grün 雪 🧰 \u2028 "quoted" \\ \n\t\x01'}]},
    "a structure": {
        "content": [{"type": "text", "text": "so"}],
        "structuredContent": {"z": 1e16, "a": [1.5, None, True, "é"], "10": {"b": {}, "a": []}},
    },
    "an error": {"content": [{"type": "text", "text": "not so"}], "isError": True},
    "no content": {"content": []},
}


@pytest.mark.parametrize("result", ODD)
def test_every_server_result_is_the_same_on_both_paths(run, result):
    message = request(arguments={"result": json.dumps(ODD[result])})

    async def scenario(door):
        return [await door.ask(message) for _ in range(2)]

    door, answers = run(scenario)
    assert door.ways == ["ordinary", "short" if door.short else "ordinary"]
    assert [status for status, _ in answers] == [200, 200]
    # The same value; the SDK escapes non-ASCII characters and orders keys differently.
    first, second = (json.loads(body) for _, body in answers)
    assert first == second
    result_body = json.loads(answers[0][1])["result"]
    assert result_body["isError"] is ODD[result].get("isError", False)
    for part in ("content", "structuredContent"):
        assert result_body.get(part) == ODD[result].get(part)


def test_unusual_requests_take_the_ordinary_path(run):
    odd = {
        "a progress token": ({"message": request(meta={"progressToken": 1})}, 200),
        "another name in the header": ({"mcp_name": "raw__seen"}, 400),
        "another method in the header": ({"mcp_method": "tools/list"}, 400),
        "an origin": ({"origin": "https://evil.example"}, 403),
        "another host": ({"host": "evil.example"}, 421),
        "a meta-tool": ({"message": request("search_tools", {"query": "say"})}, 200),
        "a batch": ({"message": request(id=None)}, 400),
    }

    async def scenario(door):
        await door.ask()
        return {what: await door.ask(**given) for what, (given, _) in odd.items()}

    door, answers = run(scenario)
    assert door.ways[1:] == ["ordinary"] * len(odd)
    assert {what: status for what, (status, _) in answers.items()} == {
        what: status for what, (_, status) in odd.items()
    }


CHANGES = {
    "key revoked": (
        lambda: api_keys.revoke(ApiKey.objects.get(scope="agent"), actor=SYSTEM),
        401,
        "",
    ),
    "tool held": (lambda: hold(Tool.objects.get(name="say"), "why", actor=SYSTEM), 200, "why"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_applies_to_the_next_call(run, change):
    act, expected, words = CHANGES[change]

    async def scenario(door):
        await door.ask()
        await door.ask()
        await in_database(act)
        return await door.ask()

    _, (status, body) = run(scenario)
    assert status == expected
    assert words in body.decode()
    assert Call.objects.filter(state="succeeded").count() == 2


def test_a_closed_session_is_replaced_by_a_new_one(run):
    async def scenario(door):
        await door.ask()
        await door.ask()
        await in_database(lambda: lifecycle.close_session(AgentSession.objects.get()))
        return await door.ask(), await door.ask()

    _, answers = run(scenario)
    assert [status for status, _ in answers] == [200, 200]
    assert list(AgentSession.objects.order_by("pk").values_list("calls", flat=True)) == [2, 2]


def test_a_call_that_the_fast_path_passes_on_is_counted_once(run, monkeypatch):
    """As after an idle minute: the entry is loaded again, the call counted and then passed on."""
    counted = []
    count = rate_limits.check_rate

    def check_rate(agent, what, limit):
        counted.append(what)
        return count(agent, what, limit)

    async def scenario(door):
        await door.ask()
        long_ago = timezone.now() - timedelta(seconds=MIN_IDLE_SECONDS + 5)
        await in_database(AgentSession.objects.update, last_used_at=long_ago)
        authorization_cache.clear()
        monkeypatch.setattr(rate_limits, "check_rate", check_rate)
        return await door.ask()

    door, (status, body) = run(scenario)
    assert (status, json.loads(body)["result"]["isError"]) == (200, False)
    assert door.ways[-1] == "ordinary"
    assert counted == ["calls"]


def test_the_endpoint_reports_a_database_error_of_the_cache_lookup(run, monkeypatch):
    def locked(*args):
        raise OperationalError("database is locked")

    async def scenario(door):
        await door.ask()
        authorization_cache.clear()
        monkeypatch.setattr(authorization_cache, "load", locked)
        return await door.ask()

    door, (status, body) = run(scenario)
    assert door.ways[-1] == "ordinary"
    assert status == 200
    assert "jsonrpc" in json.loads(body)


def test_a_large_message_is_parsed_off_the_event_loop(run, monkeypatch):
    """The sender is not authenticated yet, and parsing calls Python for each object."""
    where = []

    def parsed(body):
        where.append(threading.current_thread() is threading.main_thread())
        return json_codec.parse_strict(body)

    monkeypatch.setattr(mcp_call, "parse_strict", parsed)

    async def scenario(door):
        await door.ask()
        return await door.ask(request(arguments={"result": CONTENT, "more": [{}] * 30_000}))

    run(scenario)
    assert where == [True, False]
