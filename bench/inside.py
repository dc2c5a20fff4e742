"""Toolcrib with timers, for bench/dispatch.py --profile: `python bench/inside.py serve`.

The product has no code for this: functions on the path of a call are wrapped before the server
starts. SIGUSR1 starts a measurement, SIGUSR2 writes it to the file named by BENCH_INSIDE: seconds
in each stage, including waits, and CPU seconds of each thread. With BENCH_FUNCTIONS set, the event
loop and the ledger thread run under cProfile, which slows everything down and attributes the CPU
time to functions.
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
# Title of a stage, its nesting depth, and the function that implements it.
STAGES = (
    ("total", 0, "sessions_app.sessions.endpoint:serve"),
    ("total", 0, "sessions_app.mcp.endpoint:Endpoint._post"),
    ("read the request", 1, "sessions_app.sessions.endpoint:_parse_body"),
    ("read the request", 1, "sessions_app.mcp.tool_calls:parse_call"),
    ("plan: scope, policy, validation", 1, "sessions_app.dispatch.planner:plan_call"),
    ("accept: until committed", 1, "sessions_app.dispatch.dispatcher:accept"),
    ("call the server", 1, "servers.connections.calls:call"),
    ("exchange over the connection", 2, "servers.connections.connection:Connection.call_tool"),
    ("until the response starts", 3, "servers.transports.http1:HttpConnectionPool.post"),
    ("process the result", 1, "sessions_app.dispatch.dispatcher:_call_result"),
    ("finish: until committed", 1, "sessions_app.ledger.calls:finish"),
    ("write the row", 2, "sessions_app.ledger.calls:fill_in_result"),
    ("transactions, in the ledger thread", 1, "sessions_app.ledger.writer:write_batch"),
    ("respond", 1, "sessions_app.sessions.endpoint:send_response"),
    ("respond", 1, "sessions_app.mcp.tool_calls:send_response"),
)
# Where the CPU time of a function counts, by the start of its file's path; the first that matches.
LAYERS = (
    ("web server", ("uvicorn/", "httptools/", "toolcrib/http/", "toolcrib/runtime/")),
    ("endpoint", ("toolcrib/asgi.py", "toolcrib/lib/protocols/asgi.py", "sessions_app/mcp/",
                  "sessions_app/sessions/endpoint.py")),
    ("message checks of the SDK", ("mcp/", "mcp_types/", "pydantic/")),
    ("ledger", ("sessions_app/ledger/", "toolcrib/sqlite/", "django/db/")),
    ("authorization, planning, result", ("sessions_app/", "catalog/", "jsonschema", "rs_bpe/")),
    ("upstream call", ("servers/",)),
    ("JSON", ("json/", "toolcrib/lib/json_codec.py", "toolcrib/lib/payloads.py")),
    ("tasks, timers, threads", ("asyncio/", "threading.py", "asgiref/", "contextvars")),
)  # fmt: skip
LEDGER = "sessions_app.ledger.writer:write_batch"
MAX_FUNCTIONS = 45  # functions

stage_seconds: dict[str, list[float]] = {}
cpu_at_start: dict[str, float] = {}
profiles: dict[str, cProfile.Profile] = {}
measuring = False


def resolve(where: str) -> tuple[Any, str, Any]:
    """Return the object that has a function as attribute, the attribute and the function."""
    module, _, path = where.partition(":")
    holder = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        holder = getattr(holder, part)
    return holder, name, getattr(holder, name)


def with_timer(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if asyncio.iscoroutinefunction(function):

        @functools.wraps(function)
        async def around(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return await function(*args, **options)
            finally:
                record(name, time.perf_counter() - start)

        return around

    @functools.wraps(function)
    def plain(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            record(name, time.perf_counter() - start)

    return plain


def record(name: str, seconds: float) -> None:
    if measuring:
        stage_seconds.setdefault(name, []).append(seconds)


def with_profiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it is profiled in the thread that runs it."""

    @functools.wraps(function)
    def around(*args: Any) -> Any:
        if not measuring:
            return function(*args)
        return profiles.setdefault("ledger", cProfile.Profile()).runcall(function, *args)

    return around


def thread_cpu_seconds() -> dict[str, float]:
    """Return CPU seconds by thread; the thread pools of Django and asyncio are one entry."""
    seconds: dict[str, float] = {}
    for thread in threading.enumerate():
        name = {"MainThread": "event loop", "ledger": "ledger"}.get(thread.name, "other threads")
        with suppress(OSError):  # the thread may have ended
            used = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]
            seconds[name] = seconds.get(name, 0.0) + int(used) / 1e9
    return seconds


def start_measurement(*_: object) -> None:
    global measuring
    stage_seconds.clear()
    cpu_at_start.clear()
    cpu_at_start.update(thread_cpu_seconds())
    measuring = True
    if os.environ.get("BENCH_FUNCTIONS"):
        profiles.clear()
        profiles["event loop"] = cProfile.Profile()
        profiles["event loop"].enable()


def write_measurement(*_: object) -> None:
    global measuring
    measuring = False
    if "event loop" in profiles:
        profiles["event loop"].disable()
    used = {
        name: seconds - cpu_at_start.get(name, 0.0)
        for name, seconds in thread_cpu_seconds().items()
    }
    measurement = {"stages": stage_seconds, "threads": used, "functions": profile_rows(),
                   "layers": layer_seconds()}  # fmt: skip
    target = Path(os.environ["BENCH_INSIDE"])
    unfinished = target.with_suffix(".part")
    unfinished.write_text(json.dumps(measurement))
    unfinished.rename(target)


def profile_rows() -> list[list[Any]]:
    rows = []
    for thread, profile in profiles.items():
        for (file, line, name), (_, calls, own, total, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
            where = file.rpartition("site-packages/")[2].removeprefix(f"{ROOT}/")
            rows.append([thread, f"{where}:{line} {name}", calls, own, total])
    return sorted(rows, key=lambda row: -row[3])[:MAX_FUNCTIONS]


def layer_seconds() -> dict[str, dict[str, float]]:
    """Return the CPU seconds of each thread by layer; built-in functions count where called."""
    layers: dict[str, dict[str, float]] = {}
    for thread, profile in profiles.items():
        seconds = layers.setdefault(thread, {})
        stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
        for (file, *_), (_, _, own, _, callers) in stats.items():
            if file != "~" or not callers:
                seconds[layer_of(file)] = seconds.get(layer_of(file), 0.0) + own
                continue
            for (caller, *_), (_, _, part, _) in callers.items():
                seconds[layer_of(caller)] = seconds.get(layer_of(caller), 0.0) + part
    return layers


def layer_of(file: str) -> str:
    path = file.rpartition("site-packages/")[2].removeprefix(f"{ROOT}/")
    path = path.rpartition("python3.")[2].partition("/")[2] if "/lib/python3." in path else path
    return next((name for name, starts in LAYERS if path.startswith(starts)), "other")


def main() -> None:
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")
    import django

    django.setup()
    for name, _, where in STAGES:
        holder, attribute, function = resolve(where)
        setattr(holder, attribute, with_timer(name, function))
    if os.environ.get("BENCH_FUNCTIONS"):
        holder, attribute, function = resolve(LEDGER)
        setattr(holder, attribute, with_profiler(function))
    signal.signal(signal.SIGUSR1, start_measurement)
    signal.signal(signal.SIGUSR2, write_measurement)
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
