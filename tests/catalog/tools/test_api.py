"""Admin API: tools, reviews, custom tools and error responses."""

import json

import pytest

from catalog.audit import SYSTEM
from catalog.models import AuditEntry, Tool
from catalog.tools import actions as tool_actions
from tests.support.factories import ingest_tools, make_server, make_tool, tool_object


@pytest.fixture
def weather(db):
    return make_server(slug="weather", name="Weather")


@pytest.fixture
def api(client, admin_token):
    """Call the API: api("POST", "/tools", {...}, key=...) returns status and body."""

    def call(method, path, body=None, key=admin_token):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        response = client.generic(
            method,
            f"/api/v1{path}",
            b"" if body is None else json.dumps(body).encode(),
            content_type="application/json",
            headers=headers,
        )
        return response.status_code, json.loads(response.content) if response.content else None

    return call


def pending_tool(server):
    make_tool(server, "a", description="Old.")
    ingest_tools(server, tool_object("a", description="New."))
    return Tool.objects.get(server=server, name="a")


def is_error(response, status, code):
    assert response[0] == status
    assert set(response[1]) == {"error"}
    assert response[1]["error"]["code"] == code
    assert response[1]["error"]["message"]
    assert "hint" in response[1]["error"]
    return True


# --- Errors -------------------------------------------------------------------------------------

WRITES = [
    ("POST", "/tools", tool_object("mine")),
    ("PATCH", "/tools/weather__a", {"description_override": "x"}),
    ("PUT", "/tools/weather__a", tool_object("a")),
    ("DELETE", "/tools/weather__a", None),
    ("POST", "/tools/weather__a/approve", {}),
    ("POST", "/tools/weather__a/undo-approval", {}),
    ("POST", "/tools/weather__a/keep-old", {}),
    ("POST", "/tools/weather__a/hold", {"reason": "x"}),
    ("POST", "/tools/weather__a/release", {}),
]
READS = ["/tools", "/tools/weather__a", "/tools/weather__a/history", "/groups", "/audit"]


@pytest.mark.parametrize("key", ["", "tcb_wrong", "no key at all"])
@pytest.mark.parametrize("path", READS)
def test_requests_without_a_valid_key_are_unauthorized(path, key, api, weather):
    pending_tool(weather)

    assert is_error(api("GET", path, key=key), 401, "unauthorized")


@pytest.mark.parametrize(("method", "path", "body"), WRITES)
def test_an_operator_key_cannot_write(method, path, body, api, weather, operator_token):
    pending_tool(weather)
    before = AuditEntry.objects.count()

    assert is_error(api(method, path, body, key=operator_token), 403, "forbidden")
    assert AuditEntry.objects.count() == before


@pytest.mark.parametrize("path", READS)
def test_an_operator_key_can_read_everything(path, api, weather, operator_token):
    pending_tool(weather)

    assert api("GET", path, key=operator_token)[0] == 200


@pytest.mark.parametrize(("method", "path", "body"), WRITES[1:])
def test_an_unknown_tool_is_not_found(method, path, body, api, db):
    assert is_error(api(method, path, body), 404, "not_found")


@pytest.mark.parametrize("limit", ["-1", "0", "201", "1000000000", "abc", "1e9", "5.5", ""])
@pytest.mark.parametrize("path", ["/tools", "/audit"])
def test_a_limit_out_of_range_is_invalid(path, limit, api, db):
    assert is_error(api("GET", f"{path}?limit={limit}"), 422, "invalid")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/tools", {"name": "x"}),
        ("POST", "/tools", [1]),
        ("POST", "/tools", {"name": "x", "inputSchema": {"type": "array"}}),
        ("PATCH", "/tools/weather__a", {"unknown": 1}),
        ("PATCH", "/tools/weather__a", {"description_override": 5}),
        ("PATCH", "/tools/weather__a", {"call_policy": "maybe"}),
        ("PATCH", "/tools/weather__a", {"description_override": "x" * 40_000}),
        ("POST", "/tools/weather__a/hold", {"why": "x"}),
        ("GET", "/tools/weather__a?shape=gemini", None),
        ("PUT", "/tools/weather__a", tool_object("a")),
    ],
)
def test_invalid_input_is_rejected(method, path, body, api, weather):
    make_tool(weather, "a")

    assert is_error(api(method, path, body), 422, "invalid")


def test_a_second_decision_is_a_conflict_that_names_the_first_reviewer(api, weather):
    pending_tool(weather)
    assert api("POST", "/tools/weather__a/approve", {})[0] == 200

    response = api("POST", "/tools/weather__a/keep-old", {})

    assert is_error(response, 409, "already_decided")
    assert "reviewed by tests: approved" in response[1]["error"]["message"]


def test_a_definition_that_changed_since_it_was_read_is_not_approved(api, weather):
    pending_tool(weather)
    seen = api("GET", "/tools/weather__a")[1]["waiting_sha256"]
    ingest_tools(weather, tool_object("a", description="Swapped in."))

    response = api("POST", f"/tools/weather__a/approve?sha256={seen}", {})

    assert is_error(response, 409, "changed_again")


def test_a_tool_of_a_server_cannot_be_deleted(api, weather):
    make_tool(weather, "a")

    assert is_error(api("DELETE", "/tools/weather__a"), 409, "conflict")


def test_a_duplicate_name_is_a_conflict(api, db):
    assert api("POST", "/tools", tool_object("mine"))[0] == 201

    assert is_error(api("POST", "/tools", tool_object("mine")), 409, "conflict")


