"""Sessions over REST with tools that an admin renamed, or whose parameters an admin overrides."""

import json

import pytest

from catalog.audit import SYSTEM
from catalog.models import Definition, Revision, Tool
from catalog.tools import actions as tool_actions
from catalog.tools import overrides
from catalog.tools.actions import save_custom_tool
from sessions_app.models import Call, Rule
from tests.support.agent_client import add_tools, make_agent_client, make_group
from tests.support.factories import tool_object

SCHEMA = {
    "type": "object",
    "properties": {
        "repo": {"type": "string"},
        "title": {"type": "string"},
        "limit": {"type": "integer"},
    },
    "required": ["repo", "title"],
}
FIXED = {"repo": {"hidden": True, "fixed": "a/b"}}


@pytest.fixture
def ticket(db):
    """A custom tool: its call answers with the arguments that it would be run with."""
    tool = save_custom_tool(tool_object("open_ticket", inputSchema=SCHEMA), actor=SYSTEM)
    make_group("desk", tool)
    return tool


@pytest.fixture
def scout(ticket):
    return make_agent_client("scout", mode="deferred")


def rename(tool, *aliases):
    for alias in aliases:
        tool = overrides.set_alias(tool, alias, actor=SYSTEM)
    return tool


def fix(tool, given=FIXED):
    return overrides.override_parameters(tool, given, actor=SYSTEM)


@pytest.mark.parametrize("name", ["ticket", "report", "open_ticket"])
def test_a_tool_is_used_by_its_alias_an_old_alias_and_its_original_name(scout, ticket, name):
    fix(rename(ticket, "report", "ticket"))
    session = scout.open()
    found = session.search(name=name)["tools"][0]
    assert found["name"] == "ticket"
    loaded = session.load("desk", name)
    assert (loaded["tool_names"], loaded["unknown"]) == (["ticket"], [])
    assert list(loaded["schemas"][0]["parameters"]["properties"]) == ["limit", "title"]
    assert session.get(f"/tools/{name}")["name"] == "ticket"
    assert session.post("/preload", {"tool_names": [name]})["preloaded"] == ["ticket"]
    answer = session.call(name, {"title": "Broken"})
    assert (answer["tool_name"], answer["state"]) == ("ticket", "client")
    assert answer["structured_content"] == {"repo": "a/b", "title": "Broken"}
    assert answer["implicit_load"] is False
    row = Call.objects.get()
    assert json.loads(row.arguments) == {"repo": "a/b", "title": "Broken"}
    assert row.definition == Tool.objects.get().effective


def test_a_renamed_tool_of_a_server_is_found_by_its_bare_name(db):
    add_tools("github", "list_issues")
    rename(Tool.objects.get(name="list_issues"), "bugs")
    session = make_agent_client("scout", mode="deferred").open()
    for name in ("bugs", "list_issues", "github__list_issues"):
        assert session.load("mcp:github", name)["tool_names"] == ["bugs"]
        assert session.search(name=name)["tools"][0]["name"] == "bugs"
    assert "bugs" in session.opened["catalog"]["text"]


def test_a_session_keeps_the_name_that_it_was_given(scout, ticket):
    other = save_custom_tool(tool_object("other"), actor=SYSTEM)
    make_group("more", other)
    session = scout.open()
    loaded = session.load("desk").bytes
    session.get("/tools/other")
    catalog = session.get("/catalog").bytes
    rename(ticket, "ticket")
    rename(other, "another")
    assert session.load("desk").bytes == loaded
    assert session.get("/catalog").bytes == catalog
    assert session.call("open_ticket", {"repo": "x", "title": "y"})["tool_name"] == "open_ticket"
    assert session.call("ticket", {"repo": "x", "title": "y"})["tool_name"] == "open_ticket"
    assert session.search(name="ticket")["tools"][0]["name"] == "open_ticket"
    assert session.load("more", "another")["tool_names"] == ["other"]
    assert session.state == {"desk": None, "more": None}
    assert scout.open().load("desk")["tool_names"] == ["ticket"]


@pytest.mark.parametrize("value", ["a/b", "c/d"])
def test_a_hidden_parameter_cannot_be_given(scout, ticket, value):
    fix(ticket)
    answer = scout.open().call("open_ticket", {"title": "t", "repo": value})
    assert answer["error"]["code"] == "invalid_arguments"
    text = answer["content"][0]["text"]
    assert "'repo' is not a parameter of this tool" in text
    assert '"repo"' not in text
    assert "a/b" not in text


