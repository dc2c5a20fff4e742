"""Responses far over the size limit (R8): clear error, bounded memory, responsive event loop."""

import asyncio
import os
import time
from typing import Any

from bench.fault_bed import (
    Bed,
    Callers,
    Row,
    cpu_wait,
    memory_mb,
    register,
    register_stdio,
    remove,
    reset_peak_memory,
    running_upstream,
)
from tests.support.agents import Session

KINDS = {  # tool: server, and title
    "json": ("heavy-http", "JSON"),
    "told": ("heavy-http", "JSON with Content-Length"),
    "sse": ("heavy-http", "SSE"),
    "bomb": ("heavy-http", "gzip bomb"),
    "line": ("heavy-stdio", "stdio line"),
}
MEGABYTES = 50
PROBE_INTERVAL = 0.005  # seconds between two probes of the event loop


def oversized_responses(bed: Bed, size: str) -> Row:
    """R8: responses of 50 MB in every form, with small requests at the same time."""
    rounds = {"tiny": 1, "short": 1, "full": 5}[size]
    row = Row("R8", f"{MEGABYTES} MB as JSON, SSE, a stdio line and a gzip bomb")
    with running_upstream("heavy", "--http", "--megabytes", str(MEGABYTES)) as server:
        register(bed.toolcrib, "heavy-http", url=server.url)
        register_stdio(bed.toolcrib, "heavy-stdio", "heavy", "--megabytes", str(MEGABYTES))
        sessions = {slug: bed.session(slug) for slug in ("heavy-http", "heavy-stdio")}
        for session in sessions.values():
            assert session.call("ping")["state"] == "succeeded"
        results_by_tool = {
            tool: [asyncio.run(_measure_call(bed, sessions[slug], tool)) for _ in range(rounds)]
            for tool, (slug, _) in KINDS.items()
        }
        idle_stall = asyncio.run(_longest_stall(bed, 1.0))
        for slug in sessions:
            remove(bed.toolcrib, slug)
    worst = {
        tool: {
            "error": results[-1]["code"],
            "seconds": round(max(result["seconds"] for result in results), 2),
            "growth_mb": round(max(result["growth"] for result in results), 1),
            "stall_ms": round(max(result["stall"] for result in results) * 1000, 1),
        }
        for tool, results in results_by_tool.items()
    }
    row.procedure = f"{rounds} × each of {', '.join(title for _, title in KINDS.values())}"
    row.figures = {**worst, "idle_stall_ms": round(idle_stall * 1000, 1)}
    for tool, results in results_by_tool.items():
        title = KINDS[tool][1]
        codes = {result["code"] for result in results}
        row.check_equal(f"{title}: error", ", ".join(sorted(codes)), "result_too_large")
        row.check_equal(f"{title}: next call", results[-1]["next"], "succeeded")
    row.check_equal(
        "errors with limit and hint",
        all(result["explained"] for results in results_by_tool.values() for result in results),
        True,
    )
    growth = max(figures["growth_mb"] for figures in worst.values())
    row.check_at_most("memory growth", growth, 64, " MB", timed=False)
    row.check_at_most(
        "slowest error", max(figures["seconds"] for figures in worst.values()), 2, " s"
    )
    row.check_at_most(
        "longest event loop stall",
        max(figures["stall_ms"] for figures in worst.values()),
        50,
        " ms",
    )
    return row


async def _measure_call(bed: Bed, session: Session, tool: str) -> dict[str, Any]:
    """Make the call while probing the event loop."""
    before = memory_mb(bed.pid)
    reset_peak_memory(bed.pid)
    async with Callers(bed.agent) as callers:
        call = asyncio.create_task(callers.call(session, tool))
        stall = 0.0
        while not call.done():
            stall = max(stall, await _probe(bed, callers))
            await asyncio.sleep(PROBE_INTERVAL)
        response = await call
        growth = memory_mb(bed.pid, "VmHWM") - before
        following = await callers.call(session, "ping")
    error = response.json.get("error", {})
    return {
        "code": error.get("code", response.state),
        "explained": "10" in error.get("message", "") and bool(error.get("hint")),
        "seconds": response.seconds,
        "growth": growth,
        "stall": stall,
        "next": following.state,
    }


async def _probe(bed: Bed, callers: Callers) -> float:
    """Return the seconds of a request that needs only the event loop, without waits for a CPU.

    A thread that holds the GIL while it waits for a CPU blocks the loop as well. Without such
    waits, as on an idle machine, the result is the stall of the loop.
    """
    before = cpu_wait(bed.pid) + cpu_wait(os.getpid())
    response = await callers.request("GET", "/mcp")
    assert response.status in (401, 405, 406), response.status  # no key, so no database access
    return max(0.0, response.seconds - (cpu_wait(bed.pid) + cpu_wait(os.getpid()) - before))


async def _longest_stall(bed: Bed, seconds: float) -> float:
    """Return the slowest probe without other requests."""
    started, worst = time.monotonic(), 0.0
    async with Callers(bed.agent) as callers:
        while time.monotonic() - started < seconds:
            worst = max(worst, await _probe(bed, callers))
            await asyncio.sleep(PROBE_INTERVAL)
    return worst
