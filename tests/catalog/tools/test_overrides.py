"""Aliases of tools and overrides of parameters: what is accepted, stored, kept and dropped."""

from importlib import import_module

import pytest
from django.apps import apps
from django.core.management import call_command
from django.urls import reverse

from catalog import cache
from catalog.approvals import actions as approval_actions
from catalog.audit import SYSTEM
from catalog.definitions.effective import derive, refresh
from catalog.models import AuditEntry, GoldenQuery, Revision, Tool
from catalog.search import golden_queries
from catalog.tools import actions as tool_actions
from catalog.tools import overrides
from catalog.tools.queries import find_tool
from tests.catalog.tools.test_api import api
from tests.support.factories import ingest_tools, make_server, make_tool, tool_object
from toolcrib.lib.errors import Conflict, Invalid

__all__ = ["api"]
BACKEND = "django.contrib.auth.backends.ModelBackend"
SCHEMA = {
    "type": "object",
    "properties": {
        "repo": {"type": "string", "description": "Owner and name."},
        "state": {"enum": ["open", "closed"]},
        "limit": {"type": "integer", "minimum": 1},
    },
    "required": ["repo", "state"],
}


@pytest.fixture
def server(db):
    return make_server(slug="github")


@pytest.fixture
def tool(server):
    return make_tool(server, "list_issues", description="List issues.", inputSchema=SCHEMA)


def served(tool):
    """Return the definition that agents get."""
    return cache.current().tools[tool.pk].approved.tool


def change(tool, **schema):
    ingest_tools(tool.server, tool_object(tool.name, inputSchema={"type": "object", **schema}))
    return Tool.objects.get(pk=tool.pk)


def test_a_schema_is_derived_without_what_is_hidden_or_given():
    given = {
        "repo": {"hidden": True, "fixed": "a/b"},
        "state": {"fixed": "open", "description": "Always open."},
        "limit": {"description": "At most 50."},
    }
    schema = {
        **SCHEMA,
        "anyOf": [{"required": ["repo"]}, {"required": ["limit"]}],
        "not": {"required": ["limit", "other"]},
    }
    tool = {"name": "list_issues", "inputSchema": schema}
    assert derive(tool, "Ours.", given) == {
        "name": "list_issues",
        "description": "Ours.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "state": {
                    "enum": ["open", "closed"],
                    "const": "open",
                    "description": "Always open.",
                },
                "limit": {"type": "integer", "minimum": 1, "description": "At most 50."},
            },
            "not": {"required": ["limit", "other"]},
        },
    }
    assert tool["inputSchema"] == schema


def test_agents_get_the_effective_definition_stored_like_any_other(tool):
    approved = tool.approved
    tool = overrides.override_parameters(
        tool, {"limit": {"description": "Number of narwhals."}}, actor=SYSTEM
    )
    assert served(tool)["inputSchema"]["properties"]["limit"]["description"].startswith("Number")
    assert tool.approved == approved
    assert tool.effective.sha256 != approved.sha256
    assert "narwhals" in tool.effective.search_text
    assert cache.current().tools[tool.pk].tokens == tool.effective.tokens == tool.tokens

    tool = overrides.override_parameters(tool, {}, actor=SYSTEM)
    assert (tool.effective, served(tool)) == (None, approved.tool)


def test_a_description_override_is_part_of_the_effective_definition(tool):
    text = "List the issues of our own repository."
    tool = tool_actions.override_description(tool, text, actor=SYSTEM)
    assert served(tool)["description"] == text
    assert tool.effective.tokens != tool.approved.tokens


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"repo": {"hidden": True}}, "repo is required: hidden, it needs a fixed value."),
        ({"limit": {"fixed": 0}}, "The fixed value of limit does not match its schema."),
        ({"other": {"hidden": True}}, "The tool has no parameter 'other'."),
        ({"limit": {"secret": 1}}, "Unknown override of limit: secret."),
        ({"limit": {"hidden": "yes"}}, "limit: description must be a text"),
        ({"limit": {"description": "x" * 40_000}}, "over the limit"),
        ({"repo": {"fixed": "a\0b"}}, "NUL"),
        ([], "parameters must be an object"),
    ],
)
def test_an_override_that_cannot_work_is_refused(tool, given, sentence):
    with pytest.raises(Invalid) as error:
        overrides.override_parameters(tool, given, actor=SYSTEM)
    assert sentence in error.value.sentence
    assert Tool.objects.get(pk=tool.pk).parameter_overrides == {}


def test_an_alias_keeps_all_earlier_names(tool):
    for alias in ("issues", "bugs", "issues"):
        tool = overrides.set_alias(tool, alias, actor=SYSTEM)
    assert (tool.public_name, tool.alias, tool.assigned_name) == (
        "issues",
        "issues",
        "github__list_issues",
    )
    assert {row.name for row in tool.former_names.all()} == {"github__list_issues", "bugs"}
    for name in ("issues", "bugs", "github__list_issues"):
        assert find_tool(name) == tool

    tool = overrides.set_alias(tool, "", actor=SYSTEM)
    assert (tool.public_name, tool.alias) == ("github__list_issues", "")
    assert find_tool("issues") == tool


