"""Operator API of held calls: who decides, one or several, grants and what they lift."""

import json

import pytest

from catalog.models import AuditEntry, Revision
from sessions_app.held_calls import actions
from sessions_app.models import Call, Grant, Rule
from sessions_app.sessions import lifecycle
from tests.sessions_app.rules.test_dispatch import add_rule, code_of
from tests.support.asgi_requests import send_api

pytestmark = pytest.mark.django_db
TOOL = "github__create_issue"
SENT = "stopping"  # no server runs: the code of a call that would have been sent


def send(token, method, path, body=None):
    data = b"" if body is None else json.dumps(body).encode()
    response = send_api(method, f"/api/v1{path}", data, {"Authorization": f"Bearer {token}"})
    content = json.loads(response.content) if response.content else None
    return response.status_code, content


def decide(token, call_id, **body):
    return send(token, "POST", f"/calls/{call_id}/decision", {"decision": "allow", **body})


@pytest.fixture
def rule(scout):
    return add_rule("Ask first", effect="hold", tools=["github__*"])


@pytest.fixture
def session(scout, rule):
    return scout.open()


def hold(session, tool=TOOL, what="x"):
    answer = session.call(tool, {"what": what})
    assert answer["state"] == "held", answer.json
    return answer["call_id"]


def test_an_operators_token_decides_and_an_agents_key_never_does(session, scout, operator_token):
    call_id = hold(session)
    status, body = decide(scout.key, call_id)
    assert (status, body["error"]["code"]) == (403, "forbidden")
    assert (
        send(scout.key, "POST", "/calls/decisions", {"call_ids": [call_id], "decision": "allow"})[0]
        == 403
    )
    assert Call.objects.get().state == "held"
    status, body = decide(operator_token, call_id, comment="Go on.")
    assert (status, body["state"], body["comment"]) == (200, "approved", "Go on.")
    assert body["decided_by"] == "tests"


def test_an_operators_token_still_writes_nothing_else(operator_token, session):
    assert send(operator_token, "POST", "/groups", {"group_id": "x"})[0] == 403


def test_a_decided_call_is_a_conflict_and_an_unknown_one_not_found(session, operator_token):
    call_id = hold(session)
    assert decide(operator_token, call_id)[0] == 200
    status, body = decide(operator_token, call_id, decision="deny")
    assert (status, body["error"]["code"]) == (409, "already_decided")
    assert decide(operator_token, "call_0")[0] == 404


@pytest.mark.parametrize(
    "body",
    [
        {"decision": "maybe"},
        {"decision": "deny", "scope": "session"},
        {"grant": {"tools": ["*"]}},
        {"scope": "session", "grant": {"count": 0}},
        {"scope": "session", "grant": {"tools": [""]}},
        {"scope": "session", "grant": {"forever": True}},
        {"unknown": 1},
    ],
)
def test_a_decision_that_makes_no_sense_is_rejected_and_changes_nothing(
    session, operator_token, body
):
    call_id = hold(session)
    assert decide(operator_token, call_id, **body)[0] == 422
    assert Call.objects.get().state == "held"


def test_several_calls_are_decided_each_on_its_own(session, operator_token):
    ids = [hold(session, what=str(number)) for number in range(3)]
    decide(operator_token, ids[1])
    body = {"call_ids": [*ids, "call_0"], "decision": "deny", "comment": "No."}
    status, answer = send(operator_token, "POST", "/calls/decisions", body)
    assert status == 200
    assert [item.get("state") for item in answer["items"]] == ["denied", None, "denied", None]
    assert answer["items"][1]["error"]["code"] == "already_decided"
    assert AuditEntry.objects.filter(verb="call.deny").count() == 2


def test_held_calls_are_listed_by_state_with_masked_arguments_and_no_answer(
    session, operator_token, scout
):
    first, second = hold(session), hold(session, what="y")
    decide(operator_token, first)
    status, body = send(operator_token, "GET", "/calls?state=held")
    assert (status, [item["call_id"] for item in body["items"]]) == (200, [second])
    item = body["items"][0]
    assert (item["agent"], item["rule"], item["arguments"]) == ("scout", "Ask first", {"what": "y"})
    assert "answer" not in item
    assert "request" not in item
    assert send(operator_token, "GET", "/calls?state=lost")[0] == 422
    assert send(scout.key, "GET", "/calls")[0] == 403


# --- Grants ---------------------------------------------------------------------------------------


def grant(token, session, **terms):
    status, body = decide(
        token, hold(session), scope="session", **({"grant": terms} if terms else {})
    )
    assert status == 200, body


