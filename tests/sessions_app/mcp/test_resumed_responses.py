"""Responses of slow calls whose connection breaks: their clients come back for them."""

import asyncio
import json

import pytest

from sessions_app.mcp import tool_calls
from sessions_app.models import Call
from tests.sessions_app.mcp.test_features import run_scenario
from tests.sessions_app.mcp.test_tool_calls import LEGACY, agent, stream_messages
from tests.sessions_app.sessions.test_endpoint import in_database
from tests.support.waiting import wait_for

__all__ = ["agent"]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Every call is slow."""
    monkeypatch.setattr(tool_calls, "FIRST_EVENT_SECONDS", 0.0)


def event_id_of(answer):
    fields = dict(line.split(": ", 1) for line in answer.body.decode().splitlines()[:2])
    assert fields["retry"] == "10000"
    return fields["id"]


async def come_back(door, event_id, *, connection=None):
    headers = {"mcp-protocol-version": LEGACY, "last-event-id": event_id}
    headers["mcp-session-id"] = connection or await door.connect()
    headers["accept"] = "text/event-stream"
    return await door.send(None, headers, method="GET")


def test_a_slow_response_begins_with_an_event_to_come_back_for(agent):
    async def scenario(door):
        return await door.call("raw__later", {"seconds": 1})

    answer = run_scenario(agent, LEGACY, scenario)
    assert tool_calls.resumed_request(event_id_of(answer)) == 7
    (message,) = stream_messages(answer)
    assert message["id"] == 7
    assert message["result"]["isError"] is False


def test_a_client_that_comes_back_during_its_call_gets_the_response(agent):
    async def scenario(door):
        await door.connect()
        call = asyncio.create_task(door.call("raw__later", {"seconds": 5}))
        await in_database(wait_for, lambda: door.endpoint.calls._running)
        again = await come_back(door, tool_calls.first_event(7).decode().split()[1])
        return stream_messages(await call), stream_messages(again)

    first, second = run_scenario(agent, LEGACY, scenario)
    assert first == second
    assert second[0]["result"]["isError"] is False
    assert Call.objects.filter(tool_name="raw__later").count() == 1


@pytest.mark.parametrize("request_id", [7, "a string/é"])
def test_a_client_whose_response_is_lost_is_told_so(agent, request_id):
    async def scenario(door):
        event_id = tool_calls.first_event(request_id).decode().split()[1]
        return await come_back(door, event_id)

    (message,) = stream_messages(run_scenario(agent, LEGACY, scenario))
    assert message["id"] == request_id
    assert message["result"]["isError"] is True
    assert "may have run" in json.dumps(message)


def test_only_the_key_of_a_connection_resumes_its_streams(agent):
    async def scenario(door):
        event_id = tool_calls.first_event(7).decode().split()[1]
        return await come_back(door, event_id, connection="0" * 32)

    assert run_scenario(agent, LEGACY, scenario).status == 404


@pytest.mark.parametrize("event_id", ["", "call-", "call-!", "call-bnVsbA==", "other-1"])
def test_other_event_ids_resume_nothing(event_id):
    assert tool_calls.resumed_request(event_id) is None
