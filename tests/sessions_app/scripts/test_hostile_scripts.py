"""Scripts that try to reach what they may not, or to use too much: each ends as stated.

After each of them the same process answers an ordinary script, so none has harmed it.
"""

import json
import os
from pathlib import Path

import pytest

from sessions_app.models import Call, ScriptRun
from sessions_app.scripts import engines, python_engine
from tests.sessions_app.rules.test_dispatch import add_rule
from tests.sessions_app.scripts.conftest import result

SAY = f"await raw.say(result={result('secret')!r})"
CATCH = "try:\n    {}\nexcept BaseException:\n    pass\n'survived'"
ABSENT: tuple[str, ...] = (
    "TypeCheckError",
    "NameError",
    "ImportError",
    "ModuleNotFoundError",
    "AttributeError",
)
ABSENT += ("SyntaxError", "NotImplementedError", "PermissionError", "RuntimeError", "TypeError")
LIMITS: tuple[str, ...] = (
    "LimitExceeded",
    "TimeoutError",
    "MemoryError",
    "RecursionError",
    "OverflowError",
)
LIMITS += ("SyntaxError", "ValueError", "RuntimeError", "TypeCheckError")

# What is outside of the interpreter: files, network, environment, processes, the clock.
OUTSIDE = [
    "open('/etc/passwd').read()",
    "open('owned', 'w').write('x')",
    "from pathlib import Path\nPath('/etc/passwd').read_text()",
    "from pathlib import Path\nPath('owned').write_text('x')",
    "from pathlib import Path\nlist(Path('/').iterdir())",
    "from pathlib import Path\nPath('/etc/passwd').exists()",
    "import os\nos.listdir('/')",
    "import os\nos.environ['HOME']",
    "import os\nos.getenv('TOOLCRIB_ENCRYPTION_KEY') or 1 / 0",
    "import os\nos.system('id')",
    "import os\nos.fork()",
    "import os\nos.kill(1, 9)",
    "import os\nos._exit(1)",
    "import sys\nsys.exit(1)",
    "import subprocess\nsubprocess.run(['id'])",
    "import socket\nsocket.create_connection(('127.0.0.1', 80))",
    "import urllib.request\nurllib.request.urlopen('http://127.0.0.1')",
    "import ctypes\nctypes.CDLL(None)",
    "import importlib\nimportlib.import_module('os')",
    "import multiprocessing",
    "import threading",
    "import signal\nsignal.alarm(1)",
    "import sqlite3",
    "import django",
    "import pydantic_monty",
    "import builtins\nbuiltins.open('/etc/passwd')",
    "input('name?')",
    "__import__('os').system('id')",
    "eval('open(1)')",
    "exec('open(1)')",
    "compile('1', 'x', 'eval')",
    "breakpoint()",
]
# Ways from a value to the interpreter, or from a function to the process that answers it.
INSIDE = [
    "().__class__.__bases__[0].__subclasses__()",
    "(lambda: 0).__globals__",
    "(lambda: 0).__code__",
    "(lambda: 0).__closure__[0].cell_contents",
    "''.__class__.__mro__[1].__subclasses__()",
    "int.__subclasses__()",
    "raw.say.__globals__['dispatcher']",
    "raw.say.__self__",
    "raw.__dict__",
    "raw.__loader__",
    "print.__self__",
    "globals()['__builtins__']",
    "vars(raw)",
    "'{0.__class__.__init__.__globals__}'.format(raw)",
    "getattr(raw, '__class__').__base__.__subclasses__()",
    "raw.say = lambda **named: 'forged'\nawait raw.say(result='x')",
]
# What uses more than is permitted.
GREEDY = [
    "while True:\n    pass",
    "n = 0\nwhile True:\n    n += 1",
    "x = []\nwhile True:\n    x.append('word' * 1000)",
    "'a' * 10**9",
    "[0] * 10**9",
    "bytes(10**10)",
    "2 ** (10**9)",
    "len(str(7**3_000_000))",
    "def f(n: int) -> int:\n    return f(n + 1)\nf(0)",
    "x: list = []\nfor i in range(10**9):\n    x = [x]\nx",
    "(" * 5_000 + "1" + ")" * 5_000,
    "{i: str(i) * 100 for i in range(10**8)}",
    "sum(range(10**11))",
    "sorted(range(10**8))",
    "while True:\n    print('x' * 100_000)",
    "import itertools\nlist(itertools.product(range(1000), repeat=4))",
    "'%1000000000d' % 1",
    "f'{1:>999999999}'",
    "'x'.replace('x', 'y' * 10**5).replace('y', 'z' * 10**5)",
]


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    """A second of processor time: the same end, five times sooner."""
    limits = python_engine.LIMITS | {"max_feed_duration_secs": 1.0, "max_turn_duration_secs": 1.0}
    monkeypatch.setattr(python_engine, "LIMITS", limits)
    monkeypatch.setattr(python_engine, "TURN_SECONDS", 3.0)


def run_all(run, codes, **body):
    """Run scripts one after the other, and an ordinary one after each; return the answers."""

    async def scenario(web):
        answers = []
        for code in codes:
            answers.append((code, await web.script(code, **body)))
            assert (await web.script("1 + 1"))["result"] == 2, code
        return answers

    return run(scenario)


