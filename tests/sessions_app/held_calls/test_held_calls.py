"""Held calls: held, decided, executed once, fetched; the same call again; what ends them."""

import asyncio
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from catalog.audit import SYSTEM, Actor
from catalog.models import AuditEntry, Revision, Tool
from catalog.tools import overrides
from catalog.tools.actions import hold as hide_tool
from servers.models import Server
from servers.registration.actions import delete_server
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys
from sessions_app.held_calls import actions, answers, ending, execution
from sessions_app.ledger import calls as call_ledger
from sessions_app.models import Agent, AgentSession, ApiKey, Call, CallState, Event, HeldCall
from sessions_app.sessions import lifecycle
from tests.sessions_app.held_calls.conftest import said
from tests.sessions_app.rules.test_dispatch import add_rule
from tests.sessions_app.sessions.test_endpoint import SAY, in_database
from tests.support.agent_client import make_agent_client
from tests.support.factories import ingest_tools, make_program, tool_object
from tests.support.waiting import wait_for
from toolcrib import backup
from toolcrib.lib.errors import Conflict, NotFound

OTTO = Actor("user", "otto@example.org")
SECRET = "the exact words 8731"
HELD = said(SECRET)


async def hold(crib, body=HELD, **headers):
    """Make a call that the rule holds; return its id."""
    answer = await crib.call(body, **headers)
    assert (answer.status, answer.json["state"]) == (200, "held"), answer.json
    return answer.json["call_id"]


async def allow(call_id, **fields):
    return await in_database(actions.allow, call_id, actor=OTTO, **fields)


def text_of(answer):
    return answer.json["content"][0]["text"]


async def rows(call_id):
    return await in_database(lambda: Call.objects.select_related("hold").get(call_id=call_id))


def test_a_held_call_is_answered_at_once_and_its_payload_is_in_clear_nowhere(run):
    async def scenario(crib):
        answer = await crib.call({"tool_name": "raw__say", "arguments": {"result": SECRET * 1000}})
        assert (answer.status, answer.json["state"], answer.json["is_error"]) == (
            200,
            "held",
            False,
        )
        assert "Ask first" in text_of(answer)
        assert "It changes data." in text_of(answer)
        row = await rows(answer.json["call_id"])
        assert row.sent_at is None
        assert SECRET not in row.hold.request
        assert "error" not in answer.json

    run(scenario)
    kinds = list(Event.objects.values_list("kind", flat=True))
    assert kinds[-1] == "held"


def test_an_allowed_call_runs_once_and_its_result_is_fetched_once(run):
    async def scenario(crib):
        call_id = await hold(crib)
        await allow(call_id, comment="Fine.")
        assert (await crib.check(call_id)).json["state"] == "approved"
        await crib.execute()
        await crib.execute()
        row = await rows(call_id)
        assert row.state == "succeeded"
        assert row.hold.request == ""
        assert SECRET not in row.hold.answer
        first = await crib.check(call_id)
        assert (first.json["state"], text_of(first)) == ("succeeded", SECRET)
        assert (await rows(call_id)).hold.answer == ""
        again = await crib.check(call_id)
        assert again.json["state"] == "succeeded"
        assert "no longer stored" in text_of(again)

    run(scenario)
    assert Call.objects.count() == 1
    entry = AuditEntry.objects.get(verb="call.allow")
    assert entry.actor_label == "otto@example.org"
    assert entry.after["rule"] == "Ask first"
    told = AuditEntry.objects.filter(target_kind="call").order_by("pk")
    assert list(told.values_list("verb", "actor_kind", "actor_label")) == [
        ("call.hold", "system", "Toolcrib"),
        ("call.allow", "user", "otto@example.org"),
        ("call.fetch", "agent", "scout"),
    ]
    assert told[2].after["state"] == "succeeded"
    assert SECRET not in str(list(told.values()))


