"""Servers that hang (R3) and callers who leave (R26): nobody else may notice."""

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from bench.fault_bed import (
    Bed,
    Callers,
    Row,
    Told,
    Upstream,
    at_rate,
    milliseconds,
    percentile,
    register,
    remove,
    until,
    upstream,
)
from tests.support.agents import Session
from tests.support.servers import call_upstream
from tests.support.waiting import wait_for

LEFT = {"succeeded", "unknown", "cancelled"}  # how a call may end whose caller may leave
A_RATE, B_RATE = 50, 100
TURNS, QUEUED = 8, 16  # of one server, by default


def hung_server(bed: Bed, size: str) -> Row:
    """R3: one server stops answering under load; another's callers must not notice."""
    hang, deadline = {"tiny": (2.0, 1.0), "short": (10.0, 2.0), "full": (30.0, 2.0)}[size]
    rates = (10, 5) if size == "tiny" else (A_RATE, B_RATE)
    row = Row("R3", f"a server hung for {hang:g} s at {rates[0]} calls/s")
    with (
        upstream("counting", "--journal", str(bed.folder / "hung")) as a,
        upstream("counting", "--journal", str(bed.folder / "well")) as b,
    ):
        register(bed.toolcrib, "hung", url=a.url)
        register(bed.toolcrib, "well", url=b.url)
        sessions = {slug: bed.session(slug) for slug in ("hung", "well")}
        phases = asyncio.run(_phases(bed, sessions, a, hang, deadline, rates))
        back = True
        try:
            wait_for(lambda: _works(sessions["hung"]), 60)
        except AssertionError:
            back = False
        remove(bed.toolcrib, "hung")
        remove(bed.toolcrib, "well")
    before, during, after = phases
    without = [told.seconds for phase in (before, after) for told in phase["well"]]
    within = [told.seconds for told in during["well"]]
    hung = during["hung"]
    ended = Counter(told.state for told in hung)
    ratio = percentile(within, 99) / percentile(without, 99)
    row.done = (
        f"SIGSTOP to one server for {hang:g} s under {rates[0]} calls/s with a deadline of "
        f"{deadline:g} s; another at {rates[1]}/s, compared with the same load before and after"
    )
    row.figures = {
        "well_without_ms": milliseconds(without),
        "well_with_ms": milliseconds(within),
        "p99_with_÷_without": round(ratio, 2),
        "hung_ended": dict(ended),
        "hung_slowest_s": round(max(told.seconds for told in hung), 2),
    }
    errors = {
        when: dict(Counter(told.state for told in phase["well"] if told.state != "succeeded"))
        for when, phase in (("before", before), ("during", during), ("after", after))
    }
    row.figures["errors_of_the_other"] = errors
    row.exactly("errors of the other server", sum(sum(of.values()) for of in errors.values()))
    row.some("calls of the hung server timed out", ended["timed_out"])
    odd = set(ended) - {"timed_out", "busy", "timeout", "failed"}
    row.exactly("other ends of the hung one's calls", len(odd))
    row.exactly("hung one's callers left without an answer", ended["broken"])
    row.exactly("works again afterwards", back, True)
    late = max(told.seconds for told in hung) - deadline
    row.at_most("slowest answer past its deadline", late, 0.5, " s")
    row.at_most("p99 with ÷ without", ratio, 1.6)
    return row


def _works(session: Session) -> bool:
    answer = session.post_call("stamp", {"paper": "again"}, timeout=5)
    return answer.status == 200 and answer.json["state"] == "succeeded"


async def _phases(
    bed: Bed,
    sessions: dict[str, Session],
    server: Upstream,
    hang: float,
    deadline: float,
    rates: tuple[int, int],
) -> list[dict[str, list[Told]]]:
    """The same load before, while and after the server hangs."""
    async with Callers(bed.agent) as callers:

        def calls(slug: str, rate: float, seconds: float) -> Awaitable[list[Told]]:
            limit = deadline if slug == "hung" else None
            return at_rate(
                rate,
                seconds,
                lambda number: callers.call(
                    sessions[slug], "stamp", {"paper": str(number)}, timeout=limit
                ),
            )

        async def phase(seconds: float) -> dict[str, list[Told]]:
            hung, well = await asyncio.gather(
                calls("hung", rates[0], seconds), calls("well", rates[1], seconds)
            )
            return {"hung": hung, "well": well}

        await phase(1.0)  # connections and caches
        before = await phase(hang / 2)
        server.signal(signal.SIGSTOP)
        try:
            during = await phase(hang)
        finally:
            server.signal(signal.SIGCONT)
        await asyncio.sleep(deadline)
        return [before, during, await phase(hang / 2)]


