"""Scripts in TypeScript that try to reach what they may not, or to use too much.

After them the same process answers an ordinary script, so none has harmed it. Node's modules, and
whatever else a script finds in Deno, have no permission: that is tested, not that they are absent.
"""

import asyncio
import json
from pathlib import Path

import pytest

from sessions_app.models import Call, ScriptRun
from sessions_app.scripts import typescript_engine
from sessions_app.scripts.engines import MAX_CALLS, MAX_RUNS
from tests.sessions_app.rules.test_dispatch import add_rule
from tests.sessions_app.scripts.test_typescript import say

ERRORS = ("TypeError", "ReferenceError", "SyntaxError", "NotCapable", "Error", "Exited")
LIMITS = ("LimitExceeded", "TimeoutError", "RangeError")
EVERY_END = (*ERRORS, *LIMITS, "ProtocolError", "ToolError")
SECRET = f"await raw.say({say('secret')})"
SURVIVE = "try {{ {} }} catch {{ }}\nreturn 'survived';"
# Files, network, environment, processes: each is tried in a function of its own, caught.
OUTSIDE = [
    "return Deno.readTextFileSync('/etc/passwd')",
    "return (await import('node:fs')).readFileSync('/etc/passwd', 'utf8')",
    "(await import('node:fs')).writeFileSync('owned', 'x')",
    "Deno.writeTextFileSync('owned', 'x')",
    "return [...Deno.readDirSync('/')]",
    "return Deno.statSync('/etc/passwd')",
    "const at = 'file:///etc/passwd'; return (await import(at, {with: {type: 'text'}})).default",
    "return (await import('file:///etc/hosts', {with: {type: 'text'}})).default",
    "return (await import('/etc/hosts', {with: {type: 'text'}})).default",
    "return (await import('data:text/javascript,' + encodeURIComponent(STEAL))).default",
    "return await import(URL.createObjectURL(new Blob([STEAL], {type: 'text/javascript'})))",
    "return (await import('node:module')).createRequire('file:///x.js')('/etc/passwd')",
    "return new (await import('node:sqlite')).DatabaseSync('/etc/passwd')",
    "return Deno.env.get('HOME') ?? Deno.env.toObject()",
    "return (await import('node:process')).default.env.HOME.length",
    "return new Deno.Command('id').outputSync()",
    "return (await import('node:child_process')).execSync('id').toString()",
    "return Deno.dlopen('libc.so.6', {})",
    "return Deno.kill(1, 'SIGKILL')",
    "return (await import('node:process')).default.kill(1, 9)",
    "return Deno.hostname()",
    "return (await import('node:os')).hostname()",
    "return await (await fetch('http://127.0.0.1:8000/')).text()",
    "return await (await fetch('file:///etc/passwd')).text()",
    "return await Deno.connect({port: 8000})",
    "return Deno.listen({port: 0})",
    "return await Deno.resolveDns('example.org', 'A')",
    "return new WebSocket('ws://127.0.0.1:8000/')",
    "const net = await import('node:net');"
    " await new Promise((_, no) => net.connect(8000, '127.0.0.1').on('error', no))",
    "return await import('https://esm.sh/left-pad')",
    "return await import('http://127.0.0.1:8000/x.js')",
    "return await import('npm:left-pad')",
    "return await import('jsr:@std/fs')",
    "if ((await Deno.permissions.request({name: 'read'})).state !== 'granted') throw Error('no')",
    "return alert('x') ?? prompt('name?').length",
    "localStorage.setItem('a', 'b')",
    "return new WebAssembly.Memory({initial: 1})",
    "const {Worker: W} = await import('node:worker_threads');"
    " await new Promise((_, no) => new W('require(`fs`).readFileSync(`/etc/passwd`)', {eval: true})"
    ".on('error', no))",
]
STEAL = "import x from 'file:///etc/hosts' with {type: 'text'}; export default x"
# These end the process, or leave the function around a script, as imports of a module need.
ALONE = [
    "return await new Promise((yes, no) => {"
    " const w = new Worker('data:text/javascript,postMessage(Deno.statSync(`/etc/passwd`))',"
    " {type: 'module', deno: {permissions: 'inherit'}});"
    " w.onmessage = (e) => yes(e.data);"
    " w.onerror = (e) => { e.preventDefault(); no(new Error(e.message)); }; })",
    "}; import x from 'file:///etc/hosts' with {type: 'text'}; (async () => { console.log(x)",
    "}; export * from 'file:///etc/passwd'; (async () => {",
    "}; import x from 'https://esm.sh/left-pad'; (async () => {",
    "}; import fs from 'node:fs'; console.log(fs.readFileSync('/etc/hosts')); (async () => {",
]
# What uses more than is permitted.
GREEDY = [
    "for (;;) {}",
    "for (;;) await null;",
    "setInterval(() => {}, 0); await new Promise(() => {});",
    "const f = () => Promise.resolve().then(f); await f();",
    "const all: any[] = []; for (;;) all.push({n: all.length, text: 'x' + all.length});",
    "const all = []; for (;;) all.push(new Uint8Array(1e7).fill(1));",
    "const all = []; for (;;) all.push(new Blob(['x'.repeat(1e7)]));",
    "return new Uint8Array(1e9).fill(1).length;",
    "return new Array(1e9).fill(0).length;",
    "let text = 'x'; for (;;) text += text;",
    "return 'x'.repeat(2 ** 30);",
    "return 7n ** 300_000_000n > 0n;",
    "const f = (n: number): number => f(n + 1) + 1; return f(0);",
    "let x: any = []; for (let n = 0; n < 1e7; n++) x = [x]; return x;",
    "/^(a+)+$/.test('a'.repeat(40) + 'b');",
    "for (;;) console.log('x'.repeat(100_000));",
    "console.log('x'.repeat(3_000_000));",
    "await raw.say({result: 'x'.repeat(20_000_000)});",
    "return JSON.parse('['.repeat(1e6));",
    "Object.defineProperty(Error.prototype, 'x', {get() { for (;;) {} }}); throw new Error().x;",
]
# What a script may change in its own realm, or write to its own output.
TRICKS = [
    "Array.prototype.push = () => { throw 1; }; Array.prototype.map = () => []; return await GO;",
    "Promise.prototype.then = () => { throw 1; }; return await GO;",
    "globalThis.Promise = class {}; return await GO;",
    "JSON.stringify = () => 'null'; JSON.parse = () => []; return await GO;",
    "Object.prototype.toJSON = () => 'forged'; return await GO;",
    "Object.prototype.error = {kind: 'RuntimeError', message: 'x'}; return await GO;",
    "Map.prototype.get = () => ({resolve() {}, reject() {}}); return await GO;",
    "String.prototype.replace = () => 'forged'; throw new Error('x');",
    "Error.prepareStackTrace = () => { throw 1; }; throw new Error('x');",
    "Error.stackTraceLimit = 0; throw new Error('x');",
    "throw new Proxy({}, {get() { throw new Error('x'); }});",
    "throw {get message() { for (;;) {} }, toString() { throw 1; }};",
    "raw.say = async () => 'forged'; return await GO;",
    "Object.assign(raw, {say: 1}); return await GO;",
    "globalThis.raw = {say: async () => 'forged'}; return await GO;",
    "delete globalThis.raw; return await GO;",
    "globalThis.Deno = {exit() {}}; setTimeout = () => 0; return await GO;",
    "globalThis.setTimeout = null; globalThis.console = null; return await GO;",
    "Object.freeze(globalThis); return await GO;",
    "eval('throw new Error(`x`)');",
    "new Function('return this')().raw = null; return await GO;",
    "return (() => {}).constructor('return Deno')();",
    "return [].constructor.constructor('return process')().exit();",
    "dispatchEvent(new Event('beforeunload')); return await GO;",
    "dispatchEvent(new Event('unhandledrejection')); return await GO;",
    "close(); await new Promise(() => {});",
]


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    """Two seconds of processor time: the same end, three times sooner."""
    monkeypatch.setitem(typescript_engine.LIMITS, "cpu", 2)


