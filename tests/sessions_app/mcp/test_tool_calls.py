"""Calls over MCP, of both eras: responses, protocol errors, changes between two calls."""

import asyncio
import json
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.models import Tool
from catalog.tools.actions import hold
from servers.connections import calls as upstream_calls
from sessions_app.agents import api_keys, rate_limits
from sessions_app.dispatch import authorization
from sessions_app.ledger import writer as ledger_writer
from sessions_app.mcp import endpoint as mcp_endpoint
from sessions_app.mcp import sessions as mcp_sessions
from sessions_app.mcp import tool_calls
from sessions_app.mcp.endpoint import Endpoint
from sessions_app.models import AgentSession, ApiKey, Call, McpConnection
from sessions_app.sessions import lifecycle
from tests.sessions_app.sessions.test_endpoint import CONTENT, agent, in_database
from tests.support.asgi_requests import AsgiResponse, bearer_headers, exchange, make_scope
from tests.support.waiting import scaled, wait_for
from toolcrib.lib import json_codec

__all__ = ["agent"]
MODERN, LEGACY = "2026-07-28", "2025-11-25"
META = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "tests", "version": "1"},
}
ACCEPT = {"accept": "application/json, text/event-stream"}


class Door:
    """`/mcp` as it is served, called with one of the two eras."""

    def __init__(self, key: str, era: str, *, cached: bool) -> None:
        self.key, self.era, self.cached = key, era, cached
        self.endpoint = Endpoint()
        self.left = asyncio.Event()  # the client disconnects
        self.connection = ""

    async def call(
        self, name: str = "raw__say", arguments: Any = None, **fields: Any
    ) -> AsgiResponse:
        """Send `tools/call`; `meta`, `headers` and other fields change the message."""
        headers = fields.pop("headers", {})
        params = {
            "name": name,
            "arguments": {"result": CONTENT} if arguments is None else arguments,
        }
        meta = {**(META if self.era == MODERN else {}), **fields.pop("meta", {})}
        if meta:
            params["_meta"] = meta
        message = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params, **fields}
        if self.era == MODERN:
            routing = {"mcp-protocol-version": MODERN, "mcp-method": "tools/call", "mcp-name": name}
        else:
            routing = {"mcp-protocol-version": LEGACY, "mcp-session-id": await self.connect()}
        return await self.send(message, {**routing, **headers})

    async def connect(self) -> str:
        """Do the handshake once; return the id of the connection."""
        if not self.connection:
            hello = {"protocolVersion": LEGACY, "capabilities": {}}
            hello["clientInfo"] = {"name": "tests", "version": "1"}
            message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
            self.connection = (await self.send(message, {})).headers["mcp-session-id"]
        return self.connection

    async def send(
        self, message: Any, headers: dict[str, str], *, method: str = "POST", url: str = "/mcp"
    ) -> AsgiResponse:
        if not self.cached:
            authorization.clear()
            mcp_sessions.clear_caches()
        data = b"" if message is None else json.dumps(message).encode()
        scope = make_scope(method, url, bearer_headers(self.key, data, {**ACCEPT, **headers}))
        return await exchange(self.endpoint, scope, data, self.left)


@pytest.fixture(params=[MODERN, LEGACY])
def era(request):
    return request.param


@pytest.fixture(params=["cached", "uncached"])
def run(agent, era, request):
    def run(scenario: Any) -> Any:
        async def inside() -> Any:
            door = Door(agent.key, era, cached=request.param == "cached")
            async with (
                asyncio.timeout(scaled(60)),
                ledger_writer.run_writer(),
                upstream_calls.call_pool(),
                door.endpoint.run(),
            ):
                return await scenario(door)

        mcp_sessions.clear_caches()
        return asyncio.run(inside())

    return run


def result_of(response: AsgiResponse) -> Any:
    assert response.status == 200, response.body
    return response.json["result"]


def stream_messages(response: AsgiResponse) -> list[Any]:
    assert response.headers["content-type"] == "text/event-stream"
    lines = response.body.decode().splitlines()
    return [json.loads(line[5:]) for line in lines if len(line) > 6 and line.startswith("data:")]


def test_every_call_gives_the_same_response_and_row(run, era):
    async def scenario(door):
        return [await door.call() for _ in range(3)]

    answers = run(scenario)
    assert len({answer.body for answer in answers}) == 1
    assert answers[0].headers["content-type"] == "application/json"
    assert answers[0].json["id"] == 7
    result = result_of(answers[0])
    assert result["content"] == [{"type": "text", "text": "done"}]
    assert result["isError"] is False
    server_info = "io.modelcontextprotocol/serverInfo"
    if era == MODERN:
        assert result["resultType"] == "complete"
        assert result["_meta"][server_info]["name"] == "toolcrib"
    else:
        assert result.keys() == {"content", "isError"}
    rows = list(Call.objects.values("tool_name", "path", "state", "implicit_load", "session_id"))
    assert rows == [rows[0]] * 3
    assert (rows[0]["path"], rows[0]["state"]) == ("native", "succeeded")
    session = AgentSession.objects.get()
    assert session.calls == 3
    assert json.loads(session.metadata)["client"]["name"] == "tests"