def test_a_name_is_never_given_to_another_tool(server, tool):
    overrides.set_alias(tool, "first", actor=SYSTEM)
    tool = overrides.set_alias(tool, "second", actor=SYSTEM)
    other = make_tool(server, "other")
    for taken in ("first", "second", "github__list_issues"):
        with pytest.raises(Conflict, match="is, or was, the name of another tool"):
            overrides.set_alias(other, taken, actor=SYSTEM)
    with pytest.raises(Conflict, match="A tool was called first before"):
        tool_actions.save_custom_tool(tool_object("first"), actor=SYSTEM)
    # A sync does not give it either: `list-issues` has the same safe form.
    ingest_tools(
        server,
        tool_object("list_issues", inputSchema=SCHEMA),
        tool_object("other"),
        tool_object("list.issues"),
    )
    assert Tool.objects.get(name="list.issues").public_name.startswith("github__list_issues_")


@pytest.mark.parametrize("alias", ["a b", "é", "x" * 65, "search_tools"])
def test_an_alias_that_no_provider_accepts_is_refused(tool, alias):
    with pytest.raises((Invalid, Conflict)):
        overrides.set_alias(tool, alias, actor=SYSTEM)


def test_golden_queries_follow_a_new_name(tool):
    golden_queries.set_expected_tools(
        "open bugs", [tool.public_name], origin=GoldenQuery.Origin.API, actor=SYSTEM
    )
    overrides.set_alias(tool, "issues", actor=SYSTEM)
    assert GoldenQuery.objects.get().right == ["issues"]


def test_each_change_is_audited_and_bumps_the_revision(tool):
    for change_it, verb in (
        (lambda: overrides.set_alias(tool, "issues", actor=SYSTEM), "tool.rename"),
        (
            lambda: overrides.override_parameters(tool, {"limit": {"fixed": 5}}, actor=SYSTEM),
            "tool.parameters",
        ),
    ):
        before = Revision.current()
        change_it()
        assert Revision.current() > before
        assert AuditEntry.objects.first().verb == verb
        entries = AuditEntry.objects.count()
        change_it()
        assert AuditEntry.objects.count() == entries


def test_an_approved_change_drops_overrides_of_removed_parameters(tool):
    given = {"limit": {"hidden": True}, "repo": {"description": "Ours."}}
    overrides.override_parameters(tool, given, actor=SYSTEM)
    tool = change(tool, properties={"repo": {"type": "string"}})
    assert tool.parameter_overrides == given  # it waits for approval
    tool = approval_actions.approve(tool, actor=SYSTEM)

    assert tool.parameter_overrides == {"repo": {"description": "Ours."}}
    assert [row["parameter"] for row in tool.dropped_overrides] == ["limit"]
    entry = AuditEntry.objects.get(verb="tool.override.drop")
    assert entry.before == {"parameters": {"limit": {"hidden": True}}}
    assert served(tool)["inputSchema"]["properties"] == {
        "repo": {"type": "string", "description": "Ours."}
    }
    # Saving the parameters acknowledges it.
    tool = overrides.override_parameters(tool, tool.parameter_overrides, actor=SYSTEM)
    assert tool.dropped_overrides == []


def test_undoing_an_approval_restores_the_overrides_that_it_dropped(tool):
    given = {"limit": {"hidden": True}, "repo": {"description": "Ours."}}
    overrides.override_parameters(tool, given, actor=SYSTEM)
    before = served(Tool.objects.get())
    change(tool, properties={"repo": {"type": "string"}})
    approval_actions.approve(Tool.objects.get(), actor=SYSTEM)

    approval_actions.undo_approval(Tool.objects.get(), actor=SYSTEM)
    tool = Tool.objects.get()
    assert tool.parameter_overrides == given
    assert tool.dropped_overrides == []
    assert served(tool) == before
    # Approved again, the change drops them again.
    tool = approval_actions.approve(tool, actor=SYSTEM)
    assert tool.parameter_overrides == {"repo": {"description": "Ours."}}


def test_undoing_an_approval_keeps_what_was_dropped_before_it(tool):
    overrides.override_parameters(tool, {"limit": {"hidden": True}}, actor=SYSTEM)
    repo = {"repo": {"type": "string"}}
    approval_actions.approve(change(tool, properties=repo), actor=SYSTEM)
    changed = change(tool, properties={**repo, "state": {"type": "string"}})
    approval_actions.approve(changed, actor=SYSTEM)
    tool = approval_actions.undo_approval(Tool.objects.get(), actor=SYSTEM)
    assert tool.parameter_overrides == {}
    assert [row["parameter"] for row in tool.dropped_overrides] == ["limit"]


