"""Hung servers (R3) and disconnecting callers (R26) must not affect other calls."""

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
    Response,
    Row,
    Upstream,
    latency_ms,
    percentile,
    register,
    remove,
    repeat_until,
    running_upstream,
    send_at_rate,
)
from tests.support.agents import Session
from tests.support.servers import call_upstream
from tests.support.waiting import wait_for

DISCONNECTED_STATES = {"succeeded", "unknown", "cancelled"}  # of calls whose caller may disconnect
A_RATE, B_RATE = 50, 100
SLOTS, QUEUED = 8, 16  # defaults of a server


def hung_server(bed: Bed, size: str) -> Row:
    """R3: one server hangs under load; calls to another server must not be affected."""
    hang, deadline = {"tiny": (2.0, 1.0), "short": (10.0, 2.0), "full": (30.0, 2.0)}[size]
    rates = (10, 5) if size == "tiny" else (A_RATE, B_RATE)
    row = Row("R3", f"server hung for {hang:g} s at {rates[0]} calls/s")
    with (
        running_upstream("counting", "--journal", str(bed.folder / "hung")) as a,
        running_upstream("counting", "--journal", str(bed.folder / "well")) as b,
    ):
        register(bed.toolcrib, "hung", url=a.url)
        register(bed.toolcrib, "well", url=b.url)
        sessions = {slug: bed.session(slug) for slug in ("hung", "well")}
        phases = asyncio.run(_phases(bed, sessions, a, hang, deadline, rates))
        recovered = True
        try:
            wait_for(lambda: _call_succeeds(sessions["hung"]), 60)
        except AssertionError:
            recovered = False
        remove(bed.toolcrib, "hung")
        remove(bed.toolcrib, "well")
    before, during, after = phases
    without = [response.seconds for phase in (before, after) for response in phase["well"]]
    within = [response.seconds for response in during["well"]]
    hung = during["hung"]
    states = Counter(response.state for response in hung)
    ratio = percentile(within, 99) / percentile(without, 99)
    row.procedure = (
        f"SIGSTOP to one server for {hang:g} s under {rates[0]} calls/s with a deadline of "
        f"{deadline:g} s; another at {rates[1]}/s, compared with the same load before and after"
    )
    row.figures = {
        "well_without_ms": latency_ms(without),
        "well_with_ms": latency_ms(within),
        "p99_with_÷_without": round(ratio, 2),
        "hung_states": dict(states),
        "hung_slowest_s": round(max(response.seconds for response in hung), 2),
    }
    errors = {
        when: dict(
            Counter(response.state for response in phase["well"] if response.state != "succeeded")
        )
        for when, phase in (("before", before), ("during", during), ("after", after))
    }
    row.figures["errors_of_other_server"] = errors
    row.check_equal(
        "errors of the other server", sum(sum(counts.values()) for counts in errors.values())
    )
    row.check_positive("calls of the hung server timed out", states["timed_out"])
    unexpected = set(states) - {"timed_out", "busy", "timeout", "failed"}
    row.check_equal("unexpected states of calls to the hung server", len(unexpected))
    row.check_equal("calls to the hung server without a response", states["broken"])
    row.check_equal("works again afterwards", recovered, True)
    late = max(response.seconds for response in hung) - deadline
    row.check_at_most("slowest response after its deadline", late, 0.5, " s")
    row.check_at_most("p99 with ÷ without", ratio, 1.6)
    return row


def _call_succeeds(session: Session) -> bool:
    response = session.post_call("stamp", {"paper": "again"}, timeout=5)
    return response.status == 200 and response.json["state"] == "succeeded"


async def _phases(
    bed: Bed,
    sessions: dict[str, Session],
    server: Upstream,
    hang: float,
    deadline: float,
    rates: tuple[int, int],
) -> list[dict[str, list[Response]]]:
    """Generate the same load before, during and after the hang."""
    async with Callers(bed.agent) as callers:

        def calls(slug: str, rate: float, seconds: float) -> Awaitable[list[Response]]:
            limit = deadline if slug == "hung" else None
            return send_at_rate(
                rate,
                seconds,
                lambda number: callers.call(
                    sessions[slug], "stamp", {"paper": str(number)}, timeout=limit
                ),
            )

        async def phase(seconds: float) -> dict[str, list[Response]]:
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


# --- Disconnecting callers ------------------------------------------------------------------------