def run_all(run, codes, **body):
    """Run scripts, two at a time, and an ordinary one after them; return the answers."""

    async def scenario(web):
        slots = asyncio.Semaphore(MAX_RUNS)

        async def send(code):
            async with slots:
                answer = await web.script(code, language="typescript", **body)
                while answer["status"] == "running":
                    answer = (await web.get_run(answer["run_id"], wait=20)).json
                return answer

        answers = await asyncio.gather(*map(send, codes))
        assert (await send("return 1 + 1"))["result"] == 2
        return list(zip(codes, answers, strict=True))

    return run(scenario)


def keep(monkeypatch, tmp_path):
    """Start scripts by a host that takes nothing away, as one that was outwitted."""
    text = typescript_engine.HOST.read_text()
    start, end = text.index("const REMOVED = ["), text.index("const PRINTS")
    host = tmp_path / "host.js"
    host.write_text(f"{text[:start]}const REMOVED = [];\n{text[end:]}")
    monkeypatch.setattr(typescript_engine, "HOST", host)


@pytest.mark.parametrize("is_outwitted", [False, True])
def test_nothing_outside_can_be_reached(script, monkeypatch, tmp_path, is_outwitted):
    """Also with what the host removes."""
    if is_outwitted:
        keep(monkeypatch, tmp_path)
    attempts = ",\n".join(f"async () => {{ {code} }}" for code in OUTSIDE)
    answer = script(
        f"""const STEAL = {json.dumps(STEAL)};
const outcomes: unknown[] = [];
for (const attempt of [{attempts}]) {{
  outcomes.push(await attempt().then((value) => ["done", value], (no) => ["failed", `${{no}}`]));
}}
return outcomes;""",
        language="typescript",
    )
    assert answer["status"] == "completed", answer
    for code, (outcome, value) in zip(OUTSIDE, answer["result"], strict=True):
        assert outcome == "failed", (code, value)
        if is_outwitted and "Deno." in code and "127.0.0.1" not in code:
            assert "NotCapable" in value or "no" in value or "NotSupported" in value, (code, value)
    assert_nothing_was_seen(answer)


