"""Toolcrib with a clock in it, for bench/dispatch.py --profile: `python bench/inside.py serve`.

Nothing of the product knows of this: named functions of the way of a call are wrapped from
outside before the server starts. SIGUSR1 begins a measurement, SIGUSR2 writes it to the file that
BENCH_INSIDE names: seconds spent in each stage, waiting included, and processor seconds of each
thread. With BENCH_FUNCTIONS set, the event loop and the ledger's thread run under cProfile, which
makes everything slower and says which functions the processor time goes to.
"""

import asyncio
import cProfile
import functools
import importlib
import json
import os
import pstats
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# What a stage is called, how deep it lies in the one before, and the function that is it.
STAGES = (
    ("whole", 0, "sessions_app.fast_path.rest_call:call"),
    ("whole", 0, "sessions_app.fast_path.mcp_call:call"),
    ("read the request", 1, "sessions_app.fast_path.rest_call:_request"),
    ("read the request", 1, "sessions_app.fast_path.mcp_call:_message"),
    ("plan: scope, policy, validation", 1, "sessions_app.dispatch.planner:plan_from_cache"),
    ("accept: until committed", 1, "sessions_app.dispatch.authorization_cache:accept_call"),
    ("ask the server", 1, "servers.connections.calls:call"),
    ("exchange over the connection", 2, "servers.connections.connection:Connection.call_tool"),
    ("until its answer begins", 3, "servers.transports.http1:HttpConnectionPool.post"),
    ("judge the result", 1, "sessions_app.dispatch.dispatcher:_call_result"),
    ("finish: until committed", 1, "sessions_app.ledger.calls:finish"),
    ("write the answer", 2, "sessions_app.ledger.calls:fill_in_result"),
    ("transactions, in the ledger's thread", 1, "sessions_app.ledger.batch_writer:write_batch"),
    ("answer", 1, "sessions_app.fast_path.http:_answer"),
    ("answer", 1, "sessions_app.fast_path.mcp_call:_answer"),
)
LEDGER = "sessions_app.ledger.batch_writer:write_batch"
SHOWN = 45  # functions

spent: dict[str, list[float]] = {}
began: dict[str, float] = {}
profiles: dict[str, cProfile.Profile] = {}
measuring = False


def found(where: str) -> tuple[Any, str, Any]:
    """Return what holds a function, and the function's name there."""
    module, _, path = where.partition(":")
    holder = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        holder = getattr(holder, part)
    return holder, name, getattr(holder, name)


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if asyncio.iscoroutinefunction(function):

        @functools.wraps(function)
        async def around(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return await function(*args, **options)
            finally:
                note(name, time.perf_counter() - start)

        return around

    @functools.wraps(function)
    def plain(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            note(name, time.perf_counter() - start)

    return plain


def note(name: str, seconds: float) -> None:
    if measuring:
        spent.setdefault(name, []).append(seconds)


def profiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have what runs in another thread profiled there."""

    @functools.wraps(function)
    def around(*args: Any) -> Any:
        if not measuring:
            return function(*args)
        return profiles.setdefault("ledger", cProfile.Profile()).runcall(function, *args)

    return around


def threads() -> dict[str, float]:
    """Processor seconds by thread; the pool of Django's and asyncio's threads as one."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        name = {"MainThread": "event loop", "ledger": "ledger"}.get(thread.name, "other threads")
        with suppress(OSError):  # it may have ended
            used = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]
            found[name] = found.get(name, 0.0) + int(used) / 1e9
    return found


def begin(*_: object) -> None:
    global measuring
    spent.clear()
    began.clear()
    began.update(threads())
    measuring = True
    if os.environ.get("BENCH_FUNCTIONS"):
        profiles.clear()
        profiles["event loop"] = cProfile.Profile()
        profiles["event loop"].enable()


def write(*_: object) -> None:
    global measuring
    measuring = False
    if "event loop" in profiles:
        profiles["event loop"].disable()
    used = {name: seconds - began.get(name, 0.0) for name, seconds in threads().items()}
    told = {"stages": spent, "threads": used, "functions": functions()}
    target = Path(os.environ["BENCH_INSIDE"])
    unfinished = target.with_suffix(".part")
    unfinished.write_text(json.dumps(told))
    unfinished.rename(target)


def functions() -> list[list[Any]]:
    rows = []
    for thread, profile in profiles.items():
        for (file, line, name), (_, calls, own, total, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
            where = file.rpartition("site-packages/")[2].removeprefix(f"{ROOT}/")
            rows.append([thread, f"{where}:{line} {name}", calls, own, total])
    return sorted(rows, key=lambda row: -row[3])[:SHOWN]


def main() -> None:
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")
    import django

    django.setup()
    for name, _, where in STAGES:
        holder, attribute, function = found(where)
        setattr(holder, attribute, timed(name, function))
    if os.environ.get("BENCH_FUNCTIONS"):
        holder, attribute, function = found(LEDGER)
        setattr(holder, attribute, profiled(function))
    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, write)
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
