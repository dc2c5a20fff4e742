"""Changes to tools: overrides, hiding, call policy and custom tools."""

import pytest

from catalog.audit import SYSTEM
from catalog.models import AuditEntry, Revision, Tool, ToolState
from catalog.tools import actions as tool_actions
from tests.support.factories import ingest_tools, make_server, make_tool, tool_object
from toolcrib.lib.errors import Conflict, Invalid

pytestmark = pytest.mark.django_db

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


# --- Overrides, hiding, policies ---------------------------------------------------------------


def test_an_override_replaces_the_description_and_an_empty_one_resets_it():
    tool = make_tool(description="The server's own.")

    tool_actions.override_description(tool, "  Ours.  ", actor=SYSTEM)
    assert Tool.objects.get().description == "Ours."
    tool_actions.override_description(tool, "", actor=SYSTEM)
    assert Tool.objects.get().description == "The server's own."


def test_an_override_is_kept_when_the_definition_changes():
    server = make_server(trust="auto")
    tool_actions.override_description(make_tool(server), "Ours.", actor=SYSTEM)

    ingest_tools(server, tool_object(description="Another text."))

    assert Tool.objects.get().description == "Ours."


@pytest.mark.parametrize(
    ("text", "reason"),
    [("x" * (32 * 1024 + 1), "32 KB"), ("a\0b", "NUL"), ("\ud800", "invalid Unicode")],
)
def test_an_override_that_cannot_be_stored_is_invalid(text, reason):
    with pytest.raises(Invalid, match=reason):
        tool_actions.override_description(make_tool(), text, actor=SYSTEM)


def test_setting_the_current_value_changes_and_records_nothing():
    tool = make_tool()
    tool_actions.override_description(tool, "Ours.", actor=SYSTEM)
    tool_actions.hold(tool, "looks odd", actor=SYSTEM)
    before = (Revision.current(), AuditEntry.objects.count())

    tool_actions.override_description(tool, "Ours. ", actor=SYSTEM)
    tool_actions.hold(tool, "again", actor=SYSTEM)
    tool_actions.set_call_policy(tool, "allow", actor=SYSTEM)

    assert (Revision.current(), AuditEntry.objects.count()) == before
    assert Tool.objects.get().held_reason == "looks odd"


def test_a_hidden_tool_is_unavailable_until_it_is_released():
    tool = make_tool()

    tool_actions.hold(tool, "looks odd", actor=SYSTEM)
    assert Tool.objects.get().state == ToolState.HELD
    assert not Tool.objects.servable()
    tool_actions.release(tool, actor=SYSTEM)
    assert Tool.objects.servable().get() == tool


def test_each_action_is_audited_and_bumps_the_revision():
    tool = make_tool()
    actions = [
        lambda: tool_actions.override_description(tool, "Ours.", actor=SYSTEM),
        lambda: tool_actions.hold(tool, "odd", actor=SYSTEM),
        lambda: tool_actions.release(tool, actor=SYSTEM),
        lambda: tool_actions.set_call_policy(tool, "deny", actor=SYSTEM),
    ]
    for action in actions:
        before = (Revision.current(), AuditEntry.objects.count())
        action()
        assert (Revision.current(), AuditEntry.objects.count()) == (before[0] + 1, before[1] + 1)


def test_an_unknown_call_policy_is_invalid():
    with pytest.raises(Invalid):
        tool_actions.set_call_policy(make_tool(), "ask", actor=SYSTEM)


# --- Custom tools -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        {"name": "forecast", "description": "Tell.", "inputSchema": SCHEMA},
        {"name": "forecast", "description": "Tell.", "input_schema": SCHEMA},
        {"name": "forecast", "description": "Tell.", "parameters": SCHEMA, "type": "function"},
        {
            "type": "function",
            "function": {"name": "forecast", "description": "Tell.", "parameters": SCHEMA},
        },
    ],
)
def test_a_custom_tool_is_the_same_in_any_provider_format(raw):
    tool = tool_actions.save_custom_tool(raw, actor=SYSTEM)

    assert (tool.public_name, tool.source, tool.state) == ("forecast", "custom", "available")
    assert tool.approved.tool == {
        "name": "forecast",
        "description": "Tell.",
        "inputSchema": SCHEMA,
    }


