"""Faults by `kill -9`: Toolcrib during calls (R1), and with running stdio servers (R7)."""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.fault_bed import (
    Bed,
    Callers,
    Response,
    Row,
    count_descriptors,
    percentile,
    register,
    register_stdio,
    remove,
    running_upstream,
    start_time,
    zombies,
)
from bench.fault_starter import Starter
from tests.support.agents import Session
from tests.support.waiting import wait_for

IN_FLIGHT = "select call_id from sessions_app_call where state in ('accepted', 'sent')"
CALLERS = 8
FULL_START_EVERY = 10  # the other starts fork a preloaded process
MAX_DELAY = 0.4  # seconds of calls before the kill
RECOVERY_LIMIT = 30.0  # seconds from the restart until no call is in flight
FINAL_STATES = ("unknown", "succeeded", "failed", "timed_out", "cancelled", "refused")


@dataclass
class SentCalls:
    """Calls by idempotency key: tool and arguments, and all responses."""

    requests: dict[str, tuple[str, dict[str, object]]] = field(default_factory=dict)
    responses: dict[str, list[Response]] = field(default_factory=dict)

    def record(self, key: str, response: Response) -> None:
        self.responses.setdefault(key, []).append(response)


def killed_during_calls(bed: Bed, size: str) -> Row:
    """R1: kill at random moments of dispatch, then retry every broken call."""
    rounds = {"tiny": 2, "short": 10, "full": 500}[size]
    row = Row("R1", "kill -9 at random moments of dispatch")
    journal = bed.folder / "executions"
    chance = random.Random(7)  # noqa: S311 - moments, not secrets
    sent = SentCalls()
    caught: set[str] = set()
    until_certain: list[float] = []
    after_ready: list[float] = []
    with (
        running_upstream("counting", "--journal", str(journal)) as server,
        Starter(bed.toolcrib) as quick,
    ):
        register(bed.toolcrib, "executions", url=server.url)
        session = bed.session("executions")
        for number in range(rounds):
            broken = asyncio.run(_calls_until_killed(bed, session, sent, number, chance))
            bed.toolcrib.kill()  # waits for the exit
            caught |= {call_id for (call_id,) in bed.query(IN_FLIGHT)}
            started = time.monotonic()
            start = bed.toolcrib.start if number % FULL_START_EVERY == 0 else quick.start
            start()
            ready = time.monotonic()
            wait_for(lambda: not bed.query(IN_FLIGHT), 60, what="no call is in flight")
            until_certain.append(time.monotonic() - started)
            after_ready.append(time.monotonic() - ready)
            asyncio.run(_retry_calls(bed, session, sent, broken))
        remove(bed.toolcrib, "executions")
    row.procedure = (
        f"{rounds} kills under {CALLERS} callers, {len(sent.requests):,} keyed calls, "
        f"{len(caught):,} in flight when killed; every broken call retried with its key"
    )
    row.figures = {
        "rounds": rounds,
        "calls": len(sent.requests),
        "in_flight_when_killed": len(caught),
        "quick_starts": quick.starts,
        "recovery_seconds_p50": round(percentile(until_certain, 50), 2),
        "recovery_seconds_max": round(max(until_certain), 2),
        "recovery_after_ready_seconds_max": round(max(after_ready), 2),
    }
    row.check_positive("calls in flight when killed", len(caught))
    states = Counter(call["state"] for call in bed.calls(session) if call["call_id"] in caught)
    row.check_equal(
        "in flight when killed, now in another state than unknown",
        len(caught) - states["unknown"],
    )
    _compare(row, bed, session, sent, journal)
    row.check_at_most("restart until no call in flight", max(until_certain), RECOVERY_LIMIT, " s")
    return row