def test_the_same_call_gives_the_same_id_then_its_result_and_then_a_new_call(run):
    async def scenario(crib):
        call_id = await hold(crib)
        assert await hold(crib) == call_id
        other = await hold(crib, said("something else"))
        assert other != call_id
        await allow(call_id)
        assert (await crib.call(HELD)).json["call_id"] == call_id
        await crib.execute()
        result = await crib.call(HELD)
        assert (result.json["call_id"], text_of(result)) == (call_id, SECRET)
        assert await hold(crib) != call_id

    run(scenario)


def test_the_same_call_still_gives_the_held_one_after_the_rule_is_gone(run, rule):
    async def scenario(crib):
        call_id = await hold(crib)
        await in_database(delete_rule)
        assert (await crib.call(HELD)).json["call_id"] == call_id
        free = await crib.call(said("free"))
        assert free.json["state"] == "succeeded"

    def delete_rule():
        rule.delete()
        Revision.bump()

    run(scenario)


def test_a_denied_call_is_an_error_with_the_words_and_never_runs(run):
    async def scenario(crib):
        call_id = await hold(crib)
        await in_database(actions.deny, call_id, actor=OTTO, comment="Ask finance first.")
        await crib.execute()
        answer = await crib.check(call_id)
        assert (answer.json["state"], answer.json["is_error"]) == ("denied", True)
        assert answer.json["error"]["code"] == "call_denied"
        assert "Ask finance first." in text_of(answer)
        assert (await rows(call_id)).sent_at is None
        with pytest.raises(Conflict, match=r"otto@example.org decided"):
            await allow(call_id)

    run(scenario)
    assert AuditEntry.objects.filter(verb="call.deny").count() == 1


def test_a_call_that_nobody_decides_about_expires(run):
    async def scenario(crib):
        call_id = await hold(crib)
        assert await in_database(ending.expire_due) == 0
        assert await in_database(ending.expire_due, timezone.now() + timedelta(days=1)) == 1
        answer = await crib.check(call_id)
        assert (answer.json["state"], answer.json["error"]["code"]) == ("expired", "call_expired")
        with pytest.raises(Conflict):
            await allow(call_id)

    run(scenario)


def test_closing_the_session_expires_its_held_calls(run):
    async def scenario(crib):
        call_id = await hold(crib)
        session = await in_database(AgentSession.objects.get)
        await in_database(lifecycle.close_session, session)
        assert (await crib.check(call_id)).json["state"] == "expired"

    run(scenario)


def _revoke():
    api_keys.revoke(ApiKey.objects.get(scope="agent"), actor=SYSTEM)


def _close():
    lifecycle.close_session(AgentSession.objects.get())


def _hide():
    hide_tool(Tool.objects.get(name="say"), "Broken.", actor=SYSTEM)


def _deny_by_rule():
    rule = add_rule("Never", effect="deny", tools=["raw__say"])
    type(rule).objects.filter(pk=rule.pk).update(position=0)
    type(rule).objects.exclude(pk=rule.pk).update(position=1)


def _disable():
    agent_actions.set_enabled(Agent.objects.get(), False, actor=SYSTEM)


def _expire():
    ApiKey.objects.filter(scope="agent").update(expires_at=timezone.now())


def _remove():
    delete_server(Server.objects.get(), actor=SYSTEM)


def _replace():
    _remove()
    ingest_tools(make_program("raw_calls", slug="raw"), tool_object("say", inputSchema=SAY))


@pytest.mark.parametrize("is_decided", [True, False])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_disable, "A valid API key is required"),
        (_expire, "A valid API key is required"),
        (_remove, "'raw__say' is not available in this session"),
        (_replace, "raw__say is another tool now"),
    ],
)
def test_an_allowed_call_of_a_removed_agent_key_or_server_is_refused(
    run, change, reason, is_decided
):
    async def scenario(crib):
        call_id = await hold(crib)
        if is_decided:
            await allow(call_id)
        await in_database(change)
        if not is_decided:
            await allow(call_id)
        await crib.execute()
        return await rows(call_id)

    row = run(scenario)
    assert (row.state, row.sent_at) == ("refused", None)
    assert reason in row.error_message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_revoke, "A valid API key is required"),
        (_close, "This session is closed"),
        (_hide, "raw__say"),
        (_deny_by_rule, "The rule “Never” denies"),
    ],
)
def test_what_no_longer_holds_at_execution_ends_as_refused(run, change, reason):
    async def scenario(crib):
        call_id = await hold(crib)
        await allow(call_id)
        await in_database(change)
        await crib.execute()
        return await rows(call_id)

    row = run(scenario)
    assert row.state == "refused"
    assert reason in row.error_message
    assert row.sent_at is None


