"""Scripts in TypeScript: results, errors, limits, held calls, and what an engine is sent."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from servers.models import Server
from sessions_app.held_calls import actions
from sessions_app.models import Agent, Call, ScriptRun
from sessions_app.scripts import typescript_engine
from sessions_app.scripts.broker import Broker
from sessions_app.scripts.engines import (
    Failure,
    Finished,
    Program,
    ScriptFailed,
    ToolCall,
    Value,
    Waiting,
)
from sessions_app.scripts.typescript_engine import TypeScriptEngine
from tests.sessions_app.rules.test_dispatch import add_rule
from tests.sessions_app.scripts.conftest import result
from tests.sessions_app.scripts.test_held import become_another_process, decide, end, pause
from tests.support.waiting import scaled


def say(text: str = "told", structured: Any = None, **more: Any) -> str:
    """Return the argument of a call of `say` that gives this result."""
    return f"{{result: {json.dumps(result(text, structured, **more))}}}"


@pytest.fixture
def typescript(script):
    def typescript(code: str, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = script(code, language="typescript", **body)
        return answer

    return typescript


# --- Results and errors ---------------------------------------------------------------------------


def test_a_script_calls_tools_of_two_servers_and_only_its_result_comes_back(typescript):
    answer = typescript(
        f"""interface Seen {{ words: number; second: string }}
const first: string = await raw.say({say("word " * 500)});
const second = await desk.say({say("two")});
console.log("seen", first.length, {{ n: 1 }});
const seen: Seen = {{ words: first.trim().split(" ").length, second }};
return seen;"""
    )
    assert answer["status"] == "completed", answer
    assert answer["result"] == {"words": 500, "second": "two"}
    assert answer["logs"] == 'seen 2500 {"n":1}\n'
    assert answer["language"] == "typescript"
    assert [(call["tool"], call["state"]) for call in answer["calls"]] == [
        ("raw__say", "succeeded"),
        ("desk__say", "succeeded"),
    ]
    assert answer["tokens"]["spared"] > 400
    assert 0 < answer["tokens"]["given"] < 40


def test_structured_content_is_a_value_and_input_is_given(typescript):
    code = f"const got = await raw.say({say('3', {'n': 3})}); return got.n + input.more;"
    assert typescript(code, input={"more": 4})["result"] == 7


def test_calls_of_a_promise_all_run_at_the_same_time(typescript):
    answer = typescript(
        "const all = await Promise.all([raw.seen(), raw.seen({}), desk.seen()]);\n"
        "return all.map((text: string) => text.length > 0);"
    )
    assert answer["result"] == [True, True, True]
    times = sorted(Call.objects.values_list("accepted_at", "finished_at"))
    assert times[1][0] < times[0][1] or times[2][0] < times[0][1]


def test_errors_of_tools_reject_with_the_line_of_the_call_and_can_be_caught(typescript):
    failed = say("no such page", isError=True)
    answer = typescript(
        f"""type Shape = {{
  n: number;
}};
try {{
  await raw.say({failed});
}} catch (error) {{
  console.log(error instanceof ToolError, error.message);
}}
const fetchPage = async () =>
  await raw.say({failed});
