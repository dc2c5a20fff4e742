"""Scripts of which a call is held: paused, continued by any process, or ended with the reason."""

import json
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import F
from django.utils import timezone

from catalog.audit import Actor
from sessions_app.held_calls import actions, ending
from sessions_app.models import Agent, ApiKey, Call, HeldCall, Rule, ScriptRun
from sessions_app.scripts import engines, runs
from tests.sessions_app.rules.test_dispatch import add_rule
from tests.sessions_app.scripts.conftest import ScriptWeb, result
from tests.sessions_app.sessions.test_endpoint import in_database

OTTO = Actor("user", "otto@example.org")
SAY = f"await raw.say(result={result('told')!r})"


def read_stored() -> Any:
    with connection.cursor() as cursor:
        cursor.execute("SELECT snapshot, payload FROM sessions_app_scriptrun")
        return cursor.fetchone()


@pytest.fixture
def rule(agent):
    return add_rule("Ask first", effect="hold", reason="It changes data.", tools=["raw__say"])


async def pause(web: ScriptWeb, code: str, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = await web.script(code, **body)
    assert answer["status"] == "held", answer
    return answer


async def held_ids() -> list[str]:
    rows = Call.objects.filter(state="held").order_by("id")
    ids: list[str] = await in_database(lambda: list(rows.values_list("call_id", flat=True)))
    return ids


async def decide(decision: Any = actions.allow, **fields: Any) -> None:
    for call_id in await held_ids():
        await in_database(decision, call_id, actor=OTTO, **fields)


async def end(web: ScriptWeb, run_id: str) -> dict[str, Any]:
    await web.execute()
    ended: dict[str, Any] = (await web.get_run(run_id)).json
    return ended


async def become_another_process(monkeypatch: Any) -> None:
    """Forget everything in memory, as a process that starts knows nothing of the script."""
    await engines.close_engines()
    monkeypatch.setattr(runs, "THIS_PROCESS", "another")


def test_an_allowed_call_continues_the_script_in_another_process(run, rule, monkeypatch):
    code = f"print('before')\nn = input * 2\ntext = {SAY}\nprint('after')\n[n, text]"

    async def scenario(web):
        held = await pause(web, code, input=4)
        stored = await in_database(read_stored)
        await become_another_process(monkeypatch)
        assert (await end(web, held["run_id"]))["status"] == "held"
        await decide()
        return held, stored, await end(web, held["run_id"])

    held, stored, ended = run(scenario)
    assert all(text.startswith("~") for text in stored)
    assert held["calls"][0]["state"] == "held"
    assert (ended["status"], ended["result"]) == ("completed", [8, "told"])
    assert ended["logs"] == "before\nafter\n"
    assert [call["state"] for call in ended["calls"]] == ["succeeded"]
    assert Call.objects.count() == 1
    assert ScriptRun.objects.get().snapshot == ""


def test_a_script_waits_23_hours_for_its_decision(run, rule, monkeypatch):
    ago = timedelta(hours=23)

    def move_back():
        HeldCall.objects.update(held_at=F("held_at") - ago, expires_at=F("expires_at") - ago)
        ScriptRun.objects.update(
            started_at=F("started_at") - ago, deadline=F("deadline") - ago, holder=""
        )
        assert (ending.expire_due(), runs.recover()) == (0, 0)

    async def scenario(web):
        held = await pause(web, SAY)
        await become_another_process(monkeypatch)
        await in_database(move_back)
        await decide()
        return await end(web, held["run_id"])

    assert run(scenario)["result"] == "told"


def test_a_denied_call_raises_permission_error_that_can_be_caught(run, rule):
    code = f"try:\n    {SAY}\nexcept PermissionError as error:\n    print(error)\n'went on'"

    async def scenario(web):
        held = await pause(web, code)
        await decide(actions.deny, comment="Not on a Friday.")
        return await end(web, held["run_id"])

    ended = run(scenario)
    assert (ended["status"], ended["result"]) == ("completed", "went on")
    assert "Not on a Friday." in ended["logs"]


def test_a_gather_of_which_one_call_is_held_keeps_the_other_answers(run, rule):
    other = f"desk.say(result={result('free')!r})"
    code = f"import asyncio\nawait asyncio.gather({other}, {SAY[6:]}, {other})"

    async def scenario(web):
        held = await pause(web, code)
        await decide()
        return held, await end(web, held["run_id"])

    held, ended = run(scenario)
    assert len(held["calls"]) == 3
    assert ended["result"] == ["free", "told", "free"]
    assert Call.objects.count() == 3


def test_once_a_call_is_held_those_that_were_not_started_wait(run, rule, monkeypatch):
    """The held one is first; with one call at a time, the others start after the decision."""
    monkeypatch.setattr("sessions_app.scripts.broker.MAX_PARALLEL", 1)
    free = ", ".join(f"desk.say(result={result(str(n))!r})" for n in range(3))
    code = f"import asyncio\nawait asyncio.gather({SAY[6:]}, {free})"

    async def scenario(web):
        held = await pause(web, code)
        await decide()
        return held, await end(web, held["run_id"])

    held, ended = run(scenario)
    assert len(held["calls"]) == 1
    assert ended["result"] == ["told", "0", "1", "2"]


def test_a_call_with_too_large_arguments_is_not_made_without_them_after_the_decision(
    run, rule, monkeypatch
):
    monkeypatch.setattr("sessions_app.scripts.broker.MAX_PARALLEL", 1)
    code = (
        "import asyncio\n"
        f"told, wrong = await asyncio.gather({SAY[6:]}, desk.seen(**{{'all': [0] * 200_000}}))\n"
    )

    async def scenario(web):
        held = await pause(web, code)
        await decide()
        return await end(web, held["run_id"])

    ended = run(scenario)
    assert "has more than" in ended["error"]["message"]
    assert [call["tool"] for call in ended["calls"]] == ["raw__say"]


def test_equal_calls_are_one_call_and_each_gets_its_result(run, rule):
    """In one script, and in two that wait for the same call."""

    async def scenario(web):
        both = await pause(web, f"import asyncio\nawait asyncio.gather({SAY[6:]}, {SAY[6:]})")
        one = await pause(web, SAY)
        await decide()
        await web.execute()
        return [(await web.get_run(body["run_id"])).json for body in (both, one)]

    both, one = run(scenario)
    assert both["result"] == ["told", "told"]
    assert one["result"] == "told"
    assert HeldCall.objects.exclude(answer="").count() == 0


def forget_sending() -> None:
    """Let the time pass in which an answer counts as being sent."""
    HeldCall.objects.update(sending_until=timezone.now())


def test_the_result_of_an_earlier_held_call_is_given_to_a_script_once(run, rule):
    """Afterwards the same call is a new one, which a person decides about again."""
    body = {"tool_name": "raw__say", "arguments": {"result": result("told")}}

    async def scenario(web):
        assert (await web.call(body)).json["state"] == "held"
        await decide()
        await web.executor.run_once()
        await web.executor.drain()
        first = await web.script(SAY)
        await in_database(forget_sending)
        return first, await web.script(SAY)

    first, second = run(scenario)
    assert (first["status"], first["result"]) == ("completed", "told")
    assert (second["status"], Call.objects.count()) == ("held", 2)


def test_the_result_of_a_held_call_whose_script_was_interrupted_is_given_once(run, rule):
    body = {"tool_name": "raw__say", "arguments": {"result": result("told")}}

    async def scenario(web):
        await pause(web, SAY)
        await decide()
        await web.executor.run_once()
        await web.executor.drain()
        lost = timezone.now() + timedelta(days=2)
        assert await in_database(runs.recover, lost) == 1
        first = await web.call(body)
        await in_database(forget_sending)
        return first.json, (await web.call(body)).json

    first, second = run(scenario)
    assert (first["state"], first["content"][0]["text"]) == ("succeeded", "told")
    assert second["state"] == "held"
    assert second["call_id"] != first["call_id"]


def test_a_script_may_be_paused_several_times(run, rule):
    code = "\n".join(f"print(await raw.say(result={result(str(n))!r}))" for n in range(3))

    async def scenario(web):
        run_id = (await pause(web, code))["run_id"]
        states = []
        for _ in range(3):
            await decide()
            states.append((await end(web, run_id))["status"])
        return states, (await web.get_run(run_id)).json

    states, ended = run(scenario)
    assert states == ["held", "held", "completed"]
    assert ended["logs"] == "0\n1\n2\n"


def test_a_call_that_nobody_decided_about_ends_the_script_with_the_words(run, rule):
    def expire():
        HeldCall.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
        assert ending.expire_due() == 1

    async def scenario(web):
        held = await pause(web, f"try:\n    {SAY}\nexcept BaseException:\n    pass")
        await in_database(expire)
        return await end(web, held["run_id"])

    ended = run(scenario)
    assert (ended["status"], ended["error"]["type"]) == ("failed", "expired")
    assert ended["error"]["message"] == runs.EXPIRED


def test_a_paused_script_whose_time_is_over_has_expired(run, rule):
    def is_over():
        ScriptRun.objects.update(deadline=timezone.now() - timedelta(seconds=1))
        return runs.recover()

    async def scenario(web):
        held = await pause(web, SAY)
        assert await in_database(is_over) == 1
        return (await web.get_run(held["run_id"])).json

    assert run(scenario)["error"]["message"] == runs.EXPIRED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "pydantic-monty 0.0.1"}, runs.OTHER_ENGINE),
        ({"snapshot": ""}, "The paused script can no longer be read."),
    ],
)
def test_a_script_that_cannot_be_continued_says_why(run, rule, change, message):
    async def scenario(web):
        held = await pause(web, SAY)
        await in_database(lambda: ScriptRun.objects.update(**change))
        await decide()
        return await end(web, held["run_id"])

    ended = run(scenario)
    assert (ended["status"], ended["error"]["type"]) == ("failed", "expired")
    assert ended["error"]["message"] == message


