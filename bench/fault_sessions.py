"""Many sessions at once for long (R21), a model of sessions (R22), and what grows meanwhile."""

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
    Row,
    Told,
    descriptors,
    memory,
    milliseconds,
    percentile,
    register,
    register_program,
    remove,
    until,
    upstream,
)
from tests.support.agents import Agent
from tests.support.installation import clean_environment

QUERIES = (
    "create an issue", "list pull requests by label", "send a message to a channel",
    "search files in a folder", "export a report as csv", "restart a pod", "refund a payment",
)  # fmt: skip
LEAST = 150  # acts, however slow the machine
WARM = 0.2  # of the time, before growth is measured


def slope(points: list[tuple[float, float]]) -> float:
    """The least-squares slope of (x, y)."""
    if len(points) < 2:
        return 0.0
    x_mean = sum(x for x, _ in points) / len(points)
    y_mean = sum(y for _, y in points) / len(points)
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / spread if spread else 0.0


class Watch:
    """Memory and descriptors of the web process, looked at every so often."""

    def __init__(self, bed: Bed, seconds: float) -> None:
        self.bed, self.every = bed, max(0.2, seconds / 200)
        self.points: list[tuple[float, float, int]] = []

    async def run(self) -> None:
        began = time.monotonic()
        while True:
            pid = self.bed.pid
            self.points.append((time.monotonic() - began, memory(pid), descriptors(pid)))
            await asyncio.sleep(self.every)

    def figures(self) -> dict[str, Any]:
        kept = [point for point in self.points if point[0] >= WARM * self.points[-1][0]]
        return {
            "rss_mb": [round(kept[0][1], 1), round(kept[-1][1], 1)],
            "rss_mb_a_minute": round(60 * slope([(at, rss) for at, rss, _ in kept]), 2),
            "descriptors": [kept[0][2], kept[-1][2]],
        }


async def _watched(watch: Watch, work: Any) -> None:
    looking = asyncio.create_task(watch.run())
    try:
        await work
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


# --- R21 ------------------------------------------------------------------------------------------


class Held:
    """One session as its agent holds it: what it loaded so far."""

    def __init__(self, session_id: str) -> None:
        self.id, self.path = session_id, f"/sessions/{session_id}"
        self.tools: list[dict[str, Any]] = []


def many_sessions(bed: Bed, size: str) -> Row:
    """R21: all of them open at once, loading, searching and calling in turn."""
    number, seconds, groups, tools = {
        "tiny": (40, 0.0, 3, 24), "short": (200, 15.0, 12, 200), "full": (1000, 600.0, 33, 600),
    }[size]  # fmt: skip
    row = Row("R21", f"{number:,} open sessions that load, search and call")
    options = argparse.Namespace(folder=None, groups=groups, tools=tools, most=None)
    with fleet.running(options) as mcp_json:
        file = bed.folder / "fleet.json"
        file.write_text(json.dumps(mcp_json))
        done = bed.toolcrib.command("import_servers", str(file), "--wait", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        slugs = list(mcp_json["mcpServers"])
        for slug in slugs:  # the callers' number is what is measured, not the turns at a server
            bed.toolcrib.api("PATCH", f"/servers/{slug}", {"concurrency": 32})
        told: dict[str, list[Told]] = {"open": [], "load": [], "search": [], "call": []}
        watch = Watch(bed, seconds)
        mixed: list[str] = []
        asyncio.run(_all_of_them(bed.agent, slugs, number, seconds, told, watch, mixed))
        for slug in slugs:
            remove(bed.toolcrib, slug)
    bad = Counter(
        f"{act} {found.state}"
        for act, answers in told.items()
        for found in answers
        if found.status not in (200, 201) or found.json.get("is_error") or found.json.get("error")
    )
    total = sum(len(answers) for act, answers in told.items() if act != "open")
    seconds = watch.points[-1][0] or 1.0
    row.done = (
        f"{tools} tools in {groups} groups; {total:,} acts in {seconds:.0f} s by 8 callers, who "
        "take the sessions in turn"
    )
    row.figures = {
        "acts_a_second": round(total / seconds, 1),
        **{f"{act}_ms": milliseconds([found.seconds for found in of]) for act, of in told.items()},
        **watch.figures(),
        "errors": dict(bad),
    }
    for act in ("load", "search", "call"):
        row.some(f"acts of {act}", len(told[act]))
    row.exactly("errors", sum(bad.values()))
    row.exactly("answers with another session's words", len(mixed))
    searches = [found.seconds for found in told["search"]]
    row.at_most("p99 of a search", percentile(searches, 99) * 1000, 150, " ms")
    if size == "full":  # less says nothing about growth
        row.at_most("growth of memory", watch.figures()["rss_mb_a_minute"], 1, " MB/min")
    first, last = watch.figures()["descriptors"]
    row.at_most("descriptors more than at first", last - first, 20)
    return row


async def _all_of_them(
    agent: Agent,
    slugs: list[str],
    number: int,
    seconds: float,
    told: dict[str, list[Told]],
    watch: Watch,
    mixed: list[str],
) -> None:
    chance = random.Random(21)  # noqa: S311 - the same in every run
    async with Callers(agent) as callers:
        sessions: list[Held] = []

        async def open_one(at: int) -> None:
            answer = await callers.ask("POST", "/sessions", {"mode": "deferred"})
            told["open"].append(answer)
            if answer.status == 201:
                sessions.append(Held(answer.json["id"]))

        await until(lambda: len(told["open"]) >= number, 8, open_one)
        ends = time.monotonic() + seconds
        turn = 0

        async def act(at: int) -> None:
            nonlocal turn
            turn += 1
            session = sessions[turn % len(sessions)]
            kind = ("load", "search", "call")[chance.randrange(3)]
            if kind == "call" and not session.tools:
                kind = "load"
            answer = await _act(callers, session, kind, slugs, chance, mixed)
            told[kind].append(answer)

        await _watched(watch, until(lambda: time.monotonic() > ends and turn >= LEAST, 8, act))


async def _act(
    callers: Callers,
    session: Held,
    kind: str,
    slugs: list[str],
    chance: random.Random,
    mixed: list[str],
) -> Told:
    if kind == "search":
        return await callers.ask(
            "POST", f"{session.path}/search", {"query": chance.choice(QUERIES)}
        )
    if kind == "load":
        group = {"group_id": f"mcp:{chance.choice(slugs)}"}
        answer = await callers.ask("POST", f"{session.path}/load", group)
        schemas = answer.json.get("schemas") or []
        session.tools += [tool for tool in schemas if tool["parameters"].get("required")]
        return answer
    tool = chance.choice(session.tools)
    mark = f"{session.id} {chance.random()}"
    arguments = fleet.arguments_for(tool["parameters"])
    arguments[tool["parameters"]["required"][0]] = mark
    call = {"tool_name": tool["name"], "arguments": arguments}
    answer = await callers.ask("POST", f"{session.path}/call", call)
    if answer.status == 200 and mark.encode() not in answer.body:
        mixed.append(mark)
    return answer


# --- R22 ------------------------------------------------------------------------------------------


def model_of_sessions(bed: Bed | None, size: str) -> Row:
    """R22: the stateful model of the tests, for as many steps as asked for."""
    steps = {"tiny": 200, "short": 500, "full": 10_000}[size]
    row = Row("R22", f"a model of sessions over {steps:,} steps")
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider",
         "tests/sessions_app/test_session_model.py", "--timeout", "7200"],
        cwd=ROOT,
        env=clean_environment({"MODEL_STEPS": str(steps)}),
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    said = re.search(r"steps of the model: (\d+)", done.stdout)
    row.done = "hypothesis opens, loads, searches, forks, resumes, calls, edits and syncs"
    row.figures = {
        "steps": int(said[1]) if said else 0,
        "seconds": round(time.monotonic() - began, 1),
    }
    if done.returncode:
        row.figures["said"] = done.stdout[-2000:]
    row.exactly("disagreements", int(done.returncode != 0))
    row.at_most("steps short of those wanted", steps - row.figures["steps"], 0, timed=False)
    return row


