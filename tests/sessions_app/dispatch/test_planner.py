"""Call planning and the ledger: definitions, validation, policy, idempotency, recovery, limits.

Custom tools answer without a server, so these tests cover everything before a call is sent; the
rest is in tests/e2e/live.
"""

import json
import subprocess
import sys
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.utils import timezone

from catalog.approvals import actions as approval_actions
from catalog.audit import SYSTEM
from catalog.groups import actions as group_actions
from catalog.models import Group, Revision, Tool
from catalog.tools.actions import hold, save_custom_tool, set_call_policy
from sessions_app.agents import api_keys
from sessions_app.dispatch import authorization, dispatcher, planner
from sessions_app.dispatch.authorization import Caller
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger import writer as ledger_writer
from sessions_app.models import AgentSession, Call, CallAnswer, Event
from tests.support.agent_client import Session, make_agent_client, make_group
from tests.support.factories import ingest_tools, tool_object
from toolcrib.lib.payloads import stored_copy
from toolcrib.lib.redaction.redactor import redact
from toolcrib.lib.token_counter import count

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TEXT = {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]}
EITHER = {"type": "object", "properties": {"n": {}}}


def custom(schema=NUMBER, name="count", tool=None):
    return save_custom_tool(tool_object(name, inputSchema=schema), actor=SYSTEM, tool=tool)


@pytest.fixture
def counting(db):
    tool = custom()
    make_group("own", tool)
    return tool


@pytest.fixture
def scout(counting):
    return make_agent_client("scout", mode="deferred")


@pytest.fixture
def session(scout):
    return scout.open()


def test_invalid_arguments_are_rejected_with_the_problems_and_the_schema(session):
    answer = session.call("count", {"n": "five"})
    text = answer["content"][0]["text"]
    assert answer["error"]["code"] == "invalid_arguments"
    assert "n: " in text
    assert '(sent: "five")' in text
    assert '{"properties":{"n":{"type":"integer"}},"required":["n"],"type":"object"}' in text
    assert "properties" not in answer["error"]["message"]
    row = Call.objects.get()
    assert (row.state, row.error_code, row.tool_name) == ("refused", "invalid_arguments", "count")
    assert session.kinds[-1] == "refused"


def test_a_custom_tool_answers_client_with_the_validated_arguments(session):
    answer = session.call("count", {"n": 5})
    assert set(answer.json) == {
        "call_id", "tool_name", "state", "is_error", "content", "structured_content", "tokens",
        "duration_ms", "implicit_load",
    }  # fmt: skip
    assert (answer["state"], answer["is_error"]) == ("client", False)
    assert answer["structured_content"] == {"n": 5}
    assert session.get("/stats")["tokens"]["by"]["call"] == answer["tokens"] > 0


def test_one_correction_is_enough_after_an_approved_change(session, counting):
    assert session.call("count", {"n": 5})["state"] == "client"  # preloaded: pinned when opened
    tools = session.get("/tools").bytes
    custom(TEXT, tool=counting)
    outdated = session.call("count", {"n": 5})
    assert outdated["error"]["code"] == "definition_changed"
    assert '"type":"string"' in outdated["content"][0]["text"]
    assert "changed since" in outdated["content"][0]["text"]
    assert session.call("count", {"n": "5"})["state"] == "client"
    # From now on the newer definition applies: an error is no longer reported as a change.
    assert session.call("count", {"n": 5})["error"]["code"] == "invalid_arguments"
    assert '"type":"string"' in session.call("count", {"n": 5})["content"][0]["text"]
    assert session.get("/tools/count")["parameters"]["properties"]["n"] == {"type": "string"}
    assert session.get("/tools").bytes == tools
    custom(EITHER, tool=counting)
    assert session.call("count", {"n": 5})["state"] == "client"


def test_arguments_that_match_neither_definition_need_one_correction_too(session, counting):
    custom(TEXT, tool=counting)
    neither = session.call("count", {"n": [5]})
    assert neither["error"]["code"] == "definition_changed"
    assert '"type":"string"' in neither["content"][0]["text"]
    assert session.call("count", {"n": "5"})["state"] == "client"