await fetchPage();"""
    )
    assert answer["status"] == "failed"
    assert answer["logs"] == "true raw.say: no such page\n"
    assert answer["error"]["type"] == "ToolError"
    assert answer["error"]["message"] == "raw.say: no such page"
    assert answer["error"]["line"] == 10
    assert "fetchPage (script.ts:10:" in answer["error"]["traceback"]
    assert "(script.ts:11:" in answer["error"]["traceback"]
    assert "data:" not in answer["error"]["traceback"]
    assert len(answer["calls"]) == 2


def test_a_refused_call_rejects_with_a_permission_error_and_the_reason(typescript):
    add_rule("No desk", reason="The desk is closed.", servers=["desk"], origin="script")
    answer = typescript(
        f"""try {{
  await desk.say({say()});
}} catch (error) {{
  if (!(error instanceof PermissionError)) throw error;
  console.log(error.name, error.message);
}}"""
    )
    assert answer["status"] == "completed"
    assert answer["logs"].startswith("PermissionError ")
    assert "The desk is closed." in answer["logs"]
    assert answer["calls"][0]["state"] == "refused"


def test_a_late_call_rejects_with_a_timeout_error(typescript, agent):
    Server.objects.filter(slug="raw").update(call_timeout=1)
    answer = typescript(
        "try { await raw.later({seconds: 30}); }\n"
        "catch (error) { return [error instanceof TimeoutError, error.name]; }"
    )
    assert answer["result"] == [True, "TimeoutError"]


@pytest.mark.parametrize(
    ("code", "kind", "line", "words"),
    [
        ("const a = 1;\nlet b: = 2;", "SyntaxError", 2, ""),
        ("import fs from 'node:fs';", "SyntaxError", 1, "import"),
        ("\n\nnull.x;", "TypeError", 3, "null"),
        ("const fs = await import('node:fs');", "TypeError", 1, "Modules of Node.js"),
        ("\nthrow {code: 7};", "Error", None, '{"code":7}'),
        ("await new Promise(() => {});", "Error", None, "cannot happen"),
        ("raw.say('text');", "TypeError", 1, "raw.say takes one object"),
        ("const a = {}; a.a = a;\nreturn a;", "TypeError", None, "circular"),
        ("Promise.reject(new RangeError('unseen')); await raw.seen();", "RangeError", 1, "unseen"),
    ],
)  # fmt: skip
def test_an_uncaught_error_is_the_result_with_its_line(typescript, code, kind, line, words):
    error = typescript(code)["error"]
    assert (error["type"], error["line"]) == (kind, line), error
    assert words in error["message"]
    assert "export default" not in json.dumps(error)


def test_values_become_json(typescript):
    code = (
        "return {big: 10n, map: new Map([['a', 1]]), set: new Set([2]), no: undefined, nan: NaN,"
        " date: new Date(0), text: '\\ud800', f: () => 1};"
    )
    assert typescript(code)["result"] == {
        "big": "10", "map": {"a": 1}, "set": [2], "nan": None,
        "date": "1970-01-01T00:00:00.000Z", "text": "?",
    }  # fmt: skip


def test_errors_of_all_settled_calls_are_read_by_the_model(typescript):
    answer = typescript(
        f"return await Promise.allSettled([raw.say({say('no such page', isError=True)}),"
        f" desk.say({say('ok')})]);"
    )
    assert answer["result"] == [
        {"status": "rejected", "reason": "ToolError: raw.say: no such page"},
        {"status": "fulfilled", "value": "ok"},
    ]


@pytest.mark.parametrize("setting", ["masked", "nothing", "all"])
def test_an_error_of_any_text_ends_the_script(typescript, agent, setting):
    """JavaScript has halves of characters, which can neither be encoded nor stored."""
    Agent.objects.update(payload_storage=setting)
    answer = typescript(
        "const error = new Error('half \\ud800 and \\0');\n"
        "error.name = 'N\\0\\ud800';\nthrow error;"
    )
    assert (answer["status"], answer["error"]["type"]) == ("failed", "Error")
    assert answer["error"]["message"] == "half ? and \0"


def test_a_call_that_nothing_waits_for_is_made_before_the_end(typescript):
    answer = typescript(f"raw.say({say()}).then((text) => console.log(text)); return 1;")
    assert (answer["result"], answer["logs"]) == (1, "told\n")
    assert len(answer["calls"]) == 1


def test_sleeping_takes_no_time_and_moves_the_clock(typescript):
    answer = typescript(
        """const start = Date.now();