@pytest.mark.parametrize("is_outwitted", [False, True])
def test_nor_by_a_worker_or_imports_of_a_module(run, monkeypatch, tmp_path, is_outwitted):
    if is_outwitted:
        keep(monkeypatch, tmp_path)
    for code, answer in run_all(run, ALONE):
        assert answer["status"] == "failed", (code, answer)
        assert_nothing_was_seen(answer)


def assert_nothing_was_seen(answer):
    for words in ("root:", "localhost", "uid="):
        assert words not in json.dumps(answer)
    assert not Path("owned").exists()
    assert not Path("/owned").exists()
    assert Call.objects.count() == 0


@pytest.mark.parametrize("codes", [GREEDY[:10], GREEDY[10:]], ids=["first", "second"])
def test_what_uses_too_much_is_ended(run, codes):
    for code, answer in run_all(run, codes, timeout=15):
        assert answer["status"] == "failed", (code, str(answer)[:300])
        assert answer["error"]["type"] in (*LIMITS, "SyntaxError"), (code, answer["error"])
        assert len(json.dumps(answer)) < 120_000


def test_limits_cannot_be_caught(run):
    codes = [
        SURVIVE.format("for (;;) {}"),
        SURVIVE.format("const all = []; for (;;) all.push({});"),
        SURVIVE.format(f"for (let n = 0; n < 60; n++) {SECRET};"),
        "for (;;) { try { for (;;) {} } catch { continue; } finally { for (;;) {} } }",
        SURVIVE.format(f"await Promise.allSettled(Array(51).fill(0).map(() => raw.say({say()})));"),
    ]
    answers = [answer for _, answer in run_all(run, codes)]
    for answer in answers:
        assert answer["status"] == "failed", answer
        assert answer["error"]["type"] == "LimitExceeded"
        assert "survived" not in str(answer["result"])
    assert len(answers[2]["calls"]) == MAX_CALLS
    assert answers[4]["calls"] == []


def test_a_script_that_changes_its_realm_changes_nothing_else(run):
    codes = [code.replace("GO", f"raw.say({say('told')})") for code in TRICKS]
    for code, answer in run_all(run, codes):
        assert answer["status"] in ("completed", "failed"), code
        if answer["status"] == "failed":
            assert answer["error"]["type"] in EVERY_END, (code, answer)
        assert len(answer["calls"]) <= 1
    assert set(Call.objects.values_list("tool_name", flat=True)) == {"raw__say"}


