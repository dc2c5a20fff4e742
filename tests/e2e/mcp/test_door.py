"""Access to /mcp: keys, hosts, origins, invalid input, slow clients, streams and shutdown."""

import http.client
import json
import socket
import threading
from contextlib import ExitStack, closing

import pytest

from tests.support import raw_mcp as raw
from tests.support.agents import Session, make_agent, read_ledger
from tests.support.installation import Installation
from tests.support.mcp_clients import LEGACY, MODERN, make_unique_agent
from tests.support.waiting import scaled, wait_for

pytestmark = pytest.mark.timeout(240)
PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


# --- Keys ---------------------------------------------------------------------------------------


def test_requests_without_a_valid_key_are_rejected(toolcrib, agent):
    for header in (None, "Basic YTpi", "Bearer ", "Bearer tcb_nothing", f"Bearer {agent.key}x"):
        for path in ("", "/ses_00000000000000000000000000000000"):
            response = raw.send_modern(
                agent, "tools/list", more={"Authorization": header}, path=path
            )
            assert (response.status, response.code) == (401, "unauthorized")
            assert response.headers["www-authenticate"] == "Bearer"
    operator = {"Authorization": f"Bearer {toolcrib.token('operator')}"}
    assert raw.send_modern(agent, "tools/list", more=operator).status == 403


def test_a_revoked_key_is_rejected_immediately(toolcrib, agent):
    session_id = raw.initialize(agent)
    assert raw.send_modern(agent, "tools/list").status == 200
    revoke(toolcrib, agent)
    assert raw.send_modern(agent, "tools/list").status == 401
    assert raw.send(agent, PING, {"Mcp-Session-Id": session_id}).status == 401


def revoke(toolcrib, agent):
    (key,) = toolcrib.api("GET", f"/agents/{agent.name}/keys")[1]["items"]
    assert toolcrib.api("POST", f"/keys/{key['id']}/revoke")[0] == 200


def test_revoking_a_key_ends_its_streams(toolcrib, agent):
    with ExitStack() as open_:
        _, listening = open_.enter_context(closing_stream(raw.subscribe(agent)))
        assert b"acknowledged" in first_event(listening)
        session_id = raw.initialize(agent)
        _, hanging = open_.enter_context(
            closing_stream(
                raw.open_stream(
                    agent, {"Mcp-Session-Id": session_id, "MCP-Protocol-Version": LEGACY}
                )
            )
        )
        assert hanging.status == 200
        late = []
        arguments = {"name": "workshop__wait", "arguments": {"seconds": 60, "name": "revoked"}}
        calling = threading.Thread(
            target=lambda: late.append(raw.send_modern(agent, "tools/call", arguments))
        )
        calling.start()
        other = make_unique_agent(toolcrib).open()
        wait_for(
            lambda: "revoked" in other.call("workshop__cancelled")["structured_content"]["begun"],
            what="the call is in flight",
        )
        revoke(toolcrib, agent)
        assert b"result" not in listening.read()  # until it ends
        assert b"data" not in hanging.read()
        calling.join(scaled(30))
        assert late[0].status == 401
        wait_for(
            lambda: (
                "revoked" in other.call("workshop__cancelled")["structured_content"]["given_up"]
            ),
            what="the call is cancelled",
        )


class closing_stream(ExitStack):
    """Close a stream at the end of the block."""

    def __init__(self, pair):
        super().__init__()
        self.pair = pair
        self.callback(pair[0].close)
        self.callback(pair[1].close)

    def __enter__(self):
        super().__enter__()
        return self.pair


def first_event(response):
    """Return the next event of a stream; comments keep it open."""
    lines = []
    while not lines or lines[-1].strip():
        line = response.readline()
        assert line, "the stream ended"
        if line.startswith(b":"):
            assert not response.readline().strip()
        else:
            lines.append(line)
    return b"".join(lines)


