import asyncio

from servers.connections.bulkhead import Bulkhead


def run(scenario):
    async def in_time():
        async with asyncio.timeout(20):
            return await scenario()

    return asyncio.run(in_time())


async def settled():
    """Let everybody on the loop have their turn."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_turn_of_a_late_call_is_given_on_only_when_it_ended():
    async def scenario():
        bulkhead = Bulkhead()
        late = await bulkhead.enter(1)
        late.linger()
        assert not late.needed.is_set()
        entering = asyncio.create_task(bulkhead.enter(1))
        await settled()
        assert late.needed.is_set()
        assert not entering.done()
        late.leave()
        (await entering).leave()
        assert bulkhead.running == 0

    run(scenario)


def test_a_call_that_is_late_while_others_wait_is_told_so_at_once():
    async def scenario():
        bulkhead = Bulkhead()
        slow = await bulkhead.enter(1)
        entering = asyncio.create_task(bulkhead.enter(1))
        await settled()
        slow.linger()
        assert slow.needed.is_set()
        slow.leave()
        await entering

    run(scenario)


def test_only_as_many_late_calls_end_as_others_wait():
    async def scenario():
        bulkhead = Bulkhead()
        late = [await bulkhead.enter(3) for _ in range(3)]
        for turn in late:
            turn.linger()
        entering = asyncio.create_task(bulkhead.enter(3))
        await settled()
        assert [turn.needed.is_set() for turn in late] == [True, False, False]
        late[0].leave()
        await entering
        assert not late[1].needed.is_set()

    run(scenario)


def test_a_server_that_is_given_fewer_calls_from_now_on_is_given_no_more():
    async def scenario():
        bulkhead = Bulkhead()
        turns = [await bulkhead.enter(3) for _ in range(3)]
        entering = asyncio.create_task(bulkhead.enter(1))
        for turn in turns:
            await settled()
            assert not entering.done()
            turn.leave()
        await entering
        assert bulkhead.running == 1

    run(scenario)
