"""Scripts: results, errors, limits, what they may not do, and what is recorded of them."""

import asyncio
import sys
import tomllib
from pathlib import Path

import pytest
from django.db import connection
from django.utils import timezone

from servers.models import Server
from sessions_app.dispatch import key_revocation
from sessions_app.dispatch.authorization import Caller
from sessions_app.models import Agent, ApiKey, Call, Event, ScriptRun
from sessions_app.scripts import engines, runner
from tests.sessions_app.rules.test_dispatch import add_rule
from tests.sessions_app.scripts.conftest import add_parameter, result
from tests.sessions_app.sessions.test_endpoint import in_database
from tests.support.agent_client import make_agent_client
from toolcrib.lib.protocols.asgi import bearer_digest

FIRST = f"await raw.say(result={result('one')!r})"


def test_a_script_calls_tools_of_two_servers_and_only_its_result_comes_back(script, agent):
    long = result("word " * 500)
    answer = script(
        f"first = await raw.say(result={long!r})\n"
        f"second = await desk.say(result={result('two')!r})\n"
        "print('seen', len(first))\n"
        "{'words': len(first.split()), 'second': second}"
    )
    assert answer["status"] == "completed"
    assert answer["is_error"] is False
    assert answer["result"] == {"words": 500, "second": "two"}
    assert answer["logs"] == "seen 2500\n"
    assert [(call["seq"], call["tool"], call["state"]) for call in answer["calls"]] == [
        (1, "raw__say", "succeeded"),
        (2, "desk__say", "succeeded"),
    ]
    assert answer["tokens"]["spared"] > 400
    assert 0 < answer["tokens"]["given"] < 30
    rows = Call.objects.order_by("id")
    assert [(row.path, row.run.run_id, row.tokens) for row in rows] == [
        ("script", answer["run_id"], 0)
    ] * 2
    event = Event.objects.get(kind="script")
    assert event.tokens == answer["tokens"]["given"]
    assert event.session.tokens_call == answer["tokens"]["given"]
    with connection.cursor() as cursor:
        cursor.execute("SELECT code, result, logs FROM sessions_app_scriptrun")
        assert all(text.startswith("~") for text in cursor.fetchone())


def test_structured_content_is_a_value_and_input_is_given(script):
    structured = result("3", {"n": 3})
    answer = script(
        f"got = await raw.say(result={structured!r})\nreturn got['n'] + input['more']",
        input={"more": 4},
    )
    assert answer["result"] == 7


def test_calls_of_a_gather_run_at_the_same_time(script):
    """Each of the two calls is answered when both have arrived."""
    answer = script(
        "import asyncio\n"
        "a, b, c = await asyncio.gather(raw.seen(), raw.seen(), desk.seen())\n"
        "[len(a) > 0, len(b) > 0, len(c) > 0]"
    )
    assert answer["result"] == [True, True, True]
    times = sorted(Call.objects.values_list("accepted_at", "finished_at"))
    assert times[1][0] < times[0][1] or times[2][0] < times[0][1]


def test_errors_of_tools_raise_and_can_be_caught(script):
    failed = result("no such page", isError=True)
    answer = script(
        "try:\n"
        f"    await raw.say(result={failed!r})\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
        f"await raw.say(result={failed!r})"
    )
    assert answer["status"] == "failed"
    assert answer["is_error"] is True
    assert answer["logs"] == "raw.say: no such page\n"
    assert answer["error"]["type"] == "RuntimeError"
    assert answer["error"]["line"] == 5
    assert 'File "script.py", line 5' in answer["error"]["traceback"]
    assert len(answer["calls"]) == 2


def test_a_refused_call_raises_permission_error_with_the_reason(script):
    add_rule("No desk", reason="The desk is closed.", servers=["desk"], origin="script")
    answer = script(
        f"try:\n    await desk.say(result={result('x')!r})\n"
        "except PermissionError as error:\n    print(error)\n"
    )
    assert "The desk is closed." in answer["logs"]
    assert answer["calls"][0]["state"] == "refused"


def test_a_call_beyond_a_limit_of_the_agent_raises_permission_error(script):
    Agent.objects.update(calls_per_minute=1)
    answer = script(f"{FIRST}\n{FIRST}")
    assert answer["error"]["type"] == "PermissionError"
    assert "calls" in answer["error"]["message"]
    assert [call["state"] for call in answer["calls"]] == ["succeeded"]


