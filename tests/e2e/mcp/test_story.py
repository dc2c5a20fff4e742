"""A scripted agent does the same work over REST and over both eras of MCP."""

import asyncio
import json

import pytest

from tests.support.agents import Session
from tests.support.mcp_clients import (
    LEGACY,
    MODERN,
    call_meta_tool,
    connected_client,
    make_unique_agent,
    tool_names,
)

pytestmark = pytest.mark.timeout(240)
META = [
    "search_tools",
    "load_tools",
    "get_tool_details",
    "call_read_only_tool",
    "deferred_tool_call",
]
QUERY, GROUP, TOOL = "weather forecast for a city", "mcp:weather", "weather__get_forecast"
ARGUMENTS = {"city": "Oslo", "days": 2}


def over_rest(agent):
    session = agent.open()
    matches = session.search(query=QUERY, limit=3)
    loaded = json.loads(session.load(GROUP, [TOOL]))
    wrong = session.call(TOOL, {"town": "Oslo"})
    result = session.call(TOOL, ARGUMENTS)
    results = [matches, loaded, wrong["content"], result["content"], result["structured_content"]]
    return session, results


def over_mcp(agent, mode):
    async def work():
        async with connected_client(agent, mode=mode) as client:
            assert tool_names(await client.list_tools()) == META
            matches = await call_meta_tool(client, "search_tools", query=QUERY, limit=3)
            loaded = await call_meta_tool(client, "load_tools", group_id=GROUP, tool_names=[TOOL])
            call = {"tool_name": TOOL, "arguments": {"town": "Oslo"}}
            wrong = await client.call_tool("deferred_tool_call", call)
            assert wrong.is_error
            call["arguments"] = ARGUMENTS
            result = await client.call_tool("deferred_tool_call", call)
            assert not result.is_error
            contents = [
                [part.model_dump(by_alias=True, exclude_none=True) for part in outcome.content]
                for outcome in (wrong, result)
            ]
            return client.protocol_version, [matches, loaded, *contents, result.structured_content]

    version, results = asyncio.run(work())
    (row,) = agent.send("GET", "/sessions").json["items"]
    session = Session(agent, row["id"], {})
    return version, session, results


def story(session):
    """Return the timeline without the values that differ between runs."""
    told_ = [event for event in session.events() if event["kind"] not in ("catalog", "closed")]
    for event in told_:
        for key in ("id", "at", "call_id"):
            del event[key]
    return told_


@pytest.mark.smoke
@pytest.mark.parametrize(("mode", "version"), [(MODERN, MODERN), ("legacy", LEGACY)])
def test_rest_and_mcp_give_the_same_results_and_timeline(toolcrib, mode, version):
    rest, expected = over_rest(make_unique_agent(toolcrib, mode="deferred"))
    negotiated, session, results = over_mcp(make_unique_agent(toolcrib, mode="deferred"), mode)
    assert negotiated == version
    assert results == expected
    assert results[-1] == {"city": "Oslo", "days": 2, "summary": "sunny"}
    assert story(session) == story(rest)
    kinds = [event["kind"] for event in story(session)]
    assert kinds == ["opened", "searched", "loaded", "refused", "called"]
    client = session.get()["metadata"]["client"]
    assert client == {"name": "scripted", "version": "3.1", "protocol": version}


def test_an_auto_client_negotiates_the_newer_era(agent):
    assert over_mcp(agent, "auto")[0] == MODERN