# --- Callers who leave ----------------------------------------------------------------------------


def callers_who_leave(bed: Bed, size: str) -> Row:
    """R26: cancel calls at random moments; every turn at the server must come back."""
    cancels = {"tiny": 60, "short": 200, "full": 1000}[size]
    row = Row("R26", f"{cancels:,} callers who leave at random moments")
    journal = bed.folder / "left"
    with upstream("counting", "--journal", str(journal)) as server:
        register(bed.toolcrib, "left", url=server.url)
        session = bed.session("left")
        usual, answered = asyncio.run(_leave(bed, session, cancels))
        # Each must come to an end of its own, long before the deadline of 60 s.
        with suppress(AssertionError):
            wait_for(lambda: not _open(bed, session), 30)
        left_open = _open(bed, session)
        rows = bed.calls(session)
        states = Counter(found["state"] for found in rows)
        begun = _begun(journal)
        # The gauge, read from outside: exactly as many as before get a turn, the rest of them wait.
        free, refused = _turns(bed, session, journal, server.url)
        remove(bed.toolcrib, "left")
    row.done = (
        f"12 callers at once who cut their connection at a random moment of the call (about "
        f"{1.5 * usual:.2g} s), until {cancels:,} did; then {TURNS + QUEUED + 2} calls at once to "
        "count turns"
    )
    row.figures = {"answered_first": answered, "states": dict(states), "turns_after": free}
    row.some("calls cut off after they were sent", states["unknown"])
    of_state = {
        state: {json.loads(one["arguments"]).get("name") for one in rows if one["state"] == state}
        for state in states
    }
    row.exactly("cancelled, but the server began it", len(of_state.get("cancelled", set()) & begun))
    row.exactly("other ends of calls", sorted(set(states) - LEFT), [])
    row.exactly("rows left open", left_open)
    row.exactly("turns free afterwards", free, TURNS)
    row.exactly("calls refused beyond those that may wait", refused, 2)
    return row


def _open(bed: Bed, session: Session) -> int:
    return sum(found["state"] in ("accepted", "sent") for found in bed.calls(session))


async def _leave(bed: Bed, session: Session, cancels: int) -> tuple[float, int]:
    """Call until so many callers left; return how long such a call takes, and how many stayed."""
    chance = random.Random(26)  # noqa: S311 - moments, not secrets
    answered = left = number = 0
    async with Callers(bed.agent) as callers:
        papers = [callers.call(session, "stamp", {"paper": str(at)}) for at in range(12)]
        usual = percentile([told.seconds for told in await asyncio.gather(*papers)], 50)

        async def one(at: int) -> None:
            nonlocal answered, left, number
            number += 1
            seconds = chance.random() * usual
            arguments = {"name": f"left-{number}", "seconds": seconds}
            try:
                async with asyncio.timeout(chance.random() * (usual + seconds)):
                    await callers.call(session, "wait", arguments)
                answered += 1
            except TimeoutError:
                left += 1

        # Those under way when the last one left may leave, too.
        await until(lambda: left >= cancels, 12, one)
    return usual, answered


def _begun(journal: Path) -> set[str]:
    """The names of the calls that reached the server."""
    lines = journal.read_text().splitlines()
    return {line.removeprefix("wait ") for line in lines if line.startswith("wait ")}


def _turns(bed: Bed, session: Session, journal: Path, url: str) -> tuple[int, int]:
    """Fill the server: how many calls reach it at once, and how many are refused."""

    def arrived() -> int:
        return sum(line.startswith("queue turn-") for line in journal.read_text().splitlines())

    with ThreadPoolExecutor(TURNS + QUEUED) as callers:
        rows = len(bed.calls(session))
        asked = [
            callers.submit(session.post_call, "queue", {"name": f"turn-{number}"}, timeout=120)
            for number in range(TURNS + QUEUED)
        ]
        wait_for(lambda: len(bed.calls(session)) - rows == TURNS + QUEUED, 60, what="all are there")
        with suppress(AssertionError):  # fewer, where a turn was lost
            wait_for(lambda: arrived() >= TURNS, 20)
        more = [session.post_call("queue", {"name": f"turn-{number}"}) for number in (98, 99)]
        free = arrived()
        call_upstream(url, "open_gate")  # type: ignore[no-untyped-call]
        for future in asked:
            future.result(130)
    return free, sum(answer.status == 503 for answer in more)
