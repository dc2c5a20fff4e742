"""Rules about the past: results that a session was given, and the first use of a tool."""

from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.utils import timezone

from catalog.models import Tool
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger.calls import CallResult
from sessions_app.ledger.writer import CallRow
from sessions_app.models import Agent, AgentSession, Call, SessionRead, ToolUse
from tests.sessions_app.rules.test_dispatch import DENIED, SENT, add_rule, code_of
from tests.support.agent_client import AgentClient
from tests.support.factories import make_call

READ, WRITE = "github__get_file", "slack__post_message"


def give_result(session, tool_name=READ, state="succeeded", *, is_sent=True, at=None):
    """Finish a call of a session as the dispatcher does after a server has answered."""
    tool = Tool.objects.get(public_name=tool_name)
    row = make_call(AgentSession.objects.get(session_id=session.id), tool, state="accepted", at=at)
    entry = CallRow.from_model(row)
    entry.sent_at = row.accepted_at if is_sent else None
    result = CallResult.of_text(state, "found", is_error=state != "succeeded")
    async_to_sync(call_ledger.finish)(entry, result)


@pytest.fixture
def after_github(db):
    return add_rule("No leaks", after=["github"], not_servers=["github"])


@pytest.mark.parametrize("state", ["succeeded", "failed"])
def test_a_call_is_denied_after_a_result_of_the_server_and_not_before(session, after_github, state):
    assert code_of(session, WRITE) == SENT
    give_result(session, state=state)
    assert code_of(session, WRITE) == DENIED
    assert code_of(session, READ) == SENT  # the same server


def test_a_call_that_was_not_sent_and_definitions_do_not_count(session, after_github):
    give_result(session, state="failed", is_sent=False)
    session.load("mcp:github", "get_file")
    session.search("file")
    assert code_of(session, WRITE) == SENT


def test_results_of_other_sessions_do_not_count(scout, session, after_github):
    give_result(scout.open())
    assert code_of(session, WRITE) == SENT


def fork(session):
    return session.__class__(session.client, session.post("/fork"))


def test_a_fork_has_read_what_its_parent_had_read(session, after_github):
    before = fork(session)
    give_result(session)
    child = fork(session)
    grandchild = fork(child)
    assert code_of(child, WRITE) == DENIED
    assert code_of(grandchild, WRITE) == DENIED
    assert code_of(before, WRITE) == SENT


def test_a_resumed_session_has_read_what_the_earlier_one_had_read(scout, session, after_github):
    give_result(session)
    session.post("/close")
    state = session.get("/state").json
    assert code_of(scout.open(resume={**state, "session_id": session.id}), WRITE) == DENIED
    other = scout.open()
    assert code_of(scout.open(resume={**state, "session_id": other.id}), WRITE) == SENT


@pytest.mark.parametrize("named", [{}, {"session_id": "ses_gone"}])
def test_a_resumed_session_that_names_no_other_may_continue_any(scout, after_github, named):
    give_result(scout.open())
    resumed = scout.open(resume={"strategy": "dispatch", "expanded_groups": {}, **named})
    assert code_of(resumed, WRITE) == DENIED


def test_a_session_of_another_agent_cannot_be_named(scout, session, after_github):
    give_result(session)
    stranger = AgentClient(Agent.objects.create(name="other", all_groups=True, mode="deferred"))
    state = {"strategy": "dispatch", "expanded_groups": {}, "session_id": session.id}
    assert code_of(stranger.open(resume=state), WRITE) == SENT


def test_the_agent_scope_covers_all_sessions_of_24_hours(scout, session):
    add_rule(after=["github"], after_scope="agent", not_servers=["github"])
    assert code_of(session, WRITE) == SENT
    give_result(scout.open())
    assert code_of(session, WRITE) == DENIED
    late = timezone.now() - timedelta(hours=24, minutes=2)
    SessionRead.objects.update(last_at=late)
    assert code_of(session, WRITE) == SENT
    SessionRead.objects.update(last_at=late + timedelta(minutes=3))
    assert code_of(session, WRITE) == DENIED


def test_the_time_of_a_read_is_written_again_after_a_while(session, monkeypatch):
    give_result(session)
    first = SessionRead.objects.get().last_at
    give_result(session)
    assert SessionRead.objects.get().last_at == first
    monkeypatch.setattr(call_ledger, "READ_REFRESH", timedelta(0))
    give_result(session)
    assert SessionRead.objects.get().last_at > first


def test_the_first_use_of_a_tool_by_an_agent(scout, session):
    add_rule("First time", first_use=True)
    assert code_of(session, READ) == DENIED
    assert code_of(session, READ) == DENIED  # a denied call is no use
    give_result(session)
    assert code_of(session, READ) == SENT
    assert code_of(scout.open(), READ) == SENT
    assert code_of(session, WRITE) == DENIED
    assert ToolUse.objects.count() == 1


def test_rules_after_one_that_history_excludes_are_asked(session):
    add_rule("after", effect="allow", after=["slack"])
    add_rule("deny", effect="deny")
    assert code_of(session, READ) == DENIED
    give_result(session, WRITE)
    assert code_of(session, READ) == SENT
    assert Call.objects.filter(error_code=DENIED).count() == 1