const order: number[] = [];
setTimeout(() => order.push(2), 7_200_000);
setTimeout(() => order.push(1), 3_600_000);
await new Promise((wake) => setTimeout(wake, 86_400_000));
return [order, new Date().getTime() - start, performance.now()];"""
    )
    assert answer["result"] == [[1, 2], 86_400_000, 86_400_000]


def test_long_output_is_cut_with_a_mark_and_stays_valid_json(typescript):
    answer = typescript(
        "for (let i = 0; i < 6000; i++) console.log('0123456789');\n"
        "return Array(1000).fill('x'.repeat(200));"
    )
    assert answer["status"] == "completed"
    assert answer["truncated"] is True
    assert answer["result"]["cut"] is True
    assert answer["result"]["bytes"] == 203_001
    assert answer["result"]["start"].startswith('["xxx')
    assert 49_000 < len(answer["logs"]) < 50_200
    assert "cut" in answer["logs"][-60:]


def test_a_result_above_the_limit_that_is_sent_whole_is_cut_the_same_way(typescript):
    answer = typescript("return 'é'.repeat(40_000);")
    assert answer["truncated"] is True
    assert answer["result"]["bytes"] == 80_002


def test_a_script_that_runs_too_long_is_ended_with_its_calls(typescript):
    answer = typescript("await raw.later({seconds: 30});", timeout=3)
    assert answer["error"]["type"] == "TimeoutError"
    assert answer["calls"][0]["state"] in ("unknown", "cancelled")


def test_extract_is_a_function_of_scripts(typescript):
    code = "try { await extract('x', Number); } catch (error) { return error.message; }"
    assert "binds no model" in typescript(code)["result"]


# --- Held calls -----------------------------------------------------------------------------------

TYPESCRIPT = {"language": "typescript"}


@pytest.fixture
def rule(agent):
    return add_rule("Ask first", effect="hold", reason="It changes data.", tools=["raw__say"])


def test_an_allowed_call_continues_the_script_in_another_process(run, rule, monkeypatch):
    """It is run again to that point, and finds there what it had: answers, clock, chance."""
    code = f"""console.log("before");
const seen = [Date.now(), Math.random(), crypto.randomUUID()];
const free = await desk.say({say("free")});
await desk.say({{result: {json.dumps(result("x"))}}});
const text = await raw.say({say("told")});
console.log("after");
return [input * 2, free, text, seen, [Date.now(), Math.random()].length];"""

    async def scenario(web):
        held = await pause(web, code, input=4, **TYPESCRIPT)
        await become_another_process(monkeypatch)
        assert (await end(web, held["run_id"]))["status"] == "held"
        await decide()
        return held, await end(web, held["run_id"])

    held, ended = run(scenario)
    assert [call["state"] for call in held["calls"]] == ["succeeded", "succeeded", "held"]
    assert ended["status"] == "completed", ended
    assert ended["result"][:3] == [8, "free", "told"]
    assert ended["logs"] == "before\nafter\n"
    assert Call.objects.count() == 3
    assert ScriptRun.objects.get().snapshot == ""


def test_a_script_may_be_paused_several_times_and_makes_no_call_twice(run, rule):
    calls = "\n".join(
        f"console.log(await desk.say({say(f'free {n}')}), await raw.say({say(str(n))}));"
        for n in range(3)
    )
    code = f"const first = Date.now() + Math.random();\n{calls}\nreturn first;"

    async def scenario(web):
        run_id = (await pause(web, code, **TYPESCRIPT))["run_id"]
        states = []
        for _ in range(3):
            await decide()
            states.append((await end(web, run_id))["status"])
        return states, (await web.get_run(run_id)).json

    states, ended = run(scenario)
    assert states == ["held", "held", "completed"]
    assert ended["logs"] == "free 0 0\nfree 1 1\nfree 2 2\n"
    assert Call.objects.count() == 6


def test_a_promise_all_of_which_one_call_is_held_keeps_the_other_answers(run, rule):
    free = f"desk.say({say('free')})"
    code = f"return await Promise.all([{free}, raw.say({say('told')}), {free}]);"

    async def scenario(web):
        held = await pause(web, code, **TYPESCRIPT)
        await decide()
        return held, await end(web, held["run_id"])

    held, ended = run(scenario)
    assert len(held["calls"]) == 3
    assert ended["result"] == ["free", "told", "free"]
    assert Call.objects.count() == 3


@pytest.mark.parametrize(
    "work",
    [
        'new Blob(["x".repeat(100_000)]).text()',
        'import("data:text/javascript,export default 1")',
        "new Promise((done) => { const { port1, port2 } = new MessageChannel(); "
        "port1.onmessage = done; port2.postMessage(1); })",
    ],
    ids=["a blob", "a module", "a message"],
)
def test_calls_after_native_work_are_announced_with_those_before_it(typescript, monkeypatch, work):
    """Else a paused script that is run again might not make the same calls together."""
    together = []
    answer = Broker.answer

    async def counted(broker: Broker, waiting: Waiting) -> Any:
        together.append(len(waiting.calls))
        return await answer(broker, waiting)

    monkeypatch.setattr(Broker, "answer", counted)
    code = f"""const free = desk.say({say("free")});