@pytest.mark.parametrize("shape", ["mcp", "openai", "anthropic"])
def test_a_tool_in_a_provider_format_is_normalized_to_the_original(shape):
    tool = tool_object("forecast", description="Tell.", inputSchema=SCHEMA)

    assert tool_actions.normalize_tool(tool_actions.to_provider_format(tool, shape)) == tool


def test_a_schema_without_a_type_defaults_to_object():
    tool = tool_actions.save_custom_tool({"name": "forecast", "parameters": {}}, actor=SYSTEM)

    assert tool.approved.input_schema == {"type": "object"}


@pytest.mark.parametrize(
    "raw",
    [
        None,
        [],
        {"name": "forecast"},
        {"name": "", "inputSchema": {}},
        {"name": "a\0b", "inputSchema": {}},
        {"name": "forecast", "inputSchema": {"type": "array"}},
        {"name": "forecast", "inputSchema": {"$ref": "file:///etc/passwd"}},
        {"name": "forecast", "inputSchema": {}, "description": "x" * 40_000},
        {"type": "function", "function": {"name": "forecast"}},
    ],
)
def test_a_custom_tool_is_validated_like_every_definition(raw):
    """Hostile inputs 6 to 10, pasted by an admin."""
    with pytest.raises(Invalid):
        tool_actions.save_custom_tool(raw, actor=SYSTEM)
    assert not Tool.objects.exists()


def test_a_custom_tool_cannot_have_the_name_of_a_built_in_tool():
    """Hostile input 7."""
    with pytest.raises(Conflict, match="built-in tool"):
        tool_actions.save_custom_tool(tool_object("search_tools"), actor=SYSTEM)


def test_a_custom_tool_cannot_have_the_name_of_a_server_tool():
    """Hostile input 4: no tool shadows another."""
    make_tool(make_server(slug="weather"), "forecast")

    with pytest.raises(Conflict, match="weather__forecast already"):
        tool_actions.save_custom_tool(tool_object("weather__forecast"), actor=SYSTEM)


def test_a_server_tool_gets_another_name_if_a_custom_tool_has_its_name():
    """Hostile input 4: the server tool gets a hashed name, and the sync does not fail."""
    custom = tool_actions.save_custom_tool(tool_object("weather__forecast"), actor=SYSTEM)

    tool = make_tool(make_server(slug="weather"), "forecast")

    assert tool.public_name != custom.public_name
    assert tool.public_name.startswith("weather__forecast_")


def test_a_second_custom_tool_with_the_same_name_is_a_conflict():
    tool_actions.save_custom_tool(tool_object("forecast"), actor=SYSTEM)

    with pytest.raises(Conflict, match="already"):
        tool_actions.save_custom_tool(tool_object("forecast", description="x"), actor=SYSTEM)


def test_a_replaced_definition_is_kept_in_the_history():
    tool = tool_actions.save_custom_tool(tool_object("forecast", description="Old."), actor=SYSTEM)

    tool_actions.save_custom_tool(
        tool_object("forecast", description="New."), actor=SYSTEM, tool=tool
    )

    change = tool.changes.get()
    assert (change.before.description, change.after.description) == ("Old.", "New.")
    assert (change.outcome, change.decided_by) == ("approved", "Toolcrib")


def test_a_custom_tool_cannot_be_renamed():
    tool = tool_actions.save_custom_tool(tool_object("forecast"), actor=SYSTEM)

    with pytest.raises(Invalid, match="cannot be renamed"):
        tool_actions.save_custom_tool(tool_object("weather"), actor=SYSTEM, tool=tool)


def test_only_a_custom_tool_can_be_deleted():
    custom = tool_actions.save_custom_tool(tool_object("forecast"), actor=SYSTEM)

    tool_actions.delete_custom_tool(custom, actor=SYSTEM)
    with pytest.raises(Conflict, match="belongs to a server"):
        tool_actions.delete_custom_tool(make_tool(), actor=SYSTEM)
    assert Tool.objects.get().source == "mcp"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"name": }', "Line 1, column 10"),
        ("", "Line 1"),
        ("[" * 100_000, "nested too deep"),
        ('{"x": ' + "9" * 5_000 + "}", "number"),
    ],
)
def test_invalid_json_is_rejected_with_its_position(text, reason):
    with pytest.raises(Invalid, match=reason):
        tool_actions.parse_tool_text(text)
