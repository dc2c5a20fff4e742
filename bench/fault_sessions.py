"""Long runs: concurrent sessions (R21), the session model (R22), soak test for leaks (R23)."""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from typing import Any

from bench import fleet
from bench.fault_bed import (
    ROOT,
    Bed,
    Callers,
    Response,
    Row,
    count_descriptors,
    latency_ms,
    memory_mb,
    percentile,
    register,
    register_stdio,
    remove,
    repeat_until,
    running_upstream,
)
from tests.support.agents import Agent
from tests.support.installation import clean_environment

QUERIES = (
    "create an issue", "list pull requests by label", "send a message to a channel",
    "search files in a folder", "export a report as csv", "restart a pod", "refund a payment",
)  # fmt: skip
MIN_OPERATIONS = 150  # however slow the machine
WARM_UP_SHARE = 0.2  # of the time, before growth is measured


def slope(points: list[tuple[float, float]]) -> float:
    """Return the least-squares slope of (x, y)."""
    if len(points) < 2:
        return 0.0
    x_mean = sum(x for x, _ in points) / len(points)
    y_mean = sum(y for _, y in points) / len(points)
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / spread if spread else 0.0


class ResourceMonitor:
    """Samples of memory and file descriptors of the web process."""

    def __init__(self, bed: Bed, seconds: float) -> None:
        self.bed, self.interval = bed, max(0.2, seconds / 200)
        self.points: list[tuple[float, float, int]] = []

    async def run(self) -> None:
        started = time.monotonic()
        while True:
            pid = self.bed.pid
            self.points.append((time.monotonic() - started, memory_mb(pid), count_descriptors(pid)))
            await asyncio.sleep(self.interval)

    def figures(self) -> dict[str, Any]:
        points = [point for point in self.points if point[0] >= WARM_UP_SHARE * self.points[-1][0]]
        return {
            "rss_mb": [round(points[0][1], 1), round(points[-1][1], 1)],
            "rss_mb_per_minute": round(60 * slope([(at, rss) for at, rss, _ in points]), 2),
            "descriptors": [points[0][2], points[-1][2]],
        }


async def _run_monitored(monitor: ResourceMonitor, work: Any) -> None:
    sampling = asyncio.create_task(monitor.run())
    try:
        await work
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)


# --- R21 ------------------------------------------------------------------------------------------


class OpenSession:
    """One session and the tools it has loaded."""

    def __init__(self, session_id: str) -> None:
        self.id, self.path = session_id, f"/sessions/{session_id}"
        self.tools: list[dict[str, Any]] = []


def many_sessions(bed: Bed, size: str) -> Row:
    """R21: many open sessions that load, search and call."""
    number, seconds, groups, tools = {
        "tiny": (40, 0.0, 3, 24), "short": (200, 15.0, 12, 200), "full": (1000, 600.0, 33, 600),
    }[size]  # fmt: skip
    row = Row("R21", f"{number:,} open sessions that load, search and call")
    options = argparse.Namespace(folder=None, groups=groups, tools=tools, most=None, even=False)
    with fleet.running(options) as mcp_json:
        file = bed.folder / "fleet.json"
        file.write_text(json.dumps(mcp_json))
        process = bed.toolcrib.command("import_servers", str(file), "--wait", "--json")
        assert process.returncode == 0, process.stdout + process.stderr
        slugs = list(mcp_json["mcpServers"])
        for slug in slugs:  # so that the concurrency limit of a server does not limit the callers
            bed.toolcrib.api("PATCH", f"/servers/{slug}", {"concurrency": 32})
        responses: dict[str, list[Response]] = {"open": [], "load": [], "search": [], "call": []}
        monitor = ResourceMonitor(bed, seconds)
        mixed_up: list[str] = []
        asyncio.run(_use_sessions(bed.agent, slugs, number, seconds, responses, monitor, mixed_up))
        for slug in slugs:
            remove(bed.toolcrib, slug)
    errors = Counter(
        f"{operation} {response.state}"
        for operation, some in responses.items()
        for response in some
        if response.status not in (200, 201)
        or response.json.get("is_error")
        or response.json.get("error")
    )
    total = sum(len(some) for operation, some in responses.items() if operation != "open")
    seconds = monitor.points[-1][0] or 1.0
    row.procedure = (
        f"{tools} tools in {groups} groups; {total:,} operations in {seconds:.0f} s by 8 callers, "
        "which use the sessions in rotation"
    )
    row.figures = {
        "operations_per_second": round(total / seconds, 1),
        **{
            f"{operation}_ms": latency_ms([response.seconds for response in some])
            for operation, some in responses.items()
        },
        **monitor.figures(),
        "errors": dict(errors),
    }
    for operation in ("load", "search", "call"):
        row.check_positive(f"operations: {operation}", len(responses[operation]))
    row.check_equal("errors", sum(errors.values()))
    row.check_equal("responses with content of another session", len(mixed_up))
    searches = [response.seconds for response in responses["search"]]
    row.check_at_most("p99 of a search", percentile(searches, 99) * 1000, 150, " ms")
    if size == "full":  # shorter runs prove nothing about growth
        row.check_at_most("memory growth", monitor.figures()["rss_mb_per_minute"], 1, " MB/min")
    first, last = monitor.figures()["descriptors"]
    row.check_at_most("additional file descriptors", last - first, 20)
    return row


