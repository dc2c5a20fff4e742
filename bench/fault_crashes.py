"""`kill -9`: of Toolcrib in the middle of calls (R1), and around programs it runs (R7)."""

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
    Row,
    Told,
    born,
    descriptors,
    percentile,
    register,
    register_program,
    remove,
    upstream,
    zombies,
)
from bench.fault_starter import Starter
from tests.support.agents import Session
from tests.support.waiting import wait_for

IN_FLIGHT = "select call_id from sessions_app_call where state in ('accepted', 'sent')"
CALLERS = 8
USUAL = 10  # one start in so many is as usual, the others are quick
LATEST = 0.4  # seconds of calls before the kill, at most
WITHIN = 30.0  # seconds from the restart until nothing is in flight
CERTAIN = ("unknown", "succeeded", "failed", "timed_out", "cancelled", "refused")


@dataclass
class Sent:
    """Calls by their idempotency key: what was asked, and everything that was told."""

    asked: dict[str, tuple[str, dict[str, object]]] = field(default_factory=dict)
    told: dict[str, list[Told]] = field(default_factory=dict)

    def note(self, key: str, answer: Told) -> None:
        self.told.setdefault(key, []).append(answer)


def killed_during_calls(bed: Bed, size: str) -> Row:
    """R1: kill at random moments of dispatch, then ask for every broken call again."""
    rounds = {"tiny": 2, "short": 10, "full": 500}[size]
    row = Row("R1", "kill -9 at random moments of dispatch")
    journal = bed.folder / "executions"
    chance = random.Random(7)  # noqa: S311 - moments, not secrets
    sent = Sent()
    caught: set[str] = set()
    until_certain: list[float] = []
    after_ready: list[float] = []
    with (
        upstream("counting", "--journal", str(journal)) as server,
        Starter(bed.toolcrib) as quick,
    ):
        register(bed.toolcrib, "executions", url=server.url)
        session = bed.session("executions")
        for number in range(rounds):
            broken = asyncio.run(_calls_until_killed(bed, session, sent, number, chance))
            bed.toolcrib.kill()  # waits for its end
            caught |= {call_id for (call_id,) in bed.query(IN_FLIGHT)}
            began = time.monotonic()
            start = bed.toolcrib.start if number % USUAL == 0 else quick.start
            start()
            ready = time.monotonic()
            wait_for(lambda: not bed.query(IN_FLIGHT), 60, what="nothing is in flight")
            until_certain.append(time.monotonic() - began)
            after_ready.append(time.monotonic() - ready)
            asyncio.run(_ask_again(bed, session, sent, broken))
        remove(bed.toolcrib, "executions")
    row.done = (
        f"{rounds} kills under {CALLERS} callers, {len(sent.asked):,} keyed calls, "
        f"{len(caught):,} in flight when killed; every broken one asked again with its key"
    )
    row.figures = {
        "rounds": rounds,
        "calls": len(sent.asked),
        "in_flight_when_killed": len(caught),
        "quick_starts": quick.starts,
        "seconds_to_certainty_p50": round(percentile(until_certain, 50), 2),
        "seconds_to_certainty_max": round(max(until_certain), 2),
        "of_these_after_it_was_ready_max": round(max(after_ready), 2),
    }
    row.some("calls in flight when killed", len(caught))
    became = Counter(one["state"] for one in bed.calls(session) if one["call_id"] in caught)
    row.exactly("in flight when killed, now anything but unknown", len(caught) - became["unknown"])
    _judge(row, bed, session, sent, journal)
    row.at_most("restart to no call in flight", max(until_certain), WITHIN, " s")
    return row


async def _calls_until_killed(
    bed: Bed, session: Session, sent: Sent, number: int, chance: random.Random
) -> list[str]:
    """Call until the process is killed, and return the keys that have no answer."""
    broken: list[str] = []
    flowing = asyncio.Event()
    async with Callers(bed.agent) as callers:

        async def caller(at: int) -> None:
            for turn in range(100_000):
                key = f"round-{number}-{at}-{turn}"
                if at == 0:  # surely under way when the kill comes
                    asked: tuple[str, dict[str, object]] = ("wait", {"name": key, "seconds": 1})
                elif chance.random() < 0.5:
                    asked = ("stamp", {"paper": key})
                else:
                    asked = ("wait", {"name": key, "seconds": round(chance.random() * 0.05, 4)})
                sent.asked[key] = asked
                answer = await callers.call(session, *asked, key=key)
                sent.note(key, answer)
                if answer.status == 200:
                    flowing.set()
                if not answer.status:
                    broken.append(key)
                    return

        calling = [asyncio.create_task(caller(at)) for at in range(CALLERS)]
        # Mostly when calls flow; in a long run now and then before the first is answered.
        if number < 2 or chance.random() < 0.8:
            with suppress(TimeoutError):
                await asyncio.wait_for(flowing.wait(), 20)
        await asyncio.sleep(chance.random() * LATEST)
        os.kill(bed.pid, signal.SIGKILL)
        await asyncio.gather(*calling)
    return broken


async def _ask_again(bed: Bed, session: Session, sent: Sent, keys: list[str]) -> None:
    """Do as a careful client does: the same call with the same key, until there is an answer."""
    async with Callers(bed.agent) as callers:

        async def again(key: str) -> None:
            for _ in range(40):
                answer = await callers.call(session, *sent.asked[key], key=key)
                sent.note(key, answer)
                if answer.status == 200:
                    return
                await asyncio.sleep(0.25)

        await asyncio.gather(*map(again, keys))