ODD = {
    "any script": {"content": [{"type": "text", "text": 'grün 雪 🧰 \u2028 "quoted" \\ \n\t\x01'}]},
    "a structure": {
        "content": [{"type": "text", "text": "so"}],
        "structuredContent": {"z": 1e16, "a": [1.5, None, True, "é"], "10": {"b": {}, "a": []}},
    },
    "an error": {"content": [{"type": "text", "text": "not so"}], "isError": True},
    "no content": {"content": []},
    "a _meta": {"content": [], "_meta": {"example.org/x": [1, {"y": "é"}]}},
}


@pytest.mark.parametrize("result", ODD)
def test_every_server_result_passes_unchanged(run, result):
    async def scenario(door):
        return await door.call(arguments={"result": json.dumps(ODD[result])})

    body = result_of(run(scenario))
    assert body["isError"] is ODD[result].get("isError", False)
    for part in ("content", "structuredContent"):
        assert body.get(part) == ODD[result].get(part)
    sent = ODD[result].get("_meta", {})
    assert {name: body.get("_meta", {})[name] for name in sent} == sent


# --- Meta-tools -----------------------------------------------------------------------------------


def test_dispatchers_take_name_and_tool_name_and_nulls(run):
    arguments = {"result": CONTENT}
    forms = [
        ("deferred_tool_call", {"name": "raw__say", "arguments": arguments}),
        ("deferred_tool_call", {"tool_name": "raw__say", "args": arguments}),
        ("call_tool", {"name": "raw__say", "arguments": arguments, "tool_name": None}),
        ("deferred_tool_call", {"name": "say", "arguments": json.dumps(arguments)}),
        # Semantic Kernel repeats the call in its parameter `arguments`.
        (
            "deferred_tool_call",
            {"name": "say", "arguments": {"name": "say", "arguments": arguments}},
        ),
    ]
    wrong = [
        ("deferred_tool_call", {"name": "raw__say", "tool_name": "raw__seen"}),
        ("deferred_tool_call", {"arguments": arguments}),
        ("deferred_tool_call", {"name": "raw__say", "result": CONTENT}),
    ]

    async def scenario(door):
        return [await door.call(*form) for form in forms + wrong]

    answers = [result_of(answer) for answer in run(scenario)]
    assert [answer["isError"] for answer in answers] == [False] * 5 + [True] * 3
    assert all("Input schema of" in answer["content"][0]["text"] for answer in answers[5:])
    assert set(Call.objects.values_list("path", "tool_name")) == {("dispatch", "raw__say")}


def test_meta_tools_take_nulls_and_digits_for_what_they_mean(run):
    everything = {"limit": None, "name": None, "pattern": None, "server": None}

    async def scenario(door):
        return [
            await door.call("search_tools", {"query": "say", **everything}),
            await door.call("search_tools", {"query": "say", "limit": "1"}),
            await door.call("load_tools", {"group_id": "mcp:raw", "tool_names": None}),
            await door.call("get_tool_details", {"name": "raw__say", "tool_name": None}),
            await door.call("search_tools", {"query": "say", "limit": "many"}),
            await door.call("get_tool_details", {"name": "nothing"}),
        ]

    answers = [result_of(answer) for answer in run(scenario)]
    assert [answer["isError"] for answer in answers] == [False] * 4 + [True] * 2
    one = json.loads(answers[1]["content"][0]["text"])
    assert len(one["tools"]) == 1
    assert "limit" in answers[4]["content"][0]["text"]
    assert "raw__say" in answers[5]["content"][0]["text"]


# --- The protocol ---------------------------------------------------------------------------------


def test_protocol_violations_are_rejected(run, era):
    both = {
        "no accept header": ({"headers": {"accept": "application/json"}}, 406),
        "another content type": ({"headers": {"content-type": "text/plain"}}, 400),
        "an origin": ({"headers": {"origin": "https://evil.example"}}, 403),
        "no id": ({"id": None}, 400),
        "another version of JSON-RPC": ({"jsonrpc": "1.0"}, 400),
        "a fraction as id": ({"id": 1.5}, 400),
    }
    modern = {
        "another name in the header": ({"headers": {"mcp-name": "raw__seen"}}, 400),
        "another method in the header": ({"headers": {"mcp-method": "tools/list"}}, 400),
        "another version in the body": ({"meta": {next(iter(META)): "2031-01-01"}}, 400),
        "capabilities that are none": ({"meta": {list(META)[1]: []}}, 400),
    }
    legacy = {
        "an unknown connection": ({"headers": {"mcp-session-id": "0" * 32}}, 404),
        "no connection": ({"headers": {"mcp-session-id": ""}}, 400),
    }
    cases = {**both, **(modern if era == MODERN else legacy)}

    async def scenario(door):
        return {what: await door.call(**given) for what, (given, _) in cases.items()}

    answers = run(scenario)
    assert {what: answer.status for what, answer in answers.items()} == {
        what: status for what, (_, status) in cases.items()
    }
    assert all("error" in answer.json for answer in answers.values())
    assert not Call.objects.exists()


