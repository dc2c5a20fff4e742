"""Deadlines, callers who leave, and answers that come too late."""

import asyncio
import json

import pytest

from servers.connections import calls as upstream_calls
from tests.support.factories import make_program
from tests.support.upstream_calls import (
    HTTP,
    SOON,
    TWO_WAYS,
    WAYS,
    ask,
    run,
    target,
    until,
    upstream,
    waits,
)

pytestmark = pytest.mark.django_db(transaction=True)

# --- Time -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
def test_a_call_that_times_out_disturbs_no_other_on_its_connection(how):
    async def scenario():
        await ask(server, "count")
        others = [asyncio.create_task(ask(server, "wait", seconds=1.0)) for _ in range(5)]
        slow = await ask(server, "wait", within=0.3, seconds=30, name="slow")
        assert (slow.state, slow.code) == ("timed_out", "timeout")
        assert "within 0.3 s" in slow.message
        assert [outcome.state for outcome in await asyncio.gather(*others)] == ["succeeded"] * 5
        owner = next(iter(upstream_calls._pool().owners.values()))
        assert owner.failures == 0
        assert upstream_calls.in_flight(server.pk) == 0

    with upstream(how, "workshop") as server:
        run(scenario)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_an_answer_after_the_deadline_is_dropped_and_told(how):
    async def scenario():
        late = asyncio.Queue()
        await ask(server, "seen")
        outcome = await ask(
            server, "later", within=0.2, seconds=0.6, on={"on_late": late.put_nowait}
        )
        assert outcome.state == "timed_out"
        note = await late.get()
        assert note.startswith("answered 0.")
        assert note.endswith(" s after its deadline")
        assert (await ask(server, "say", result='{"content": []}')).state == "succeeded"

    with upstream(how) as server:
        run(scenario)


@pytest.mark.parametrize("how", WAYS)
def test_a_call_nobody_waits_for_any_more_is_cancelled_at_the_server(how, monkeypatch):
    monkeypatch.setattr(upstream_calls, "LATE_GRACE", 0.2)

    async def scenario():
        await ask(server, "count")
        outcome = await ask(server, "wait", within=0.3, seconds=30, name="late")
        assert outcome.state == "timed_out"
        await waits(server, "given_up", ["late"])

    with upstream(how, "workshop") as server:
        run(scenario)


@pytest.mark.parametrize("how", HTTP)
def test_a_drip_of_bytes_ends_at_the_deadline(how):
    async def scenario():
        outcome = await ask(server, "drip", within=0.5)
        assert outcome.state == "timed_out"

    with upstream(how) as server:
        run(scenario)


def test_a_deadline_that_passes_before_anything_was_sent_is_no_timeout_of_the_tool():
    async def scenario():
        sent = []

        async def on_sent():
            sent.append(1)

        outcome = await ask(server, "say", within=0.3, on={"on_sent": on_sent})
        assert (outcome.state, outcome.code) == ("not_sent", "timeout")
        assert sent == []

    server = make_program("raw_stdio", "--do", "hang")
    run(scenario)


# --- Cancelling -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
def test_cancelling_tells_the_server_and_frees_the_turn(how):
    async def scenario():
        names = [str(number) for number in range(7)]
        calls = [ask(server, "wait", seconds=30, name=name) for name in names]
        waiting = [asyncio.create_task(call) for call in calls]
        await waits(server, "begun", names)
        waiting += [asyncio.create_task(ask(server, "wait", seconds=30)) for _ in range(12)]
        await until(lambda: upstream_calls.in_flight(server.pk) == 8, "eight run")
        for task in waiting:
            task.cancel()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        assert upstream_calls.in_flight(server.pk) == 0
        await waits(server, "given_up", names)

    with upstream(how, "workshop") as server:
        run(scenario)


def test_cancels_at_any_moment_leave_no_turn_taken():
    async def scenario():
        calls = []
        for number in range(200):
            calls.append(asyncio.create_task(ask(server, "later", seconds=0.01)))
            if number % 3 == 0:
                await asyncio.sleep(0.001 * (number % 7))
                calls[number // 2].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert upstream_calls.in_flight(server.pk) == 0
        assert (await ask(server, "say", result='{"content": []}')).state == "succeeded"

    with upstream("stdio") as server:
        run(scenario)


# --- A late call and the next -------------------------------------------------------------------


async def in_turn(server, tool, within=SOON, **arguments):
    """Call a tool of a server that is given one call at once."""
    return await upstream_calls.call(target(server, concurrency=1), tool, arguments, timeout=within)


def test_a_late_call_is_cancelled_before_the_next_is_sent_to_a_server_that_takes_one(settings):
    settings.CALLS_QUEUED = 0  # who gets the turn of a late call does not wait in the queue

    async def scenario():
        await in_turn(server, "seen")
        late = await in_turn(server, "hang", within=0.3)
        assert late.state == "timed_out"
        seen = json.loads((await in_turn(server, "seen")).content[0]["text"])
        came = [each["params"].get("name", each["method"]) for each in seen if "params" in each]
        assert came[came.index("hang") :] == ["hang", "notifications/cancelled", "seen"]

    with upstream("stdio legacy") as server:
        run(scenario)


@pytest.mark.parametrize("how", WAYS)
def test_nobody_listens_for_a_late_answer_while_another_call_needs_the_turn(how, monkeypatch):
    monkeypatch.setattr(upstream_calls, "LATE_GRACE", 600.0)

    async def scenario():
        await in_turn(server, "count")
        late = await in_turn(server, "wait", within=0.3, seconds=600, name="late")
        assert late.state == "timed_out"
        async with asyncio.timeout(SOON):
            while (await in_turn(server, "cancelled")).structured["given_up"] != ["late"]:
                pass

    with upstream(how, "workshop") as server:
        run(scenario)


def test_late_calls_and_cancels_at_any_moment_leave_no_turn_taken():
    async def scenario():
        await ask(server, "seen")
        ends = []
        for number in range(20):
            calls = [asyncio.create_task(ask(server, "hang", within=0.1)) for _ in range(12)]
            await asyncio.sleep(0.005 * (number % 7))
            calls[number % 12].cancel()
            ends += await asyncio.gather(*calls, return_exceptions=True)
        assert "timed_out" in {getattr(end, "state", "cancelled") for end in ends}
        assert upstream_calls.in_flight(server.pk) == 0
        assert (await in_turn(server, "say", result='{"content": []}')).state == "succeeded"

    with upstream("stdio") as server:
        run(scenario)