def test_a_snapshot_continues_its_own_run_alone(run, rule):
    def swap():
        first, second = ScriptRun.objects.order_by("id")
        first.snapshot = second.snapshot
        first.save()

    async def scenario(web):
        first = await pause(web, f"print('first')\n{SAY}")
        await pause(web, f"print('second')\nawait raw.say(result={result('x')!r})")
        await in_database(swap)
        await decide()
        return await end(web, first["run_id"])

    assert "belongs to another run" in run(scenario)["error"]["message"]


def test_the_script_of_a_revoked_key_makes_no_further_call(run, rule):
    async def scenario(web):
        held = await pause(web, f"{SAY}\nawait desk.say(result={result('x')!r})")
        await decide()
        await web.executor.run_once()
        await web.executor.drain()
        await in_database(lambda: ApiKey.objects.update(revoked_at=timezone.now()))
        await web.execute()
        return held["run_id"]

    row = ScriptRun.objects.get(run_id=run(scenario))
    assert row.state == "failed"
    assert row.error_type in ("PermissionError", "interrupted")
    assert not Call.objects.filter(tool_name="desk__say", state="succeeded").exists()


def test_a_paused_script_is_not_continued_once_the_agent_may_run_none(run, rule):
    async def scenario(web):
        held = await pause(web, f"{SAY}\nawait desk.say(result={result('x')!r})")
        await decide()
        await in_database(lambda: Agent.objects.update(code_mode=False))
        return await end(web, held["run_id"])

    ended = run(scenario)
    assert (ended["status"], ended["error"]["type"]) == ("failed", "code_mode_off")
    assert [call["tool"] for call in ended["calls"]] == ["raw__say"]


