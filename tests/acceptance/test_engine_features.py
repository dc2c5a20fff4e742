"""Acceptance of rows of the feature table that cross several parts: registry, details, previews.

Each test is named after the feature that it walks, as a client or a person sees it.
"""

import json

import pytest
from django.urls import reverse

from catalog.approvals import actions as approvals
from catalog.audit import SYSTEM
from catalog.models import Tool
from tests.sessions_app.mcp.test_features import run_scenario
from tests.sessions_app.mcp.test_surface import read_instructions
from tests.sessions_app.mcp.test_tool_calls import LEGACY, MODERN, agent, result_of
from tests.sessions_app.sessions.test_endpoint import in_database
from tests.support.agent_client import add_tools, make_agent_client, make_group
from tests.support.factories import ingest_tools, tool_object

__all__ = ["agent"]
LEVELS = {
    "name": {"name", "group_id"},
    "summary": {"name", "group_id", "description"},
    "full": {"name", "group_id", "description", "schema", "source", "server"},
}


@pytest.fixture(params=[MODERN, LEGACY])
def era(request):
    return request.param


async def read(door, tool, **arguments):
    """Call a meta-tool; return the JSON that the model reads."""
    result = result_of(await door.call(tool, arguments))
    assert not result["isError"], result
    return json.loads(result["content"][0]["text"])


@pytest.mark.django_db
def test_a_lazy_registry_is_searched_without_schemas_and_a_tool_activated_by_its_name(agent, era):
    """Row 17: at most 15 names where the caller gives no limit, and no schemas."""

    async def scenario(door):
        await in_database(lambda: add_tools("many", *(f"note_{n}" for n in range(60))))
        found = await read(door, "tool_search", query="note")
        listed = [hit["name"] for hit in found["tools"]] + found.get("more", [])
        assert 5 < len(set(listed)) <= 15
        assert found["total_matches"] == 60
        assert not any({"schema", "loaded"} & hit.keys() for hit in found["tools"])
        wide = await read(door, "tool_search", query="note", limit=999)
        assert len(wide["tools"]) == 50, "the limit of the caller counts, up to 50"

        [hit] = (await read(door, "tool_search", name="raw__say"))["tools"]
        assert hit["loaded"] is True
        assert hit["schema"]["type"] == "object"
        again = await read(door, "tool_search", query="say")
        assert [h.get("loaded") for h in again["tools"] if h["name"] == "raw__say"] == [True]
        called = result_of(await door.call("raw__say"))
        assert called["isError"] is False

    run_scenario(agent, era, scenario)


@pytest.mark.parametrize("level", LEVELS)
def test_three_levels_of_detail_over_rest(session, level):
    """Row 23."""
    hit = session.search("create issue", detail=level)["tools"][0]
    assert hit["name"] == "github__create_issue"
    shown = LEVELS[level]
    assert shown <= hit.keys()
    assert not hit.keys() & ({"description", "schema"} - shown)

    details = session.get(f"/tools/github__create_issue?detail={level}").json
    assert ("description" in details) == (level != "name")
    assert ("parameters" in details) == (level == "full")


def test_three_levels_of_detail_over_mcp(agent, era):
    """Row 23."""

    async def scenario(door):
        for level, shown in LEVELS.items():
            hit = (await read(door, "search_tools", query="say", detail=level))["tools"][0]
            assert shown <= hit.keys()
            assert not hit.keys() & ({"description", "schema"} - shown)
            details = await read(door, "get_tool_details", name="raw__say", detail=level)
            assert ("description" in details) == (level != "name")
            assert ("parameters" in details) == (level == "full")

    run_scenario(agent, era, scenario)


def test_a_preload_set_on_the_page_is_in_the_api_and_in_a_session(client, admin, operator_token):
    """Row 32: the page's own form, without JavaScript; then the API, then what an agent gets."""
    make_group("research", *add_tools("github", "create_issue", "list_issues").tools.all())
    agent = make_agent_client("scout", "research", mode="deferred")
    assert "github__list_issues" not in [tool["name"] for tool in agent.open().opened["tools"]]

    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    form = reverse("group-preload", args=["research"])
    assert f'action="{form}"' in client.get("/groups/research").content.decode()
    assert client.post(form, {"always": "github__list_issues"}).status_code == 302

    headers = {"Authorization": f"Bearer {operator_token}"}
    members = client.get("/api/v1/groups/research/members", headers=headers).json()["items"]
    assert {row["name"]: row["preload"] for row in members} == {
        "github__create_issue": None,
        "github__list_issues": True,
    }
    assert agent.open().opened["tools"][-1]["name"] == "github__list_issues"


def test_a_live_session_with_an_old_definition_is_listed_on_the_page(client, admin, scout, github):
    """Row 55: a load, a change that a person approves, and the page that names the session."""
    session = scout.open()
    session.load("mcp:github", "create_issue")
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    tool = Tool.objects.get(public_name="github__create_issue")
    assert "Open sessions on outdated definitions" in client.get("/usage").content.decode()
    assert f"/sessions/{session.id}" not in outdated_sessions(client)

    ingest_tools(tool.server, tool_object("create_issue", description="Open an issue, always."))
    tool.refresh_from_db()
    assert f"/sessions/{session.id}" not in outdated_sessions(client), "the change is pending"
    approvals.approve(tool, actor=SYSTEM)

    assert f"/sessions/{session.id}" in outdated_sessions(client)
    assert "github__create_issue" in outdated_sessions(client)
    session.post("/close")
    assert f"/sessions/{session.id}" not in outdated_sessions(client)


def outdated_sessions(client):
    """Return the section of the usage page."""
    page = client.get("/usage").content.decode()
    return page.partition('id="old-title"')[2].partition("</section>")[0]


def test_the_description_of_the_search_names_the_groups(agent, era):
    """Row 57: groups in the description of the search, their lines in the instructions."""

    async def scenario(door):
        await in_database(lambda: add_tools("github", "create_issue"))
        tools = (await door.result("tools/list"))["tools"]
        by_name = {tool["name"]: tool["description"] for tool in tools}
        instructions = await read_instructions(door)
        return by_name, instructions

    by_name, instructions = run_scenario(agent, era, scenario)
    assert by_name.pop("search_tools").endswith(" Groups: mcp:github, mcp:raw")
    assert not any("mcp:" in description for description in by_name.values())
    lines = [line for line in instructions.splitlines() if line.startswith("- `")]
    assert [line.split("`")[1] for line in lines] == ["mcp:github", "mcp:raw"]