def test_a_load_returns_the_newer_definition_after_a_call_has_quoted_it(counting):
    group_actions.set_preload(Group.objects.get(), [counting], False, actor=SYSTEM)
    group_id = Group.objects.get().group_id
    session = make_agent_client("late", mode="deferred").open()
    first = session.load(group_id, "count").bytes
    custom(TEXT, tool=counting)
    assert session.load(group_id, "count").bytes == first
    assert session.call("count", {"n": 5})["error"]["code"] == "definition_changed"
    newer = session.load(group_id, "count")
    assert newer["schemas"][0]["parameters"]["properties"]["n"] == {"type": "string"}
    custom(EITHER, tool=counting)
    assert session.load(group_id, "count").bytes == newer.bytes
    found = session.search(name="count")
    assert found["tools"][0]["schema"] == newer["schemas"][0]["parameters"]
    child = Session(session.client, session.post("/fork"))
    assert child.load(group_id, "count").bytes == newer.bytes


def test_a_session_that_loaded_nothing_is_validated_against_the_newest_definition(counting):
    group_actions.set_preload(Group.objects.get(), [counting], False, actor=SYSTEM)
    session = make_agent_client("late", mode="deferred").open()
    custom(TEXT, tool=counting)
    assert session.call("count", {"n": "5"})["state"] == "client"


def test_hidden_and_denied_tools_are_rejected_with_the_reason(session, counting):
    set_call_policy(counting, "deny", actor=SYSTEM)
    assert session.call("count", {"n": 5})["error"]["code"] == "denied"
    hold(counting, "under review", actor=SYSTEM)
    answer = session.call("count", {"n": 5})
    assert answer["error"]["code"] == "held"
    assert "under review" in answer["content"][0]["text"]


def test_a_pending_change_is_neither_used_nor_quoted_and_strict_trust_blocks_calls(github):
    schema = {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}
    newer = {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]}
    server = github.follows
    session = make_agent_client("scout", mode="deferred").open()
    names = ["create_issue", "list_issues", "search_code", "merge_pull"]
    ingest_tools(server, *(tool_object(name, inputSchema=schema) for name in names),
         tool_object("get_file", inputSchema=newer))  # fmt: skip
    for open_session in (session, session.client.open()):
        # Valid for the approved definition, so it is sent; its server does not run in this test.
        assert open_session.call("github__get_file", {"what": "x"}).status == 503
        refused = open_session.call("github__get_file", {"who": 7})
        assert refused["error"]["code"] == "invalid_arguments"
        text = refused["content"][0]["text"].partition("(sent:")[0]
        assert '"what"' in refused["content"][0]["text"]
        assert "who" not in text.partition("Input schema")[2]
    server.trust = "strict"
    server.save()
    Revision.bump()
    assert session.call("github__get_file", {"what": "x", "who": "y"})["error"]["code"] == "waiting"
    approval_actions.keep_old(Tool.objects.get(public_name="github__get_file"), actor=SYSTEM)
    # Sent; the server does not run in this test.
    assert session.call("github__get_file", {"what": "x"}).status == 503


def test_header_mappings_are_those_of_the_approved_definition(github):
    region = {"type": "string", "x-mcp-header": "Region"}
    names = ["create_issue", "list_issues", "search_code", "merge_pull", "get_file"]
    changed = {"type": "object", "properties": {"what": region}}
    agent = make_agent_client("scout", mode="deferred")
    session = agent.open()
    tools = [tool_object(name, inputSchema=changed) for name in names]
    ingest_tools(github.follows, *tools)
    tool = Tool.objects.get(public_name="github__get_file")
    assert (tool.state, "x-mcp-header" in tool.latest.body) == ("waiting", True)
    request = planner.CallRequest("github__get_file", {"what": "x"})
    server_row = async_to_sync(authorization.find_server)(tool.server_id, renew=True)

    def plan():
        caller = Caller(api_keys.find_key(agent.key).sha256, session.id)
        entry = authorization._load(caller, session.id)
        return planner.plan_call(entry, request, server_row)

    assert plan().schema is None
    approval_actions.approve(tool, actor=SYSTEM)
    assert plan().schema["properties"]["what"] == region


# --- Idempotency --------------------------------------------------------------------------------


def test_an_idempotency_key_returns_the_stored_response_and_rejects_another_body(session):
    first = session.call("count", {"n": 1}, Idempotency_Key="a")
    assert session.call("count", {"n": 1}, Idempotency_Key="a").bytes == first.bytes
    other = session.call("count", {"n": 2}, Idempotency_Key="a")
    assert (other.status, other["error"]["code"]) == (409, "idempotency_conflict")
    assert Call.objects.count() == 1


