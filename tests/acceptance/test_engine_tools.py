"""Acceptance of the engine: custom tools, filters and lints of tools, over the admin API."""

import pytest

from catalog.audit import SYSTEM
from sessions_app.agents import api_keys
from tests.support.agent_client import AgentClient, make_agent_client

SCHEMA = {"type": "object", "properties": {"sql": {"type": "string"}}}


@pytest.fixture
def admin(db):
    client = object.__new__(AgentClient)
    client.key = api_keys.create_key("admin", "admin", actor=SYSTEM)[1]
    return client


def custom(name="query_database", **fields):
    return {"name": name, "description": "Run a query.", "inputSchema": SCHEMA, **fields}


@pytest.mark.parametrize(("sent", "preloaded"), [({}, True), ({"preload": False}, False)])
def test_a_custom_tool_reaches_every_agent_with_all_groups(admin, sent, preloaded):
    """Requirements 14 and 16, defect 4."""
    created = admin.send("POST", "/tools", custom(**sent))
    assert (created.status, created["groups"]) == (201, ["custom:tools"])
    assert "preload" not in created["definition"]
    session = make_agent_client("scout", mode="deferred").open()
    names = {tool["name"] for tool in session.opened["tools"]}
    assert ("query_database" in names) is preloaded
    call = session.call("query_database", {"sql": "SELECT 1"})
    assert call["state"] == "client"


def test_a_custom_tool_can_be_created_in_another_group(admin):
    admin.send("POST", "/groups", {"group_id": "ops", "display_name": "Ops"})
    assert admin.send("POST", "/tools", custom(group_id="ops"))["groups"] == ["ops"]
    refused = admin.send("POST", "/tools", custom("other", group_id="nothing"))
    assert refused.status == 422
    assert admin.send("GET", "/tools/other").status == 404


@pytest.mark.parametrize(
    "body",
    [
        custom(bogus=1),
        {"type": "function", "function": custom(), "bogus": 1},
        {"type": "function", "function": custom(bogus=1)},
        custom(preload="yes"),
        custom(group_id=3),
    ],
)
def test_unknown_fields_of_a_custom_tool_are_refused(admin, body):
    """Defect 4."""
    assert admin.send("POST", "/tools", body).status == 422


def test_custom_tools_with_similar_names_are_told_apart(admin):
    """Defect 18."""
    first, second = (admin.send("POST", "/tools", custom(name)) for name in ("é", "ü"))
    assert (first.status, second.status) == (201, 201)
    assert first["name"] == "_"
    assert second["name"].startswith("__")
    assert admin.send("POST", "/tools", custom("é")).status == 409


def test_tools_are_filtered_by_source_group_and_state(admin, github):
    """Feature row 16."""
    admin.send("POST", "/tools", custom())

    def names(query):
        return [tool["name"] for tool in admin.send("GET", f"/tools?{query}")["items"]]

    assert names("source=custom") == names("group=custom:tools") == ["query_database"]
    assert len(names("source=mcp")) == len(names("group=mcp:github")) == 5
    for query in ("source=bogus", "state=bogus"):
        assert admin.send("GET", f"/tools?{query}").status == 422


def test_a_tool_has_a_lint_report(admin, github):
    """Requirement 29."""
    admin.send("POST", "/tools", custom("get_forecast", description="Forecast for a city"))
    report = admin.send("GET", "/tools/get_forecast/lint").json
    assert report["tool_name"] == "get_forecast"
    assert [lint["code"] for lint in report["lints"]] == ["description_verb"]
    assert admin.send("GET", "/tools/github__create_issue/lint")["lints"] == []
    assert admin.send("GET", "/tools/nothing/lint").status == 404
