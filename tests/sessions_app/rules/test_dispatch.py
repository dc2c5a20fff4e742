"""Rules decide calls: order, effects, validated arguments, custom tools, people who try a tool."""

import pytest

from catalog.audit import SYSTEM
from catalog.models import Revision
from catalog.tools.actions import save_custom_tool
from sessions_app.models import Call, Rule
from tests.support.agent_client import make_group
from tests.support.factories import tool_object

SENT, DENIED = "stopping", "denied_by_rule"
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def add_rule(name="rule", effect="deny", **match):
    fields = {key: match.pop(key) for key in ("reason", "approver", "enabled") if key in match}
    rule = Rule.objects.create(
        name=name, effect=effect, position=Rule.objects.count(), match=match, **fields
    )
    Revision.bump()
    return rule


def code_of(session, tool, **arguments):
    """Call a tool and return the error's code; no server runs, so a sent call is `stopping`."""
    return session.call(tool, arguments or {"what": "x"})["error"]["code"]


@pytest.fixture
def counting(db):
    tool = save_custom_tool(tool_object("count", inputSchema=NUMBER), actor=SYSTEM)
    make_group("own", tool)
    return tool


def test_a_denied_call_is_refused_with_the_reason_and_recorded(session):
    add_rule("No issues", reason="Issues are written by people.", tools=["*__create_*"])
    answer = session.call("github__create_issue", {"what": "x"})
    assert answer["state"] == "refused"
    assert answer["is_error"] is True
    assert answer["error"]["code"] == "denied_by_rule"
    assert "No issues" in answer["error"]["message"]
    assert "Issues are written by people." in answer["content"][0]["text"]
    assert Call.objects.get().error_code == "denied_by_rule"


def test_a_rule_is_in_effect_from_the_next_call_on_in_an_open_session(session):
    assert code_of(session, "github__create_issue") == SENT
    rule = add_rule(tools=["github__create_issue"])
    assert code_of(session, "github__create_issue") == DENIED
    rule.delete()
    Revision.bump()
    assert code_of(session, "github__create_issue") == SENT


def test_the_first_rule_that_matches_decides(session):
    add_rule("allow one", effect="allow", tools=["github__get_file"])
    add_rule("deny all", effect="deny", servers=["github"])
    assert code_of(session, "github__get_file") == SENT
    assert code_of(session, "github__list_issues") == DENIED
    assert code_of(session, "slack__post_message") == SENT


def test_a_rule_that_is_disabled_decides_nothing(session):
    add_rule(enabled=False)
    assert code_of(session, "github__get_file") == SENT


def test_a_call_with_invalid_arguments_is_not_decided_by_rules(session):
    add_rule(effect="deny")
    assert session.call("github__get_file", {})["error"]["code"] == "invalid_arguments"


def test_custom_tools_are_decided_too(scout, counting):
    add_rule(tools=["count"], arguments=[{"path": "/n", "op": "gt", "value": 10}])
    session = scout.open()
    assert session.call("count", {"n": 3})["state"] == "client"
    assert session.call("count", {"n": 30})["error"]["code"] == "denied_by_rule"


def test_a_held_call_reaches_no_server(session):
    add_rule("Ask first", effect="hold", tools=["github__*"])
    answer = session.call("github__get_file", {"what": "x"})
    assert "Ask first" in answer["content"][0]["text"]
    assert Call.objects.get().sent_at is None


def test_a_damaged_rule_holds_every_call(session):
    rule = add_rule("Damaged", effect="allow")
    Rule.objects.filter(pk=rule.pk).update(match={"arguments": [{"op": "eq"}]})
    answer = session.call("github__get_file", {"what": "x"})
    assert "it is damaged" in answer["content"][0]["text"]
    assert Call.objects.get().sent_at is None
