"""Profile of a call: latency by stage, CPU by layer and function: bench/dispatch.py --profile.

One caller. First direct, REST and MCP in rotation, with timers around the stages of a call inside
Toolcrib (bench/inside.py); then REST and MCP again under cProfile, for layers and functions.
"""

import asyncio
import json
import os
import signal
import statistics
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import dispatch
import inside
import load

from tests.support.waiting import wait_for

PATHS = ("direct 2026", "REST, socket", "dispatcher 2026", "dispatcher 2025")
CALLS = 300
ROUNDS = 5
MAX_FUNCTIONS = 30  # printed per path


class TimedToolcrib(dispatch.Toolcrib):
    program = str(dispatch.ROOT / "bench" / "inside.py")


def run(options):
    for functions in (False, True):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrib-")))
            output = folder / "inside.json"
            env = {"BENCH_INSIDE": str(output), **({"BENCH_FUNCTIONS": "1"} if functions else {})}
            toolcrib, echo = dispatch.start_all(stack, options, TimedToolcrib, env)
            for over in options.over:
                rows = [dispatch.BY_NAME[name] for name in PATHS]
                bed = dispatch.Bed(stack, over, rows, toolcrib, echo)
                for size in options.sizes[:1]:
                    work = measure(bed, size, output, functions)
                    print_report(over, size, asyncio.run(work), functions)


async def measure(bed, size, output, functions):
    """Return the durations, CPU seconds and stages of each path, by round."""
    results = {path: [] for path in PATHS}
    text = dispatch.make_text(size)
    calls = max(20, CALLS // (1 + size // 20_000))
    rounds = 1 if functions else ROUNDS
    try:
        for number in range(rounds):
            for path in PATHS[number % len(PATHS) :] + PATHS[: number % len(PATHS)]:
                before = set(dispatch.descendants(os.getpid()))
                call = await bed.callers[path].call()
                pids = set().union(*bed.pids(path, before))
                await load.time_calls(call, text, 1, 0, least=20)
                if path != PATHS[0]:
                    await asyncio.to_thread(send_signal, bed.toolcrib.pid, signal.SIGUSR1, None)
                cpu_used = dispatch.cpu_seconds(pids)
                durations, _ = await load.time_calls(call, text, 1, 0, least=calls)
                cpu_used = dispatch.cpu_seconds(pids) - cpu_used
                stages = None
                if path != PATHS[0]:
                    stages = await asyncio.to_thread(
                        send_signal, bed.toolcrib.pid, signal.SIGUSR2, output
                    )
                results[path].append((durations, cpu_used, stages))
    finally:
        for caller in bed.callers.values():
            await caller.close()
    return results


def send_signal(pid, number, output):
    """Start a measurement in Toolcrib, or read its result from `output`."""
    os.kill(pid, number)
    if output is None:
        return None
    wait_for(output.exists, 20, what="Toolcrib wrote its measurement")
    measurement = json.loads(output.read_text())
    output.unlink()
    return measurement


def print_report(over, size, results, functions):
    medians = {path: per_call(rounds, lambda durations, cpu_used, _: statistics.median(durations))
              for path, rounds in results.items()}  # fmt: skip
    print(f"\n{over} server, {size:,} bytes, one caller"
          + (", under cProfile: slower, only for proportions" if functions else ""))  # fmt: skip
    for path, rounds in results.items():
        cpu = per_call(rounds, lambda durations, cpu_used, _: cpu_used / len(durations))
        print(
            f"\n{path}: p50 {medians[path]:.3f} ms, "
            f"{medians[path] / medians[PATHS[0]]:.2f} × direct; "
            f"CPU {cpu:.2f} ms per call without the caller"
        )
        if path != PATHS[0]:
            if functions:
                print_layers(rounds)
                print_functions(rounds)
            else:
                print_stages(rounds)


def per_call(rounds, figure):
    """Return the median over rounds of a figure in seconds, as milliseconds."""
    return statistics.median(figure(*results) for results in rounds) * 1000


def print_stages(rounds):
    depths = {name: depth for name, depth, _ in inside.STAGES}
    for name, depth in depths.items():
        times = per_call(rounds, partial(_stage, name))
        if times:
            print(f"  {'  ' * depth}{name:<{44 - 2 * depth}}{times:8.3f} ms")
    for thread in ("event loop", "ledger", "other threads"):
        times = per_call(rounds, partial(_thread, thread))
        print(f"  CPU, {thread:<39}{times:8.3f} ms")


def _stage(name, durations, cpu_used, measurement):
    """Return the seconds of a stage in a typical call; there are two transactions per call."""
    times = measurement["stages"].get(name, [])
    return statistics.median(times) * round(len(times) / len(durations)) if times else 0.0


def _thread(name, durations, cpu_used, measurement):
    return measurement["threads"].get(name, 0.0) / len(durations)


def print_layers(rounds):
    """Print the CPU time of a call by layer, in the proportions that cProfile shows."""
    durations, _, measurement = rounds[0]
    layers = measurement["layers"]
    total = sum(map(sum, (seconds.values() for seconds in layers.values())))
    names = {name: sum(seconds.get(name, 0.0) for seconds in layers.values())
             for seconds in layers.values() for name in seconds}  # fmt: skip
    print("  share of the CPU of Toolcrib's event loop and ledger threads, by layer:")
    for name, seconds in sorted(names.items(), key=lambda pair: -pair[1]):
        print(f"    {name:<36}{seconds / total:7.0%}{seconds / len(durations) * 1e6:10.0f} µs")


def print_functions(rounds):
    durations, _, measurement = rounds[0]
    print(f"  {'thread':<12}{'calls/call':>13}{'self µs':>9}{'total µs':>12}")
    for thread, name, calls, own, total in measurement["functions"][:MAX_FUNCTIONS]:
        each = len(durations)
        print(f"  {thread:<12}{calls / each:13.1f}{own / each * 1e6:9.1f}"
              f"{total / each * 1e6:12.1f}  {name}")  # fmt: skip
