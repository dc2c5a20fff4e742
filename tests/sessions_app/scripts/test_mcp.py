"""Scripts over MCP, of both eras: how they are listed, run, and asked for."""

import asyncio
import json
from typing import Any

import pytest

from catalog import rendering
from catalog.models import Revision
from servers.connections import calls as upstream_calls
from sessions_app.ledger import writer as ledger_writer
from sessions_app.mcp import sessions as mcp_sessions
from sessions_app.mcp import tool_list
from sessions_app.models import Agent, Event
from sessions_app.scripts import runner
from tests.sessions_app.mcp.test_tool_calls import LEGACY, META, MODERN, Door, result_of
from tests.sessions_app.scripts.conftest import add_parameter, result
from tests.sessions_app.sessions.test_endpoint import in_database
from tests.support.waiting import scaled
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.token_counter import count

TWO = (
    f"one = await raw.say(result={result('one')!r})\none + await desk.say(result={result('two')!r})"
)


@pytest.fixture(params=[MODERN, LEGACY])
def era(request):
    return request.param


@pytest.fixture
def run(agent, era):
    def run(scenario: Any) -> Any:
        async def inside() -> Any:
            door = Door(agent.key, era, cached=True)
            async with (
                asyncio.timeout(scaled(60)),
                ledger_writer.run_writer(),
                upstream_calls.call_pool(),
                door.endpoint.run(),
            ):
                try:
                    return await scenario(door)
                finally:
                    await runner.stop()

        mcp_sessions.clear_caches()
        return asyncio.run(inside())

    return run


async def listed(door: Door, era: str) -> dict[str, Any]:
    headers = {"mcp-protocol-version": era, "mcp-method": "tools/list"}
    if era == LEGACY:
        headers["mcp-session-id"] = await door.connect()
    params = {"_meta": META} if era == MODERN else {}
    message = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": params}
    tools = result_of(await door.send(message, headers))["tools"]
    return {tool["name"]: tool for tool in tools}


def body_of(response: Any) -> Any:
    return json.loads(result_of(response)["content"][0]["text"])


def test_a_script_runs_and_its_result_is_the_text(run):
    async def scenario(door):
        response = await door.call("run_script", {"code": TWO, "input": None})
        asked = await door.call("check_call", {"run_id": body_of(response)["run_id"]})
        return response, asked

    response, asked = run(scenario)
    body = body_of(response)
    assert result_of(response)["isError"] is False
    assert (body["status"], body["result"]) == ("completed", "onetwo")
    assert [call["tool"] for call in body["calls"]] == ["raw__say", "desk__say"]
    assert body_of(asked) == body


def test_a_script_in_typescript_runs_too(run):
    code = (
        f"const [one, two] = await Promise.all([raw.say({{result: {json.dumps(result('one'))}}}),"
        f" desk.say({{result: {json.dumps(result('two'))}}})]);\nreturn one + two;"
    )

    async def scenario(door):
        tools = await listed(door, door.era)
        return tools, await door.call("run_script", {"code": code, "language": "typescript"})

    tools, response = run(scenario)
    body = body_of(response)
    assert (body["status"], body["result"], body["language"]) == (
        "completed",
        "onetwo",
        "typescript",
    )
    assert "typescript" in tools["run_script"]["inputSchema"]["properties"]["language"]["enum"]


def test_an_uncaught_error_is_an_error_result_with_the_calls(run):
    async def scenario(door):
        code = f"await raw.say(result={result('bad', isError=True)!r})"
        return await door.call("run_script", {"code": code})

    response = run(scenario)
    assert result_of(response)["isError"] is True
    assert body_of(response)["error"]["type"] == "RuntimeError"
    assert len(body_of(response)["calls"]) == 1


def test_a_running_script_is_asked_for_by_its_id(run, monkeypatch):
    monkeypatch.setattr(runner.run_script, "__defaults__", (0.01,))

    async def scenario(door):
        slow = {"code": "await raw.later(**{'seconds': 1})"}
        started = body_of(await door.call("run_script", slow))
        check = {"run_id": started["run_id"], "wait_seconds": 20}
        return started, body_of(await door.call("check_call", check))

    started, ended = run(scenario)
    assert started["status"] == "running"
    assert (ended["status"], ended["result"]) == ("completed", "late")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("run_script", {}),
        ("run_script", {"code": "1", "timeout": 61}),
        ("check_call", {"call_id": "a", "run_id": "b"}),
    ],
)
def test_wrong_arguments_are_explained(run, name, arguments):
    async def scenario(door):
        return result_of(await door.call(name, arguments))

    answer = run(scenario)
    assert answer["isError"] is True
    assert f"Input schema of {name}" in answer["content"][0]["text"]