def test_approved_twice_at_once_it_runs_once(run):
    async def scenario(crib):
        call_id = await hold(crib)
        outcomes = await asyncio.gather(*(allow(call_id) for _ in range(4)), return_exceptions=True)
        assert sum(isinstance(one, Conflict) for one in outcomes) == 3
        executors = [type(crib)(crib.key, crib.session) for _ in range(4)]
        await asyncio.gather(*(one.execute() for one in executors))
        sent = await crib.call({"tool_name": "raw__seen", "arguments": {}})
        assert sent.json["state"] == "held"
        return await rows(call_id)

    assert run(scenario).state == "succeeded"
    assert Event.objects.filter(kind="called").count() == 1


def test_a_claim_that_was_taken_over_sends_nothing(run):
    async def scenario(crib):
        call_id = await hold(crib)
        await allow(call_id)
        (claim,), _ = await in_database(execution.claim_calls, 1)
        assert await in_database(execution.claim_calls, 1) == ([], True)
        await in_database(HeldCall.objects.update, holder="", lease_until=None)
        (newer,), _ = await in_database(execution.claim_calls, 1)
        await execution.execute(claim)
        assert (await rows(call_id)).state == "approved"
        await execution.execute(newer)
        assert (await rows(call_id)).state == "succeeded"

    run(scenario)


def test_a_call_of_a_dead_process_is_claimed_again_unless_it_was_sent(run):
    dead = call_ledger.THIS_PROCESS.rpartition(" ")[0] + " 0"

    async def scenario(crib):
        call_id = await hold(crib)
        await allow(call_id)
        await in_database(execution.claim_calls, 1)
        await in_database(HeldCall.objects.update, holder=dead)
        await in_database(Call.objects.update, holder=dead, state="accepted")
        assert await in_database(call_ledger.recover_lost_calls) == 0
        assert (await rows(call_id)).state == "approved"
        await in_database(Call.objects.update, holder=dead, state="sent")
        assert await in_database(call_ledger.recover_lost_calls) == 1
        await crib.execute()
        answer = await crib.check(call_id)
        assert (answer.json["state"], answer.json["error"]["code"]) == (
            "unknown",
            "unknown_outcome",
        )

    run(scenario)


def test_an_answer_whose_sender_died_can_be_fetched_again(run):
    dead = call_ledger.THIS_PROCESS.rpartition(" ")[0] + " 0"

    async def scenario(crib):
        call_id = await hold(crib)
        await allow(call_id)
        await crib.execute()
        agent = await in_database(lambda: Call.objects.select_related("agent").get().agent)
        await in_database(answers.read_answer, agent, call_id)  # and it never arrives
        await in_database(HeldCall.objects.update, sender=dead)
        assert text_of(await crib.call(HELD)) == SECRET

    run(scenario)


def test_another_agent_finds_no_such_call_and_cannot_tell_it_from_an_unknown_one(run):
    async def scenario(crib):
        call_id = await hold(crib)
        other = await in_database(lambda: make_agent_client("other").key)
        theirs = await crib.check(call_id, key=other)
        unknown = await crib.check("call_0", key=other)
        assert theirs.status == unknown.status == 404
        assert theirs.json == unknown.json

    run(scenario)