def test_a_rule_for_scripts_does_not_concern_other_calls(run):
    add_rule("No scripts", servers=["raw"], origin="script")

    async def scenario(web):
        direct = await web.call({"tool_name": "raw__say", "arguments": {"result": result("x")}})
        return direct.json, await web.script(FIRST)

    direct, answer = run(scenario)
    assert direct["is_error"] is False
    assert answer["error"]["type"] == "PermissionError"


def test_results_of_one_server_do_not_reach_another_under_a_flow_rule(script):
    add_rule("No leaks", after=["raw"], servers=["desk"])
    answer = script(f"secret = {FIRST}\nawait desk.say(result=secret)")
    assert answer["error"]["type"] == "PermissionError"
    assert [call["state"] for call in answer["calls"]] == ["succeeded", "refused"]


def test_a_late_call_raises_timeout_error(script, agent):
    Server.objects.filter(slug="raw").update(call_timeout=1)
    answer = script(
        "try:\n    await raw.later(**{'seconds': 30})\n"
        "except TimeoutError as error:\n    print('late')\n"
    )
    assert answer["logs"] == "late\n"


def test_types_are_checked_before_anything_runs(script):
    answer = script(f"{FIRST}\nawait raw.say(text='x')")
    assert answer["error"]["type"] == "TypeCheckError"
    assert answer["error"]["line"] == 2
    assert "`result`" in answer["error"]["message"]
    assert answer["calls"] == []


def test_types_are_those_of_the_definition_that_the_session_was_shown(run):
    """As the arguments of its calls are: so one correction suffices here, too."""

    async def scenario(web):
        await web.post("load", {"group_id": "mcp:raw", "tool_names": ["say"]})
        await in_database(add_parameter)
        by_the_old = await web.script(FIRST)
        return by_the_old, await web.script(FIRST[:-1] + ", new='x')")

    old, new = run(scenario)
    assert old["error"]["type"] == "RuntimeError"
    assert '"new"' in old["error"]["message"]
    assert [call["state"] for call in old["calls"]] == ["refused"]
    assert (new["status"], new["result"]) == ("completed", "one")


def test_long_output_is_cut_with_a_mark_and_stays_valid_json(script):
    answer = script("for i in range(6000): print('0123456789')\n['x' * 100] * 1000")
    assert answer["status"] == "completed"
    assert answer["truncated"] is True
    assert answer["result"]["cut"] is True
    assert answer["result"]["bytes"] > 100_000
    assert len(answer["logs"]) < 50_200
    assert "cut" in answer["logs"][-60:]


def test_more_calls_than_permitted_end_the_script(script):
    answer = script(
        "import asyncio\n"
        "try:\n    await asyncio.gather(*[raw.seen() for i in range(51)])\n"
        "except BaseException:\n    pass\n"
    )
    assert answer["error"]["type"] == "LimitExceeded"
    assert answer["calls"] == []


def test_a_script_that_runs_too_long_is_ended_with_its_calls(script):
    answer = script("await raw.later(**{'seconds': 30})", timeout=1)
    assert answer["error"]["type"] == "TimeoutError"
    assert answer["calls"][0]["state"] in ("unknown", "cancelled")


def test_arguments_larger_than_a_request_may_have_are_refused(script):
    answer = script("await raw.say(result='x' * 1_100_000)")
    assert "larger than 1,048,576 bytes" in answer["error"]["message"]
    assert answer["calls"] == []


@pytest.mark.parametrize("key", [None, "k-1"])
def test_a_cancelled_request_ends_its_script_unless_it_may_be_repeated(run, key):
    """Without a key nobody knows the run: it would make further calls that nobody asked for."""
    code = "await raw.later(**{'seconds': 1})\nawait raw.seen()"

    async def scenario(web):
        request = runner.ScriptRequest(code, idempotency_key=key)
        asked = asyncio.create_task(runner.run_script(_caller(web), request))
        while not await in_database(Call.objects.exists):  # noqa: ASYNC110 - a row without an event
            await asyncio.sleep(0)
        asked.cancel()
        await runner.drain()
        row = await in_database(ScriptRun.objects.get)
        return (await web.get_run(row.run_id)).json

    ended = run(scenario)
    tools = [call["tool"] for call in ended["calls"]]
    if key is None:
        assert (ended["error"]["type"], tools) == ("cancelled", ["raw__later"])
    else:
        assert (ended["status"], tools) == ("completed", ["raw__later", "raw__seen"])


