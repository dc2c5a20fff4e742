"""Tokens and time of one script, compared with the same work call by call.

    python bench/scripts.py [--rounds 5] [--calls 50] [--json]

The task: find the error logs of the past hour and open one ticket for each different error, over
two local MCP servers (bench/incidents.py) behind one installation. Call by call, the model
receives every result and writes every argument; with a script, in Python and in TypeScript, it
receives the script's result and writes its code. Both are counted by toolcrib.lib.token_counter. A
call inside a script is timed by a script with many small calls, minus one without calls, and
compared with the same calls over REST on one connection; rounds are interleaved.
"""

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.installation import Installation  # noqa: E402
from tests.support.waiting import wait_for  # noqa: E402
from toolcrib.lib.json_codec import canonical  # noqa: E402
from toolcrib.lib.token_counter import count  # noqa: E402

LEAST_RATIO = 10  # tokens call by call ÷ tokens with the script
MAX_OVERHEAD = 1.5  # a call in a script ÷ the same call over REST
UNLIMITED = dict.fromkeys(("calls_per_minute", "cost_per_minute"), 10**9)
SEARCH = {"level": "error", "minutes": 60}
PYTHON = """found = await logs.search_logs(level="error", minutes=60)
errors: dict[str, int] = {}
for line in found["lines"]:
    errors[line["message"]] = errors.get(line["message"], 0) + 1
created: list[str] = []
for message, times in errors.items():
    ticket = await tickets.create_ticket(title=message, description=f"{times} times in an hour")
    created.append(ticket["id"])
{"tickets": created}
"""
TYPESCRIPT = """const found = await logs.search_logs({ level: "error", minutes: 60 });
const errors = new Map<string, number>();
for (const { message } of found.lines) errors.set(message, (errors.get(message) ?? 0) + 1);
const created: string[] = [];
for (const [message, times] of errors) {
  const description = `${times} times in an hour`;
  created.push((await tickets.create_ticket({ title: message, description })).id);
}
return { tickets: created };
"""
TASKS = {"python": PYTHON, "typescript": TYPESCRIPT}
MANY_CALLS = {
    "python": """state = ""
for number in range(input):
    ticket = await tickets.get_state(ticket_id="OPS-1")
    state = ticket["state"]
state
""",
    "typescript": """let state = "";
for (let number = 0; number < input; number++) {
  state = (await tickets.get_state({ ticket_id: "OPS-1" })).state;
}
return state;
""",
}
Work = tuple[list[str], int, int]  # tickets, tokens received and written


class Agent:
    """REST client of an agent that may run scripts, on one connection."""

    def __init__(self, toolcrib: Installation) -> None:
        body = {"name": "bench", "all_groups": True, "mode": "deferred", "code_mode": True}
        status, answer = toolcrib.api("POST", "/agents", body | UNLIMITED)
        assert status == 201, answer
        key = toolcrib.api("POST", "/agents/bench/keys", {})[1]["key"]
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self.http = HTTPConnection("127.0.0.1", toolcrib.port, timeout=60)
        self.http.connect()
        self.http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.path = f"/sessions/{self.post('/sessions', {})['id']}"

    def post(self, path: str, body: Any) -> Any:
        self.http.request("POST", f"/api/v1{path}", json.dumps(body).encode(), self.headers)
        response = self.http.getresponse()
        text = response.read()
        assert response.status in (200, 201), text
        return json.loads(text)

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        answer = self.post(f"{self.path}/call", {"tool_name": name, "arguments": arguments})
        assert not answer["is_error"], answer
        return answer

    def script(self, language: str, code: str, value: Any = None) -> Any:
        body = {"code": code, "language": language, "input": value}
        answer = self.post(f"{self.path}/scripts", body)
        assert answer["status"] == "completed", answer
        return answer


def add_server(toolcrib: Installation, name: str) -> None:
    argv = [sys.executable, str(ROOT / "bench" / "incidents.py"), name]
    body = {
        "name": name,
        "slug": name,
        "transport": "stdio",
        "command": argv[0],
        "args": argv[1:],
        "confirm_argv": argv,
    }
    status, answer = toolcrib.api("POST", "/servers", body)
    assert status == 201, answer
    wait_for(lambda: toolcrib.tool_names(name), 60, what=f"{name} is synced")