def test_the_page_warns_of_a_fixed_value_that_the_definition_does_not_allow(signed_in, tool):
    sentence = "Fixed values do not match the approved definition"
    overrides.override_parameters(tool, {"limit": {"fixed": 5}}, actor=SYSTEM)
    url = f"/tools/{tool.public_name}"
    assert sentence not in signed_in.get(url).content.decode()
    limit = {"type": "integer", "maximum": 3}
    approval_actions.approve(change(tool, properties={"limit": limit}), actor=SYSTEM)
    assert sentence in signed_in.get(url).content.decode()


def test_a_sync_with_automatic_approval_drops_them_too(server, tool):
    server.trust = "auto"
    server.save()
    overrides.override_parameters(tool, {"limit": {"hidden": True}}, actor=SYSTEM)
    tool = change(tool, properties={"limit": {"type": "integer"}, "repo": {}}, required=["limit"])
    assert (tool.parameter_overrides, tool.effective) == ({}, None)
    assert "required now" in tool.dropped_overrides[0]["reason"]


def test_the_api_sets_alias_and_parameters(api, tool):
    body = {"alias": "issues", "parameters": {"repo": {"hidden": True, "fixed": "a/b"}}}
    status, answer = api("PATCH", f"/tools/{tool.public_name}", body)[:2]
    assert status == 200
    assert (answer["name"], answer["alias"], answer["overridden"]) == ("issues", "issues", True)
    assert answer["former_names"] == ["github__list_issues"]
    assert answer["parameters"] == body["parameters"]
    assert "repo" in answer["definition"]["inputSchema"]["properties"]
    assert "repo" not in answer["effective_definition"]["inputSchema"]["properties"]
    assert api("GET", "/tools/github__list_issues")[1]["name"] == "issues"


def test_the_api_changes_nothing_if_one_part_is_invalid(api, tool):
    body = {"alias": "issues", "parameters": {"repo": {"hidden": True}}}
    assert api("PATCH", f"/tools/{tool.public_name}", body)[0] == 422
    assert Tool.objects.get(pk=tool.pk).alias == ""


@pytest.fixture
def signed_in(client, admin):
    client.force_login(admin, backend=BACKEND)
    return client


def fields_of(response):
    return {
        name: value
        for name, value in response.context["parameters_form"].initial.items()
        if value is not False
    }


def test_the_page_saves_a_row_for_each_parameter(signed_in, tool):
    page = signed_in.get(f"/tools/{tool.public_name}")
    url = reverse("tool-parameters", args=[tool.public_name])
    assert url in page.content.decode()
    # The rows are limit, repo, state.
    data = {"alias": "issues", "hidden_1": "on", "fixed_1": "a/b", "fixed_0": "5"}
    response = signed_in.post(url, fields_of(page) | data)
    assert response.status_code == 302
    tool.refresh_from_db()
    assert tool.alias == "issues"
    assert tool.parameter_overrides == {
        "limit": {"fixed": 5},
        "repo": {"hidden": True, "fixed": "a/b"},
    }
    page = signed_in.get("/tools/issues")
    assert fields_of(page)["fixed_1"] == "a/b"
    assert "Also called by github__list_issues" in page.content.decode()


def test_the_page_refuses_with_the_reason(signed_in, tool):
    url = reverse("tool-parameters", args=[tool.public_name])
    page = signed_in.get(f"/tools/{tool.public_name}")
    hidden = signed_in.post(url, fields_of(page) | {"hidden_1": "on"})
    assert (hidden.status_code, "needs a fixed value" in hidden.content.decode()) == (422, True)
    text = signed_in.post(url, fields_of(page) | {"fixed_0": "five"})
    assert (text.status_code, "Enter a JSON value" in text.content.decode()) == (422, True)
    stale = signed_in.post(url, fields_of(page) | {"seen": '["a"]'})
    assert (stale.status_code, "have changed" in stale.content.decode()) == (422, True)


def test_the_page_names_dropped_overrides(signed_in, tool):
    overrides.override_parameters(tool, {"limit": {"hidden": True}}, actor=SYSTEM)
    approval_actions.approve(change(tool, properties={}), actor=SYSTEM)
    page = signed_in.get(f"/tools/{tool.public_name}").content.decode()
    assert "An approved change dropped overrides of this tool." in page


def test_the_migration_stores_effective_definitions_of_overridden_descriptions(tool):
    Tool.objects.update(description_override="Ours, from an older release.")
    migration = import_module("catalog.migrations.0013_effective_descriptions")
    migration.store(apps, None)
    derived = Tool.objects.get().effective
    assert derived.description == "Ours, from an older release."
    tool = Tool.objects.get()
    refresh(tool)  # derives the same
    assert tool.effective == derived


def test_the_command_accepts_a_former_name(tool, capsys):
    overrides.set_alias(tool, "issues", actor=SYSTEM)
    call_command("tools", "hold", "github__list_issues", "--json")
    assert Tool.objects.get().held_at is not None
