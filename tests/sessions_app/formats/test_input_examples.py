"""Example arguments of a tool: in every format, as the session was shown them."""

import json

import pytest

from catalog.audit import SYSTEM
from catalog.groups import preview
from catalog.models import Group, Tool
from catalog.tools.actions import save_custom_tool, set_input_examples, to_provider_format
from sessions_app.mcp import tool_list
from sessions_app.models import AgentSession
from sessions_app.sessions.snapshots import Surface
from tests.support.agent_client import add_tools, make_agent_client, make_group
from tests.support.factories import ingest_tools, tool_object

EXAMPLE = {"what": "The login fails"}
SHOWN = 'Examples of arguments:\n{"what":"The login fails"}'
NAME = "github__create_issue"


def set_examples(*examples):
    set_input_examples(Tool.objects.get(public_name=NAME), list(examples), actor=SYSTEM)


@pytest.fixture
def scout(db):
    add_tools("github", "create_issue", "list_issues")
    set_examples(EXAMPLE)
    return make_agent_client("scout", mode="deferred")


def named(tools):
    """Return the one tool with examples, wherever the format puts it."""
    if "functionDeclarations" in tools[0]:
        tools = tools[0]["functionDeclarations"]
    members = [inner for tool in tools for inner in tool.get("tools", [tool])]
    return next(
        found
        for tool in members
        if (found := tool.get("function", tool)).get("name") in (NAME, "_" + NAME)
    )


FIELD = ("json", "anthropic", "anthropic&native=true")
TEXT = ("openai", "openai-responses", "openai-responses&native=true", "gemini", "mcp")


@pytest.mark.parametrize("format_", FIELD)
def test_formats_with_a_field_have_them_there(scout, format_):
    session = scout.open(preload=[NAME])
    tool = named(session.get(f"/tools?format={format_}").json)
    assert tool["input_examples"] == [EXAMPLE]
    assert "Examples" not in tool["description"]


@pytest.mark.parametrize("format_", TEXT)
def test_other_formats_have_them_in_the_description(scout, format_):
    session = scout.open(preload=[NAME])
    tool = named(session.get(f"/tools?format={format_}").json)
    assert "input_examples" not in tool
    assert tool["description"].endswith(SHOWN)


def test_the_native_form_has_those_of_deferred_tools(scout):
    session = scout.open()
    tools = session.get("/tools?format=anthropic&native=true").json
    assert named(tools)["defer_loading"] is True
    assert named(tools)["input_examples"] == [EXAMPLE]


def test_loads_details_and_searches_in_full_have_them(scout):
    assert named(scout.open().load("mcp:github")["schemas"])["input_examples"] == [EXAMPLE]
    session = scout.open()
    assert session.get(f"/tools/{NAME}")["input_examples"] == [EXAMPLE]
    assert "input_examples" not in session.get(f"/tools/{NAME}?detail=summary").json
    (hit,) = session.search(pattern="create_issue", detail="full")["tools"]
    assert hit["input_examples"] == [EXAMPLE]
    found = session.post(
        "/search?format=openai-responses&call_id=c", {"pattern": "create_issue"}
    ).json
    assert named(found["tools"])["description"].endswith(SHOWN)


def test_mcp_lists_them_in_the_description(scout):
    session = AgentSession.objects.get(session_id=scout.open(preload=[NAME]).id)
    tools = tool_list.list_tools(session, fixed=True, fits=lambda _: True)
    assert named(tools)["description"].endswith(SHOWN)


def test_a_session_keeps_what_it_was_shown(scout):
    session = scout.open()
    first = session.load("mcp:github").bytes
    set_examples()
    assert session.load("mcp:github").bytes == first


def test_examples_that_do_not_fit_a_changed_schema_are_left_out(scout):
    tool = Tool.objects.get(public_name=NAME)
    schema = {"type": "object", "properties": {"what": {"type": "integer"}}}
    ingest_tools(tool.server, tool_object("create_issue", inputSchema=schema))
    tool.refresh_from_db()
    Tool.objects.filter(pk=tool.pk).update(approved=tool.latest, state="available")
    assert "input_examples" not in scout.open().get(f"/tools/{NAME}").json


def test_a_custom_tool_brings_its_own(db):
    shape = {"input_schema": {"type": "object"}, "input_examples": [{"a": 1}]}
    tool = save_custom_tool({"name": "note", "description": "Note.", **shape}, actor=SYSTEM)
    make_group("own", tool)
    session = make_agent_client("scout", mode="deferred").open()
    assert session.get("/tools/note")["input_examples"] == [{"a": 1}]


def test_the_admin_api_sets_and_exports_them(scout, client, admin_token):
    headers = {"Authorization": f"Bearer {admin_token}"}
    url = f"/api/v1/tools/{NAME}"

    def patch(examples):
        body = {"input_examples": examples}
        return client.patch(url, json.dumps(body), content_type="application/json", headers=headers)

    other = {"what": "It is slow"}
    assert patch([other]).json()["input_examples"] == [other]
    assert patch([{"what": 5}]).status_code == 422
    assert patch("no list").status_code == 422
    shown = client.get(f"{url}?shape=anthropic", headers=headers).json()
    assert shown["definition"]["input_examples"] == [other]
    openai = client.get(f"{url}?shape=openai", headers=headers).json()["definition"]
    assert '{"what":"It is slow"}' in openai["function"]["description"]
    assert "input_examples" not in to_provider_format(tool_object("plain"), "anthropic")


def test_admins_set_them_on_the_page(scout, admin, page_of, client):
    url = f"/tools/{NAME}"
    assert b"The login fails" in page_of(admin, url).content
    saved = client.post(f"{url}/examples", {"examples": '[{"what": "It is slow"}]'})
    assert saved.status_code == 302
    assert Tool.objects.get(public_name=NAME).input_examples == [{"what": "It is slow"}]
    for wrong in ("[", '[{"what": 5}]', '{"what": "a"}'):
        assert client.post(f"{url}/examples", {"examples": wrong}).status_code == 422
    client.post(f"{url}/examples", {"examples": " "})
    assert Tool.objects.get(public_name=NAME).input_examples == []


def test_the_preview_of_a_group_shows_them(scout):
    tool = preview.cached_group(Group.objects.get(group_id="mcp:github")).members[0].tool
    assert preview.tool_object(tool)["input_examples"] == [EXAMPLE]


def test_snapshots_of_older_versions_have_no_examples():
    values = {"deferred": {"a": [1, "", "github"]}}
    surface = Surface((), {}, [], {}, None, "", 0, 0, "deferred", (), **values)
    assert surface.servers == ["github"]