def call_by_call(agent: Agent) -> Work:
    """Do the task as a model does; return the tickets, and tokens received and written."""
    found = agent.call("logs__search_logs", SEARCH)
    received, written = found["tokens"], count(canonical(SEARCH))
    errors: dict[str, int] = {}
    for line in found["structured_content"]["lines"]:
        errors[line["message"]] = errors.get(line["message"], 0) + 1
    tickets = []
    for message, times in errors.items():
        arguments = {"title": message, "description": f"{times} times in an hour"}
        answer = agent.call("tickets__create_ticket", arguments)
        received += answer["tokens"]
        written += count(canonical(arguments))
        tickets.append(answer["structured_content"]["id"])
    return tickets, received, written


def with_script(language: str, agent: Agent) -> Work:
    code = TASKS[language]
    answer = agent.script(language, code)
    assert answer["tokens"]["spared"] > 0, answer
    return answer["result"]["tickets"], answer["tokens"]["given"], count(code)


def timed(work: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work(*args)
    return time.perf_counter() - started, result


def measure(agent: Agent, options: argparse.Namespace) -> dict[str, Any]:
    ways: dict[str, Callable[[Agent], Work]] = {"call by call": call_by_call}
    ways |= {language: partial(with_script, language) for language in TASKS}
    task: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "received": 0, "written": 0} for name in ways
    }
    alone: list[float] = []
    inside: dict[str, list[float]] = {language: [] for language in MANY_CALLS}
    for way in ways.values():
        way(agent)  # warm up
    for _ in range(options.rounds):
        for name, way in ways.items():
            seconds, (tickets, received, written) = timed(way, agent)
            assert len(tickets) == 8, tickets
            task[name]["seconds"].append(seconds)
            task[name].update(received=received, written=written)
        for language, code in MANY_CALLS.items():
            empty, _ = timed(agent.script, language, code, 0)
            full, answer = timed(agent.script, language, code, options.calls)
            assert len(answer["calls"]) == options.calls, answer
            inside[language].append((full - empty) / options.calls)
        started = time.perf_counter()
        for _ in range(options.calls):
            agent.call("tickets__get_state", {"ticket_id": "OPS-1"})
        alone.append((time.perf_counter() - started) / options.calls)
    return {
        "task": [
            {"way": name, **row, "seconds": statistics.median(row["seconds"])}
            for name, row in task.items()
        ],
        "rest_call_ms": statistics.median(alone) * 1000,
        "script_call_ms": {
            language: {
                "ms": statistics.median(times) * 1000,
                # Of pairs of one round, so that a slow moment of the machine concerns both.
                "ratio": statistics.median(
                    one / other for one, other in zip(times, alone, strict=True)
                ),
            }
            for language, times in inside.items()
        },
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="toolcrib-bench-") as folder,
        Installation(Path(folder)) as toolcrib,
    ):
        for name in ("logs", "tickets"):
            add_server(toolcrib, name)
        return measure(Agent(toolcrib), options)


def mark(good: bool) -> str:
    return "OK  " if good else "MISS"


def print_report(report: dict[str, Any], options: argparse.Namespace) -> None:
    print(
        "Error logs of the past hour, a ticket for each of 8 errors; "
        f"median of {options.rounds} rounds"
    )
    print(f"{'way':>14}{'received':>10}{'written':>9}{'tokens':>8}{'seconds':>9}")
    totals = {}
    for row in report["task"]:
        totals[row["way"]] = total = row["received"] + row["written"]
        print(
            f"{row['way']:>14}{row['received']:>10,}{row['written']:>9,}{total:>8,}"
            f"{row['seconds']:>9.3f}"
        )
    for language, call in report["script_call_ms"].items():
        ratio = totals["call by call"] / totals[language]
        spared = totals["call by call"] - totals[language]
        print(
            f"{mark(ratio >= LEAST_RATIO)} tokens spared in {language}: {spared:,}, {ratio:.1f} "
            f"times fewer, limit {LEAST_RATIO}"
        )
        print(
            f"{mark(call['ratio'] <= MAX_OVERHEAD)} a call inside a script in {language}: "
            f"{call['ms']:.2f} ms, over REST {report['rest_call_ms']:.2f} ms, "
            f"ratio {call['ratio']:.2f}, limit {MAX_OVERHEAD:g}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=50, help="of the overhead, at most 50")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = run(options)
    if options.json:
        print(json.dumps(report))
    else:
        print_report(report, options)


if __name__ == "__main__":
    main()
