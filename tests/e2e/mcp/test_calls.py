"""Calls over MCP: content types, progress, cancellation and errors."""

import asyncio
import json
from urllib.parse import quote

import pytest

from tests.support import raw_mcp as raw
from tests.support.agents import Session, read_ledger
from tests.support.mcp_clients import (
    MODERN,
    call_meta_tool,
    connected_client,
    make_unique_agent,
    result_text,
)
from tests.support.upstreams.conformance import CONTENT
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(240)
BOTH = pytest.mark.parametrize("mode", [MODERN, "legacy"])


def with_client(agent, mode, work, **options):
    async def run():
        async with connected_client(agent, mode=mode, **options) as client:
            return await work(client)

    return asyncio.run(run())


def _readable(content):
    """Return content with the URI under which Toolcrib reads the embedded resource."""
    uri = "test://embedded-resource"
    return json.loads(json.dumps(content).replace(uri, f"crib://fixtures/{quote(uri, safe='')}"))


def only_session(agent):
    (row,) = agent.send("GET", "/sessions").json["items"]
    return Session(agent, row["id"], {})


@BOTH
def test_every_content_type_is_passed_on_unchanged(toolcrib, agent, mode):
    rest = agent.open()

    async def work(client):
        return {
            name: await client.call_tool(f"fixtures__{name}", {})
            for name in CONTENT
            if name != "test_tool_with_progress"
        }

    for name, result in with_client(agent, mode, work).items():
        plain = [part.model_dump(by_alias=True, exclude_none=True) for part in result.content]
        assert plain == _readable(CONTENT[name]) == rest.call(f"fixtures__{name}")["content"]
        assert result.is_error is (name == "test_error_handling")


def test_structured_content_and_unknown_fields_pass_unchanged(agent):
    rest = agent.open().call("workshop__rich")
    body = {"name": "workshop__rich", "arguments": {}}
    result = raw.send_modern(agent, "tools/call", body).json["result"]
    assert result["content"] == rest["content"]
    assert result["content"][0]["_meta"] == {"example.org/weight": 3}
    assert result["structuredContent"] == rest["structured_content"] == {"a": [1, 1.0, None]}
    assert (result["isError"], result["resultType"]) == (False, "complete")
    session_id = raw.initialize(agent)
    message = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": body}
    older = raw.parse_result(raw.send(agent, message, {"Mcp-Session-Id": session_id}))["result"]
    assert older == {key: result[key] for key in ("content", "structuredContent", "isError")}


@BOTH
def test_a_tool_is_called_by_its_original_name_and_recorded_in_the_ledger(toolcrib, agent, mode):
    async def work(client):
        await client.call_tool("weather__get_temperature", {"city": "Oslo"})
        await client.call_tool("get_temperature", {"city": "Oslo"})  # unambiguous
        await client.call_tool("deferred_tool_call", {"tool_name": "weather__get_temperature"})
        await client.call_tool(
            "call_tool", {"name": "weather__get_temperature", "args": {"city": "Oslo"}}
        )

    with_client(agent, mode, work)
    rows = read_ledger(toolcrib.data_dir, only_session(agent))
    assert [(row["path"], row["state"]) for row in rows] == [
        ("native", "succeeded"),
        ("native", "succeeded"),
        ("dispatch", "refused"),
        ("dispatch", "succeeded"),
    ]
    assert {row["tool_name"] for row in rows} == {"weather__get_temperature"}


def test_aliases_of_the_meta_tools_work(agent):
    async def work(client):
        by_words = await call_meta_tool(client, "tool_search", query="weather forecast")
        by_pattern = await call_meta_tool(client, "tool_search_regex", pattern="get_fore")
        as_query = await call_meta_tool(client, "tool_search_regex", query="list_stat")
        details = await call_meta_tool(client, "get_tool_details", name="weather__get_forecast")
        return by_words, by_pattern, as_query, details

    by_words, by_pattern, as_query, details = with_client(agent, MODERN, work)
    assert by_words["tools"][0]["name"] == "weather__get_forecast"
    assert (by_words["newly_loaded"], by_pattern["newly_loaded"]) == (0, 1)
    assert [tool["name"] for tool in as_query["tools"]] == ["weather__list_stations"]
    assert details["outputSchema"]["properties"].keys() == {"city", "days", "summary"}


