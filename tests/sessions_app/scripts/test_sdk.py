"""`GET /sessions/{id}/sdk`: the typed functions of a session's tools."""

import pytest

pytestmark = pytest.mark.django_db


def test_an_agent_gets_its_tools_as_python_functions(session):
    sdk = session.get("/sdk?tools=github__create_issue").json
    assert "async def create_issue(*, what: str) -> Any:" in sdk["text"]
    assert "Create an issue in a repository." in sdk["text"]
    assert sdk["names"] == {"github.create_issue": "github__create_issue"}
    assert sdk["tokens"] > 0
    assert sdk["left_out"] == 0


def test_and_as_typescript_functions(session):
    sdk = session.get("/sdk?lang=typescript&tools=create_issue,slack__search_code").json
    assert "function create_issue(input: { what: string }): Promise<any>;" in sdk["text"]
    assert list(sdk["names"]) == ["github.create_issue", "slack.search_code"]


def test_without_names_it_has_all_tools_in_scope(session):
    assert len(session.get("/sdk").json["names"]) == 7


def test_a_group_gives_its_tools_alone(session, drifter):
    slack = session.get("/sdk?group_id=mcp:slack").json["names"]
    assert slack
    assert all(name.startswith("slack.") for name in slack)
    both = session.get("/sdk?group_id=mcp:slack&tools=create_issue,slack__search_code").json
    assert list(both["names"]) == ["slack.search_code"]
    unknown = drifter.open().get("/sdk?group_id=mcp:slack").json["error"]
    assert (unknown["code"], "mcp:slack" in unknown["hint"]) == ("unknown_group", False)


def test_a_tool_outside_the_scope_is_unknown(session, drifter):
    assert session.get("/sdk?tools=github__nothing").json["error"]["code"] == "unknown_tool"
    assert drifter.open().get("/sdk").json["names"] == {}
    foreign = drifter.send("GET", f"/sessions/{session.id}/sdk")
    assert foreign.json["error"]["code"] == "unknown_session"


def test_another_language_is_rejected(session):
    assert session.get("/sdk?lang=rust").status == 422