def test_a_script_whose_process_died_has_failed_with_its_calls(run, monkeypatch):
    """It is not continued: a call that it waited for may have run."""
    free = f"await desk.say(result={result('x')!r})"

    async def scenario(web):
        body = await web.script(free)
        rows = ScriptRun.objects.filter(run_id=body["run_id"])
        await in_database(lambda: rows.update(state="running", holder="gone:1:0"))
        monkeypatch.setattr(runs, "is_dead", lambda holder: holder.startswith("gone"))
        assert await in_database(runs.recover) == 1
        return (await web.get_run(body["run_id"])).json

    ended = run(scenario)
    assert (ended["error"]["type"], ended["error"]["message"]) == ("interrupted", runs.INTERRUPTED)
    assert len(ended["calls"]) == 1


# --- Many held scripts ----------------------------------------------------------------------------


def test_a_decided_script_is_continued_behind_any_number_of_older_ones(run, rule):
    """Also if more of them wait than a query may have parameters."""

    async def scenario(web):
        run_id = (await pause(web, SAY))["run_id"]
        await decide()
        await in_database(add_older, 700)
        return await end(web, run_id)

    def add_older(number):
        row = ScriptRun.objects.get()
        row.delete()
        waiting = Call.objects.create(
            call_id="call_w", agent=row.agent, state="held", accepted_at=row.started_at,
            deadline=row.deadline,
            tool_name="raw__say", path="script",
        )  # fmt: skip
        fields = {
            "session": row.session, "agent": row.agent, "language": "python", "state": "held",
            "started_at": row.started_at, "timeout": 60, "deadline": row.deadline,
        }  # fmt: skip
        ScriptRun.objects.bulk_create(
            ScriptRun(**fields, waiting_for=[waiting.call_id, f"call_{n}"]) for n in range(number)
        )
        row.pk = None
        row.save(force_insert=True)

    assert run(scenario)["result"] == "told"
    assert ScriptRun.objects.filter(state="held").count() == 700


def test_an_agent_has_at_most_so_many_held_scripts(run, rule, monkeypatch):
    monkeypatch.setattr(runs, "MAX_HELD_RUNS", 2)

    async def scenario(web):
        for _ in range(2):
            await pause(web, SAY)
        return await web.post("scripts", {"code": "1"})

    refused = run(scenario)
    assert refused.status == 429
    assert refused.json["error"]["code"] == "too_many_runs"
    assert "wait for a person" in refused.json["error"]["message"]


def test_a_grant_lets_the_calls_of_a_script_pass(run, rule):
    async def scenario(web):
        held = await pause(web, f"{SAY}\nawait raw.say(result={result('next')!r})")
        await decide(grant=actions.GrantTerms())
        return await end(web, held["run_id"])

    assert run(scenario)["result"] == "next"
    assert Rule.objects.count() == 1


# --- Retries --------------------------------------------------------------------------------------


def test_a_repeated_request_with_its_key_runs_nothing_twice(run):
    code = {"code": f"await desk.say(result={result('once')!r})"}
    key = {"idempotency-key": "k-1"}

    async def scenario(web):
        first = await web.post("scripts", code, **key)
        again = await web.post("scripts", code, **key)
        other = await web.post("scripts", {"code": "2"}, **key)
        bad = await web.post("scripts", code, **{"idempotency-key": " "})
        return first, again, other, bad

    first, again, other, bad = run(scenario)
    assert first.json == again.json
    assert first.json["result"] == "once"
    assert Call.objects.count() == 1
    assert (other.status, other.json["error"]["code"]) == (409, "idempotency_conflict")
    assert bad.status == 422
    assert json.loads(first.body)["run_id"] == ScriptRun.objects.get().run_id
