"""The fixed surface of a deferred session as it is sent, and loads of whole groups over MCP."""

import json

import pytest

from sessions_app.mcp.tool_list import DISPATCH_INSTRUCTIONS
from tests.sessions_app.mcp.test_features import FeatureDoor, run_scenario
from tests.sessions_app.mcp.test_tool_calls import LEGACY, MODERN, agent, result_of
from tests.sessions_app.rules.test_dispatch import add_rule
from tests.sessions_app.sessions.test_endpoint import in_database
from toolcrib.lib.token_counter import count

__all__ = ["agent"]
MAX_TOKENS = 900


@pytest.fixture(params=[MODERN, LEGACY])
def era(request):
    return request.param


async def read_instructions(door):
    if door.era == MODERN:
        return (await door.result("server/discover"))["instructions"]
    hello = {"protocolVersion": LEGACY, "capabilities": {}}
    hello["clientInfo"] = {"name": "tests", "version": "1"}
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    return result_of(await door.send(message, {}))["instructions"]


def test_the_fixed_surface_as_sent_stays_under_900_tokens(agent, era):
    """The bytes of the list and the instructions; what depends on the groups is counted apart."""

    async def scenario(door):
        await in_database(lambda: add_rule("Ask first", effect="hold"))  # lists check_call
        response = await door.request("tools/list")
        assert "check_call" in [tool["name"] for tool in result_of(response)["tools"]]
        return response.body.decode(), await read_instructions(door)

    sent, instructions = run_scenario(agent, era, scenario)
    start = sent.index('"tools":') + len('"tools":')
    tools, length = json.JSONDecoder().raw_decode(sent[start:])
    head, lines = instructions.split("\n\n", 1)
    assert head == DISPATCH_INSTRUCTIONS
    assert lines.startswith("- `mcp:raw`")
    assert " Groups: mcp:raw" in sent
    surface = sent[start : start + length].replace(" Groups: mcp:raw", "") + head
    assert 500 < count(surface) < MAX_TOKENS
    assert all(tool["_meta"] == {"anthropic/alwaysLoad": True} for tool in tools)


def test_an_empty_list_of_names_loads_the_whole_group(agent, era):
    async def scenario(door):
        found = []
        for names in ([], ["say"]):
            values = {"group_id": "mcp:raw", "tool_names": names}
            result = result_of(await door.call("load_tools", values))
            found.append(json.loads(result["content"][0]["text"])["tool_names"])
        return found

    everything, one = run_scenario(agent, era, scenario, FeatureDoor)
    assert everything == ["raw__later", "raw__say", "raw__seen"]
    assert one == ["raw__say"]
