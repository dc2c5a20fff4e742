"""Results that agents report of custom tools: once, in time, by the same agent, validated."""

import importlib
from datetime import timedelta

import pytest
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.tools.actions import save_custom_tool
from sessions_app.models import Agent, AgentSession, Call
from tests.support.agent_client import add_tools, make_agent_client, make_group
from tests.support.factories import tool_object

TEXT = [{"type": "text", "text": "5 words"}]
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture
def scout(db):
    schema = {"inputSchema": {"type": "object"}}
    count = save_custom_tool(tool_object("count", outputSchema=NUMBER, **schema), actor=SYSTEM)
    make_group("own", save_custom_tool(tool_object("note", **schema), actor=SYSTEM), count)
    add_tools("github", "create_issue")
    return make_agent_client("scout", mode="deferred")


def report(client, call, **body):
    return client.send("POST", f"/calls/{call}/result", {"content": TEXT, **body})


def test_a_result_closes_the_call(scout):
    session = scout.open()
    call = session.call("note", {"text": "a"}, Idempotency_Key="k1")["call_id"]

    answer = report(scout, call)

    assert answer.status == 200, answer.bytes
    assert (answer["state"], answer["is_error"], answer["content"]) == ("succeeded", False, TEXT)
    row = Call.objects.get()
    assert (row.state, row.is_error, row.error_code) == ("succeeded", False, "")
    assert "5 words" in row.result_copy
    assert scout.send("GET", f"/calls/{call}")["state"] == "succeeded"
    # A retry of the call does not ask the agent to run the tool again.
    assert session.call("note", {"text": "a"}, Idempotency_Key="k1")["content"] == TEXT


def test_an_error_is_counted(scout):
    session = scout.open()
    call = session.call("note")["call_id"]
    assert report(scout, call, is_error=True)["state"] == "failed"
    row = Call.objects.get()
    assert (row.state, row.is_error, row.error_code) == ("failed", True, "tool_error")
    assert AgentSession.objects.get().errors == 1


def test_a_result_is_reported_once(scout):
    call = scout.open().call("note")["call_id"]
    first = report(scout, call)
    assert report(scout, call)["content"] == first["content"]  # a retry of the same report
    for other in ({"is_error": True}, {"structured_content": {"n": 1}}):
        refused = report(scout, call, **other)
        assert (refused.status, refused["error"]["code"]) == (409, "result_reported")
    assert Call.objects.get().state == "succeeded"


def test_only_the_agent_of_the_call_reports(scout):
    call = scout.open().call("note")["call_id"]
    refused = report(make_agent_client("other"), call)
    assert (refused.status, refused["error"]["code"]) == (404, "unknown_call")
    assert Call.objects.get().state == "client"


def test_only_calls_left_to_the_agent_have_results_to_report(scout):
    session = scout.open()
    for call in (session.call("github__create_issue"), session.call("nothing")):
        refused = report(scout, call["call_id"])
        assert (refused.status, refused["error"]["code"]) == (409, "not_a_client_call")


def test_a_result_is_reported_within_a_day(scout):
    call = scout.open().call("note")["call_id"]
    Call.objects.update(finished_at=timezone.now() - timedelta(hours=24, seconds=1))
    refused = report(scout, call)
    assert (refused.status, refused["error"]["code"]) == (409, "result_too_late")


def test_a_result_matches_the_output_schema(scout):
    call = scout.open().call("count")["call_id"]
    for wrong in ({}, {"structured_content": {"n": "five"}}):
        refused = report(scout, call, **wrong)
        assert (refused.status, refused["error"]["code"]) == (422, "output_invalid")
        assert refused["error"]["details"]["problems"]
    assert Call.objects.get().state == "client"
    assert report(scout, call, structured_content={"n": 5})["structured_content"] == {"n": 5}


def test_an_error_needs_no_structured_content(scout):
    call = scout.open().call("count")["call_id"]
    assert report(scout, call, is_error=True)["state"] == "failed"


@pytest.mark.parametrize("body", [{"content": "text"}, {"content": [], "more": 1}, {}])
def test_other_bodies_are_refused(scout, body):
    call = scout.open().call("note")["call_id"]
    assert scout.send("POST", f"/calls/{call}/result", body).status == 422


def test_nothing_is_stored_where_the_tool_says_so(scout):
    Agent.objects.update(payload_storage="nothing")
    call = scout.open().call("note")["call_id"]
    assert report(scout, call).status == 200
    row = Call.objects.get()
    assert (row.state, row.result_copy) == ("succeeded", "")


def test_agents_that_called_custom_tools_keep_them_over_mcp(scout):
    other = make_agent_client("other")
    scout.open().call("note")
    other.open().call("github__create_issue", {"wrong": 1})

    name = "sessions_app.migrations.0021_agents_that_ran_custom_tools"
    importlib.import_module(name).set_for_callers(_Apps(), None)

    assert set(Agent.objects.filter(runs_custom_tools=True)) == {scout.agent}


class _Apps:
    def get_model(self, app, name):
        return {"Call": Call, "Agent": Agent}[name]
