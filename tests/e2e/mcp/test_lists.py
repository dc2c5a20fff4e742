"""Contents of tools/list by session, and its changes."""

import asyncio

import pytest

from tests.support import raw_mcp as raw
from tests.support.agents import Session
from tests.support.mcp_clients import (
    LEGACY,
    MODERN,
    NotificationCounter,
    call_meta_tool,
    connected_client,
    make_unique_agent,
    tool_names,
)
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(240)
META = [
    "search_tools",
    "load_tools",
    "get_tool_details",
    "call_read_only_tool",
    "deferred_tool_call",
]
BOTH = pytest.mark.parametrize("mode", [MODERN, "legacy"])


def list_tools(agent, mode, **options):
    async def run():
        async with connected_client(agent, mode=mode, **options) as client:
            return await client.list_tools()

    return asyncio.run(run())


@BOTH
def test_meta_tools_are_annotated_and_the_search_describes_the_groups(agent, mode):
    tools = {tool.name: tool for tool in list_tools(agent, mode).tools}
    assert list(tools) == META
    assert all(tool.annotations and tool.title for tool in tools.values())
    assert tools["search_tools"].annotations.read_only_hint is True
    assert tools["deferred_tool_call"].annotations.destructive_hint is True
    assert tools["call_read_only_tool"].annotations.read_only_hint is True
    assert all(tool.meta == {"anthropic/alwaysLoad": True} for tool in tools.values())
    behind = tools["search_tools"].description
    assert len(behind.encode()) <= 2000
    assert "mcp:weather" in behind
    assert "7 tools" not in behind


def test_the_list_is_private_cacheable_and_byte_stable(agent):
    first, second = raw.send_modern(agent, "tools/list"), raw.send_modern(agent, "tools/list")
    assert first.body == second.body
    result = first.json["result"]
    assert (result["cacheScope"], result["ttlMs"] > 0) == ("private", True)
    instructions = raw.send_modern(agent, "server/discover").json["result"]["instructions"]
    assert instructions.partition("\n\n")[0].count(". ") == 1
    refused = raw.send_modern(agent, "tools/list", {"cursor": "2"})
    assert refused.json["error"]["code"] == -32602


def test_the_list_never_changes_in_the_newer_era(toolcrib):
    agent = make_unique_agent(toolcrib, mode="deferred", strategy="inject")

    async def work():
        async with connected_client(agent, mode=MODERN) as client:
            before = await client.list_tools()
            await call_meta_tool(client, "load_tools", group_id="mcp:weather")
            await call_meta_tool(client, "tool_search_regex", pattern="simple_text")
            return before, await client.list_tools()

    before, after = asyncio.run(work())
    assert tool_names(before) == META  # dispatch, whatever the agent's strategy
    assert before == after
    # Also if the session was opened over REST with the inject strategy.
    session = agent.open()
    first = raw.send_modern(agent, "tools/list", path=f"/{session.id}")
    session.load("mcp:weather")
    assert raw.send_modern(agent, "tools/list", path=f"/{session.id}").body == first.body


@pytest.mark.parametrize("source", ["by the agent's settings", "in the URL"])
def test_only_older_clients_with_the_inject_strategy_are_notified(toolcrib, source):
    by_agent = source == "by the agent's settings"
    agent = make_unique_agent(
        toolcrib, mode="deferred", strategy="inject" if by_agent else "dispatch"
    )
    path = "" if by_agent else "?strategy=inject"
    mine, theirs = NotificationCounter(), NotificationCounter()

    async def work():
        async with (
            connected_client(agent, mode="legacy", path=path, message_handler=mine) as client,
            connected_client(agent, mode="legacy", path=path, message_handler=theirs) as other,
        ):
            before, untouched = await client.list_tools(), await other.list_tools()
            assert tool_names(before) == META[:3]
            await call_meta_tool(
                client, "load_tools", group_id="mcp:weather", tool_names=["get_temperature"]
            )
            assert mine.tool_list_changes == 1
            await call_meta_tool(client, "search_tools", name="weather__get_forecast")
            assert mine.tool_list_changes == 2
            after = await client.list_tools()
            added = ["weather__get_temperature", "weather__get_forecast"]  # in load order
            assert tool_names(after) == [*tool_names(before), *added]
            assert after.tools[: len(before.tools)] == before.tools
            assert after.tools[-1].output_schema
            result = await client.call_tool(added[0], {"city": "Oslo"})
            assert result.structured_content == {"result": 21.5}
            # Loading the same tools again sends no notification.
            await call_meta_tool(
                client, "load_tools", group_id="mcp:weather", tool_names=["get_temperature"]
            )
            assert mine.tool_list_changes == 2
            assert await other.list_tools() == untouched
            assert theirs.tool_list_changes == 0

    asyncio.run(work())