async def _use_sessions(
    agent: Agent,
    slugs: list[str],
    number: int,
    seconds: float,
    responses: dict[str, list[Response]],
    monitor: ResourceMonitor,
    mixed_up: list[str],
) -> None:
    chance = random.Random(21)  # noqa: S311 - the same in every run
    async with Callers(agent) as callers:
        sessions: list[OpenSession] = []

        async def open_one(at: int) -> None:
            response = await callers.request_api("POST", "/sessions", {"mode": "deferred"})
            responses["open"].append(response)
            if response.status == 201:
                sessions.append(OpenSession(response.json["id"]))

        await repeat_until(lambda: len(responses["open"]) >= number, 8, open_one)
        ends = time.monotonic() + seconds
        turn = 0

        async def use_next_session(at: int) -> None:
            nonlocal turn
            turn += 1
            session = sessions[turn % len(sessions)]
            kind = ("load", "search", "call")[chance.randrange(3)]
            if kind == "call" and not session.tools:
                kind = "load"
            response = await _do_operation(callers, session, kind, slugs, chance, mixed_up)
            responses[kind].append(response)

        await _run_monitored(
            monitor,
            repeat_until(
                lambda: time.monotonic() > ends and turn >= MIN_OPERATIONS, 8, use_next_session
            ),
        )


async def _do_operation(
    callers: Callers,
    session: OpenSession,
    kind: str,
    slugs: list[str],
    chance: random.Random,
    mixed_up: list[str],
) -> Response:
    if kind == "search":
        return await callers.request_api(
            "POST", f"{session.path}/search", {"query": chance.choice(QUERIES)}
        )
    if kind == "load":
        group = {"group_id": f"mcp:{chance.choice(slugs)}"}
        response = await callers.request_api("POST", f"{session.path}/load", group)
        schemas = response.json.get("schemas") or []
        session.tools += [tool for tool in schemas if tool["parameters"].get("required")]
        return response
    tool = chance.choice(session.tools)
    mark = f"{session.id} {chance.random()}"
    arguments = fleet.arguments_for(tool["parameters"])
    arguments[tool["parameters"]["required"][0]] = mark
    call = {"tool_name": tool["name"], "arguments": arguments}
    response = await callers.request_api("POST", f"{session.path}/call", call)
    if response.status == 200 and mark.encode() not in response.body:
        mixed_up.append(mark)
    return response


# --- R22 ------------------------------------------------------------------------------------------


def session_model(bed: Bed | None, size: str) -> Row:
    """R22: the model-based session test, for many steps."""
    steps = {"tiny": 200, "short": 500, "full": 10_000}[size]
    row = Row("R22", f"model-based session test over {steps:,} steps")
    started = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider",
         "tests/sessions_app/sessions/test_session_model.py", "--timeout", "7200"],
        cwd=ROOT,
        env=clean_environment({"MODEL_STEPS": str(steps)}),
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    match = re.search(r"steps of the model: (\d+)", process.stdout)
    row.procedure = "hypothesis opens, loads, searches, forks, resumes, calls, edits and syncs"
    row.figures = {
        "steps": int(match[1]) if match else 0,
        "seconds": round(time.monotonic() - started, 1),
    }
    if process.returncode:
        row.figures["output"] = process.stdout[-2000:]
    row.check_equal("disagreements", int(process.returncode != 0))
    row.check_at_most("missing steps", steps - row.figures["steps"], 0, timed=False)
    return row


