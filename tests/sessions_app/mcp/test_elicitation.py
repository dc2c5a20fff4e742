"""Questions of servers to the user of a client, both eras of clients with both eras of servers."""

import asyncio
import json
from typing import Any

import pytest
from mcp.server import MCPServer

from catalog import cache
from servers.connections.connection import run_session
from servers.connections.coordination import record_asking
from servers.models import Server
from servers.sync import runner
from sessions_app.agents import rate_limits
from sessions_app.dispatch import authorization
from sessions_app.mcp import questions
from sessions_app.models import Agent, AgentSession, Call, Event
from tests.sessions_app.mcp.test_features import (
    AskingFeatureDoor,
    FeatureDoor,
    add_fixtures,
    run_scenario,
)
from tests.sessions_app.mcp.test_tool_calls import LEGACY, MODERN, result_of
from tests.sessions_app.rules.test_dispatch import add_rule
from tests.sessions_app.sessions.test_endpoint import in_database
from tests.support.agent_client import make_agent_client
from tests.support.factories import make_program

ROUNDS = "fixtures__test_input_required_result_multi_round"
ANSWERS = {
    "Step 1: What is your name?": {"action": "accept", "content": {"name": "Ada"}},
    "Step 2: What is your favorite color?": {"action": "decline"},
    "What context should the prompt use?": {"action": "accept", "content": {"context": "x"}},
}