def test_a_visible_fixed_parameter_may_be_left_out_but_not_changed(scout, ticket):
    fix(ticket, {"repo": {"fixed": "a/b"}})
    session = scout.open()
    for arguments in ({"title": "t"}, {"title": "t", "repo": "a/b"}):
        answer = session.call("open_ticket", arguments)
        assert answer["structured_content"] == {"repo": "a/b", "title": "t"}
    answer = session.call("open_ticket", {"title": "t", "repo": "c/d"})
    assert answer["error"]["code"] == "invalid_arguments"


def test_the_complete_arguments_are_validated_by_the_approved_definition(scout, ticket):
    schema = {**SCHEMA, "not": {"required": ["repo", "limit"]}}
    tool = save_custom_tool(
        tool_object("open_ticket", inputSchema=schema), actor=SYSTEM, tool=ticket
    )
    fix(tool)
    session = scout.open()
    assert session.call("open_ticket", {"title": "t"})["state"] == "client"
    answer = session.call("open_ticket", {"title": "t", "limit": 5})
    assert answer["error"]["code"] == "invalid_arguments"
    assert "do not fit the values that an admin has fixed" in answer["error"]["message"]
    assert "repo" not in str(answer.json)


def test_a_new_override_is_a_changed_definition_for_a_session_that_had_the_old_one(scout, ticket):
    session = scout.open()
    loaded = session.load("desk").bytes
    fix(ticket)
    assert session.load("desk").bytes == loaded
    arguments = {"repo": "c/d", "title": "t"}
    answer = session.call("open_ticket", arguments)
    assert answer["error"]["code"] == "definition_changed"
    answer = session.call("open_ticket", {"title": "t"})
    assert answer["structured_content"] == {"repo": "a/b", "title": "t"}
    assert "repo" not in str(session.load("desk")["schemas"])


def test_tokens_and_search_follow_the_effective_definition(scout, ticket):
    before = scout.open().get("/stats")["tokens"]["all_schemas"]
    fix(ticket, {"limit": {"description": "The number of narwhals that the answer may have."}})
    session = scout.open()
    effective = Definition.objects.get(pk=Tool.objects.get().effective_id)
    assert session.get("/stats")["tokens"]["all_schemas"] == effective.tokens > before
    assert session.search("narwhals")["tools"][0]["name"] == "open_ticket"


@pytest.mark.parametrize("glob", ["open_*", "report", "tick*"])
def test_rules_match_all_names_and_see_the_full_arguments(scout, ticket, glob):
    fix(rename(ticket, "report", "ticket"))
    conditions = [{"path": "/repo", "op": "eq", "value": "a/b"}]
    Rule.objects.create(
        name="no", effect="deny", position=1, match={"tools": [glob], "arguments": conditions}
    )
    Revision.bump()
    answer = scout.open().call("ticket", {"title": "t"})
    assert answer["error"]["code"] == "denied_by_rule"


def test_a_held_call_shows_and_runs_with_the_fixed_values(scout, ticket):
    fix(ticket)
    Rule.objects.create(name="ask", effect="hold", position=1, match={})
    Revision.bump()
    session = scout.open()
    held = session.call("open_ticket", {"title": "t"})
    assert held["state"] == "held"
    assert json.loads(Call.objects.get().arguments) == {"repo": "a/b", "title": "t"}
    assert session.call("open_ticket", {"title": "t"})["call_id"] == held["call_id"]


def test_a_description_override_reaches_sessions_as_part_of_the_definition(scout, ticket):
    tool_actions.override_description(ticket, "Ask the help desk.", actor=SYSTEM)
    loaded = scout.open().load("desk")
    assert loaded["schemas"][0]["description"] == "Ask the help desk."


def test_the_page_of_a_renamed_tool_counts_calls_by_all_its_names(scout, ticket, client, admin):
    arguments = {"repo": "x", "title": "y"}
    assert scout.open().call("open_ticket", arguments)["state"] == "client"
    rename(ticket, "ticket")
    scout.open().call("ticket", arguments)
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    assert client.get("/tools/ticket").context["series"].total.calls == 2
