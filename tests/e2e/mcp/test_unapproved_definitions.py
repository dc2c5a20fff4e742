"""No text of a definition that is pending review reaches an agent, over REST or MCP."""

import pytest

from tests.e2e.mcp.test_calls import with_client
from tests.support.agents import read_ledger, sync_server
from tests.support.mcp_clients import MODERN, make_unique_agent
from tests.support.servers import call_upstream, register
from tests.support.upstreams.rug_pull import CANARY
from tests.support.upstreams.running import running_http

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def changed(toolcrib):
    """The URL of a server whose `send` is about to change, registered as `rug`."""
    with running_http("rug_pull") as url:
        register(toolcrib, "rug", url)
        yield url
    toolcrib.api("DELETE", "/servers/rug")


def rest_responses(session):
    """Return every kind of call result, and the other resources of the session."""
    calls = [session.call("rug__send", {"to": to}) for to in ("x", "seven")]
    calls.append(session.call("rug__send", {}))
    others = [session.load("mcp:rug"), session.search(query="send a message", detail="full")]
    others += [session.get(path) for path in ("/tools/rug__send", "/catalog", "/tools", "/events")]
    return calls, others


async def mcp_responses(client):
    arguments = {"x": {"to": "x"}, "seven": {"to": "seven"}, "none": {}}
    calls = {name: await client.call_tool("rug__send", arguments[name]) for name in arguments}
    for name in arguments:
        body = {"tool_name": "rug__send", "arguments": arguments[name]}
        calls[f"dispatched {name}"] = await client.call_tool("deferred_tool_call", body)
    calls["details"] = await client.call_tool("get_tool_details", {"name": "rug__send"})
    listed = await client.list_tools()
    return {
        **{name: result.model_dump_json() for name, result in calls.items()},
        "list": listed.model_dump_json(),
    }


@pytest.fixture(scope="module")
def old_session(toolcrib, changed):
    """A session that loaded `send` before it changed; after this it is pending review."""
    session = make_unique_agent(toolcrib, mode="deferred").open()
    session.load("mcp:rug")
    assert session.call("rug__send", {"to": "x"})["state"] == "succeeded"
    call_upstream(changed, "swap")
    sync_server(toolcrib, "rug")
    assert toolcrib.api("GET", "/tools/rug__send")[1]["state"] == "waiting"
    return session


def test_no_rest_response_quotes_a_pending_definition(toolcrib, agent, old_session):
    for session in (old_session, agent.open()):
        calls, others = rest_responses(session)
        quoted = [str(body) for body in (*calls, *others) if CANARY in str(body)]
        assert quoted == []
        sent, wrong_result, wrong_arguments = calls
        assert sent["state"] == "succeeded"
        assert wrong_result["error"]["code"] == "output_invalid"
        assert "status" in wrong_result["error"]["message"]
        assert wrong_arguments["error"]["code"] == "invalid_arguments"
        assert '"required":["to"]' in wrong_arguments["content"][0]["text"]
        rows = [str(dict(row)) for row in read_ledger(toolcrib.data_dir, session)]
        assert not [row for row in rows if CANARY in row]


@pytest.mark.parametrize("mode", [MODERN, "legacy"])
def test_no_mcp_response_quotes_a_pending_definition(toolcrib, agent, old_session, mode):
    path = f"/{old_session.id}"
    for caller, options in ((agent, {}), (old_session.agent, {"path": path})):
        responses = with_client(caller, mode, mcp_responses, **options)
        assert [name for name, text in responses.items() if CANARY in text] == []
        assert '"is_error":false' in responses["x"]


def test_one_correction_suffices_over_mcp_after_the_approval(toolcrib, old_session):
    """Runs last in this file: it approves what the others see as pending."""
    assert toolcrib.api("POST", "/tools/rug__send/approve")[0] == 200

    async def work(client):
        first = await client.call_tool("rug__send", {"to": "x"})
        note = {"to": "x", f"note_{CANARY}": "n"}
        second = await client.call_tool("rug__send", note)
        return first.model_dump_json(), second.model_dump_json()

    first, second = with_client(old_session.agent, MODERN, work, path=f"/{old_session.id}")
    assert "has changed since this session received it" in first
    assert CANARY in first
    # The arguments are valid now; the result of the server violates its new output schema.
    assert "invalid_arguments" not in second
    assert "output schema" in second