def test_arguments_of_another_type_are_invalid_params(run, era):
    async def scenario(door):
        return await door.call(arguments=[1])

    answer = run(scenario)
    assert answer.status == (400 if era == MODERN else 200)
    assert answer.json["error"]["code"] == -32602
    assert answer.json["id"] == 7


def test_protocol_errors_are_reported_only_to_a_valid_key(run, era):
    async def scenario(door):
        await door.call()
        door.key = "tcb_nothing"
        return await door.call(id=None)

    assert run(scenario).status == 401


def test_a_duplicate_key_in_a_message_is_rejected(run):
    async def scenario(door):
        data = b'{"jsonrpc":"2.0","id":1,"id":2,"method":"tools/call","params":{}}'
        scope = make_scope("POST", "/mcp", bearer_headers(door.key, data, ACCEPT))
        return await exchange(door.endpoint, scope, data)

    answer = run(scenario)
    assert (answer.status, answer.json["error"]["code"]) == (400, -32600)


# --- Progress, cancellation, connections ----------------------------------------------------------


def test_progress_precedes_the_result_in_an_event_stream(run, monkeypatch):
    call = upstream_calls.call

    async def call_with_progress(*args, on_progress, **named):
        for step in (1.0, 2.0):
            on_progress(step, None, "half" if step == 1 else None)
        return await call(*args, on_progress=on_progress, **named)

    async def scenario(door):
        plain = await door.call(meta={"progressToken": "p"})
        with monkeypatch.context() as patched:
            patched.setattr(upstream_calls, "call", call_with_progress)
            return plain, await door.call(meta={"progressToken": "p"})

    plain, streamed = run(scenario)
    assert result_of(plain)["isError"] is False  # the server reported none
    first, second, message = stream_messages(streamed)
    assert first["method"] == second["method"] == "notifications/progress"
    assert first["params"] == {"progressToken": "p", "progress": 1.0, "message": "half"}
    assert second["params"] == {"progressToken": "p", "progress": 2.0}
    assert (message["id"], message["result"]["content"][0]["text"]) == (7, "done")


def test_a_slow_call_becomes_an_event_stream_with_pings(run, monkeypatch):
    monkeypatch.setattr(tool_calls, "PING_SECONDS", 0.05)

    async def scenario(door):
        return await door.call("raw__later", {"seconds": 1})

    answer = run(scenario)
    assert answer.body.startswith(b": ping")
    (message,) = stream_messages(answer)
    assert message["result"]["isError"] is False


@pytest.mark.parametrize("era", [LEGACY])
def test_an_older_client_cancels_by_id_and_gets_no_response(run, era):
    async def scenario(door):
        await door.call("raw__seen", {})
        calls = [
            asyncio.create_task(door.call("raw__later", {"seconds": 50}, id=number))
            for number in (8, 9)
        ]
        rows = Call.objects.filter(state="sent")
        await in_database(wait_for, lambda: rows.count() == 2)
        cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled"}
        connection = {"mcp-session-id": door.connection}
        for number in (8, "nothing", None):
            message = {**cancelled, "params": {"requestId": number}}
            assert (await door.send(message, connection)).status == 202
        first = await calls[0]
        assert not calls[1].done()
        await door.send({**cancelled, "params": {"requestId": 9}}, connection)
        return first, await calls[1]

    for answer in run(scenario):
        assert (answer.status, answer.body) == (200, b"")
        assert answer.headers["content-type"] == "text/event-stream"
    rows = Call.objects.filter(tool_name="raw__later")
    assert set(rows.values_list("state", "error_code")) == {("unknown", "cancelled")}


def test_two_requests_with_one_id_both_get_their_response(run):
    async def scenario(door):
        await door.call()
        texts = [json.dumps({"content": [{"type": "text", "text": text}]}) for text in "ab"]
        return await asyncio.gather(*(door.call(arguments={"result": text}) for text in texts))

    answers = [result_of(answer)["content"][0]["text"] for answer in run(scenario)]
    assert answers == ["a", "b"]


