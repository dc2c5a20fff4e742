"""`kill -9` at every step of held → approved → executed → answered (R27)."""

import asyncio
import os
import random
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from bench.fault_bed import Bed, Callers, Response, Row, register, remove, running_upstream
from bench.fault_starter import Starter
from tests.support.agents import Session
from tests.support.waiting import wait_for

RULE = {
    "name": "Ask before executions",
    "effect": "hold",
    "reason": "Each execution is counted.",
    "match": {"servers": ["executions"]},
}
CALLERS = 6
FULL_START_EVERY = 10  # the other starts fork a preloaded process
# After which step of the first caller the kill comes, and how many seconds later at most.
STEPS = ("asked", "held", "allowed", "sent", "answered")
MAX_DELAY = 0.12
WAITING = "select call_id from sessions_app_call where state in ('held', 'approved')"
IN_FLIGHT = "select call_id from sessions_app_call where state in ('accepted', 'sent')"
SENT = "select count(*) from sessions_app_call where state = 'sent'"


@dataclass
class HeldCall:
    """One call of the run, and what its agent and operator were told."""

    paper: str
    request: tuple[str, dict[str, object]]
    call_ids: set[str] = field(default_factory=set)
    results: list[Response] = field(default_factory=list)  # final ones

    @property
    def states(self) -> set[str]:
        return {response.state for response in self.results}


def killed_during_held_calls(bed: Bed, size: str) -> Row:
    """R27: kill while calls are held, allowed twice at once, executed and fetched."""
    rounds = {"tiny": 10, "short": 20, "full": 200}[size]
    row = Row("R27", "kill -9 at every step of a held call")
    journal = bed.folder / "held-executions"
    chance = random.Random(13)  # noqa: S311 - moments, not secrets
    calls: list[HeldCall] = []
    caught = Counter[str]()
    with (
        running_upstream("counting", "--journal", str(journal)) as server,
        Starter(bed.toolcrib) as quick,
    ):
        register(bed.toolcrib, "executions", url=server.url)
        assert bed.toolcrib.api("POST", "/rules", RULE)[0] == 201
        session = bed.session("executions")
        operator = {"Authorization": f"Bearer {bed.toolcrib.token('operator')}"}
        for number in range(rounds):
            step = STEPS[number % len(STEPS)]
            own = [_make_call(number, at, chance) for at in range(CALLERS)]
            calls += own
            run = _run_until_killed(bed, session, operator, own, step, chance.random() * MAX_DELAY)
            asyncio.run(run)
            bed.toolcrib.kill()  # waits for the exit
            caught["waiting"] += len(bed.query(WAITING))
            caught["in flight"] += len(bed.query(IN_FLIGHT))
            start = bed.toolcrib.start if number % FULL_START_EVERY == 0 else quick.start
            start()
            asyncio.run(_complete(bed, session, operator, own))
            wait_for(lambda: not bed.query(IN_FLIGHT), 60, what="no call is in flight")
        bed.toolcrib.api("DELETE", f"/rules/{RULE['name']}".replace(" ", "%20"))
        remove(bed.toolcrib, "executions")
    executed = Counter(
        line.partition(" ")[2]
        for line in journal.read_text().splitlines()
        if line.startswith(("stamp ", "wait "))
    )
    states = Counter(state for call in calls for state in call.states)
    row.procedure = (
        f"{rounds} kills, {len(calls):,} held calls, each allowed twice at once and fetched by its "
        f"agent; {caught['waiting']:,} waited and {caught['in flight']:,} ran when killed"
    )
    row.figures = {"rounds": rounds, "calls": len(calls), **caught, "results": dict(states)}
    row.check_positive("calls that waited when killed", caught["waiting"])
    row.check_positive("calls that ran when killed", caught["in flight"])
    row.check_positive("calls that succeeded", states["succeeded"])
    row.check_equal("calls executed twice", sum(count > 1 for count in executed.values()))
    row.check_equal("calls without a result", sum(not call.results for call in calls))
    row.check_equal("calls with more than one row", sum(len(call.call_ids) > 1 for call in calls))
    row.check_equal("calls with two different results", sum(len(call.states) > 1 for call in calls))
    row.check_equal(
        "results other than succeeded or unknown", len(states.keys() - {"succeeded", "unknown"})
    )
    row.check_equal(
        "reported as succeeded but not executed",
        sum("succeeded" in call.states and executed[call.paper] != 1 for call in calls),
    )
    row.check_equal("calls that still wait", len(bed.query(WAITING)))
    return row


def _make_call(number: int, at: int, chance: random.Random) -> HeldCall:
    paper = f"held-{number}-{at}"
    if at == 0:  # runs for a while, so that a kill can come while it runs
        return HeldCall(paper, ("wait", {"name": paper, "seconds": 0.3}))
    if chance.random() < 0.5:
        return HeldCall(paper, ("stamp", {"paper": paper}))
    return HeldCall(paper, ("wait", {"name": paper, "seconds": round(chance.random() * 0.05, 4)}))


async def _run_until_killed(
    bed: Bed,
    session: Session,
    operator: dict[str, str],
    calls: list[HeldCall],
    step: str,
    delay: float,
) -> None:
    """Make the calls, allow and fetch them; kill a moment after the first has reached a step."""
    reached = {name: asyncio.Event() for name in STEPS}
    async with Callers(bed.agent) as callers:
        tasks = [
            asyncio.create_task(
                _take_through(callers, session, operator, call, reached if not at else None)
            )
            for at, call in enumerate(calls)
        ]
        if step == "sent":
            await reached["allowed"].wait()
            for _ in range(2000):
                if bed.query(SENT) != [(0,)]:
                    break
                await asyncio.sleep(0.002)
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(reached[step].wait(), 20)
        await asyncio.sleep(delay)
        os.kill(bed.pid, signal.SIGKILL)
        await asyncio.gather(*tasks)


async def _complete(
    bed: Bed, session: Session, operator: dict[str, str], calls: list[HeldCall]
) -> None:
    """Take every call without a result through its steps again, as a careful client does."""
    async with Callers(bed.agent) as callers:

        async def complete(call: HeldCall) -> None:
            for _ in range(40):
                if call.results:
                    return
                await _take_through(callers, session, operator, call, None)
                await asyncio.sleep(0.1)

        await asyncio.gather(*map(complete, calls))


async def _take_through(
    callers: Callers,
    session: Session,
    operator: dict[str, str],
    call: HeldCall,
    reached: dict[str, asyncio.Event] | None,
) -> None:
    """Make a call, allow it twice at once, and fetch its result; stop if the connection breaks."""

    def reach(step: str) -> None:
        if reached is not None:
            reached[step].set()

    reach("asked")
    response = await callers.call(session, *call.request)
    if response.status != 200:
        return
    call.call_ids.add(response.json["call_id"])
    if response.state not in ("held", "approved", "accepted", "sent"):
        call.results.append(response)
        return
    reach("held")
    call_id = response.json["call_id"]
    path = f"/api/v1/calls/{call_id}/decision"
    allow = {"decision": "allow"}
    first, second = await asyncio.gather(
        callers.request("POST", path, allow, {**operator, "Content-Type": "application/json"}),
        callers.request("POST", path, allow, {**operator, "Content-Type": "application/json"}),
    )
    if not first.status or not second.status:
        return
    reach("allowed")
    for _ in range(10):
        response = await callers.request_api("GET", f"/calls/{call_id}?wait=5")
        if response.status != 200:
            return
        if response.state not in ("held", "approved", "accepted", "sent"):
            call.results.append(response)
            reach("answered")
            return