def test_a_grant_lets_the_tool_pass_in_its_session_alone(session, scout, operator_token):
    grant(operator_token, session)
    assert code_of(session, TOOL, what="y") == SENT
    hold(session, "github__list_issues")
    hold(scout.open())


def test_a_grant_has_patterns_a_count_and_a_time(session, operator_token):
    grant(operator_token, session, tools=["github__list_*"], count=2)
    for what in "ab":
        assert code_of(session, "github__list_issues", what=what) == SENT
    hold(session, "github__list_issues", what="c")
    assert Grant.objects.get().used == 2


def test_a_grant_that_has_run_out_of_time_lifts_nothing(session, operator_token):
    grant(operator_token, session, expires_in=3600)
    assert code_of(session, TOOL, what="y") == SENT
    row = Grant.objects.get()
    Grant.objects.update(expires_at=row.created_at)
    hold(session, what="z")


def test_a_grant_lifts_neither_a_denial_nor_another_rule(session, operator_token):
    grant(operator_token, session, tools=["*"])
    add_rule("Never", effect="deny", tools=["github__merge_pull"])
    assert code_of(session, "github__merge_pull", what="y") == "denied_by_rule"
    add_rule("Ask twice", effect="hold", tools=["github__get_file"])
    hold(session, "github__get_file", what="y")


def test_a_grant_is_not_copied_by_fork_or_resume_and_ends_with_its_session(
    session, scout, operator_token
):
    grant(operator_token, session)
    fork = session.post("/fork").json["id"]
    row = lifecycle.find_session(scout.agent, fork)
    assert not row.grants.exists()
    answer = scout.send(
        "POST", f"/sessions/{fork}/call", {"tool_name": TOOL, "arguments": {"what": "y"}}
    )
    assert answer["state"] == "held"
    resume = {"strategy": "dispatch", "expanded_groups": session.state}
    hold(scout.open(resume=resume))
    session.post("/close")
    assert not Grant.objects.exists()


def test_grants_are_listed_and_can_be_ended(session, operator_token, scout):
    grant(operator_token, session, count=5)
    path = f"/sessions/{session.id}/grants"
    status, body = send(operator_token, "GET", path)
    assert (status, [item["count"] for item in body["items"]]) == (200, [5])
    grant_id = body["items"][0]["id"]
    assert send(scout.key, "DELETE", f"/grants/{grant_id}")[0] == 403
    assert send(operator_token, "DELETE", f"/grants/{grant_id}") == (204, None)
    assert send(operator_token, "DELETE", f"/grants/{grant_id}")[0] == 404
    hold(session, what="z")
    assert AuditEntry.objects.filter(verb="grant.delete").exists()


def test_a_call_that_is_not_accepted_uses_up_no_grant(session, operator_token, scout):
    grant(operator_token, session, count=1)
    scout.agent.calls_in_flight = 0
    scout.agent.save()
    assert session.call(TOOL, {"what": "y"}).status == 429
    assert Grant.objects.get().used == 0


# --- The fixed surface ----------------------------------------------------------------------------


def names(session):
    return [tool["name"] for tool in session.opened["tools"] if tool["source"] == "builtin"]


def test_check_call_is_listed_once_a_rule_holds_and_open_sessions_keep_their_surface(scout):
    before = scout.open()
    assert "check_call" not in names(before)
    rule = add_rule("Ask first", effect="hold", tools=["github__*"])
    after = scout.open()
    assert names(after)[-1] == "check_call"
    assert scout.open(mode="full").opened["tools"][0]["name"] == "check_call"
    assert before.get("?include=tools").json["tools"] == before.opened["tools"]
    text = before.call(TOOL, {"what": "x"})["content"][0]["text"]
    assert f"call {TOOL} again with the same arguments" in text
    text = after.call(TOOL, {"what": "x"})["content"][0]["text"]
    assert "check_call" in text
    Rule.objects.filter(pk=rule.pk).update(enabled=False)
    Revision.bump()
    assert "check_call" not in names(scout.open())


def test_a_deleted_rule_does_not_hinder_the_decision(session, rule, operator_token):
    call_id = hold(session)
    rule.delete()
    Revision.bump()
    assert decide(operator_token, call_id)[1]["rule"] == "Ask first"


def test_the_comment_has_a_limit(session):
    with pytest.raises(actions.Invalid):
        actions.deny(hold(session), actor=actions.Actor("user", "o"), comment="x" * 2001)