class AskingDoor(AskingFeatureDoor):
    """A client whose user answers each question by ANSWERS."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.asked: list[str] = []

    async def ask(self, method: str, **params: Any) -> Any:
        """Send a request and answer what is asked; return the result."""
        if self.era == MODERN:
            return await self._repeat(method, params)
        answering = asyncio.create_task(self._answer_questions())
        response = await self.request(method, **params)
        answering.cancel()
        lines = response.body.decode().splitlines()
        messages = [json.loads(line[5:]) for line in lines if line.startswith("data:")]
        self.asked = [each["params"]["message"] for each in messages if "method" in each]
        return messages[-1]["result"]

    async def _repeat(self, method: str, params: dict[str, Any]) -> Any:
        result = await self.result(method, **params)
        while result["resultType"] == "input_required":
            given = {}
            for name, request in result["inputRequests"].items():
                self.asked.append(request["params"]["message"])
                given[name] = ANSWERS[self.asked[-1]]
            state = result["requestState"]
            result = await self.result(method, **params, inputResponses=given, requestState=state)
        return result

    async def _answer_questions(self) -> None:
        """Answer what waits in this process, as the client does that reads the stream."""
        answered = set()
        while True:
            await asyncio.sleep(0)
            for request_id in [each for each in questions._waiting if each not in answered]:
                answered.add(request_id)
                answer = list(ANSWERS.values())[len(answered) - 1]
                message = {"jsonrpc": "2.0", "id": request_id, "result": answer}
                headers = {"mcp-protocol-version": LEGACY, "mcp-session-id": self.connection}
                assert (await self.send(message, headers)).status == 202


@pytest.fixture(params=[MODERN, LEGACY])
def era(request):
    return request.param


@pytest.fixture(params=[MODERN, LEGACY])
def agent(transactional_db, request):
    add_fixtures(*(["--legacy"] if request.param == LEGACY else []))
    if request.param == LEGACY:
        Server.objects.update(isolation="per_session")
    cache.clear()
    authorization.clear()
    rate_limits.clear()
    yield make_agent_client("scout", mode="deferred")
    authorization.clear()


def test_the_user_of_the_client_is_asked_what_the_server_wants_to_know(agent, era):
    async def scenario(door):
        result = await door.ask("tools/call", name=ROUNDS, arguments={})
        text = result["content"][0]["text"]
        assert '"name": "Ada"' in text
        assert '"action": "decline"' in text
        assert door.asked == list(ANSWERS)[:2]
        assert (await in_database(AgentSession.objects.get)).elicits

    run_scenario(agent, era, scenario, AskingDoor)
    call, session = Call.objects.get(), AgentSession.objects.get()  # one, however often it asks
    assert (call.state, call.error_code, call.tokens > 0) == ("succeeded", "", True)
    assert Event.objects.filter(call=call, kind="called").count() == 1
    assert (session.calls, session.tokens_call) == (1, call.tokens)


def test_a_client_that_cannot_ask_its_user_is_not_asked(agent, era):
    async def scenario(door):
        result = result_of(await door.call(ROUNDS, {}))
        assert result["isError"] is True

    run_scenario(agent, era, scenario, FeatureDoor)


@pytest.mark.django_db(transaction=True)
def test_a_shared_program_that_asks_is_known_after_its_first_question(era):
    """A program of an older version that lists no other tools to clients that can ask."""
    server = make_program("conformance", "--legacy", slug="fixtures", trust="auto")
    runner.sync_now(server.pk, "schedule")  # such a sync does not look for tools of asking clients
    cache.clear()
    authorization.clear()
    rate_limits.clear()
    agent = make_agent_client("scout", mode="deferred")

    async def scenario(door):
        assert result_of(await door.call(ROUNDS, {}))["isError"] is True
        second = await door.ask("tools/call", name=ROUNDS, arguments={})
        assert '"name": "Ada"' in second["content"][0]["text"]
        assert door.asked == list(ANSWERS)[:2]

    run_scenario(agent, era, scenario, AskingDoor)


@pytest.mark.django_db(transaction=True)
def test_what_is_known_of_a_program_lasts_until_its_version_changes(operator, client):
    server = make_program("conformance", "--legacy", slug="fixtures")
    runner.sync_now(server.pk, "schedule")
    record_asking(server.pk)
    runner.sync_now(server.pk, "schedule")
    assert "asks" in Server.objects.get().capabilities
    client.force_login(operator)
    assert "It asks users during calls" in client.get("/servers/fixtures/tools").content.decode()
    Server.objects.update(server_info={"name": "fixtures", "version": "0"})
    runner.sync_now(server.pk, "schedule")
    assert "asks" not in Server.objects.get().capabilities


@pytest.mark.parametrize(
    ("failure", "is_known"),
    [("Client does not support elicitation (required)", True), ("No such file", False)],
)
def test_a_server_whose_sdk_refuses_to_ask_is_known_by_its_error(failure, is_known):
    async def connect():
        async with run_session(MCPServer("older"), mode="legacy") as connection:
            return [connection.take_asked(failure) for _ in range(2)]

    assert asyncio.run(connect()) == [is_known, False]


@pytest.mark.parametrize("agent", [MODERN], indirect=True)
def test_an_answer_continues_a_call_once_and_needs_no_new_permission(agent):
    """A rule that holds after the first question would hold a new call, and holds a repetition."""

    async def scenario(door):
        one = "fixtures__test_input_required_result_elicitation"
        asked = await door.result("tools/call", name=one, arguments={})
        await in_database(lambda: add_rule("Ask first", effect="hold", servers=["fixtures"]))
        given = {name: next(iter(ANSWERS.values())) for name in asked["inputRequests"]}
        repeated = {"inputResponses": given, "requestState": asked["requestState"]}
        states = []
        for _ in range(2):
            await door.result("tools/call", name=one, arguments={}, **repeated)
            states.append(
                await in_database(lambda: [call.state for call in Call.objects.order_by("pk")])
            )
        return states

    states = run_scenario(agent, MODERN, scenario, AskingDoor)
    assert states == [["succeeded"], ["succeeded", "held"]]


def test_a_call_counts_once_against_the_limit_however_often_it_asks(agent, era):
    async def scenario(door):
        await in_database(lambda: Agent.objects.update(calls_per_minute=1))
        result = await door.ask("tools/call", name=ROUNDS, arguments={})
        assert '"name": "Ada"' in result["content"][0]["text"]
        assert len(door.asked) == 2
        again = result_of(await door.call(ROUNDS, {}))
        assert "Rate limit exceeded" in again["content"][0]["text"]

    run_scenario(agent, era, scenario, AskingDoor)


@pytest.mark.parametrize("agent", [MODERN], indirect=True)
def test_an_answer_that_is_sent_again_is_a_call_of_its_own_for_the_limit(agent):
    async def scenario(door):
        await in_database(lambda: Agent.objects.update(calls_per_minute=1))
        one = "fixtures__test_input_required_result_elicitation"
        asked = await door.result("tools/call", name=one, arguments={})
        given = {name: next(iter(ANSWERS.values())) for name in asked["inputRequests"]}
        repeated = {"inputResponses": given, "requestState": asked["requestState"]}
        first, second = [
            await door.result("tools/call", name=one, arguments={}, **repeated) for _ in range(2)
        ]
        assert not first.get("isError")
        assert "Rate limit exceeded" in second["content"][0]["text"]

    run_scenario(agent, MODERN, scenario, AskingDoor)


@pytest.mark.parametrize("agent", [MODERN], indirect=True)
def test_a_prompt_may_ask_and_a_changed_state_is_rejected(agent):
    async def scenario(door):
        name = "fixtures__test_input_required_result_prompt"
        assert (await door.ask("prompts/get", name=name))["messages"]
        asked = await door.result("prompts/get", name=name)
        sealed = asked["requestState"]
        for state, other in ((sealed + "x", name), (sealed, "fixtures__test_simple_prompt")):
            error = await door.error("prompts/get", name=other, requestState=state)
            assert error["code"] == -32602

    run_scenario(agent, MODERN, scenario, AskingDoor)