# --- Resource leaks -------------------------------------------------------------------------------


def soak(bed: Bed, size: str) -> Row:
    """R23: normal load with a few faults, to find leaks of memory and descriptors."""
    seconds = {"tiny": 4.0, "short": 20.0, "full": 600.0}[size]
    row = Row("R23", f"{seconds:g} s of normal load with some faults")
    states: Counter[str] = Counter()
    with running_upstream("counting", "--journal", str(bed.folder / "soak-http")) as server:
        register(bed.toolcrib, "soak-http", url=server.url)
        folder = bed.folder / "soak-stdio"  # programs may not write beside the data folder
        folder.mkdir(exist_ok=True)
        program = ("counting", "--journal", str(folder / "journal"))
        register_stdio(bed.toolcrib, "soak-stdio", *program)
        monitor = ResourceMonitor(bed, seconds)
        asyncio.run(_generate_load(bed, seconds, states, monitor))
        for slug in ("soak-http", "soak-stdio"):
            remove(bed.toolcrib, slug)
    figures = monitor.figures()
    unexpected = {state: count for state, count in states.items() if state not in EXPECTED}
    row.procedure = (
        f"{states.total():,} calls of short sessions at about 50/s, 2% with faults, "
        "a sync per minute"
    )
    row.figures = {**figures, "states": dict(states)}
    row.check_equal("unexpected states", unexpected, {})
    if size == "full":
        row.check_at_most("memory growth", figures["rss_mb_per_minute"], 1, " MB/min")
    first, last = figures["descriptors"]
    # Temporary connections have more weight in a short run.
    row.check_at_most(
        "additional file descriptors", last - first, 5 if size == "full" else 15, timed=False
    )
    return row


EXPECTED = ("succeeded", "timed_out", "refused", "disconnected")


async def _generate_load(
    bed: Bed, seconds: float, states: "Counter[str]", monitor: ResourceMonitor
) -> None:
    chance = random.Random(23)  # noqa: S311 - the same in every run
    ends = time.monotonic() + seconds
    slugs = ("soak-http", "soak-stdio")

    async with Callers(bed.agent) as callers:

        async def one(at: int) -> None:
            """Run a short session of ten calls."""
            slug = chance.choice(slugs)
            opened = await callers.request_api("POST", "/sessions", {"groups": [f"mcp:{slug}"]})
            path = f"/sessions/{opened.json['id']}/call"
            for number in range(10):
                states[await _call(callers, path, number, chance)] += 1
                await asyncio.sleep(0.1)
            await callers.request_api("POST", f"/sessions/{opened.json['id']}/close", {})

        async def sync() -> None:
            while True:
                await asyncio.sleep(min(60.0, seconds / 4))
                for slug in slugs:
                    await asyncio.to_thread(bed.toolcrib.api, "POST", f"/servers/{slug}/sync")

        syncing = asyncio.create_task(sync())
        await _run_monitored(monitor, repeat_until(lambda: time.monotonic() > ends, 6, one))
        syncing.cancel()
        await asyncio.gather(syncing, return_exceptions=True)


async def _call(callers: Callers, path: str, number: int, chance: random.Random) -> str:
    fault = chance.random()
    body: dict[str, Any] = {"tool_name": "stamp", "arguments": {"paper": str(number)}}
    if fault < 0.01:
        slow = {"name": "slow", "seconds": 30}
        body = {"tool_name": "wait", "arguments": slow, "timeout": 0.3}
    elif fault < 0.015:
        body["arguments"] = {"sheet": 1}
    elif fault < 0.02:
        body = {"tool_name": "wait", "arguments": {"name": "left", "seconds": 30}}
        try:
            async with asyncio.timeout(0.2):
                await callers.request_api("POST", path, body)
        except TimeoutError:
            return "disconnected"
    return (await callers.request_api("POST", path, body)).state