async def _calls_until_killed(
    bed: Bed, session: Session, sent: SentCalls, number: int, chance: random.Random
) -> list[str]:
    """Call until the process is killed; return the keys without a response."""
    broken: list[str] = []
    flowing = asyncio.Event()
    async with Callers(bed.agent) as callers:

        async def caller(at: int) -> None:
            for turn in range(100_000):
                key = f"round-{number}-{at}-{turn}"
                if at == 0:  # in flight when the kill comes
                    request: tuple[str, dict[str, object]] = ("wait", {"name": key, "seconds": 1})
                elif chance.random() < 0.5:
                    request = ("stamp", {"paper": key})
                else:
                    request = ("wait", {"name": key, "seconds": round(chance.random() * 0.05, 4)})
                sent.requests[key] = request
                response = await callers.call(session, *request, key=key)
                sent.record(key, response)
                if response.status == 200:
                    flowing.set()
                if not response.status:
                    broken.append(key)
                    return

        calling = [asyncio.create_task(caller(at)) for at in range(CALLERS)]
        # Mostly after the first response; in a long run sometimes before it.
        if number < 2 or chance.random() < 0.8:
            with suppress(TimeoutError):
                await asyncio.wait_for(flowing.wait(), 20)
        await asyncio.sleep(chance.random() * MAX_DELAY)
        os.kill(bed.pid, signal.SIGKILL)
        await asyncio.gather(*calling)
    return broken


async def _retry_calls(bed: Bed, session: Session, sent: SentCalls, keys: list[str]) -> None:
    """Repeat each call with the same key until there is a response, as a careful client does."""
    async with Callers(bed.agent) as callers:

        async def retry(key: str) -> None:
            for _ in range(40):
                response = await callers.call(session, *sent.requests[key], key=key)
                sent.record(key, response)
                if response.status == 200:
                    return
                await asyncio.sleep(0.25)

        await asyncio.gather(*map(retry, keys))


def _compare(row: Row, bed: Bed, session: Session, sent: SentCalls, journal: Path) -> None:
    """Compare the responses, the ledger and the journal of the server."""
    ran = Counter(
        line.partition(" ")[2]
        for line in journal.read_text().splitlines()
        if line.startswith(("stamp ", "wait "))
    )
    rows = bed.calls(session)
    by_id = {call["call_id"]: call for call in rows}
    states_by_key: dict[str, list[str]] = {}
    for call in rows:
        arguments = json.loads(call["arguments"])
        key = arguments.get("paper") or arguments.get("name")
        states_by_key.setdefault(key, []).append(call["state"])
    accepted = [
        response
        for responses in sent.responses.values()
        for response in responses
        if response.status == 200
    ]
    lost = [response for response in accepted if response.json["call_id"] not in by_id]
    different = [
        response
        for response in accepted
        if response.json["call_id"] in by_id
        and response.json["state"] != by_id[response.json["call_id"]]["state"]
    ]
    unanswered = [key for key, responses in sent.responses.items() if responses[-1].status != 200]
    # A row in one of these states was not sent, so the server must not have executed it.
    sent_rows = {
        key: [state for state in states if state not in ("refused", "failed", "cancelled")]
        for key, states in states_by_key.items()
    }
    row.check_equal("accepted calls without a row", len(lost))
    row.check_equal("responses that differ from the ledger", len(different))
    row.check_equal(
        "executions without exactly one row", sum(len(sent_rows.get(k, [])) != 1 for k in ran)
    )
    row.check_equal("keys executed twice", sum(count > 1 for count in ran.values()))
    row.check_equal("reported as succeeded but not executed", sum(
        responses[-1].state == "succeeded" and not ran[key]
        for key, responses in sent.responses.items()
    ))  # fmt: skip
    row.check_equal(
        "rows in no final state", sum(call["state"] not in FINAL_STATES for call in rows)
    )
    row.check_equal("calls without a response after retries", len(unanswered))


# --- stdio servers --------------------------------------------------------------------------------


