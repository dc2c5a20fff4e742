"""Slots for requests that compute, which protect the event loop and other agents."""

import asyncio
import threading

from sessions_app.agents import slots
from sessions_app.agents.slots import MAX_CONCURRENT, FairSlots
from sessions_app.ledger import writer as ledger_writer
from tests.support.waiting import scaled, wait_for


def run(scenario):
    async def inside():
        async with ledger_writer.run_writer(on_loop=False):  # searches run in threads then
            return await scenario()

    return asyncio.run(inside())


class Crowd:
    """Searches of different keys that block until released and record their concurrency."""

    def __init__(self, count):
        self.lock, self.release = threading.Lock(), [threading.Event() for _ in range(count)]
        self.running = self.max_running = 0

    def search(self, number):
        with self.lock:
            self.running += 1
            self.max_running = max(self.max_running, self.running)
        assert self.release[number].wait(scaled(30))
        with self.lock:
            self.running -= 1
        return number

    async def request(self, number):
        return await slots.run(f"key {number}", self.search, number)


def test_at_most_one_search_per_cpu_runs_and_all_are_answered_in_order():
    count = 4 * MAX_CONCURRENT

    async def scenario():
        tasks = [asyncio.create_task(crowd.request(number)) for number in range(count)]
        for number, task in enumerate(tasks):  # hangs unless searches run in order of arrival
            crowd.release[number].set()
            assert await asyncio.wait_for(task, scaled(30)) == number

    crowd = Crowd(count)
    run(scenario)
    assert crowd.max_running == MAX_CONCURRENT


def test_a_cancelled_waiter_never_runs_and_a_cancelled_search_keeps_its_slot_until_done():
    count = 3 * MAX_CONCURRENT
    started = []

    def search(number):
        started.append(number)
        return crowd.search(number)

    async def scenario():
        tasks = [
            asyncio.create_task(slots.run(f"key {number}", search, number))
            for number in range(count)
        ]
        await asyncio.to_thread(wait_for, lambda: crowd.running == MAX_CONCURRENT)
        for task in tasks:
            task.cancel()
        after = asyncio.create_task(slots.run("another", str, 5))
        await asyncio.gather(*tasks[MAX_CONCURRENT:], return_exceptions=True)
        assert not after.done()
        for event in crowd.release:
            event.set()
        assert await asyncio.wait_for(after, scaled(30)) == "5"
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)

    crowd = Crowd(count)
    run(scenario)
    assert sorted(started) == list(range(MAX_CONCURRENT))
    assert crowd.running == 0


def test_a_failed_or_cancelled_search_releases_its_slot():
    def fail():
        raise ValueError("no")

    async def scenario():
        for _ in range(3 * MAX_CONCURRENT):
            await asyncio.gather(slots.run("key", fail), return_exceptions=True)
        crowd = Crowd(1)
        held = [asyncio.create_task(crowd.request(0)) for _ in range(3 * MAX_CONCURRENT)]
        for task in held:
            task.cancel()
        crowd.release[0].set()
        await asyncio.wait(held, timeout=30)
        return await asyncio.wait_for(slots.run("key 0", str, 5), scaled(30))

    assert run(scenario) == "5"


def test_each_event_loop_has_its_own_slots():
    def run_searches():
        async def scenario():
            crowd = Crowd(1)
            crowd.release[0].set()
            return await asyncio.gather(*(crowd.request(0) for _ in range(20)))

        return run(scenario)

    assert run_searches() == run_searches() == [0] * 20


def granted_order(total, of_key, keys):
    """Return the order in which requests of these keys, made at once, get their slots."""

    async def scenario():
        fair, order = FairSlots(total, of_key), []
        running = asyncio.Queue()

        async def request(number, key):
            await fair.acquire(key)
            order.append((number, key))
            running.put_nowait(key)

        tasks = [asyncio.create_task(request(number, key)) for number, key in enumerate(keys)]
        for _ in keys:
            fair.release(await asyncio.wait_for(running.get(), scaled(30)))
        await asyncio.gather(*tasks)
        return order

    return asyncio.run(scenario())


def test_a_key_gets_its_part_of_the_slots_and_keys_take_turns():
    """A flood of one agent delays itself, not the only request of another."""
    order = granted_order(2, 1, ["flood"] * 6 + ["calm"])
    assert order[:2] == [(0, "flood"), (6, "calm")]
    assert [number for number, key in order if key == "flood"] == list(range(6))

    order = granted_order(1, 1, ["flood"] * 3 + ["calm", "other", "calm"])
    assert [key for _, key in order] == ["flood", "flood", "calm", "other", "flood", "calm"]


def test_a_waiter_that_is_cancelled_as_it_is_granted_gives_the_slot_back():
    async def scenario():
        fair = FairSlots(1, 1)
        await fair.acquire("first")
        waiter = asyncio.create_task(fair.acquire("second"))
        await asyncio.sleep(0)
        fair.release("first")  # grants the slot to the waiter, which has not run since
        waiter.cancel()
        await asyncio.wait({waiter})
        await asyncio.wait_for(fair.acquire("third"), scaled(30))

    asyncio.run(scenario())