@BOTH
@pytest.mark.parametrize("upstream", ["fixtures", "old"])
def test_progress_reaches_the_caller_that_requested_it(agent, mode, upstream):
    updates = []

    async def record(progress, total, message):
        updates.append((progress, total, message))

    async def work(client):
        await client.call_tool(f"{upstream}__test_tool_with_progress", {})
        assert updates == []
        name = {"tool_name": f"{upstream}__test_tool_with_progress", "arguments": {}}
        await client.call_tool("deferred_tool_call", name, progress_callback=record)

    with_client(agent, mode, work)
    assert updates == [(0, 100, "begun"), (50, 100, "halfway"), (100, 100, "done")]


@BOTH
def test_a_cancelled_call_is_cancelled_at_the_server(agent, mode):
    session = agent.open()
    mark = f"over mcp {mode}"

    def waits():
        return session.call("workshop__cancelled")["structured_content"]

    async def wait_until(state):
        await asyncio.to_thread(wait_for, lambda: mark in waits()[state], what=f"it is {state}")

    async def work(client):
        arguments = {"name": mark, "seconds": 60}
        asking = asyncio.create_task(client.call_tool("workshop__wait", arguments))
        await wait_until("begun")
        asking.cancel()
        await asyncio.wait({asking})
        await wait_until("given_up")

    with_client(agent, mode, work)


@BOTH
def test_errors_that_a_model_can_correct_are_results_with_a_text(toolcrib, mode):
    agent = make_unique_agent(toolcrib, mode="deferred", calls_per_minute=3, searches_per_minute=1)

    async def work(client):
        async def error_text(tool, **arguments):
            result = await client.call_tool(tool, arguments)
            assert result.is_error
            return result_text(result)

        assert "not available in this session" in await error_text(
            "weather__get_forcast", city="Oslo"
        )
        bad = await error_text("weather__get_forecast", town="Oslo")
        assert '"city"' in bad
        assert '"properties"' in bad
        assert "tool_name" in await error_text("deferred_tool_call", name=7)
        loop = await error_text("deferred_tool_call", tool_name="search_tools")
        assert "Name the tool you want to run" in loop
        assert "may make 3 calls per minute" in await error_text("weather__get_forecast", city="O")
        assert "unknown_group" in await error_text("load_tools", group_id="mcp:nothing")
        assert '"group_id"' in await error_text("load_tools", group="mcp:weather")
        assert "Give a query" in await error_text("search_tools")
        assert "may make 1 searches per minute" in await error_text("search_tools", query="x")
        nothing = await error_text("get_tool_details", name="nothing")
        assert "not available in this session" in nothing

    with_client(agent, mode, work)


def test_a_repeated_idempotency_key_runs_the_tool_once(agent):
    body = {"name": "workshop__count", "arguments": {}}
    first, second = (
        raw.send_modern(agent, "tools/call", body, {"Idempotency-Key": "once"}).json["result"]
        for _ in range(2)
    )
    assert first["structuredContent"] == second["structuredContent"]


def test_a_header_that_contradicts_an_argument_is_refused_for_tools_in_scope(toolcrib, agent):
    body = {"name": "fixtures__test_header", "arguments": {"region": "north"}}
    good = raw.send_modern(agent, "tools/call", body, {"Mcp-Param-Region": "north"})
    assert good.json["result"]["isError"] is False
    bad = raw.send_modern(agent, "tools/call", body, {"Mcp-Param-Region": "south"})
    assert (bad.status, bad.json["error"]["code"]) == (400, -32020)
    # For an agent without access, the tool is unknown.
    other = make_unique_agent(toolcrib, groups=["mcp:weather"])
    unknown = raw.send_modern(other, "tools/call", body, {"Mcp-Param-Region": "south"})
    assert "not available" in unknown.json["result"]["content"][0]["text"]
