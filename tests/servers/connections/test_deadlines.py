"""Deadlines, cancelled calls and late answers."""

import asyncio
import json

import pytest

from servers.connections import calls as upstream_calls
from tests.support.factories import make_program
from tests.support.upstream_calls import (
    HTTP_CLIENTS,
    SHORT_TIMEOUT,
    TRANSPORTS,
    TRANSPORTS_AND_ERAS,
    call_target,
    call_tool,
    in_flight,
    run_scenario,
    running_upstream,
    wait_until,
    wait_until_reported,
)
from tests.support.waiting import scaled

pytestmark = pytest.mark.django_db(transaction=True)

# --- Deadlines --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", TRANSPORTS_AND_ERAS)
def test_a_call_that_times_out_does_not_affect_others_on_its_connection(how):
    async def scenario():
        await call_tool(server, "count")
        others = [asyncio.create_task(call_tool(server, "wait", seconds=1.0)) for _ in range(5)]
        slow = await call_tool(server, "wait", within=0.3, seconds=30, name="slow")
        assert (slow.state, slow.code) == ("timed_out", "timeout")
        assert "within 0.3 s" in slow.message
        assert [outcome.state for outcome in await asyncio.gather(*others)] == ["succeeded"] * 5
        owner = next(iter(upstream_calls.current_pool().owners.values()))
        assert owner.failures == 0
        assert in_flight(server.pk) == 0

    with running_upstream(how, "workshop") as server:
        run_scenario(scenario)


@pytest.mark.parametrize("how", TRANSPORTS)
def test_an_answer_after_the_deadline_is_dropped_and_reported(how):
    async def scenario():
        late = asyncio.Queue()
        await call_tool(server, "seen")
        outcome = await call_tool(
            server, "later", within=0.2, seconds=0.6, options={"on_late": late.put_nowait}
        )
        assert outcome.state == "timed_out"
        note = await late.get()
        assert note.startswith("answered 0.")
        assert note.endswith(" s after its deadline")
        assert (await call_tool(server, "say", result='{"content": []}')).state == "succeeded"

    with running_upstream(how) as server:
        run_scenario(scenario)


@pytest.mark.parametrize("how", TRANSPORTS_AND_ERAS)
def test_a_call_that_timed_out_is_cancelled_at_the_server(how, monkeypatch):
    monkeypatch.setattr(upstream_calls, "LATE_GRACE", 0.2)

    async def scenario():
        await call_tool(server, "count")
        outcome = await call_tool(server, "wait", within=0.3, seconds=30, name="late")
        assert outcome.state == "timed_out"
        await wait_until_reported(server, "given_up", ["late"])

    with running_upstream(how, "workshop") as server:
        run_scenario(scenario)


@pytest.mark.parametrize("how", HTTP_CLIENTS)
def test_a_response_that_drips_bytes_ends_at_the_deadline(how):
    async def scenario():
        outcome = await call_tool(server, "drip", within=0.5)
        assert outcome.state == "timed_out"

    with running_upstream(how) as server:
        run_scenario(scenario)


def test_a_deadline_that_passes_before_sending_is_reported_as_not_sent():
    async def scenario():
        sent = []

        async def on_sent():
            sent.append(1)

        outcome = await call_tool(server, "say", within=0.3, options={"on_sent": on_sent})
        assert (outcome.state, outcome.code) == ("not_sent", "timeout")
        assert sent == []

    server = make_program("raw_stdio", "--do", "hang")
    run_scenario(scenario)


# --- Cancellation -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", TRANSPORTS_AND_ERAS)
def test_cancelling_notifies_the_server_and_releases_the_slot(how):
    async def scenario():
        names = [str(number) for number in range(7)]
        calls = [call_tool(server, "wait", seconds=30, name=name) for name in names]
        waiting = [asyncio.create_task(call) for call in calls]
        await wait_until_reported(server, "begun", names)
        waiting += [asyncio.create_task(call_tool(server, "wait", seconds=30)) for _ in range(12)]
        await wait_until(lambda: in_flight(server.pk) == 8, "eight run")
        for task in waiting:
            task.cancel()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        assert in_flight(server.pk) == 0
        await wait_until_reported(server, "given_up", names)

    with running_upstream(how, "workshop") as server:
        run_scenario(scenario)


def test_cancelling_at_any_moment_leaves_no_slot_in_use():
    async def scenario():
        calls = []
        for number in range(200):
            calls.append(asyncio.create_task(call_tool(server, "later", seconds=0.01)))
            if number % 3 == 0:
                await asyncio.sleep(0.001 * (number % 7))
                calls[number // 2].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert in_flight(server.pk) == 0
        assert (await call_tool(server, "say", result='{"content": []}')).state == "succeeded"

    with running_upstream("stdio") as server:
        run_scenario(scenario)


# --- Late calls and their slots -----------------------------------------------------------------


async def call_one(server, tool, within=SHORT_TIMEOUT, **arguments):
    """Call a tool with a concurrency of one."""
    return await upstream_calls.call(
        call_target(server, concurrency=1), tool, arguments, timeout=within
    )


def test_with_a_concurrency_of_one_a_late_call_is_cancelled_before_the_next_is_sent(settings):
    settings.CALLS_QUEUED = 0  # a call that gets the slot of a late one is not queued

    async def scenario():
        await call_one(server, "seen")
        late = await call_one(server, "hang", within=0.3)
        assert late.state == "timed_out"
        messages = json.loads((await call_one(server, "seen")).content[0]["text"])
        with_params = [message for message in messages if "params" in message]
        names = [message["params"].get("name", message["method"]) for message in with_params]
        assert names[names.index("hang") :] == ["hang", "notifications/cancelled", "seen"]

    with running_upstream("stdio legacy") as server:
        run_scenario(scenario)


@pytest.mark.parametrize("how", TRANSPORTS_AND_ERAS)
def test_a_late_answer_is_not_awaited_while_another_call_needs_the_slot(how, monkeypatch):
    monkeypatch.setattr(upstream_calls, "LATE_GRACE", 600.0)

    async def scenario():
        await call_one(server, "count")
        late = await call_one(server, "wait", within=0.3, seconds=600, name="late")
        assert late.state == "timed_out"
        async with asyncio.timeout(scaled(SHORT_TIMEOUT)):
            while (await call_one(server, "cancelled")).structured["given_up"] != ["late"]:
                pass

    with running_upstream(how, "workshop") as server:
        run_scenario(scenario)


def test_late_calls_and_cancellations_at_any_moment_leave_no_slot_in_use():
    async def scenario():
        await call_tool(server, "seen")
        ends = []
        for number in range(20):
            calls = [asyncio.create_task(call_tool(server, "hang", within=0.1)) for _ in range(12)]
            await asyncio.sleep(0.005 * (number % 7))
            calls[number % 12].cancel()
            ends += await asyncio.gather(*calls, return_exceptions=True)
        assert "timed_out" in {getattr(end, "state", "cancelled") for end in ends}
        assert in_flight(server.pk) == 0
        assert (await call_one(server, "say", result='{"content": []}')).state == "succeeded"

    with running_upstream("stdio") as server:
        run_scenario(scenario)
