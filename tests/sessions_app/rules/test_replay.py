"""Test of a rule against recorded calls."""

from datetime import timedelta

import pytest
from django.utils import timezone

from catalog.models import Tool
from sessions_app.models import SessionRead, ToolUse
from sessions_app.rules import replay
from tests.sessions_app.rules.test_api import Api
from tests.support.factories import make_call, make_session


@pytest.fixture
def api(admin_token):
    return Api(admin_token)


@pytest.fixture
def stored(scout):
    return make_session(scout.agent, started=timezone.now() - timedelta(hours=2))


def record(session, tool="github__get_file", arguments=None, minutes=0, **fields):
    at = session.created_at + timedelta(minutes=minutes)
    tool = Tool.objects.get(public_name=tool)
    return make_call(session, tool, arguments=arguments or {"what": "x"}, at=at, **fields)


def replayed(api, effect="hold", days=7, **match):
    status, body = api("POST", "/test", {"effect": effect, "match": match, "days": days})
    assert status == 200, body
    return body


def counts(body):
    return tuple(body[key] for key in ("examined", "matched", "held", "denied", "undecidable"))


def test_calls_that_a_rule_would_have_held_or_denied_are_counted_and_listed(api, stored):
    record(stored, "github__create_issue", {"what": "secret plan"}, 1)
    record(stored, "github__create_issue", {"what": "lunch"}, 2)
    call = record(stored, "slack__post_message", {"what": "secret"}, 3)
    condition = {"path": "/what", "op": "contains", "value": "secret"}
    assert counts(replayed(api, arguments=[condition])) == (3, 2, 2, 0, 0)
    body = replayed(api, "deny", servers=["slack"], arguments=[condition])
    assert counts(body) == (3, 1, 0, 1, 0)
    (listed,) = body["calls"]
    assert (listed["call_id"], listed["agent"]) == (call.call_id, "scout")
    assert (listed["session_id"], listed["effect"]) == (stored.session_id, "deny")
    allowed = replayed(api, "allow")
    assert (counts(allowed), allowed["calls"]) == ((3, 3, 0, 0, 0), [])


def test_calls_of_scripts_are_told_from_direct_ones(api, stored):
    record(stored, path="script", minutes=1)
    record(stored, path="native", minutes=2)
    record(stored, minutes=3)
    assert counts(replayed(api, origin="script")) == (3, 1, 1, 0, 0)
    assert counts(replayed(api, origin="direct")) == (3, 2, 2, 0, 0)
    assert counts(replayed(api, origin="any")) == (3, 3, 3, 0, 0)


def test_a_stored_rule_is_tested_by_name(api, stored):
    record(stored)
    api("POST", body={"name": "mine", "effect": "deny"})
    assert counts(api("POST", "/test", {"name": "mine"})[1]) == (1, 1, 0, 1, 0)
    assert api("POST", "/test", {"name": "no"})[0] == 422
    assert api("POST", "/test", {})[0] == 422
    assert api("POST", "/test", {"match": {"servers": ["no"]}})[0] == 422


def test_only_calls_of_these_days_and_only_valid_ones_are_examined(api, stored):
    record(stored, minutes=-60 * 24 * 3)
    record(stored, minutes=1)
    record(stored, minutes=2, definition=None, state="refused")  # bad arguments
    assert counts(replayed(api))[0] == 2
    assert counts(replayed(api, days=2))[0] == 1


def test_the_newest_calls_are_examined(api, stored, monkeypatch):
    monkeypatch.setattr(replay, "MAX_EXAMINED", 2)
    calls = [record(stored, minutes=minute) for minute in range(4)]
    body = replayed(api)
    assert body["examined"] == 2
    assert [call["call_id"] for call in body["calls"]] == [calls[3].call_id, calls[2].call_id]


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ("", "/what"),
        ({"cut": True, "bytes": 9000, "start": '{"what"'}, "/what"),
        ({"what": "***"}, "/what"),
        ({"what": "Bearer ***"}, "/what"),
        ({"login": "***"}, "/login/user"),
        ({"login": {"user": "x", "password": "***"}}, "/login"),
        ({"all": ["x", "***"]}, "/all/*"),
    ],
)
def test_arguments_that_are_masked_or_not_stored_are_undecidable(api, stored, arguments, path):
    call = record(stored, arguments=arguments)
    call.arguments = call.arguments if arguments else ""
    call.save()
    condition = {"path": path, "op": "ne", "value": "x"}
    assert counts(replayed(api, arguments=[condition])) == (1, 0, 0, 0, 1)
    other = {"path": "/other", "op": "missing"}
    if arguments and "cut" not in arguments:
        assert counts(replayed(api, arguments=[other])) == (1, 1, 1, 0, 0)
    assert counts(replayed(api)) == (1, 1, 1, 0, 0)  # without conditions


def test_a_wrong_type_would_have_held_the_call(api, stored):
    record(stored)
    condition = {"path": "/what", "op": "gt", "value": 1}
    assert counts(replayed(api, "deny", arguments=[condition])) == (1, 1, 1, 0, 0)


def test_deleted_tools_are_decided_by_name_only(api, stored):
    record(stored)
    Tool.objects.filter(public_name="github__get_file").delete()
    assert counts(replayed(api, tools=["github__get_*"])) == (1, 1, 1, 0, 0)
    assert counts(replayed(api, annotations={"readOnlyHint": False})) == (1, 0, 0, 0, 1)


def test_flow_is_judged_by_what_had_happened_before(api, stored, scout):
    record(stored, "slack__post_message", minutes=1)
    record(stored, "github__get_file", minutes=2)
    late = record(stored, "slack__post_message", minutes=3)
    other = make_session(scout.agent, started=stored.created_at + timedelta(minutes=4))
    elsewhere = record(other, "slack__post_message", minutes=1)
    flow = {"after": ["github"], "not_servers": ["github"]}
    assert [call["call_id"] for call in replayed(api, **flow)["calls"]] == [late.call_id]
    for_agent = replayed(api, **flow, after_scope="agent")["calls"]
    assert [call["call_id"] for call in for_agent] == [elsewhere.call_id, late.call_id]
    # The other session was forked from the first.
    SessionRead.objects.create(
        session=other, agent=scout.agent, server_slug="github", last_at=stored.created_at
    )
    found = [call["call_id"] for call in replayed(api, **flow)["calls"]]
    assert found == [elsewhere.call_id, late.call_id]


def test_first_use_is_judged_by_what_had_happened_before(api, stored, scout):
    first = record(stored, minutes=1)
    record(stored, minutes=5)
    ToolUse.objects.create(agent=scout.agent, tool=first.tool, first_at=first.finished_at)
    assert [call["call_id"] for call in replayed(api, first_use=True)["calls"]] == [first.call_id]