def _judge(row: Row, bed: Bed, session: Session, sent: Sent, journal: Path) -> None:
    """Hold the clients' memory, the ledger and the server's journal against each other."""
    ran = Counter(
        line.partition(" ")[2]
        for line in journal.read_text().splitlines()
        if line.startswith(("stamp ", "wait "))
    )
    rows = bed.calls(session)
    by_id = {found["call_id"]: found for found in rows}
    of_key: dict[str, list[str]] = {}
    for found in rows:
        given = json.loads(found["arguments"])
        of_key.setdefault(given.get("paper") or given.get("name"), []).append(found["state"])
    answers = [answer for told in sent.told.values() for answer in told if answer.status == 200]
    lost = [answer for answer in answers if answer.json["call_id"] not in by_id]
    other = [
        answer
        for answer in answers
        if answer.json["call_id"] in by_id
        and answer.json["state"] != by_id[answer.json["call_id"]]["state"]
    ]
    unanswered = [key for key, told in sent.told.items() if told[-1].status != 200]
    # A row that says nothing was sent, and a server that says it ran, contradict each other.
    sent_rows = {
        key: [state for state in states if state not in ("refused", "failed", "cancelled")]
        for key, states in of_key.items()
    }
    row.exactly("accepted calls without a row", len(lost))
    row.exactly("answers that differ from the ledger", len(other))
    row.exactly(
        "executions without exactly one row", sum(len(sent_rows.get(k, [])) != 1 for k in ran)
    )
    row.exactly("keys executed twice", sum(count > 1 for count in ran.values()))
    row.exactly("told succeeded but not executed", sum(
        told[-1].state == "succeeded" and not ran[key] for key, told in sent.told.items()
    ))  # fmt: skip
    row.exactly("rows in no final state", sum(found["state"] not in CERTAIN for found in rows))
    row.exactly("calls never answered on asking again", len(unanswered))


# --- Programs -------------------------------------------------------------------------------------


def programs_left_behind(bed: Bed, size: str) -> Row:
    """R7: programs that ignore the end of stdin and SIGTERM, connected and closed many times."""
    closes, kills = {"tiny": (4, 1), "short": (12, 3), "full": (150, 50)}[size]
    row = Row("R7", "programs that ignore EOF and SIGTERM, closed or orphaned")
    notes = bed.folder / "stubborn-pids"
    # The same flags that a test of one kill uses; a process for each session.
    register_program(
        bed.toolcrib, "stubborn", "raw_stdio",
        *("--do", "ignore_term", "--do", "spawn_grandchild", "--stay", "--note", str(notes)),
        isolation="per_session", connection_policy="on_demand",
    )  # fmt: skip
    programs = Programs(bed, notes)
    programs.close_some(4 if size == "tiny" else 16)  # each thread keeps its database connection
    wait_for(lambda: not programs.living(), 60, what="the first programs are gone")
    before = descriptors(bed.pid)
    programs.close_some(closes)
    slowest = programs.gone_within(15)
    after = descriptors(bed.pid)
    left = len(programs.living())
    unwaited = len(zombies({bed.pid}))
    with Starter(bed.toolcrib) as quick:
        for number in range(kills):
            programs.use([bed.session("stubborn") for _ in range(2)])
            bed.toolcrib.kill()
            slowest = max(slowest, programs.gone_within(15))
            left += len(programs.living())
            start = bed.toolcrib.start if number % USUAL == 0 else quick.start
            start()
    remove(bed.toolcrib, "stubborn")
    pids = programs.started()
    row.done = (
        f"{closes} sessions with a program of their own closed, {kills} kills of Toolcrib with "
        f"2 programs each; {len(pids)} processes of theirs in all"
    )
    row.figures = {"closes": closes, "kills": kills, "processes": len(pids),
                   "descriptors_before": before, "descriptors_after": after,
                   "slowest_end_seconds": round(slowest, 2)}  # fmt: skip
    row.some("processes started", len(pids))
    row.exactly("processes left after 15 s", left)
    row.exactly("zombies", unwaited)
    row.at_most("descriptors more than before", after - before, 5, timed=False)
    row.at_most("slowest end of a program", slowest, 15, " s")
    return row


class Programs:
    """Every process that ran for a server: programs, their children and their supervisors."""

    def __init__(self, bed: Bed, notes: Path) -> None:
        self.bed, self.notes = bed, notes
        self.seen: dict[int, str | None] = {}  # when each began

    def started(self) -> set[int]:
        """The pids that the programs wrote down, their children's included."""
        return set(map(int, self.notes.read_text().split()))

    def use(self, sessions: list[Session]) -> None:
        """Call each session once, so that its program runs, and remember its processes."""
        with ThreadPoolExecutor(4) as callers:
            for answer in callers.map(lambda session: session.call("ping"), sessions):
                assert answer["state"] == "succeeded", answer
        for pid in (self.started() | set(self.bed.toolcrib.children())) - self.seen.keys():
            self.seen[pid] = born(pid)

    def close_some(self, number: int) -> None:
        for at in range(0, number, 4):
            sessions = [self.bed.session("stubborn") for _ in range(min(4, number - at))]
            self.use(sessions)
            with ThreadPoolExecutor(4) as callers:
                list(callers.map(lambda session: session.close(), sessions))

    def living(self) -> list[int]:
        return [pid for pid, began in self.seen.items() if began and born(pid) == began]

    def gone_within(self, seconds: float) -> float:
        """Wait until all are gone, but not longer; return how long that took."""
        began = time.monotonic()
        while self.living() and time.monotonic() - began < seconds:
            time.sleep(0.05)
        return time.monotonic() - began
