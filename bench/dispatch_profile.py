"""What the milliseconds of a call are made of: bench/dispatch.py --profile.

One caller. First direct, REST and MCP in turns, with clocks around the stages of a call inside
Toolcrib (bench/inside.py); then REST and MCP again under cProfile, for the functions.
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

from tests.support.installation import free_port
from tests.support.waiting import wait_for

PATHS = ("direct", "REST", "MCP")
CALLS = 300
TURNS = 5
FUNCTIONS = 30  # told of each path


class Timed(dispatch.Toolcrib):
    program = str(dispatch.ROOT / "bench" / "inside.py")


def run(options):
    for functions in (False, True):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrib-")))
            port = free_port()
            process = dispatch.started(stack, [*dispatch.ECHO, "--http", str(port)], port)
            echo = (f"http://127.0.0.1:{port}/mcp", process.pid)
            written = folder / "inside.json"
            env = {"BENCH_INSIDE": str(written), **({"BENCH_FUNCTIONS": "1"} if functions else {})}
            toolcrib = stack.enter_context(Timed(folder / "data", env))
            toolcrib.fill(echo[0])
            for over in options.over:
                bed = dispatch.Bed(stack, over, PATHS, toolcrib, echo)
                for size in options.sizes[:1]:
                    work = measured(bed, size, written, functions)
                    tell(over, size, asyncio.run(work), functions)


async def measured(bed, size, written, functions):
    """Return what was found of each path, turn by turn."""
    found = {path: [] for path in PATHS}
    text = dispatch.text_of(size)
    calls = max(20, CALLS // (1 + size // 20_000))
    turns = 1 if functions else TURNS
    try:
        for turn in range(turns):
            for path in PATHS[turn % 3 :] + PATHS[: turn % 3]:
                before = set(dispatch.descendants(os.getpid()))
                call = await bed.held[path].call()
                pids = bed.pids(path, before)
                await load.measure(call, text, 1, 0, least=20)
                if path != "direct":
                    await asyncio.to_thread(signalled, bed.toolcrib.pid, signal.SIGUSR1, None)
                used = dispatch.cpu(pids)
                took, _ = await load.measure(call, text, 1, 0, least=calls)
                used = dispatch.cpu(pids) - used
                inside = None
                if path != "direct":
                    inside = await asyncio.to_thread(
                        signalled, bed.toolcrib.pid, signal.SIGUSR2, written
                    )
                found[path].append((took, used, inside))
    finally:
        for held in bed.held.values():
            await held.close()
    return found


def signalled(pid, number, written):
    """Have Toolcrib begin to measure, or write down what it measured."""
    os.kill(pid, number)
    if written is None:
        return None
    wait_for(written.exists, 20, what="Toolcrib wrote what it measured")
    told = json.loads(written.read_text())
    written.unlink()
    return told


def tell(over, size, found, functions):
    middle = {path: per_call(turns, lambda took, used, _: statistics.median(took))
              for path, turns in found.items()}  # fmt: skip
    print(f"\n{over} server, {size:,} bytes, one caller"
          + (", under cProfile: slower, for proportions only" if functions else ""))  # fmt: skip
    for path, turns in found.items():
        cpu = per_call(turns, lambda took, used, _: used / len(took))
        print(
            f"\n{path}: p50 {middle[path]:.3f} ms, {middle[path] / middle['direct']:.2f} × direct; "
            f"processor {cpu:.2f} ms a call beside the caller's"
        )
        if path != "direct":
            (tell_functions if functions else tell_stages)(turns)


def per_call(turns, figure):
    """The median over turns of a figure in seconds, as milliseconds."""
    return statistics.median(figure(*turn) for turn in turns) * 1000


def tell_stages(turns):
    depths = {name: depth for name, depth, _ in inside.STAGES}
    for name, depth in depths.items():
        times = per_call(turns, partial(_stage, name))
        if times:
            print(f"  {'  ' * depth}{name:<{44 - 2 * depth}}{times:8.3f} ms")
    for thread in ("event loop", "ledger", "other threads"):
        times = per_call(turns, partial(_thread, thread))
        print(f"  processor, {thread:<33}{times:8.3f} ms")


def _stage(name, took, used, told):
    """What a stage takes in a usual call; a transaction is begun twice in each."""
    times = told["stages"].get(name, [])
    return statistics.median(times) * round(len(times) / len(took)) if times else 0.0


def _thread(name, took, used, told):
    return told["threads"].get(name, 0.0) / len(took)


def tell_functions(turns):
    took, _, told = turns[0]
    print(f"  {'thread':<12}{'calls a call':>13}{'own µs':>9}{'with inner':>12}")
    for thread, name, calls, own, total in told["functions"][:FUNCTIONS]:
        each = len(took)
        print(f"  {thread:<12}{calls / each:13.1f}{own / each * 1e6:9.1f}"
              f"{total / each * 1e6:12.1f}  {name}")  # fmt: skip
