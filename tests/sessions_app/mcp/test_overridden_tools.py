"""Calls over MCP of a tool with an alias and a fixed value, by each of its names."""

import json

import pytest

from catalog import cache
from catalog.audit import SYSTEM
from catalog.models import Tool
from catalog.tools import overrides
from sessions_app.dispatch import authorization
from sessions_app.models import Call
from tests.sessions_app.mcp.test_tool_calls import agent, era, result_of, run
from tests.sessions_app.sessions.test_endpoint import CONTENT

__all__ = ["agent", "era", "run"]


@pytest.fixture
def renamed(agent):
    """`raw__say`, renamed twice; agents do not see its required parameter."""
    tool = Tool.objects.get(name="say")
    fixed = {"result": {"hidden": True, "fixed": CONTENT}}
    overrides.override_parameters(tool, fixed, actor=SYSTEM)
    for alias in ("talk", "speak"):
        overrides.set_alias(tool, alias, actor=SYSTEM)
    cache.clear()
    authorization.clear()


def test_a_tool_is_called_by_its_alias_an_old_alias_and_its_original_name(renamed, run):
    names = ("speak", "talk", "raw__say", "say")

    async def scenario(door):
        direct = [await door.call(name, {}) for name in names]
        dispatched = [
            await door.call("deferred_tool_call", {"name": name, "arguments": {}}) for name in names
        ]
        details = await door.call("get_tool_details", {"name": "talk"})
        return direct + dispatched, details

    answers, details = run(scenario)
    for answer in answers:
        assert result_of(answer)["content"] == [{"type": "text", "text": "done"}]
    shown = result_of(details)["content"][0]["text"]
    assert "speak" in shown
    assert '"result"' not in shown
    rows = list(Call.objects.values_list("tool_name", "state", "arguments"))
    assert {row[:2] for row in rows} == {("speak", "succeeded")}
    assert [json.loads(row[2]) for row in rows] == [{"result": CONTENT}] * 8


def test_the_search_over_mcp_finds_the_tool_by_an_old_name(renamed, run):
    async def scenario(door):
        return await door.call("search_tools", {"name": "raw__say"})

    assert '"speak"' in result_of(run(scenario))["content"][0]["text"]