def test_connections_and_sessions_of_other_callers_are_not_found(toolcrib, agent):
    other_agent = make_unique_agent(toolcrib)
    session_id = raw.initialize(agent)
    unknown = raw.send(other_agent, PING, {"Mcp-Session-Id": "0" * 32})
    theirs = raw.send(other_agent, PING, {"Mcp-Session-Id": session_id})
    assert theirs.status == unknown.status == 404
    assert theirs.body == unknown.body
    # A second key of the same agent is another caller.
    status, body = toolcrib.api("POST", f"/agents/{agent.name}/keys", {})
    assert status == 201
    sibling = {"Authorization": f"Bearer {body['key']}", "Mcp-Session-Id": session_id}
    assert raw.send(agent, PING, sibling).status == 404
    assert raw.send(agent, PING, {"Mcp-Session-Id": session_id}).status == 200

    session = agent.open()
    for ask in (
        raw.send_modern(other_agent, "tools/list", path=f"/{session.id}"),
        raw.send_modern(other_agent, "tools/list", path=f"/ses_{'0' * 32}"),
        raw.send(other_agent, PING, {"Mcp-Session-Id": session_id}, path=f"/{session.id}"),
    ):
        assert (ask.status, ask.code) == (404, "unknown_session")
    assert raw.send_modern(agent, "tools/list", path=f"/{session.id}").status == 200
    assert raw.send_modern(agent, "tools/list", path=f"/{session.id}/more").status == 404
    session.close()
    body = {"name": "weather__get_temperature", "arguments": {"city": "Oslo"}}
    closed = raw.send_modern(agent, "tools/call", body, path=f"/{session.id}").json["result"]
    assert closed["isError"]
    assert "This session is closed." in closed["content"][0]["text"]


# --- Host and origin ----------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.test", "evil.test:8000", "127.0.0.1.evil.test", ""])
def test_a_wrong_host_is_rejected_before_the_key_is_checked(agent, host):
    for key in (f"Bearer {agent.key}", "Bearer tcb_nothing"):
        response = raw.send_modern(agent, "tools/list", more={"Host": host, "Authorization": key})
        assert (response.status, response.code) == (421, "wrong_host")


@pytest.mark.parametrize(
    "origin", ["https://evil.test", "null", "http://localhost.evil.test", "file://", "chrome://x"]
)
def test_requests_from_other_origins_are_rejected(agent, origin):
    response = raw.send_modern(agent, "tools/list", more={"Origin": origin})
    assert (response.status, response.code) == (403, "wrong_origin")
    assert raw.send(agent, method="GET", more={"Origin": origin}).status == 403
    own = {"Origin": agent.url.replace("127.0.0.1", "localhost")}
    assert raw.send_modern(agent, "tools/list", more=own).status == 200


def test_a_browser_gets_an_explanation(agent):
    headers = {"Accept": "text/html,*/*;q=0.8", "Authorization": None}
    response = raw.send(agent, method="GET", more=headers)
    assert (response.status, response.headers["allow"]) == (405, "POST")
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert "MCP client" in response.body.decode()


# --- Hostile input 40 ---------------------------------------------------------------------------


def test_protocol_violations_are_rejected_as_specified(toolcrib, agent):
    routing = {"MCP-Protocol-Version": MODERN, "Mcp-Method": "tools/list"}
    good = raw.build_request("tools/list")
    batch = raw.send(agent, [good, good], routing)
    assert (batch.status, batch.json["error"]["code"]) == (400, -32600)
    assert raw.send(agent, [PING], {"MCP-Protocol-Version": LEGACY}).status == 400
    assert raw.send(agent, method="GET", more=routing).status == 405
    assert raw.send(agent, method="DELETE", more=routing).status == 405
    assert raw.send(agent, method="GET").status == 400  # without a session id
    assert raw.send(agent, method="PUT", body=good).status in (400, 405)

    method = raw.send(agent, good, {**routing, "Mcp-Method": "tools/call"})
    body = {"name": "weather__get_temperature", "arguments": {"city": "Oslo"}}
    name = raw.send_modern(agent, "tools/call", body, {"Mcp-Name": "weather__get_forecast"})
    missing = raw.send_modern(agent, "tools/call", body, {"Mcp-Name": None})
    for response in (method, name, missing):
        assert (response.status, response.json["error"]["code"]) == (400, -32020)
    bare = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    assert raw.send(agent, bare, routing).json["error"]["code"] in (-32602, -32600, -32020)
    future = json.loads(json.dumps(good).replace(MODERN, "2031-01-01"))
    unknown = raw.send(agent, future, {**routing, "MCP-Protocol-Version": "2031-01-01"})
    assert (unknown.status, unknown.json["error"]["code"]) == (400, -32022)
    assert unknown.json["error"]["data"]["supported"] == [MODERN]
    nonsense = raw.send_modern(agent, "tools/unknown")
    assert (nonsense.status, nonsense.json["error"]["code"]) == (404, -32601)

    for junk in (b"", b"{", b"null", b"7", b'"x"', b"\xff\xfe", b"[" * 50_000, b'{"a":' * 9_000):
        for headers in (routing, {"MCP-Protocol-Version": LEGACY}):
            assert raw.send(agent, junk, headers).status == 400, junk[:20]
    assert raw.send_modern(agent, "tools/list").status == 200
    assert "Traceback" not in toolcrib.log


