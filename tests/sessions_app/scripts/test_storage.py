"""What is stored of a script: by the agent's setting, and the whole answer for a day."""

import json
from datetime import timedelta

import pytest
from django.utils import timezone

from sessions_app.ledger import calls as call_ledger
from sessions_app.models import Agent, ScriptRun
from tests.sessions_app.rules.test_dispatch import add_rule
from tests.sessions_app.scripts.conftest import result
from tests.sessions_app.scripts.test_held import decide
from tests.sessions_app.sessions.test_endpoint import in_database

SECRET = "ghp_" + "a1B2c3D4e5" * 4
CODE = f"print('{SECRET}')\nif input == 1:\n    raise ValueError('{SECRET}')\n'{SECRET}'"


def columns():
    row = ScriptRun.objects.get()
    return {name: getattr(row, name) for name in ("code", "input", "result", "error", "logs")}


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("storage", ["default", "masked", "nothing", "all"])
def test_people_read_what_the_agents_setting_stores_and_the_agent_gets_all(run, storage, failing):
    Agent.objects.update(payload_storage=storage)
    given = 1 if failing else {"token": SECRET}

    async def scenario(web):
        answer = await web.script(CODE, input=given)
        return answer, (await web.get_run(answer["run_id"])).json

    answer, again = run(scenario)
    whole = answer["error"]["message"] if failing else answer["result"]
    assert SECRET in whole
    assert again == answer
    stored = columns()
    text = json.dumps(stored)
    if storage == "nothing":
        assert (stored["code"], stored["logs"], stored["result"]) == ("", "", "null")
        assert SECRET not in text
        assert "ValueError" in text or not failing
    else:
        assert (SECRET in text) is (storage == "all")
        assert "print" in stored["code"]


def test_a_paused_script_shows_no_more_and_continues_with_what_it_was_given(run, agent):
    Agent.objects.update(payload_storage="nothing")
    add_rule("Hold", effect="hold", tools=["raw__say"])

    async def scenario(web):

        code = f"await raw.say(result={result('x')!r})\ninput['token']"
        held = await web.script(code, input={"token": SECRET})
        paused = await in_database(columns)
        await decide()
        await web.execute()
        return held, paused, (await web.get_run(held["run_id"])).json

    held, paused, ended = run(scenario)
    assert held["status"] == "held"
    assert paused["code"] == ""
    assert ended["result"] == SECRET


def test_the_whole_answer_is_kept_for_a_day(run):
    async def scenario(web):
        answer = await web.post("scripts", {"code": CODE}, **{"idempotency-key": "k"})
        yesterday = timezone.now() - timedelta(hours=25)
        rows = ScriptRun.objects
        await in_database(call_ledger.prune)
        kept = await in_database(lambda: rows.get().payload)
        await in_database(lambda: rows.update(finished_at=yesterday))
        await in_database(call_ledger.prune)
        return kept, (await web.get_run(answer.json["run_id"])).json

    kept, later = run(scenario)
    assert SECRET in kept
    assert later["status"] == "completed"
    assert SECRET not in json.dumps(later)
    row = ScriptRun.objects.get()
    assert (row.payload, row.idempotency_key) == ("", None)