def test_an_idempotency_key_in_progress_is_rejected_with_a_retry_time(session):
    session.call("count", {"n": 1}, Idempotency_Key="a")
    Call.objects.update(state="sent")
    answer = session.call("count", {"n": 1}, Idempotency_Key="a")
    assert (answer.status, answer["error"]["code"]) == (409, "idempotency_in_progress")
    assert answer.headers["Retry-After"] == "1"


def test_an_idempotency_key_belongs_to_one_agent(session):
    other = make_agent_client("other").open()
    session.call("count", {"n": 1}, Idempotency_Key="a")
    assert other.call("count", {"n": 2}, Idempotency_Key="a")["state"] == "client"


def test_a_call_that_was_not_sent_can_be_retried_with_its_idempotency_key(github):
    session = make_agent_client("scout").open()
    for _ in range(2):
        answer = session.call("github__get_file", {"what": "x"}, Idempotency_Key="a")
        assert answer.status == 503
        assert answer.headers["Retry-After"]
    assert Call.objects.filter(idempotency_key=None, state="refused").count() == 2


@pytest.mark.parametrize("key", ["", " ", "x" * 256, "x" * 10_240, "ключ", "a\x7f"])
def test_an_invalid_idempotency_key_is_rejected(session, key):
    answer = session.call("count", {"n": 1}, Idempotency_Key=key)
    assert answer.status == 422
    assert Call.objects.count() == 0


def test_the_servers_timeout_sets_the_deadline_unless_the_caller_sets_one(github):
    github.follows.call_timeout = 300
    github.follows.save()
    session = make_agent_client("scout").open()
    for options, expected in (({}, 300), ({"timeout": 7}, 7)):
        session.call("github__get_file", {"what": "x"}, **options)
        row = Call.objects.first()
        assert (row.deadline - row.accepted_at).total_seconds() == expected


# --- The ledger ---------------------------------------------------------------------------------


def test_a_call_of_a_dead_process_becomes_unknown(session):
    session.call("count", {"n": 1}, Idempotency_Key="a")
    CallAnswer.objects.all().delete()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = call_ledger.THIS_PROCESS.rsplit(" ", 2)[0]
    Call.objects.update(state="sent", holder=f"{host} {ended.pid} 1", finished_at=None)
    assert call_ledger.recover_lost_calls() == 1
    row = Call.objects.get()
    assert (row.state, row.is_error, row.error_code) == ("unknown", True, "unknown_outcome")
    assert "not known" in session.call("count", {"n": 1}, Idempotency_Key="a")["error"]["message"]
    assert call_ledger.recover_lost_calls() == 0


OLD = timedelta(minutes=5)


def test_a_call_that_finishes_after_recovery_is_recorded_and_counted_once(session):
    session.call("count", {"n": 1}, Idempotency_Key="a")
    was = AgentSession.objects.get()
    Call.objects.update(state="sent", holder="elsewhere 1 1", deadline=timezone.now() - OLD)
    CallAnswer.objects.all().delete()
    assert call_ledger.recover_lost_calls() == 1
    assert json.loads(CallAnswer.objects.get().body)["state"] == "unknown"
    events = Event.objects.count()

    entry = ledger_writer.CallRow.from_model(Call.objects.get())
    result = call_ledger.CallResult(
        "succeeded", False, [{"type": "text", "text": "late"}], tokens=5
    )
    async_to_sync(call_ledger.finish)(entry, result)

    assert Call.objects.get().state == "succeeded"
    again = session.call("count", {"n": 1}, Idempotency_Key="a")
    assert (again["state"], again["content"]) == ("succeeded", result.content)
    assert Event.objects.count() == events
    now = AgentSession.objects.get()
    assert (now.calls, now.errors) == (was.calls + 1, was.errors + 1)  # counted by the recovery


@pytest.mark.parametrize(("past", "recovered"), [(30, 0), (90, 1)])
def test_calls_of_other_processes_have_a_longer_grace_period(session, past, recovered):
    session.call("count", {"n": 1})
    deadline = timezone.now() - timedelta(seconds=past)
    Call.objects.update(state="sent", holder="elsewhere 1 1", deadline=deadline)
    assert call_ledger.recover_lost_calls() == recovered
    Call.objects.update(state="sent", holder=call_ledger.THIS_PROCESS, deadline=deadline)
    assert call_ledger.recover_lost_calls() == 1