def test_arguments_that_are_not_valid_json_values_reach_no_server(toolcrib, agent):
    deep = "x"
    for _ in range(200):
        deep = {"a": deep}
    for arguments in ({"a": deep}, {"a": "\ud800"}, {"a": "\0"}, {"a": float("nan")}):
        response = raw.send_modern(
            agent, "tools/call", {"name": "workshop__echo", "arguments": arguments}
        )
        result = response.json["result"]
        assert result["isError"], arguments
        assert "/arguments" in result["content"][0]["text"]
    large = {"name": "workshop__echo", "arguments": {"a": "x" * 1_100_000}}
    assert (raw.send_modern(agent, "tools/call", large).status) == 413
    assert "Traceback" not in toolcrib.log


# --- Hostile input 41 ---------------------------------------------------------------------------


def half_open(agent, *lines):
    """Send the start of a request and return the socket."""
    host, _, port = agent.url.removeprefix("http://").partition(":")
    conn = socket.create_connection((host, int(port)), timeout=scaled(30))
    conn.sendall("\r\n".join(lines).encode())
    return conn


def test_stalling_clients_are_disconnected_and_do_not_block_others(toolcrib, agent):
    """The timeout is 2 s in this installation; the default is 30 s."""
    head = ("POST /mcp HTTP/1.1", "Host: localhost", f"Authorization: Bearer {agent.key}")
    in_head = half_open(agent, *head)
    silent = half_open(agent)
    starts = [
        "Content-Length: 500\r\n",
        # A plain call, which takes the fast path.
        f"MCP-Protocol-Version: {MODERN}\r\nMcp-Method: tools/call\r\nMcp-Name: x__y\r\n"
        "Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"
        "Content-Length: 500\r\n",
    ]
    in_body = [half_open(agent, *head, start, '{"jsonrpc"') for start in starts]
    rest = ("POST /api/v1/sessions HTTP/1.1", *head[1:], starts[0], '{"mode"')
    in_body.append(half_open(agent, *rest))
    with ExitStack() as stack:
        for conn in (in_head, silent, *in_body):
            stack.enter_context(closing(conn))
        assert raw.send_modern(agent, "tools/list").status == 200
        assert in_head.recv(1000) == b""
        assert silent.recv(1000) == b""
        for conn in in_body:
            content = b""
            while part := conn.recv(10_000):
                content += part
            assert content.startswith(b"HTTP/1.1 408 ")
            assert b"too_slow" in content


