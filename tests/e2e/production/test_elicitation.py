"""Questions of a server to the user of a client: each answer reaches another web process."""

import itertools
import json

import pytest

from tests.support import raw_mcp
from tests.support.agents import make_agent, register_stdio, update_server
from tests.support.mcp_clients import LEGACY, MODERN
from tests.support.production import Production
from tests.support.raw_mcp import build_headers, parse_result, send_modern
from tests.support.waiting import scaled

pytestmark = [
    pytest.mark.needs_redis,
    pytest.mark.needs_postgres,
    pytest.mark.timeout(240),
]
_numbers = itertools.count(1)
ROUNDS = "old__test_input_required_result_multi_round"
ANSWERS = [
    {"action": "accept", "content": {"name": "Ada"}},
    {"action": "accept", "content": {"color": "blue"}},
]
ENVELOPE = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {"elicitation": {"form": {}}},
}


@pytest.fixture(scope="module")
def production(postgres, migrated, shared_redis, tmp_path_factory):
    """Two web processes, with a server that asks during calls."""
    url, folder = postgres.create("asking", template=migrated), tmp_path_factory.mktemp("asking")
    running = Production(url, shared_redis.create(), folder, {"TOOLCRIB_ALLOW_STDIO": "1"})
    try:
        running.start_all("web", "web", "worker")
        register_stdio(running, "old", "conformance", "--legacy")
        update_server(running, "old", isolation="per_session")
        yield running
    finally:
        running.stop()


@pytest.fixture
def sides(production):
    """A new agent, as it sees each of the two processes."""
    agent = make_agent(production, f"asking-{next(_numbers)}", mode="deferred")
    return [agent.at_url(url) for url in production.urls]


def call(side, **answered):
    params = {"_meta": ENVELOPE, "name": ROUNDS, "arguments": {}, **answered}
    return parse_result(send_modern(side, "tools/call", params))["result"]


def ask_first(side):
    """Make the call; return the first question and what the client carries to the answer."""
    asked = call(side)
    assert asked["resultType"] == "input_required", asked
    return asked


def answer(side, asked, given):
    (name,) = asked["inputRequests"]
    return call(side, inputResponses={name: given}, requestState=asked["requestState"])


@pytest.mark.parametrize("first", [0, 1])
def test_answers_that_reach_another_process_continue_the_call(production, sides, first):
    here, there = sides[first], sides[1 - first]
    second = answer(there, ask_first(here), ANSWERS[0])
    (question,) = second["inputRequests"].values()
    assert "favorite color" in question["params"]["message"]
    result = answer(there, second, ANSWERS[1])  # and the response of the call comes back
    assert result["resultType"] == "complete"
    assert '"name": "Ada"' in result["content"][0]["text"]
    assert '"color": "blue"' in result["content"][0]["text"]
    (session,) = production.api("GET", f"/sessions?agent={here.name}")[1]["items"]
    assert session["calls"] == 1


def test_an_answer_of_an_older_client_reaches_another_process(production, sides):
    here, there = sides
    hello = {"protocolVersion": LEGACY, "capabilities": {"elicitation": {}}}
    hello["clientInfo"] = {"name": "raw", "version": "0"}
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    connection = raw_mcp.send(here, message).headers["mcp-session-id"]
    headers = {"Mcp-Session-Id": connection, "MCP-Protocol-Version": LEGACY}
    params = {"name": ROUNDS, "arguments": {}}
    message = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}
    conn = raw_mcp.open_connection(here, scaled(60))
    conn.request("POST", "/mcp", json.dumps(message).encode(), build_headers(here, headers))
    stream, given = conn.getresponse(), iter(ANSWERS)
    for line in stream:
        if not line.startswith(b"data:") or not line[5:].strip():  # the first event is empty
            continue
        received = json.loads(line[5:])
        if "result" in received:
            break
        reply = {"jsonrpc": "2.0", "id": received["id"], "result": next(given)}
        assert raw_mcp.send(there, reply, headers).status == 202
    conn.close()
    assert '"name": "Ada"' in received["result"]["content"][0]["text"]
    assert next(given, None) is None


def test_an_answer_to_the_call_of_a_killed_process_is_rejected_with_what_to_do(production, sides):
    asked = ask_first(sides[0])
    production.processes["web-0"].kill()
    result = answer(sides[1], asked, ANSWERS[0])
    assert result["isError"] is True
    assert "Make the call again." in result["content"][0]["text"]
