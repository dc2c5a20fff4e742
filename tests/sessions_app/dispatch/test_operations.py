"""The concurrency limit for searches and loads, which protects the event loop."""

import asyncio
import threading

from sessions_app.dispatch import operations
from sessions_app.ledger import writer as ledger_writer
from tests.support.waiting import scaled, wait_for


def run(scenario):
    async def inside():
        async with ledger_writer.run_writer(on_loop=False):  # searches run in threads then
            return await scenario()

    return asyncio.run(inside())


class Crowd:
    """Searches that block until released and record their maximum concurrency."""

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
        return await operations._run_with_slot(self.search, number)


def test_at_most_one_search_per_cpu_runs_and_all_are_answered_in_order():
    count = 4 * operations.MAX_CONCURRENT

    async def scenario():
        tasks = [asyncio.create_task(crowd.request(number)) for number in range(count)]
        for number, task in enumerate(tasks):  # hangs unless searches run in order of arrival
            crowd.release[number].set()
            assert await asyncio.wait_for(task, scaled(30)) == number

    crowd = Crowd(count)
    run(scenario)
    assert crowd.max_running == operations.MAX_CONCURRENT


def test_a_cancelled_waiter_never_runs_and_a_cancelled_search_keeps_its_slot_until_done():
    count = 3 * operations.MAX_CONCURRENT
    started = []

    def search(number):
        started.append(number)
        return crowd.search(number)

    async def scenario():
        tasks = [
            asyncio.create_task(operations._run_with_slot(search, number))
            for number in range(count)
        ]
        await asyncio.to_thread(wait_for, lambda: crowd.running == operations.MAX_CONCURRENT)
        for task in tasks:
            task.cancel()
        after = asyncio.create_task(operations._run_with_slot(str, 5))
        await asyncio.gather(*tasks[operations.MAX_CONCURRENT :], return_exceptions=True)
        assert not after.done()
        for event in crowd.release:
            event.set()
        assert await asyncio.wait_for(after, scaled(30)) == "5"
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)

    crowd = Crowd(count)
    run(scenario)
    assert sorted(started) == list(range(operations.MAX_CONCURRENT))
    assert crowd.running == 0


def test_a_failed_or_cancelled_search_releases_its_slot():
    def fail(_):
        raise ValueError("no")

    async def scenario():
        for _ in range(3 * operations.MAX_CONCURRENT):
            await asyncio.gather(operations._run_with_slot(fail, None), return_exceptions=True)
        crowd = Crowd(1)
        held = [asyncio.create_task(crowd.request(0)) for _ in range(3 * operations.MAX_CONCURRENT)]
        for task in held:
            task.cancel()
        crowd.release[0].set()
        await asyncio.wait(held, timeout=30)
        return await asyncio.wait_for(operations._run_with_slot(str, 5), scaled(30))

    assert run(scenario) == "5"


def test_each_event_loop_has_its_own_slots():
    def run_searches():
        async def scenario():
            crowd = Crowd(1)
            crowd.release[0].set()
            return await asyncio.gather(*(crowd.request(0) for _ in range(20)))

        return run(scenario)

    assert run_searches() == run_searches() == [0] * 20