def orphaned_processes(bed: Bed, size: str) -> Row:
    """R7: stdio servers that ignore EOF and SIGTERM, connected and closed many times."""
    closes, kills = {"tiny": (4, 1), "short": (12, 3), "full": (150, 50)}[size]
    row = Row("R7", "stdio servers that ignore EOF and SIGTERM, closed or orphaned")
    notes = bed.folder / "stubborn" / "pids"  # programs may not write beside the data folder
    notes.parent.mkdir(exist_ok=True)
    # One process per session, with the flags of the test of a single kill.
    register_stdio(
        bed.toolcrib, "stubborn", "raw_stdio",
        *("--do", "ignore_term", "--do", "spawn_grandchild", "--stay", "--note", str(notes)),
        isolation="per_session", connection_policy="on_demand",
    )  # fmt: skip
    processes = ServerProcesses(bed, notes)
    # Warm up, so that each thread has its database connection.
    processes.open_and_close(4 if size == "tiny" else 16)
    wait_for(lambda: not processes.living(), 60, what="the first processes have ended")
    before = count_descriptors(bed.pid)
    processes.open_and_close(closes)
    slowest = processes.wait_until_ended(15)
    after = count_descriptors(bed.pid)
    alive = len(processes.living())
    unwaited = len(zombies({bed.pid}))
    with Starter(bed.toolcrib) as quick:
        for number in range(kills):
            processes.use([bed.session("stubborn") for _ in range(2)])
            bed.toolcrib.kill()
            slowest = max(slowest, processes.wait_until_ended(15))
            alive += len(processes.living())
            start = bed.toolcrib.start if number % FULL_START_EVERY == 0 else quick.start
            start()
    remove(bed.toolcrib, "stubborn")
    pids = processes.started()
    row.procedure = (
        f"{closes} sessions with their own stdio server closed, {kills} kills of Toolcrib with "
        f"2 stdio servers each; {len(pids)} server processes in total"
    )
    row.figures = {"closes": closes, "kills": kills, "processes": len(pids),
                   "descriptors_before": before, "descriptors_after": after,
                   "slowest_exit_seconds": round(slowest, 2)}  # fmt: skip
    row.check_positive("processes started", len(pids))
    row.check_equal("processes still alive after 15 s", alive)
    row.check_equal("zombies", unwaited)
    row.check_at_most("additional file descriptors", after - before, 5, timed=False)
    row.check_at_most("slowest exit of a server", slowest, 15, " s")
    return row


class ServerProcesses:
    """All processes of a stdio server: its programs, their children and supervisors."""

    def __init__(self, bed: Bed, notes: Path) -> None:
        self.bed, self.notes = bed, notes
        self.start_times: dict[int, str | None] = {}  # by pid

    def started(self) -> set[int]:
        """Return the pids that the servers wrote to the file, including their children."""
        return set(map(int, self.notes.read_text().split()))

    def use(self, sessions: list[Session]) -> None:
        """Call each session once, so that its server starts, and record the processes."""
        with ThreadPoolExecutor(4) as callers:
            for response in callers.map(lambda session: session.call("ping"), sessions):
                assert response["state"] == "succeeded", response
        for pid in (self.started() | set(self.bed.toolcrib.children())) - self.start_times.keys():
            self.start_times[pid] = start_time(pid)

    def open_and_close(self, number: int) -> None:
        for at in range(0, number, 4):
            sessions = [self.bed.session("stubborn") for _ in range(min(4, number - at))]
            self.use(sessions)
            with ThreadPoolExecutor(4) as callers:
                list(callers.map(lambda session: session.close(), sessions))

    def living(self) -> list[int]:
        return [
            pid
            for pid, started in self.start_times.items()
            if started and start_time(pid) == started
        ]

    def wait_until_ended(self, seconds: float) -> float:
        """Wait until all processes ended, at most `seconds`; return the seconds it took."""
        started = time.monotonic()
        while self.living() and time.monotonic() - started < seconds:
            time.sleep(0.05)
        return time.monotonic() - started