def test_a_disconnect_cancels_only_a_modern_call(run, era):
    async def scenario(door):
        await door.call("raw__seen", {})
        call = asyncio.create_task(door.call("raw__later", {"seconds": 2}))
        await in_database(wait_for, Call.objects.filter(state="sent").exists)
        door.left.set()
        await call
        await in_database(wait_for, lambda: not Call.objects.filter(state="sent").exists())

    run(scenario)
    row = Call.objects.get(tool_name="raw__later")
    assert row.state == ("unknown" if era == MODERN else "succeeded")


@pytest.mark.parametrize("era", [LEGACY])
def test_a_connection_survives_a_restart_and_belongs_to_its_key(run, era, agent):
    other = api_keys.create_key("other", "agent", agent=agent.agent, actor=SYSTEM)[1]

    async def scenario(door):
        first = await door.call()
        authorization.clear()
        mcp_sessions.clear_caches()
        door.endpoint = Endpoint()  # another process
        async with door.endpoint.run():
            second = await door.call()
            headers = {"mcp-session-id": door.connection, "mcp-protocol-version": LEGACY}
            ping = {"jsonrpc": "2.0", "id": 3, "method": "ping"}
            answers = [await door.send(ping, headers)]
            door.key = other
            answers += [await door.send(ping, headers), await door.call()]
        return first, second, answers

    first, second, (pong, theirs, call) = run(scenario)
    assert first.body == second.body
    assert (pong.status, pong.json["result"]) == (200, {})
    assert (theirs.status, call.status) == (404, 404)
    assert AgentSession.objects.get().calls == 2
    row = McpConnection.objects.get()
    assert (row.protocol_version, row.session_id) == (LEGACY, AgentSession.objects.get().pk)
    assert json.loads(row.client) == {"name": "tests", "protocol": LEGACY, "version": "1"}


@pytest.mark.parametrize("era", [LEGACY])
def test_a_deleted_connection_is_gone_and_its_session_closed(run, era):
    async def scenario(door):
        await door.call()
        headers = {"mcp-session-id": door.connection}
        deleted = await door.send(None, headers, method="DELETE")
        return deleted, await door.call(), await door.send(None, headers, method="DELETE")

    assert [answer.status for answer in run(scenario)] == [200, 404, 404]
    assert AgentSession.objects.get().state == "closed"
    assert not McpConnection.objects.exists()


# --- What changes between two calls ---------------------------------------------------------------

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
        await door.call()
        await door.call()
        await in_database(act)
        return await door.call()

    answer = run(scenario)
    assert answer.status == expected
    assert words in answer.body.decode()
    assert Call.objects.filter(state="succeeded").count() == 2


def test_a_closed_session_is_replaced_or_its_connection_is_unknown(run, era):
    async def scenario(door):
        await door.call()
        await door.call()
        await in_database(lambda: lifecycle.close_session(AgentSession.objects.get()))
        return await door.call(), await door.call()

    answers = run(scenario)
    assert {answer.status for answer in answers} == {200 if era == MODERN else 404}
    calls = list(AgentSession.objects.order_by("pk").values_list("calls", flat=True))
    assert calls == ([2, 2] if era == MODERN else [2])


@pytest.mark.parametrize("era", [MODERN])
def test_a_rolling_session_that_was_idle_is_replaced(run, era):
    async def scenario(door):
        await door.call()
        long_ago = timezone.now() - timedelta(minutes=31)
        await in_database(AgentSession.objects.update, last_used_at=long_ago)
        return await door.call()

    assert result_of(run(scenario))["isError"] is False
    sessions = list(AgentSession.objects.order_by("pk").values_list("state", "calls"))
    assert sessions == [("expired", 1), ("open", 1)]


def test_a_call_that_is_repeated_with_a_new_authorization_is_counted_once(run, monkeypatch):
    counted = []

    async def scenario(door):
        await door.call()
        await in_database(lambda: hold(Tool.objects.get(name="later"), "why", actor=SYSTEM))
        with monkeypatch.context() as patched:
            patched.setattr(rate_limits, "check_rate", lambda *args: counted.append(args[1]))
            return await door.call()

    assert result_of(run(scenario))["isError"] is False
    assert counted == ["calls"]


def test_a_large_message_is_parsed_off_the_event_loop(run, monkeypatch):
    """The sender is not authenticated yet, and parsing calls Python for each object."""
    where = []

    def parsed(body):
        where.append(threading.current_thread() is threading.main_thread())
        return json_codec.parse_strict(body)

    async def scenario(door):
        await door.call()
        with monkeypatch.context() as patched:
            patched.setattr(mcp_endpoint, "parse_strict", parsed)
            await door.call()
            return await door.call(arguments={"result": CONTENT, "more": [{}] * 30_000})

    run(scenario)
    assert where == [True, False]