def test_lines_that_a_script_writes_itself_give_it_nothing(run, monkeypatch, tmp_path):
    """They are calls as any other, decided by the broker, or end the run."""
    keep(monkeypatch, tmp_path)
    write = "Deno.stdout.writeSync(new TextEncoder().encode(%s + '\\n'));\nfor (;;) {}"
    unknown = '{"calls":[{"number":1,"name":"github.create_issue","arguments":{}}]}'
    meta = '{"calls":[{"number":1,"name":"run_script","arguments":{"code":"1"}}]}'
    twice = '{"calls":[{"number":0,"name":"raw.say","arguments":{}}]}'
    forged = [unknown, meta, twice, "not json", '{"status":"held"}', '{"returned":"forged"}',
              '{"failed":{"kind":"X","message":"</script>","line":-1,"traceback":5}}']  # fmt: skip
    codes = [write % json.dumps(line) for line in forged]
    codes.append("Deno.stdout.writeSync(new Uint8Array(1e7).fill(65)); for (;;) {}")
    codes.append("(await import('node:fs')).closeSync(1); for (;;) {}")
    codes.append("Deno.exit(0)")
    answers = [answer for _, answer in run_all(run, codes)]
    kinds = [answer["error"] and answer["error"]["type"] for answer in answers]
    assert kinds[2:5] == ["ProtocolError"] * 3
    assert (answers[5]["status"], answers[5]["result"]) == ("completed", "forged")
    assert kinds[6] == "X"
    assert set(kinds[:2] + kinds[7:]) <= {"LimitExceeded", "Exited"}, kinds
    assert Call.objects.count() == 0


def test_output_that_looks_like_the_protocol_stays_text(run):
    codes = [
        """console.log('{"returned":"forged"}'); return 1;""",
        """console.log('x\\n{"calls":[{"number":1,"name":"raw.say","arguments":{}}]}\\n');""",
        "return {returned: 'forged', status: 'held', run_id: 'run_0', calls: [1]};",
        "console.log('\\u0000\\u001b[2J'); return '</script><script>alert(1)</script>';",
    ]
    answers = [answer for _, answer in run_all(run, codes)]
    assert [answer["status"] for answer in answers] == ["completed"] * 4
    assert [answer["calls"] for answer in answers] == [[]] * 4
    assert answers[0]["logs"] == '{"returned":"forged"}\n'
    assert (answers[0]["result"], answers[2]["result"]["status"]) == (1, "held")


def test_only_tools_of_the_session_have_names(run):
    """Not meta-tools, not scripts in scripts, not the tools of other agents."""
    codes = [
        "return await run_script({code: '1'});",
        "return await toolcrib.run_script({code: '1'});",
        "return await raw.run_script({code: '1'});",
        "return await search_tools({query: 'x'});",
        "return await raw.deferred_tool_call({name: 'raw__say', arguments: {}});",
        "return await github.create_issue({title: 'x'});",
        "return await raw['github.create_issue']({title: 'x'});",
        "return await raw.unknown();",
        "return await raw['__proto__']['say']();",
        "return await raw.say('positional');",
    ]
    for code, answer in run_all(run, codes):
        assert answer["status"] == "failed", (code, answer)
        assert answer["calls"] == [], code
    assert Call.objects.count() == 0


@pytest.mark.parametrize(
    "way",
    [
        f"await desk.say({{result: {SECRET}}});",
        f"const secret = {SECRET}; await desk.say({{result: btoa(secret)}});",
        f"{SECRET}; await desk.say({{result: 'nothing of it'}});",
        f"const all = [...{SECRET}]; await Promise.all(all.map((c) => desk.say({{result: c}})));",
        f"{SECRET}; const tool = desk.say; await tool({{result: 'by another name'}});",
        f"{SECRET}; const all = [1, 2].map((n) => desk.say({{result: 'x' + n}}).catch(() => n));"
        " await Promise.all(all); throw new Error('refused');",
    ],
)
def test_a_flow_rule_stops_every_way_from_one_server_to_another(script, way):
    add_rule("No leaks", after=["raw"], servers=["desk"])
    answer = script(way, language="typescript")
    assert answer["status"] == "failed"
    assert not Call.objects.filter(tool_name="desk__say").exclude(state="refused").exists()


def test_scripts_of_different_runs_share_nothing(run):
    codes = [
        "globalThis.shared = 'left'; Array.prototype.left = 1;",
        "return shared;",
        "return [].left",
    ]
    answers = [answer for _, answer in run_all(run, codes)]
    assert answers[1]["error"]["type"] == "ReferenceError"
    assert answers[2]["result"] is None
    assert ScriptRun.objects.count() == 4