def test_a_local_clock_jump_does_not_recover_calls_of_other_processes(session, monkeypatch):
    """The database's clock is used for calls of other processes."""
    session.call("count", {"n": 1})
    now = timezone.now()
    Call.objects.update(state="sent", holder="elsewhere 1 1", deadline=now + timedelta(seconds=60))
    monkeypatch.setattr(timezone, "now", lambda: now + timedelta(hours=1))
    assert call_ledger.recover_lost_calls() == 0


def test_recovery_ignores_a_call_that_was_deleted_meanwhile(session):
    session.call("count", {"n": 1})
    call = Call.objects.get()
    Call.objects.all().delete()
    assert call_ledger._mark_unknown(call) == 0


def test_recovery_ignores_a_running_call_of_this_process(session):
    session.call("count", {"n": 1})
    Call.objects.update(
        state="sent",
        holder=call_ledger.THIS_PROCESS,
        deadline=timezone.now() + timedelta(minutes=1),
    )
    assert call_ledger.recover_lost_calls() == 0


def test_stored_arguments_are_redacted_and_truncated(session):
    session.post("/call", {"tool_name": "count", "arguments": {"n": 1, "api_key": "hush"}})
    assert "hush" not in Call.objects.get().arguments
    assert json.loads(Call.objects.get().arguments) == {"n": 1, "api_key": "***"}
    assert redact({"Password": "x", "a": [{"token": "y"}], "tokens": 3}) == {
        "Password": "***",
        "a": [{"token": "***"}],
        "tokens": 3,
    }
    long = json.loads(stored_copy({"text": "x" * 100_000}))
    assert long["cut"] is True
    assert long["bytes"] > 100_000


def test_no_secret_is_stored_in_arguments_results_or_messages(counting, scout):
    schema = {"type": "object", "properties": {"password": {"type": "integer"}, "n": {}}}
    login = custom(schema, "login")
    make_group("people", login)
    session = scout.open()
    refused = session.call("login", {"password": "hunter2"})
    assert refused["error"]["code"] == "invalid_arguments"
    one_of = custom({**schema, "oneOf": [{"required": ["n"]}, {"required": ["m"]}]}, "enter")
    make_group("doors", one_of)
    assert session.call("enter", {"password": 12345678})["is_error"] is True
    assert session.call("login", {"password": 12345678})["state"] == "client"
    for row in Call.objects.all():
        stored = f"{row.arguments}{row.result_copy}{row.error_message}"
        assert "hunter2" not in stored
        assert "12345678" not in stored


def test_rate_limits_return_429_with_a_retry_time(scout, session):
    scout.agent.calls_per_minute = 2
    scout.agent.searches_per_minute = 1
    scout.agent.save()
    for _ in range(2):
        assert session.call("count", {"n": 1}).status == 200
    refused = session.call("count", {"n": 1})
    assert (refused.status, refused["error"]["code"]) == (429, "rate_limited")
    assert 1 <= int(refused.headers["Retry-After"]) <= 120
    assert session.search("count").status == 200
    assert session.search("count").status == 429


def test_calls_in_flight_are_limited(github):
    client = make_agent_client("scout", calls_in_flight=1)
    session = client.open()
    session.call("github__get_file", {"what": "x"})
    Call.objects.update(state="sent", deadline=timezone.now() + timedelta(minutes=1))
    refused = session.call("github__get_file", {"what": "x"})
    assert (refused.status, refused["error"]["code"]) == (429, "too_many_calls")
    Call.objects.update(deadline=timezone.now())
    assert session.call("github__get_file", {"what": "x"}).status == 503


def test_the_tokens_of_a_large_result_are_estimated_from_samples_across_it():
    text = "tool " * 20_000 + "1" * 200_000  # two parts with different token densities
    exact, from_start = count(text), count(text[:100_000]) * len(text) / 100_000
    assert abs(from_start - exact) > 0.25 * exact

    estimate = dispatcher._count_tokens([{"type": "text", "text": text}], None)

    assert abs(estimate - exact) < 0.05 * exact
    assert dispatcher._count_tokens([{"type": "text", "text": text[:50_000]}], None) == count(
        text[:50_000]
    )
