"""Held calls over MCP, of both eras: check_call, and decisions by the user of the client."""

import asyncio
import json
import time
from typing import Any

import pytest
from django.conf import settings

from catalog.audit import Actor
from catalog.models import AuditEntry
from servers.connections import calls as upstream_calls
from sessions_app.agents import api_keys
from sessions_app.held_calls import actions
from sessions_app.held_calls.execution import Executor
from sessions_app.held_calls.waiting import watch
from sessions_app.ledger import writer as ledger_writer
from sessions_app.mcp import questions, tool_calls
from sessions_app.mcp import sessions as mcp_sessions
from sessions_app.models import Call
from tests.sessions_app.held_calls.conftest import NoCommits, said
from tests.sessions_app.mcp.test_tool_calls import LEGACY, META, MODERN, Door, result_of
from tests.sessions_app.rules.test_dispatch import add_rule
from tests.sessions_app.sessions.test_endpoint import in_database
from tests.support.waiting import scaled, wait_for

OTTO = Actor("user", "otto@example.org")
CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
ARGUMENTS = said("told")["arguments"]


class AskingDoor(Door):
    """`/mcp`, with a client that can ask its user."""

    modes: dict[str, Any] = {}

    async def connect(self) -> str:
        if not self.connection:
            capabilities = {"elicitation": self.modes}
            hello: dict[str, Any] = {"protocolVersion": LEGACY, "capabilities": capabilities}
            hello["clientInfo"] = {"name": "tests", "version": "1"}
            message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
            self.connection = (await self.send(message, {})).headers["mcp-session-id"]
        return self.connection

    async def answer(self, call_id: str, **result: Any) -> int:
        message = {"jsonrpc": "2.0", "id": f"toolcrib-decision-{call_id}", "result": result}
        headers = {"mcp-protocol-version": LEGACY, "mcp-session-id": self.connection}
        return (await self.send(message, headers)).status


class OpeningDoor(AskingDoor):
    """A client that opens URLs for its user, and shows no forms."""

    modes = {"url": {}}


@pytest.fixture(params=[MODERN, LEGACY])
def era(request):
    return request.param


@pytest.fixture
def run(agent, era, monkeypatch):
    monkeypatch.setattr(tool_calls, "PING_SECONDS", scaled(60))  # after it, JSON is a stream

    def run(scenario: Any, kind: type[Door] = AskingDoor) -> Any:
        async def inside() -> Any:
            door = kind(agent.key, era, cached=True)
            async with (
                asyncio.timeout(scaled(60)),
                ledger_writer.run_writer(),
                upstream_calls.call_pool(),
                door.endpoint.run(),
            ):
                return await scenario(door)

        mcp_sessions.clear_caches()
        return asyncio.run(inside())

    return run


async def execute_when_approved() -> None:
    approved = Call.objects.filter(state="approved")
    await in_database(wait_for, approved.exists, what="the call is allowed")
    executor = Executor(NoCommits())
    await executor.run_once()
    await executor.drain()


async def held_call() -> Call:
    rows = Call.objects.filter(state="held")
    await in_database(wait_for, rows.exists, what="the call is held")
    call: Call = await in_database(rows.get)
    return call


def text_of(response):
    return result_of(response)["content"][0]["text"]


@pytest.fixture
def operators_rule(agent):
    return add_rule("Ask first", effect="hold", tools=["raw__*"])


@pytest.fixture
def callers_rule(agent):
    return add_rule("Ask the user", effect="hold", tools=["raw__*"], approver="caller")


def test_check_call_gives_how_a_call_stands_and_then_its_result(run, operators_rule, era):
    async def scenario(door):
        held = await door.call("deferred_tool_call", {"name": "raw__say", "arguments": ARGUMENTS})
        assert result_of(held)["isError"] is False
        row = await held_call()
        assert f"check_call with the call_id {row.call_id}" in text_of(held)
        check = {"call_id": row.call_id}
        assert text_of(await door.call("check_call", check)) == text_of(held)
        waiting = asyncio.create_task(door.call("check_call", {**check, "wait_seconds": 20}))
        await in_database(actions.allow, row.call_id, actor=OTTO)
        await execute_when_approved()
        assert text_of(await waiting) == "told"
        again = await door.call("raw__say", ARGUMENTS)
        assert "holds this call" in text_of(again)

    run(scenario, Door)


