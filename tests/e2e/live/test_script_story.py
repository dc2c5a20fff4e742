"""One script does the work of many calls: error logs of the past hour, a ticket for each error.

The same script in Python and in TypeScript, over REST and over both eras of MCP, with two real
servers.
"""

import asyncio

import pytest

from bench.scripts import TASKS, add_server
from tests.support.agents import make_agent
from tests.support.mcp_clients import LEGACY, MODERN, call_meta_tool, connected_client

pytestmark = pytest.mark.timeout(240)
ERRORS = 8  # different messages among 400 lines


@pytest.fixture(scope="module")
def incidents(toolcrib):
    for name in ("logs", "tickets"):
        add_server(toolcrib, name)
    return toolcrib


def over_rest(agent, script):
    response = agent.open().post("/scripts", script)
    assert response.status == 200, response.body
    return response.json


def over_mcp(agent, mode, script):
    async def work():
        async with connected_client(agent, mode=mode) as client:
            answer = await call_meta_tool(client, "run_script", **script)
            return client.protocol_version, answer

    return asyncio.run(work())


@pytest.mark.parametrize("language", list(TASKS))
@pytest.mark.parametrize("door", ["rest", MODERN, LEGACY])
def test_a_script_opens_a_ticket_for_each_error_and_states_the_tokens(incidents, door, language):
    agent = make_agent(incidents, f"{language}-{door}", mode="deferred", code_mode=True)
    script = {"code": TASKS[language], "language": language}
    if door == "rest":
        answer = over_rest(agent, script)
    else:
        version, answer = over_mcp(agent, MODERN if door == MODERN else "legacy", script)
        assert version == door

    assert answer["status"] == "completed", answer
    tickets = answer["result"]["tickets"]
    assert len(set(tickets)) == len(tickets) == ERRORS
    made = [(call["tool"], call["state"]) for call in answer["calls"]]
    created = [("tickets__create_ticket", "succeeded")] * ERRORS
    assert made == [("logs__search_logs", "succeeded"), *created]
    assert answer["tokens"]["given"] > 0
    assert answer["tokens"]["spared"] > 10 * answer["tokens"]["given"]
    (session,) = agent.send("GET", "/sessions").json["items"]
    assert_recorded(agent, session["id"], answer)


def assert_recorded(agent, session_id, answer):
    """The timeline has the script with the same tokens, and each of its calls."""
    events = agent.send("GET", f"/sessions/{session_id}/events?limit=200").json["items"]
    (script,) = [event for event in events if event["kind"] == "script"]
    assert script["tokens"] == answer["tokens"]["given"]
    assert script["details"]["spared"] == answer["tokens"]["spared"]
    called = [event["call_id"] for event in events if event["kind"] == "called"]
    assert called == [call["call_id"] for call in answer["calls"]]