def test_both_connections_of_a_session_are_notified(toolcrib):
    agent = make_unique_agent(toolcrib, mode="deferred", strategy="inject")
    session = agent.open()
    mine, theirs = NotificationCounter(), NotificationCounter()

    async def work():
        path = f"/{session.id}"
        async with (
            connected_client(agent, mode="legacy", path=path, message_handler=mine) as client,
            connected_client(agent, mode="legacy", path=path, message_handler=theirs) as other,
        ):
            await other.list_tools()
            # The notification arrives on a stream that the client opens at some later time.
            for tool in ("get_temperature", "get_forecast", "list_stations", "report_weather"):
                await call_meta_tool(
                    client, "load_tools", group_id="mcp:weather", tool_names=[tool]
                )
            await asyncio.to_thread(
                wait_for, lambda: theirs.tool_list_changes, what="the other is notified"
            )
            assert len((await other.list_tools()).tools) == 7

    asyncio.run(work())


@BOTH
def test_full_mode_lists_every_tool_and_no_meta_tool(toolcrib, mode):
    agent = make_unique_agent(toolcrib, mode="full", groups=["mcp:weather"])
    result = list_tools(agent, mode)
    assert tool_names(result) == sorted(
        f"weather__{name}" for name in toolcrib.tool_names("weather")
    )
    (forecast,) = [tool for tool in result.tools if tool.name == "weather__get_forecast"]
    assert forecast.annotations.read_only_hint is True
    assert forecast.input_schema["required"] == ["city"]
    assert forecast.output_schema["type"] == "object"


@BOTH
def test_an_agent_without_tools_gets_an_empty_list(toolcrib, mode):
    assert (
        tool_names(list_tools(make_unique_agent(toolcrib, groups=[], all_groups=False), mode)) == []
    )


def test_preloaded_tools_follow_the_meta_tools(agent):
    session = agent.open(preload=["weather__get_temperature"])
    for mode in (MODERN, "legacy"):
        names = tool_names(list_tools(agent, mode, path=f"/{session.id}"))
        assert names == [*META, "weather__get_temperature"]


def test_a_session_belongs_to_the_url_the_connection_or_the_key(agent):
    def sessions():
        return [row["id"] for row in agent.send("GET", "/sessions").json["items"]]

    list_tools(agent, MODERN)
    (rolling,) = sessions()
    list_tools(agent, MODERN)
    assert sessions() == [rolling]
    list_tools(agent, "legacy")
    own, _ = sessions()

    def closed():
        return agent.send("GET", f"/sessions/{own}").json["state"] == "closed"

    wait_for(closed, 10, what="the session ends with its connection")
    session = agent.open()
    list_tools(agent, MODERN, path=f"/{session.id}")
    list_tools(agent, "legacy", path=f"/{session.id}")
    assert sessions() == [session.id, own, rolling]
    details = session.get()
    assert details["state"] == "open"
    assert details["metadata"]["client"]["protocol"] == MODERN  # of the first client
    kinds = [event["kind"] for event in Session(agent, rolling, {}).events()]
    assert kinds == ["opened", "catalog", "catalog"]
    assert LEGACY in agent.send("GET", f"/sessions/{own}").body.decode()