@pytest.mark.parametrize("arguments", [{}, {"call_id": 7}, {"call_id": "x", "wait_seconds": 21}])
def test_wrong_arguments_of_check_call_are_explained(run, operators_rule, arguments):
    async def scenario(door):
        answer = await door.call("check_call", arguments)
        assert result_of(answer)["isError"] is True
        assert "Input schema of check_call" in text_of(answer)

    run(scenario)


def test_check_call_of_an_unknown_call_is_an_error_result(run, operators_rule):
    async def scenario(door):
        answer = await door.call("check_call", {"call_id": "call_0"})
        assert result_of(answer)["isError"] is True
        assert "Call not found." in text_of(answer)

    run(scenario)


def test_check_call_is_listed_in_its_place(run, operators_rule, era):
    async def scenario(door):
        headers = {"mcp-protocol-version": era, "mcp-method": "tools/list"}
        params: dict[str, Any] = {"_meta": META} if era == MODERN else {}
        if era == LEGACY:
            headers["mcp-session-id"] = await door.connect()
        message = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": params}
        tools = result_of(await door.send(message, headers))["tools"]
        listed = {tool["name"]: tool for tool in tools}
        assert listed["check_call"]["annotations"]["readOnlyHint"] is True

    run(scenario, Door)


# --- Elicitation ----------------------------------------------------------------------------------


def ask(door, era, **fields):
    meta = {CAPABILITIES: {"elicitation": door.modes}} if era == MODERN else {}
    return door.call("raw__say", ARGUMENTS, meta=meta, **fields)


@pytest.mark.parametrize("decision", ["allow", "deny"])
def test_the_clients_user_decides_where_the_rule_says_so(run, callers_rule, era, decision):
    answer = {"action": "accept", "content": {"decision": decision}}

    async def modern(door):
        result = result_of(await ask(door, era))
        assert result["resultType"] == "input_required"
        question = result["inputRequests"]["decision"]
        assert question["method"] == "elicitation/create"
        assert "raw__say" in question["params"]["message"]
        params = {
            "name": "raw__say",
            "arguments": ARGUMENTS,
            "requestState": result["requestState"],
            "inputResponses": {"decision": answer},
            "_meta": {**META, CAPABILITIES: {"elicitation": {}}},
        }
        return asyncio.create_task(door.call("raw__say", ARGUMENTS, params=params))

    async def legacy(door):
        asking = asyncio.create_task(ask(door, era))
        await in_database(wait_for, lambda: bool(watch._waiting), what="the user is asked")
        row = await held_call()
        assert await door.answer(row.call_id, **answer) == 202
        return asking

    async def scenario(door):
        asking = await (modern if era == MODERN else legacy)(door)
        if decision == "allow":
            await execute_when_approved()
        return await asking

    response = run(scenario)
    text = response.body.decode()
    row = Call.objects.get()
    if decision == "allow":
        assert row.state == "succeeded"
        assert '"text":"told"' in text
    else:
        assert row.state == "denied"
        assert "denied this call" in text
    if era == LEGACY:
        first, last = (json.loads(line[5:]) for line in text.splitlines() if line[:5] == "data:")
        assert (first["method"], last["id"]) == ("elicitation/create", 7)
    entry = AuditEntry.objects.get(verb=f"call.{decision}")
    assert entry.actor_label == "user of scout's client"


