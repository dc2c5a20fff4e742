"""Answers far over the cap (R8): an error in words, little memory, and a loop that goes on."""

import asyncio
import os
import time
from typing import Any

from bench.fault_bed import (
    Bed,
    Callers,
    Row,
    forget_peak,
    memory,
    register,
    register_program,
    remove,
    upstream,
    waited,
)
from tests.support.agents import Session

KINDS = {  # tool: where, and in words
    "json": ("heavy-http", "JSON"),
    "told": ("heavy-http", "JSON, length told"),
    "sse": ("heavy-http", "SSE"),
    "bomb": ("heavy-http", "gzip bomb"),
    "line": ("heavy-stdio", "stdio line"),
}
MEGABYTES = 50
PROBE = 0.005  # seconds between two requests that look whether the loop turns


def far_too_large(bed: Bed, size: str) -> Row:
    """R8: fifty megabytes in every form, while somebody else asks for something small."""
    rounds = {"tiny": 1, "short": 1, "full": 5}[size]
    row = Row("R8", f"{MEGABYTES} MB as JSON, SSE, a stdio line and a gzip bomb")
    with upstream("heavy", "--http", "--megabytes", str(MEGABYTES)) as server:
        register(bed.toolcrib, "heavy-http", url=server.url)
        register_program(bed.toolcrib, "heavy-stdio", "heavy", "--megabytes", str(MEGABYTES))
        sessions = {slug: bed.session(slug) for slug in ("heavy-http", "heavy-stdio")}
        for session in sessions.values():
            assert session.call("ping")["state"] == "succeeded"
        found = {
            tool: [asyncio.run(_one(bed, sessions[slug], tool)) for _ in range(rounds)]
            for tool, (slug, _) in KINDS.items()
        }
        quiet = asyncio.run(_probed(bed, 1.0))
        for slug in sessions:
            remove(bed.toolcrib, slug)
    worst = {
        tool: {
            "error": results[-1]["code"],
            "seconds": round(max(one["seconds"] for one in results), 2),
            "growth_mb": round(max(one["growth"] for one in results), 1),
            "stall_ms": round(max(one["stall"] for one in results) * 1000, 1),
        }
        for tool, results in found.items()
    }
    row.done = f"{rounds} × each of {', '.join(words for _, words in KINDS.values())}"
    row.figures = {**worst, "quiet_stall_ms": round(quiet * 1000, 1)}
    for tool, results in found.items():
        words = KINDS[tool][1]
        codes = {one["code"] for one in results}
        row.exactly(f"{words}: error", ", ".join(sorted(codes)), "result_too_large")
        row.exactly(f"{words}: next call", results[-1]["next"], "succeeded")
    row.exactly(
        "told with size or cap", all(one["words"] for r in found.values() for one in r), True
    )
    growth = max(one["growth_mb"] for one in worst.values())
    row.at_most("growth of memory", growth, 64, " MB", timed=False)
    row.at_most("slowest error", max(one["seconds"] for one in worst.values()), 2, " s")
    row.at_most(
        "longest stall seen from outside", max(o["stall_ms"] for o in worst.values()), 50, " ms"
    )
    return row


async def _one(bed: Bed, session: Session, tool: str) -> dict[str, Any]:
    """Make the call with a probe beside it."""
    before = memory(bed.pid)
    forget_peak(bed.pid)
    async with Callers(bed.agent) as callers:
        asked = asyncio.create_task(callers.call(session, tool))
        stall = 0.0
        while not asked.done():
            stall = max(stall, await _probe(bed, callers))
            await asyncio.sleep(PROBE)
        told = await asked
        growth = memory(bed.pid, "VmHWM") - before
        following = await callers.call(session, "ping")
    error = told.json.get("error", {})
    return {
        "code": error.get("code", told.state),
        "words": "10" in error.get("message", "") and bool(error.get("hint")),
        "seconds": told.seconds,
        "growth": growth,
        "stall": stall,
        "next": following.state,
    }


async def _probe(bed: Bed, callers: Callers) -> float:
    """Ask for what the loop answers by itself: how long that takes, but for waiting for a CPU.

    A thread that holds Python's lock while it waits for a CPU holds the loop up as well; on a
    quiet machine none does, and this is what the loop stood still.
    """
    before = waited(bed.pid) + waited(os.getpid())
    told = await callers.fetch("GET", "/mcp")
    assert told.status in (401, 405, 406), told.status  # nobody asks: no key, no database
    return max(0.0, told.seconds - (waited(bed.pid) + waited(os.getpid()) - before))


async def _probed(bed: Bed, seconds: float) -> float:
    """The slowest probe while nothing else is asked for."""
    began, worst = time.monotonic(), 0.0
    async with Callers(bed.agent) as callers:
        while time.monotonic() - began < seconds:
            worst = max(worst, await _probe(bed, callers))
            await asyncio.sleep(PROBE)
    return worst