# --- Lists --------------------------------------------------------------------------------------


def test_the_pages_contain_every_tool_once(api, weather):
    ingest_tools(weather, *[tool_object(f"t{number}") for number in range(57)])
    seen, cursor = [], ""
    while cursor is not None:
        status, page = api("GET", f"/tools?limit=10&cursor={cursor}")
        assert status == 200
        seen += [tool["name"] for tool in page["items"]]
        cursor = page["next_cursor"]

    assert len(seen) == 57
    assert seen == sorted(set(seen))


def test_the_pages_contain_every_audit_entry_once(api, weather):
    tool = make_tool(weather, "a")
    for _ in range(12):
        tool_actions.hold(tool, "", actor=SYSTEM)
        tool_actions.release(tool, actor=SYSTEM)
    seen, cursor = [], ""
    while cursor is not None:
        page = api("GET", f"/audit?limit=7{cursor and f'&cursor={cursor}'}")[1]
        seen += [entry["id"] for entry in page["items"]]
        cursor = page["next_cursor"]

    assert seen == sorted(seen, reverse=True)
    assert len(seen) == AuditEntry.objects.count()


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("?state=waiting", ["weather__a"]),
        ("?server=weather", ["weather__a"]),
        ("?server=nowhere", []),
        ("?q=THER__", ["weather__a"]),
        ("?q=%25", []),
        ("?q=%00", ["mine", "weather__a"]),
        ("?state=available", ["mine"]),
    ],
)
def test_tools_are_filtered(query, names, api, weather):
    pending_tool(weather)
    api("POST", "/tools", tool_object("mine"))

    assert [tool["name"] for tool in api("GET", f"/tools{query}")[1]["items"]] == names


# --- Actions ------------------------------------------------------------------------------------


def test_approve_activates_the_new_definition(api, weather):
    pending_tool(weather)
    before = api("GET", "/tools/weather__a")[1]
    assert (before["state"], before["description"]) == ("waiting", "Old.")
    assert before["waiting_definition"]["description"] == "New."

    after = api("POST", "/tools/weather__a/approve", {})[1]

    assert (after["state"], after["description"]) == ("available", "New.")
    assert after["waiting_definition"] is None


def test_keep_old_rejects_the_change(api, weather):
    pending_tool(weather)

    after = api("POST", "/tools/weather__a/keep-old", {})[1]

    assert (after["state"], after["description"]) == ("available", "Old.")
    [change] = api("GET", "/tools/weather__a/history")[1]["items"]
    assert (change["outcome"], change["decided_by"]) == ("kept_old", "tests")
    assert change["before"]["description"] == "Old."


def test_hold_hides_a_tool_and_release_makes_it_available(api, weather):
    make_tool(weather, "a")

    held = api("POST", "/tools/weather__a/hold", {"reason": "Odd."})[1]
    assert (held["state"], held["reason"]) == ("held", "Odd.")
    assert api("POST", "/tools/weather__a/release", {})[1]["state"] == "available"


def test_an_overridden_tool_has_both_descriptions(api, weather):
    make_tool(weather, "a", description="Theirs.")

    tool = api("PATCH", "/tools/weather__a", {"description_override": "Ours."})[1]

    assert (tool["description"], tool["server_description"]) == ("Ours.", "Theirs.")
    assert tool["overridden"]


PARAMETERS = {"type": "object", "properties": {"title": {"type": "string"}}}
FORMATS = {
    "mcp": {"name": "ticket", "description": "Open.", "inputSchema": PARAMETERS},
    "openai": {
        "type": "function",
        "function": {"name": "ticket", "description": "Open.", "parameters": PARAMETERS},
    },
    "anthropic": {"name": "ticket", "description": "Open.", "input_schema": PARAMETERS},
}


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_a_custom_tool_is_accepted_and_returned_in_any_format(source, target, api, db):
    status, tool = api("POST", "/tools", FORMATS[source])

    assert status == 201
    assert (tool["source"], tool["state"]) == ("custom", "available")
    assert api("GET", f"/tools/ticket?shape={target}")[1]["definition"] == FORMATS[target]


def test_a_custom_tool_can_be_replaced_and_deleted(api, db):
    api("POST", "/tools", FORMATS["mcp"])

    replaced = api("PUT", "/tools/ticket", FORMATS["mcp"] | {"description": "Open one."})
    assert (replaced[0], replaced[1]["description"]) == (200, "Open one.")
    assert api("DELETE", "/tools/ticket") == (204, None)
    assert is_error(api("GET", "/tools/ticket"), 404, "not_found")


def test_the_audit_log_is_listed(api, weather):
    make_tool(weather, "a")
    api("POST", "/tools/weather__a/hold", {"reason": "Odd."})

    newest = api("GET", "/audit?limit=1")[1]["items"][0]
    assert newest["sentence"] == "tests hid weather__a"
    assert newest["after"] == {"reason": "Odd."}


def test_an_approval_is_undone_by_api_as_on_the_page(api, weather):
    pending_tool(weather)
    assert is_error(api("POST", "/tools/weather__a/undo-approval"), 409, "already_decided")
    assert api("POST", "/tools/weather__a/approve")[0] == 200
    status, body = api("POST", "/tools/weather__a/undo-approval")
    assert (status, body["state"]) == (200, "waiting")
    assert body["definition"]["description"] == "Old."
    assert body["waiting_definition"]["description"] == "New."
    assert AuditEntry.objects.filter(verb="tool.undo_approval").count() == 1