@pytest.mark.parametrize("action", ["accept", "decline"])
def test_a_client_that_opens_urls_gets_that_of_the_approvals_page(run, callers_rule, era, action):
    """Its user decides there, as an operator; what the client answers decides nothing."""
    given = {"action": action, "content": {"decision": "allow"}}

    async def modern(door):
        result = result_of(await ask(door, era))
        params = {
            "name": "raw__say",
            "arguments": ARGUMENTS,
            "requestState": result["requestState"],
            "inputResponses": {"decision": given},
            "_meta": {**META, CAPABILITIES: {"elicitation": door.modes}},
        }
        asking = asyncio.create_task(door.call("raw__say", ARGUMENTS, params=params))
        return result["inputRequests"]["decision"]["params"], asking

    async def legacy(door):
        asking = asyncio.create_task(ask(door, era))
        await in_database(wait_for, lambda: bool(watch._waiting), what="the user is asked")
        row = await held_call()
        assert await door.answer(row.call_id, **given) == 202
        return None, asking

    async def scenario(door):
        question, asking = await (modern if era == MODERN else legacy)(door)
        row = await held_call()
        if action == "accept":
            await in_database(wait_for, lambda: bool(watch._waiting), what="it waits")
            await in_database(actions.allow, row.call_id, actor=OTTO)
            await execute_when_approved()
        return question, await asking

    question, response = run(scenario, OpeningDoor)
    text = response.body.decode()
    if era == LEGACY:
        first = next(json.loads(line[5:]) for line in text.splitlines() if line[:5] == "data:")
        question = first["params"]
        assert question.pop("elicitationId") == Call.objects.get().call_id
    assert question == {
        "mode": "url",
        "message": question["message"],
        "url": f"{settings.PUBLIC_URL}/approvals/calls",
    }
    assert "raw__say" in question["message"]
    assert ("told" if action == "accept" else "holds this call") in text
    assert Call.objects.get().state == ("succeeded" if action == "accept" else "held")


def test_a_dismissed_question_leaves_the_call_to_an_operator(run, callers_rule, era):
    async def modern(door):
        state = result_of(await ask(door, era))["requestState"]
        params = {
            "name": "raw__say",
            "arguments": ARGUMENTS,
            "requestState": state,
            "inputResponses": {"decision": {"action": "cancel"}},
            "_meta": {**META, CAPABILITIES: {"elicitation": {}}},
        }
        return await door.call("raw__say", ARGUMENTS, params=params)

    async def legacy(door):
        asking = asyncio.create_task(ask(door, era))
        await in_database(wait_for, lambda: bool(watch._waiting), what="the user is asked")
        row = await held_call()
        await door.answer(row.call_id, action="cancel")
        return await asking

    response = run(modern if era == MODERN else legacy)
    assert "holds this call" in response.body.decode()
    assert Call.objects.get().state == "held"


def test_a_client_that_cannot_ask_leaves_the_call_to_an_operator(run, callers_rule, era):
    async def scenario(door):
        return await door.call("raw__say", ARGUMENTS)

    assert "holds this call" in text_of(run(scenario, Door))


def test_an_answer_decides_nothing_where_an_operator_must(run, operators_rule, era):
    answer = {"action": "accept", "content": {"decision": "allow"}}

    async def scenario(door):
        assert "holds this call" in text_of(await ask(door, era))
        row = await held_call()
        if era == LEGACY:
            assert await door.answer(row.call_id, **answer) == 202
        else:
            params = {
                "name": "raw__say",
                "arguments": ARGUMENTS,
                "requestState": questions.seal(
                    await in_database(lambda: api_keys.find_key(door.key).sha256),
                    ("tools/call", "raw__say", ARGUMENTS),
                    {"held": row.call_id},
                ),
                "inputResponses": {"decision": answer},
                "_meta": {**META, CAPABILITIES: {"elicitation": {}}},
            }
            await door.call("raw__say", ARGUMENTS, params=params)

    run(scenario)
    assert Call.objects.get().state == "held"


@pytest.mark.parametrize("era", [MODERN])  # an older client answers on the stream of the call
def test_an_answer_is_for_the_same_arguments_and_time_and_is_sealed(
    run, callers_rule, era, monkeypatch
):
    async def scenario(door):
        state = result_of(await ask(door, era))["requestState"]
        assert "call_" not in state
        row = await held_call()
        other = {**ARGUMENTS, "more": True}
        params = {
            "name": "raw__say",
            "inputResponses": {"decision": {"action": "accept", "content": {"decision": "allow"}}},
            "_meta": {**META, CAPABILITIES: {"elicitation": {}}},
        }
        for arguments, given in ((other, state), (ARGUMENTS, row.call_id), (ARGUMENTS, state)):
            if (arguments, given) == (ARGUMENTS, state):
                monkeypatch.setattr(questions.time, "time", lambda now=time.time: now() + 3601)
            sent = {**params, "arguments": arguments, "requestState": given}
            response = await door.call("raw__say", arguments, params=sent)
            assert (response.status, response.json["error"]["code"]) == (400, -32602)

    run(scenario)
    assert Call.objects.get().state == "held"