@pytest.mark.parametrize("codes", [OUTSIDE[:16], OUTSIDE[16:]], ids=["first", "second"])
def test_nothing_outside_can_be_reached(run, codes):
    for code, answer in run_all(run, codes):
        assert answer["status"] == "failed", (code, answer)
        assert answer["error"]["type"] in (*ABSENT, "ZeroDivisionError", "SystemExit"), code
        assert "root:" not in json.dumps(answer), code
    assert not Path("owned").exists()
    assert Call.objects.count() == 0


def test_values_lead_neither_to_the_interpreter_nor_to_the_broker(run):
    for code, answer in run_all(run, INSIDE):
        text = json.dumps(answer)
        assert answer["status"] == "failed" or answer["calls"] == [], (code, answer)
        for word in ("forged", "dispatcher", "sessions_app", "<module", str(os.getpid()) + " "):
            assert word not in str(answer["result"]), (code, text)
    assert Call.objects.count() == 0


@pytest.mark.parametrize("codes", [GREEDY[:10], GREEDY[10:]], ids=["first", "second"])
def test_what_uses_too_much_is_ended(run, codes):
    for code, answer in run_all(run, codes):
        assert answer["status"] == "failed", (code[:60], str(answer)[:300])
        assert answer["error"]["type"] in LIMITS, (code[:60], answer["error"])
        assert len(json.dumps(answer)) < 120_000


def test_limits_cannot_be_caught(run):
    loops = ("while True: pass", "x = 'a' * 10**9", f"[{SAY} for i in range(60)]")
    codes = [CATCH.format(loop) for loop in loops]
    codes.append("while True:\n    try:\n        while True:\n            pass\n"
                 "    except BaseException:\n        continue")  # fmt: skip
    codes.append(
        "try:\n    while True: pass\nfinally:\n    print('still here')\n    while True: pass"
    )
    answers = [answer for _, answer in run_all(run, codes)]
    for answer in answers[:1] + answers[2:]:
        assert answer["status"] == "failed", answer
        assert "survived" not in str(answer["result"])
    assert len(answers[2]["calls"]) == engines.MAX_CALLS


def test_output_that_looks_like_the_protocol_stays_text(run):
    forged = [
        'print(\'{"jsonrpc":"2.0","id":1,"result":{}}\')',
        "print('data: {}\\r\\n\\r\\n')",
        "print('\\x00\\x01\\x02\\x1b[2J')",
        "{'status': 'held', 'run_id': 'run_0', 'calls': [1]}",
        "'</script><script>alert(1)</script>'",
    ]
    answers = [answer for _, answer in run_all(run, forged)]
    assert [answer["status"] for answer in answers] == ["completed"] * len(forged)
    assert [answer["calls"] for answer in answers] == [[]] * len(forged)
    assert answers[0]["logs"] == '{"jsonrpc":"2.0","id":1,"result":{}}\n'
    assert answers[3]["result"]["status"] == "held"


def test_returned_values_of_every_kind_are_valid_json(run):
    codes = [
        "float('nan')",
        "10 ** 5000",
        "{1: 2, None: 3, (1, 2): {4}}",
        "b'\\xff\\xfe'",
        "x = []\nx.append(x)\nx",
        "x = {}\nfor i in range(500):\n    x = {'x': x}\nx",
        "['x' * 1000] * 10_000",
        "'\\ud800'",
        "print",
        "raw",
    ]
    for code, answer in run_all(run, codes):
        text = json.dumps(answer, allow_nan=False)
        assert len(text) < 120_000, code
        assert answer["status"] in ("completed", "failed"), code


def test_only_tools_of_the_session_have_names(run, agent):
    """Not meta-tools, not scripts in scripts, not the tools of other agents."""
    codes = [
        "await run_script(code='1')",
        "await toolcrib.run_script(code='1')",
        "await raw.run_script(code='1')",
        "await search_tools(query='x')",
        "await deferred_tool_call(name='raw__say', arguments={})",
        "await github.create_issue(title='x')",
        "import github\nawait github.create_issue(title='x')",
        "await raw.unknown()",
        "await getattr(raw, 'unk' + 'nown')()",
        "import raw\nawait raw.say('positional')",
    ]
    for code, answer in run_all(run, codes):
        assert answer["status"] == "failed", (code, answer)
        assert answer["calls"] == [], code
    assert Call.objects.count() == 0


@pytest.mark.parametrize(
    "way",
    [
        f"await desk.say(result={SAY})",
        f"secret = {SAY}\nimport base64\n"
        "await desk.say(result=base64.b64encode(secret.encode()).decode())",
        f"{SAY}\nawait desk.say(result='nothing of it')",
        f"import asyncio\nx = {SAY}\nawait asyncio.gather(*[desk.say(result=c) for c in x])",
        f"{SAY}\ntool = desk.say\nawait tool(result='by another name')",
        f"{SAY}\nfor i in range(3):\n    try:\n        await desk.say(result='again')\n"
        "    except PermissionError:\n        print('refused')\nraise ValueError",
    ],
)
def test_a_flow_rule_stops_every_way_from_one_server_to_another(script, way):
    add_rule("No leaks", after=["raw"], servers=["desk"])
    answer = script(way)
    assert answer["status"] == "failed"
    assert not Call.objects.filter(tool_name="desk__say").exclude(state="refused").exists()


def test_scripts_of_different_runs_share_nothing(run):
    codes = [
        "shared = 'left behind'\nimport json\njson.left = 1",
        "shared",
        "import json\njson.left",
    ]
    answers = [answer for _, answer in run_all(run, codes)]
    assert answers[1]["status"] == "failed"
    assert answers[2]["status"] == "failed"
    assert ScriptRun.objects.count() == 6