def disconnecting_callers(bed: Bed, size: str) -> Row:
    """R26: disconnect at random moments; every concurrency slot must be released."""
    cancels = {"tiny": 60, "short": 200, "full": 1000}[size]
    row = Row("R26", f"{cancels:,} callers disconnect at random moments")
    journal = bed.folder / "left"
    with running_upstream("counting", "--journal", str(journal)) as server:
        register(bed.toolcrib, "left", url=server.url)
        session = bed.session("left")
        usual, answered = asyncio.run(_disconnect(bed, session, cancels))
        # Each call must end by itself, long before its deadline of 60 s.
        with suppress(AssertionError):
            wait_for(lambda: not _count_open(bed, session), 30)
        left_open = _count_open(bed, session)
        rows = bed.calls(session)
        states = Counter(call["state"] for call in rows)
        received = _received_calls(journal)
        # Measured from outside: exactly SLOTS calls reach the server, the others wait.
        free, refused = _count_slots(bed, session, journal, server.url)
        remove(bed.toolcrib, "left")
    row.procedure = (
        f"12 concurrent callers that disconnect at a random moment of the call (about "
        f"{1.5 * usual:.2g} s), until {cancels:,} did; then {SLOTS + QUEUED + 2} concurrent calls "
        "to count slots"
    )
    row.figures = {
        "answered_before_disconnect": answered,
        "states": dict(states),
        "slots_after": free,
    }
    row.check_positive("calls disconnected after they were sent", states["unknown"])
    by_state = {
        state: {
            json.loads(call["arguments"]).get("name") for call in rows if call["state"] == state
        }
        for state in states
    }
    row.check_equal(
        "cancelled, but received by the server", len(by_state.get("cancelled", set()) & received)
    )
    row.check_equal("unexpected states", sorted(set(states) - DISCONNECTED_STATES), [])
    row.check_equal("rows left open", left_open)
    row.check_equal("slots free afterwards", free, SLOTS)
    row.check_equal("calls rejected beyond the queue", refused, 2)
    return row


def _count_open(bed: Bed, session: Session) -> int:
    return sum(call["state"] in ("accepted", "sent") for call in bed.calls(session))


async def _disconnect(bed: Bed, session: Session, cancels: int) -> tuple[float, int]:
    """Call until `cancels` callers disconnected; return the usual duration and the rest."""
    chance = random.Random(26)  # noqa: S311 - moments, not secrets
    answered = disconnected = number = 0
    async with Callers(bed.agent) as callers:
        calls = [callers.call(session, "stamp", {"paper": str(at)}) for at in range(12)]
        usual = percentile([response.seconds for response in await asyncio.gather(*calls)], 50)

        async def one(at: int) -> None:
            nonlocal answered, disconnected, number
            number += 1
            seconds = chance.random() * usual
            arguments = {"name": f"left-{number}", "seconds": seconds}
            try:
                async with asyncio.timeout(chance.random() * (usual + seconds)):
                    await callers.call(session, "wait", arguments)
                answered += 1
            except TimeoutError:
                disconnected += 1

        # Callers with a call in flight may disconnect after the last one.
        await repeat_until(lambda: disconnected >= cancels, 12, one)
    return usual, answered


def _received_calls(journal: Path) -> set[str]:
    """Return the names of the calls that reached the server."""
    lines = journal.read_text().splitlines()
    return {line.removeprefix("wait ") for line in lines if line.startswith("wait ")}


def _count_slots(bed: Bed, session: Session, journal: Path, url: str) -> tuple[int, int]:
    """Send more calls than there are slots; return how many reach the server and are rejected."""

    def arrived() -> int:
        return sum(line.startswith("queue turn-") for line in journal.read_text().splitlines())

    with ThreadPoolExecutor(SLOTS + QUEUED) as callers:
        rows = len(bed.calls(session))
        futures = [
            callers.submit(session.post_call, "queue", {"name": f"turn-{number}"}, timeout=120)
            for number in range(SLOTS + QUEUED)
        ]
        wait_for(
            lambda: len(bed.calls(session)) - rows == SLOTS + QUEUED,
            60,
            what="all calls are accepted",
        )
        with suppress(AssertionError):  # fewer if a slot was lost
            wait_for(lambda: arrived() >= SLOTS, 20)
        more = [session.post_call("queue", {"name": f"turn-{number}"}) for number in (98, 99)]
        free = arrived()
        call_upstream(url, "open_gate")  # type: ignore[no-untyped-call]
        for future in futures:
            future.result(130)
    return free, sum(response.status == 503 for response in more)