def test_it_is_listed_in_sessions_that_open_while_the_setting_is_on(run, era, agent):
    """A session keeps what it listed; the setting decides about each run."""

    async def scenario(door):
        tools = await listed(door, era)
        await in_database(Agent.objects.update, code_mode=False)
        again = await listed(door, era)
        return tools, again, result_of(await door.call("run_script", {"code": "1"}))

    tools, again, refused = run(scenario)
    assert "run_script" in again
    notes = tools["run_script"]["annotations"]
    assert (notes["readOnlyHint"], notes["destructiveHint"], notes["openWorldHint"]) == (
        False,
        True,
        True,
    )
    assert "run_id" in tools["check_call"]["inputSchema"]["properties"]
    assert "yield, inheritance" in tools["run_script"]["description"]
    assert refused["isError"] is True
    assert "may not run scripts" in refused["content"][0]["text"]
    assert not {"run_script", "check_call"} & set(names(agent.open()))


def names(session: Any) -> list[str]:
    return [tool["name"] for tool in session.opened["tools"] if tool["source"] == "builtin"]


@pytest.mark.parametrize("mode", ["deferred", "full"])
def test_it_is_listed_in_every_mode(agent, mode):
    Agent.objects.update(mode="auto")
    assert {"run_script", "check_call"} <= set(names(agent.open(mode=mode)))


@pytest.mark.parametrize(
    "options",
    [
        "format=anthropic",
        "format=openai",
        "format=openai-responses",
        "format=gemini",
        "format=anthropic&native=true",
        "format=openai-responses&native=true",
        "format=openai-responses&native=true&search=client",
    ],
)
def test_it_is_in_the_tools_of_every_provider(agent, options):
    session = agent.open()
    tools = canonical(session.get(f"/catalog?{options}").json["tools"])
    assert tools.count('"name":"run_script"') == 1
    assert tools.count('"name":"check_call"') == 1


def test_the_description_is_within_what_clients_show_and_costs_at_most_330_tokens():
    tool = tool_list.meta_tool(rendering.run_script(), [])
    assert len(tool["description"].encode()) < tool_list.MAX_DESCRIPTION_BYTES
    assert count(canonical(rendering.run_script())) <= 330


def test_a_load_gives_functions_instead_of_schemas_where_scripts_run_and_ask(run):
    asked = {"group_id": "mcp:raw", "signatures": True}

    async def scenario(door):
        plain = body_of(await door.call("load_tools", {"group_id": "mcp:raw"}))
        loaded = body_of(await door.call("load_tools", asked))
        await in_database(Agent.objects.update, code_mode=False)
        await in_database(Revision.bump)
        return plain, loaded, body_of(await door.call("load_tools", asked))

    plain, loaded, without = run(scenario)
    assert loaded["schemas"] is None
    assert "# module raw" in loaded["signatures"]
    assert "async def say(*, result: str)" in loaded["signatures"]
    assert loaded["tool_names"] == plain["tool_names"]
    assert "signatures" not in plain
    assert (without["schemas"], "signatures" in without) == (plain["schemas"], False)


def test_a_load_gives_functions_in_the_language_that_is_asked_for(agent):
    session = agent.open()
    listed = next(tool for tool in session.opened["tools"] if tool["name"] == "load_tools")
    asked = listed["parameters"]["properties"]["signatures"]
    assert asked["enum"] == ["python", "typescript"]
    loaded = session.load("mcp:raw", "say", signatures="typescript").json
    assert "function say(input: { result: string }): Promise<any>;" in loaded["signatures"]
    python = session.load("mcp:raw", "say", signatures="python").json
    assert python == session.load("mcp:raw", "say", signatures=True).json
    assert session.post("/load", {"group_id": "mcp:raw", "signatures": "ruby"}).status == 422


def test_a_load_gives_the_same_functions_after_the_tool_was_changed(agent):
    """They are those that the session was shown, which its calls are validated by."""
    session = agent.open()
    first = session.load("mcp:raw", "say", signatures=True).json
    sdk = session.get("/sdk?tools=raw__say").json
    add_parameter()
    assert session.load("mcp:raw", "say", signatures=True).json == first
    assert session.get("/sdk?tools=raw__say").json == sdk
    assert "new: str" in agent.open().load("mcp:raw", "say", signatures=True).json["signatures"]


def test_a_load_over_rest_gives_functions_too_also_with_inject(agent):
    for strategy in ("dispatch", "inject"):
        session = agent.open(strategy=strategy)
        load = next(tool for tool in session.opened["tools"] if tool["name"] == "load_tools")
        assert "signatures" in load["parameters"]["properties"]
        response = session.load("mcp:raw", "say", signatures=True)
        loaded = response.json
        assert "async def say" in loaded["signatures"]
        assert "async def later" not in loaded["signatures"]
    event = Event.objects.filter(kind="loaded").latest("id")
    assert event.tokens == count(canonical(loaded))