def test_waiting_ends_when_another_task_finishes_the_call(run):
    async def scenario(crib):
        call_id = await hold(crib)
        waiting = asyncio.create_task(crib.check(call_id, wait=20))
        is_waiting = lambda: bool(execution.watch._waiting)  # noqa: E731
        await in_database(wait_for, is_waiting, what="the request waits")
        await allow(call_id)
        await crib.execute()
        assert text_of(await waiting) == SECRET

    run(scenario)


def test_an_idempotency_key_gives_how_the_held_call_stands_and_then_its_result(run):
    async def scenario(crib):
        call_id = await hold(crib, **{"idempotency-key": "once"})
        assert await hold(crib, **{"idempotency-key": "once"}) == call_id
        await allow(call_id)
        await crib.execute()
        answer = await crib.call(HELD, **{"idempotency-key": "once"})
        assert (answer.json["call_id"], text_of(answer)) == (call_id, SECRET)

    run(scenario)


def test_held_calls_count_in_no_concurrency_limit_and_have_a_limit_of_their_own(run, settings):
    settings.MAX_HELD_CALLS = 5  # the agent may have three calls in flight

    async def scenario(crib):
        for number in range(5):
            await hold(crib, said(str(number)))
        answer = await crib.call(said("one more"))
        assert answer.status == 429
        assert answer.json["error"]["code"] == "too_many_held_calls"

    run(scenario)


def test_unfetched_answers_are_deleted_after_a_day(run):
    async def scenario(crib):
        call_id = await hold(crib)
        await allow(call_id)
        await crib.execute()
        await in_database(ending.prune_payloads)
        assert (await rows(call_id)).hold.answer != ""
        await in_database(ending.prune_payloads, timezone.now() + timedelta(days=1, minutes=1))
        assert (await rows(call_id)).hold.answer == ""
        assert await hold(crib) != call_id

    run(scenario)


def test_a_held_call_of_no_such_id_cannot_be_decided(db):
    with pytest.raises(NotFound):
        actions.allow("call_0", actor=OTTO)


def test_a_held_call_without_its_request_as_after_a_restore_expires(run):
    async def scenario(crib):
        call_id = await hold(crib)
        allowed = await hold(crib, said("other"))
        await allow(allowed)
        await in_database(HeldCall.objects.all().delete)
        assert await in_database(ending.expire_due) == 2
        return [
            (await in_database(Call.objects.get, call_id=one)).state for one in (call_id, allowed)
        ]

    assert HeldCall not in backup.backup_models()
    assert run(scenario) == ["expired", "expired"]


def _fix(value):
    fixed = {"result": {"hidden": True, "fixed": value}}
    overrides.override_parameters(Tool.objects.get(name="say"), fixed, actor=SYSTEM)


def test_an_allowed_call_runs_with_the_fixed_values_that_were_allowed(run):
    async def scenario(crib):
        await in_database(_fix, HELD["arguments"]["result"])
        call_id = await hold(crib, {"tool_name": "raw__say", "arguments": {}})
        await allow(call_id)
        await crib.execute()
        return (await crib.check(call_id)).json

    answer = run(scenario)
    assert (answer["state"], answer["content"][0]["text"]) == ("succeeded", SECRET)


def test_an_allowed_call_whose_fixed_values_changed_is_refused(run):
    async def scenario(crib):
        await in_database(_fix, HELD["arguments"]["result"])
        call_id = await hold(crib, {"tool_name": "raw__say", "arguments": {}})
        await allow(call_id)
        await in_database(_fix, "something else")
        await crib.execute()
        return await rows(call_id)

    row = run(scenario)
    assert (row.state, row.sent_at) == ("refused", None)
    assert "fixed values of raw__say have changed" in row.error_message


@pytest.mark.skipif(connection.vendor != "sqlite", reason="the plan of SQLite")
def test_held_calls_are_counted_by_their_index(db):
    """Every page counts them: without the index it reads the whole ledger."""
    assert "call_waiting" in Call.objects.held().explain()
    assert "call_waiting" not in Call.objects.filter(state=CallState.HELD).explain()