return await Promise.all([free, {work}.then(() => raw.say({say("told")}))]);"""

    assert typescript(code)["result"] == ["free", "told"]
    assert together == [2]


def test_a_denied_call_rejects_with_a_permission_error(run, rule):
    code = f"try {{ await raw.say({say()}); }} catch (e) {{ return [e.name, e.message]; }}"

    async def scenario(web):
        held = await pause(web, code, **TYPESCRIPT)
        await decide(actions.deny, comment="Not on a Friday.")
        return await end(web, held["run_id"])

    name, message = run(scenario)["result"]
    assert name == "PermissionError"
    assert "Not on a Friday." in message


def test_a_script_that_takes_another_way_when_it_is_run_again_has_failed(run, rule, monkeypatch):
    """Its clock is moved here: what a script sees otherwise follows from the journal."""
    code = f"""const spaces = " ".repeat(Date.now() % 7);
await desk.say({{result: {json.dumps(result("x"))} + spaces}});
await raw.say({say()});"""
    read = typescript_engine._Journal.read

    def moved(snapshot: bytes) -> Any:
        journal = read(snapshot)
        journal.now += 1
        return journal

    async def scenario(web):
        held = await pause(web, code, **TYPESCRIPT)
        await decide()
        monkeypatch.setattr(typescript_engine._Journal, "read", moved)
        return await end(web, held["run_id"])

    ended = run(scenario)
    assert (ended["status"], ended["error"]["type"]) == ("failed", "Diverged")
    assert ended["error"]["message"] == typescript_engine.DIVERGED
    assert Call.objects.count() == 2


def test_a_journal_of_another_version_of_the_engine_has_expired(run, rule, monkeypatch):
    async def scenario(web):
        held = await pause(web, f"await raw.say({say()});", **TYPESCRIPT)
        await become_another_process(monkeypatch)
        monkeypatch.setattr(TypeScriptEngine, "version", "deno 3.0.0 00000000")
        await decide()
        return await end(web, held["run_id"])

    assert run(scenario)["error"]["type"] == "expired"


# --- The engine -----------------------------------------------------------------------------------


def drive(code: str, answer: Any = None) -> tuple[Any, list[Any]]:
    """Run a script without a broker; return its last step and the calls it announced."""
    program = Program(code, {"raw": [SimpleNamespace(function="say")]}, {"n": 1})  # type: ignore[list-item]
    made: list[Any] = []

    async def inside() -> Any:
        engine = TypeScriptEngine()
        async with asyncio.timeout(scaled(60)), engine.run(program) as execution:
            step = await execution.start()
            while isinstance(step, Waiting):
                made.append(step.calls)
                step = await execution.resume({call.number: answer(call) for call in step.calls})
            return step

    return asyncio.run(inside()), made


def test_calls_are_announced_in_waves_with_numbers_and_arguments():
    code = """const two = async (n: number) => (await raw.say({n})) + (await raw.say({n: n + 10}));
return await Promise.all([two(1), two(2)]);"""
    step, made = drive(code, lambda call: Value(call.number))
    assert made == [
        [ToolCall(1, "raw.say", {"n": 1}), ToolCall(2, "raw.say", {"n": 2})],
        [ToolCall(3, "raw.say", {"n": 11}), ToolCall(4, "raw.say", {"n": 12})],
    ]
    assert step == Finished([4, 6])


def test_every_kind_of_failure_is_an_error_class():
    code = """const names: string[] = [];
