"""The concurrency limit of a server and its queue."""

import asyncio

from servers.connections.pool import Bulkhead
from tests.support.waiting import scaled


def run(scenario):
    async def in_time():
        async with asyncio.timeout(scaled(20)):
            return await scenario()

    return asyncio.run(in_time())


async def settled():
    """Let everybody on the loop have their slot."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_slot_of_a_late_call_is_granted_again_only_after_the_call_ended():
    async def scenario():
        bulkhead = Bulkhead()
        late = await bulkhead.acquire(1)
        late.hold_after_timeout()
        assert not late.needed.is_set()
        entering = asyncio.create_task(bulkhead.acquire(1))
        await settled()
        assert late.needed.is_set()
        assert not entering.done()
        late.release()
        (await entering).release()
        assert bulkhead.running == 0

    run(scenario)


def test_a_call_that_times_out_while_others_are_queued_is_asked_for_its_slot_at_once():
    async def scenario():
        bulkhead = Bulkhead()
        slow = await bulkhead.acquire(1)
        entering = asyncio.create_task(bulkhead.acquire(1))
        await settled()
        slow.hold_after_timeout()
        assert slow.needed.is_set()
        slow.release()
        await entering

    run(scenario)


def test_only_as_many_late_calls_are_ended_as_calls_are_queued():
    async def scenario():
        bulkhead = Bulkhead()
        late = [await bulkhead.acquire(3) for _ in range(3)]
        for slot in late:
            slot.hold_after_timeout()
        entering = asyncio.create_task(bulkhead.acquire(3))
        await settled()
        assert [slot.needed.is_set() for slot in late] == [True, False, False]
        late[0].release()
        await entering
        assert not late[1].needed.is_set()

    run(scenario)


def test_a_lower_concurrency_applies_to_calls_that_are_already_queued():
    async def scenario():
        bulkhead = Bulkhead()
        slots = [await bulkhead.acquire(3) for _ in range(3)]
        entering = asyncio.create_task(bulkhead.acquire(1))
        for slot in slots:
            await settled()
            assert not entering.done()
            slot.release()
        await entering
        assert bulkhead.running == 1

    run(scenario)