# --- What grows -----------------------------------------------------------------------------------


def soak(bed: Bed, size: str) -> Row:
    """R23: ordinary work with a few faults in it, and what grows meanwhile."""
    seconds = {"tiny": 4.0, "short": 20.0, "full": 600.0}[size]
    row = Row("R23", f"{seconds:g} s of ordinary work with some faults")
    told: Counter[str] = Counter()
    with upstream("counting", "--journal", str(bed.folder / "soak-http")) as server:
        register(bed.toolcrib, "soak-http", url=server.url)
        program = ("counting", "--journal", str(bed.folder / "soak-stdio"))
        register_program(bed.toolcrib, "soak-stdio", *program)
        watch = Watch(bed, seconds)
        asyncio.run(_work(bed, seconds, told, watch))
        for slug in ("soak-http", "soak-stdio"):
            remove(bed.toolcrib, slug)
    found = watch.figures()
    odd = {state: count for state, count in told.items() if state not in EXPECTED}
    row.done = (
        f"{told.total():,} sessions' calls at about 50/s, 2 % of them faulty, a sync a minute"
    )
    row.figures = {**found, "ended": dict(told)}
    row.exactly("ends that were not asked for", odd, {})
    if size == "full":
        row.at_most("growth of memory", found["rss_mb_a_minute"], 1, " MB/min")
    first, last = found["descriptors"]
    # Connections that come and go weigh more in a short run.
    row.at_most(
        "descriptors more than at first", last - first, 5 if size == "full" else 15, timed=False
    )
    return row


EXPECTED = ("succeeded", "timed_out", "refused", "left")


async def _work(bed: Bed, seconds: float, told: "Counter[str]", watch: Watch) -> None:
    chance = random.Random(23)  # noqa: S311 - the same in every run
    ends = time.monotonic() + seconds
    slugs = ("soak-http", "soak-stdio")

    async with Callers(bed.agent) as callers:

        async def one(at: int) -> None:
            """A short session of ten calls."""
            slug = chance.choice(slugs)
            opened = await callers.ask("POST", "/sessions", {"groups": [f"mcp:{slug}"]})
            path = f"/sessions/{opened.json['id']}/call"
            for number in range(10):
                told[await _call(callers, path, number, chance)] += 1
                await asyncio.sleep(0.1)
            await callers.ask("POST", f"/sessions/{opened.json['id']}/close", {})

        async def sync() -> None:
            while True:
                await asyncio.sleep(min(60.0, seconds / 4))
                for slug in slugs:
                    await asyncio.to_thread(bed.toolcrib.api, "POST", f"/servers/{slug}/sync")

        syncing = asyncio.create_task(sync())
        await _watched(watch, until(lambda: time.monotonic() > ends, 6, one))
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
                await callers.ask("POST", path, body)
        except TimeoutError:
            return "left"
    return (await callers.ask("POST", path, body)).state