for (const kind of ["RuntimeError", "PermissionError", "TimeoutError"]) {
  await raw.say({kind}).catch((error: Error) => names.push(`${error.name} ${error.message}`));
}
return names;"""
    step, _ = drive(code, lambda call: Failure(call.arguments["kind"], "why"))
    assert step.value == ["ToolError why", "PermissionError why", "TimeoutError why"]


def test_answers_of_any_size_and_text_arrive():
    texts = ["", '\u2028 \x00 \\ " é 😀 \ud800', "long " * 100_000]
    code = "return [(await raw.say()).map((text: string) => text.length), (await raw.say())[1]];"
    step, _ = drive(code, lambda call: Value(texts))
    assert step.value == [[0, 14, 500_000], texts[1]]


def test_the_environment_and_the_folder_of_the_process_are_empty(tmp_path, monkeypatch):
    """Asked for with permissions, which the engine does not give."""
    monkeypatch.setenv("TOOLCRIB_CANARY", "secret")
    monkeypatch.setattr(typescript_engine, "FLAGS", ("--allow-env", "--allow-read", "--quiet"))
    monkeypatch.setitem(typescript_engine.LIMITS, "memory", 0)  # needed by the JIT compiler
    code = 'const p = (await import("node:process")).default; return [Object.keys(p.env), p.cwd()]'
    removed = typescript_engine.HOST.read_text().replace('"Deno", ', "").replace('"process", ', "")
    host = tmp_path / "host.js"
    host.write_text(removed)
    monkeypatch.setattr(typescript_engine, "HOST", host)
    step, _ = drive(code)
    names, folder = step.value
    assert set(names) <= {*typescript_engine.ENVIRONMENT, "PWD", "HOME"}
    assert folder == "/"


def test_nothing_of_a_script_is_written_to_disk(tmp_path, monkeypatch):
    monkeypatch.setitem(typescript_engine.ENVIRONMENT, "HOME", str(tmp_path))
    step, _ = drive("const typed: number = 41; return typed + 1")
    assert step.value == 42
    assert list(tmp_path.iterdir()) == []


def test_a_process_ends_with_its_run():
    """Also one that would run for ever."""

    async def inside() -> None:
        async with TypeScriptEngine().run(Program("for (;;) {}", {})) as execution:
            assert await execution._is_ready()
            assert execution._process.exit_code is None
        assert execution._process.exit_code is not None

    asyncio.run(inside())


@pytest.mark.parametrize(
    "line",
    [
        "not json", "[]", "{}", '{"calls": []}', '{"calls": [1]}', '{"logs": 5}',
        '{"calls": [{"number": 2, "name": "raw.say", "arguments": {}}]}',
        '{"calls": [{"number": 1, "name": 7, "arguments": {}}]}',
        '{"calls": [{"number": 1, "name": "raw.say", "arguments": []}]}',
        '{"calls": [{"number": "1", "name": "raw.say", "arguments": {}}]}',
        '{"returned": NaN}', '{"failed": {"kind": 5, "message": "x"}}', '{"cut": {"bytes": -1}}',
        '{"returned": ' + "9" * 10_000 + "}", '{"returned": ' + "[" * 50_000,
    ],
)  # fmt: skip
def test_a_line_that_is_not_of_the_protocol_ends_the_run(line, monkeypatch, tmp_path):
    """Written by a host that forges them: no script has to find a way to the output first."""
    host = tmp_path / "host.js"
    host.write_text(
        "console.log('{\"ready\":true}');\n"
        f"console.log({json.dumps(line)});\nawait new Promise(() => setTimeout(() => {{}}, 1e8));\n"
    )
    monkeypatch.setattr(typescript_engine, "HOST", host)
    with pytest.raises(ScriptFailed) as failed:
        drive("")
    assert failed.value.kind == "ProtocolError"


def test_a_line_that_is_too_long_ends_the_run():
    with pytest.raises(ScriptFailed, match="larger than 2,000,000 bytes"):
        drive("await raw.say({text: 'x'.repeat(3_000_000)})")


def test_an_engine_that_does_not_start_says_so_and_the_log_has_the_reason(monkeypatch, caplog):
    monkeypatch.setattr(typescript_engine, "FLAGS", ("--no-such-flag",))
    with pytest.raises(ScriptFailed, match="did not start"):
        drive("return 1")
    assert "no-such-flag" in caplog.text