def test_clients_that_disconnect_during_a_response_leave_no_open_calls_or_streams(toolcrib, agent):
    rest, session_id = agent.open(), raw.initialize(agent)

    def reported(state, name):
        return name in rest.call("workshop__cancelled")["structured_content"][state]

    older = {"Mcp-Session-Id": session_id}
    newer = {
        "MCP-Protocol-Version": MODERN,
        "Mcp-Method": "tools/call",
        "Mcp-Name": "workshop__wait",
    }
    for name, seconds, more in (("older left", 1, older), ("newer left", 60, newer)):
        params = {"name": "workshop__wait", "arguments": {"name": name, "seconds": seconds}}
        plain = {**PING, "method": "tools/call", "params": params}
        body = plain if more is older else raw.build_request("tools/call", params)
        conn = raw.open_connection(agent)
        conn.request("POST", "/mcp", json.dumps(body), raw.build_headers(agent, more))
        wait_for(lambda name=name: reported("begun", name), what=f"{name} is in flight")
        conn.sock.shutdown(socket.SHUT_RDWR)
        conn.close()
    wait_for(lambda: reported("given_up", "newer left"), what="the newer call is cancelled")
    stream, response = raw.open_stream(agent, {**older, "MCP-Protocol-Version": LEGACY})
    response.close()
    stream.close()
    assert raw.send(agent, PING, older).status == 200

    def states():
        rows = agent.send("GET", "/sessions").json["items"]
        return sorted(
            call["state"]
            for row in rows
            for call in read_ledger(toolcrib.data_dir, Session(agent, row["id"], {}))
            if call["tool_name"] == "workshop__wait"
        )

    # In the older era closing a stream does not cancel a call.
    wait_for(lambda: states() == ["succeeded", "unknown"], 20, what="both calls ended")
    assert "Traceback" not in toolcrib.log


def test_idle_subscriptions_per_key_are_limited_and_do_not_block_other_keys(toolcrib, agent):
    """The limit is four streams in this installation."""
    other = make_unique_agent(toolcrib)
    with ExitStack() as open_:
        for _ in range(3):
            _, response = open_.enter_context(closing_stream(raw.subscribe(agent)))
            assert b"acknowledged" in first_event(response)
        session_id = raw.initialize(agent)
        older = {"Mcp-Session-Id": session_id, "MCP-Protocol-Version": LEGACY}
        _, response = open_.enter_context(closing_stream(raw.open_stream(agent, older)))
        assert response.status == 200
        for _ in range(20):
            _, response = open_.enter_context(closing_stream(raw.subscribe(agent)))
            refused = json.loads(response.read())
            assert (response.status, refused["error"]["data"]["code"]) == (429, "too_many_streams")
        assert response.headers["retry-after"]
        _, response = open_.enter_context(closing_stream(raw.subscribe(other)))
        assert b"acknowledged" in first_event(response)
        assert raw.send_modern(agent, "tools/list").status == 200

    def has_free_stream():
        with closing_stream(raw.subscribe(agent)) as (_, response):
            return response.status == 200

    wait_for(has_free_stream, 10, what="a closed stream frees its slot")


def test_a_subscription_reports_the_successor_of_a_rolling_session_if_its_list_differs(
    toolcrib, agent
):
    other = {"io.modelcontextprotocol/clientInfo": {"name": "other", "version": "1"}}
    raw.send_modern(agent, "tools/list")
    with closing_stream(raw.subscribe(agent)) as (_, response):
        first_event(response)

        def newest_session():
            return agent.send("GET", "/sessions?state=open&limit=1").json["items"][0]["id"]

        def replace(session_id):
            Session(agent, session_id, {}).close()
            raw.send_modern(agent, "tools/list")

        replace(newest_session())  # with the same list
        own = newest_session()
        raw.send_modern(agent, "tools/list", {"_meta": {**raw.ENVELOPE, **other}})  # of its own
        groups = {"all_groups": False, "groups": ["mcp:weather"]}
        assert toolcrib.api("PATCH", f"/agents/{agent.name}", groups)[0] == 200
        replace(own)
        assert b"tools/list_changed" in first_event(response)


# --- Shutdown -----------------------------------------------------------------------------------


def test_shutdown_ends_streams_as_specified_and_in_time(tmp_path):
    with Installation(tmp_path / "data") as toolcrib, ExitStack() as open_:
        agent = make_agent(toolcrib, "leaver")
        _, listening = open_.enter_context(closing_stream(raw.subscribe(agent)))
        first_event(listening)
        session_id = raw.initialize(agent)
        older = {"Mcp-Session-Id": session_id, "MCP-Protocol-Version": LEGACY}
        _, hanging = open_.enter_context(closing_stream(raw.open_stream(agent, older)))
        toolcrib.stop()
        last = listening.read()
        assert b'"resultType":"complete"' in last  # closed regularly, not cut off
        try:
            hanging.read()
        except http.client.IncompleteRead:
            pytest.fail("the older stream was cut")
        assert "Traceback" not in toolcrib.log
