"""CPU of a call without rules, and with 100 rules of which five or all concern the called tool.

    python bench/rules.py [--rounds 9] [--calls 400] [--rules 100] [--json]

One installation (bench/dispatch.py) with one agent for each row: rules that name an agent concern
its calls only. The rules hold calls by argument conditions that are never true, so every rule that
concerns the tool is evaluated to its end: two conditions each, a text and a regular expression.
Rounds are interleaved: each row is measured once in each round, in rotating order, with one caller
over REST. CPU is that of all threads of the web process, and ratios are within a round.
"""

import argparse
import asyncio
import json
import statistics
import sys
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import dispatch  # noqa: E402
import load  # noqa: E402

CONCERNED = 5  # rules of the middle row that concern the called tool
MAX_RATIO = 1.05  # of that row
TEXT = "The quick brown fox jumps over the lazy dog, and nobody minds at all."
TOOL = "http__echo"


def cpu_seconds(pid):
    """Return the CPU seconds of all threads: the scheduler's nanoseconds, not clock ticks."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def add_row(toolcrib, agent, many, concerned):
    """Create an agent with a session, and rules for it; return its key and session."""
    body = {"name": agent, "all_groups": True, "mode": "deferred", **dispatch.LIMITS}
    toolcrib._send("POST", "/agents", body)
    for number in range(many):
        is_concerned = number * concerned // many != (number + 1) * concerned // many
        match = {
            "agents": [agent],
            "tools": ["http__ec*"] if is_concerned else [f"other{number}__*"],
            "arguments": [
                {"path": "/text", "op": "contains", "value": "fox"},
                {"path": "/text", "op": "matches", "value": f"^delete .* {number}$"},
            ],
        }
        rule = {"name": f"{agent} {number}", "effect": "hold", "match": match}
        toolcrib._send("POST", "/rules", rule)
    key = toolcrib._send("POST", f"/agents/{agent}/keys", {})["key"]
    return key, toolcrib._send("POST", "/sessions", {}, token=key)["id"]


async def measure(toolcrib, rows, options):
    """Return the CPU microseconds of a call, by row and round."""
    figures = {name: [] for name in rows}
    async with AsyncExitStack() as stack:
        callers = {}
        for name, (key, session) in rows.items():
            caller = load.rest_caller(toolcrib.url, key, session, TOOL)
            callers[name] = await stack.enter_async_context(caller)
            await run_calls(callers[name], options.calls)  # warm up
        names = list(rows)
        for number in range(options.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                before = cpu_seconds(toolcrib.pid)
                await run_calls(callers[name], options.calls)
                used = cpu_seconds(toolcrib.pid) - before
                figures[name].append(used / options.calls * 1e6)
    return figures


async def run_calls(call, many):
    for _ in range(many):
        await call(0, TEXT)


def summarize(figures):
    base = figures["no rules"]
    report = {}
    for name, values in figures.items():
        ratios = [value / other for value, other in zip(values, base, strict=True)]
        report[name] = {
            "cpu_us": statistics.median(values),
            "cpu_us_range": [min(values), max(values)],
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
        }
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=400, help="per row and round")
    parser.add_argument("--rules", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.tools, options.servers, options.folder = 160, 5, None
    with ExitStack() as stack:
        toolcrib, _ = dispatch.start_all(stack, options)
        few = f"{options.rules} rules, {CONCERNED} concern the tool"
        rows = {
            "no rules": add_row(toolcrib, "none", 0, 0),
            few: add_row(toolcrib, "few", options.rules, CONCERNED),
            f"{options.rules} rules, all concern it": add_row(
                toolcrib, "all", options.rules, options.rules
            ),
        }
        report = summarize(asyncio.run(measure(toolcrib, rows, options)))
    if options.json:
        print(json.dumps(report))
        return
    print(f"CPU of a call over REST: {options.rounds} rounds of {options.calls} calls")
    for name, row in report.items():
        low, high = row["cpu_us_range"]
        least, most = row["ratio_range"]
        print(
            f"  {name:36} {row['cpu_us']:7.0f} µs ({low:.0f} to {high:.0f}), "
            f"ratio {row['ratio']:.3f} ({least:.3f} to {most:.3f})"
        )
    mark = "OK  " if report[few]["ratio"] <= MAX_RATIO else "MISS"
    print(f"{mark} {few}: {report[few]['ratio']:.3f} of a call without rules, limit {MAX_RATIO}")


if __name__ == "__main__":
    main()