def test_a_third_script_at_once_is_rejected_and_a_running_one_can_be_asked_for(run):
    async def scenario(web):
        slow = "await raw.later(**{'seconds': 1})"
        first, second = [
            await runner.run_script(_caller(web), runner.ScriptRequest(slow), wait=0.01)
            for _ in range(2)
        ]
        third = await web.post("scripts", {"code": "1"})
        ended = await web.get_run(first["run_id"], wait=20)
        await web.get_run(second["run_id"], wait=20)
        return first, third, ended.json, await web.script("1")

    first, third, ended, last = run(scenario)
    assert first["status"] == "running"
    assert third.status == 429
    assert third.json["error"]["code"] == "too_many_runs"
    assert ended["result"] == "late"
    assert last["result"] == 1


def _caller(web):
    return Caller(bearer_digest({"authorization": f"Bearer {web.key}"}), web.session)


def test_without_the_setting_no_script_runs(run):
    Agent.objects.update(code_mode=False)

    async def scenario(web):
        return await web.post("scripts", {"code": "1"})

    answer = run(scenario)
    assert answer.status == 403
    assert answer.json["error"]["code"] == "code_mode_off"


def test_a_missing_engine_says_so(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    monkeypatch.delitem(sys.modules, "sessions_app.scripts.python_engine", raising=False)
    monkeypatch.setattr(engines, "_engines", {})

    async def scenario(web):
        return await web.post("scripts", {"code": "1"}), await web.call()

    answer, call = run(scenario)
    assert answer.status == 501
    assert "pydantic-monty is not installed" in answer.json["error"]["message"]
    assert call.status == 200


def test_a_missing_engine_for_typescript_says_so(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "deno", None)
    monkeypatch.delitem(sys.modules, "sessions_app.scripts.typescript_engine", raising=False)
    monkeypatch.setattr(engines, "_engines", {})

    async def scenario(web):
        typescript = {"code": "return 1", "language": "typescript"}
        return await web.post("scripts", typescript), await web.script("1")

    answer, python = run(scenario)
    assert answer.status == 501
    assert answer.json["error"]["code"] == "engine_missing"
    assert "Deno is not installed" in answer.json["error"]["message"]
    assert "toolcrib[typescript]" in answer.json["error"]["hint"]
    assert python["result"] == 1


@pytest.mark.parametrize("name", ["scripts", "typescript"])
def test_a_clone_and_the_image_install_the_engine_of_the_extra(name):
    extra = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"\n{extra[name][0]} \\\n" in Path("requirements.lock").read_text()


def test_a_run_of_another_agent_is_unknown(run):
    other = make_agent_client("other", code_mode=True)

    async def scenario(web):
        mine = await web.script("1")
        return await web.get_run(mine["run_id"], key=other.key), await web.get_run("run_0")

    for answer in run(scenario):
        assert answer.status == 404
        assert answer.json["error"]["code"] == "unknown_run"


@pytest.mark.parametrize(
    "body",
    [{}, {"code": "1", "language": "ruby"}, {"code": "1", "timeout": 61}, {"code": "#" * 70_000}],
)
def test_a_request_that_cannot_be_run_is_rejected(run, body):
    async def scenario(web):
        return await web.post("scripts", body)

    assert run(scenario).status == 422


def test_a_revoked_key_ends_its_scripts(run, agent):
    async def scenario(web):
        running = asyncio.create_task(web.script("await raw.later(**{'seconds': 30})"))
        while not key_revocation.running:  # noqa: ASYNC110 - a set without an event
            await asyncio.sleep(0)
        await in_database(lambda: ApiKey.objects.update(revoked_at=timezone.now()))
        await key_revocation._check_keys()
        await running
        return await in_database(lambda: ScriptRun.objects.get())

    ended = run(scenario)
    assert ended.state == "failed"
    assert ended.error_type in ("unauthorized", "PermissionError")
