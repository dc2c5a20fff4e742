"""Searches take turns, so that the event loop does not wait for thirty threads."""

import asyncio
import threading

from asgiref.sync import ThreadSensitiveContext

from sessions_app.sessions import concurrency
from tests.support.waiting import wait_for


class Crowd:
    """Searches that stay until they are let go, and know how many there were at once."""

    def __init__(self, count):
        self.lock, self.let_go = threading.Lock(), [threading.Event() for _ in range(count)]
        self.inside = self.most = 0

    def search(self, number):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        assert self.let_go[number].wait(30)
        with self.lock:
            self.inside -= 1
        return number

    async def request(self, number):
        async with ThreadSensitiveContext():  # as Django gives each request
            return await concurrency.run_with_limit(self.search, number)


def test_no_more_searches_run_at_once_than_there_are_processors_and_all_are_answered():
    count = 4 * concurrency.MAX_CONCURRENT

    async def crowded():
        tasks = [asyncio.create_task(crowd.request(number)) for number in range(count)]
        for number, task in enumerate(tasks):  # who came first goes first, else this stands still
            crowd.let_go[number].set()
            assert await asyncio.wait_for(task, 30) == number

    crowd = Crowd(count)
    asyncio.run(crowded())
    assert crowd.most == concurrency.MAX_CONCURRENT


def test_who_leaves_before_their_turn_leaves_no_work_and_what_was_begun_keeps_its_turn():
    count = 3 * concurrency.MAX_CONCURRENT
    begun = []

    def search(number):
        begun.append(number)
        return crowd.search(number)

    async def crowded():
        tasks = [
            asyncio.create_task(concurrency.run_shielded_with_limit(search, number))
            for number in range(count)
        ]
        await asyncio.to_thread(wait_for, lambda: crowd.inside == concurrency.MAX_CONCURRENT)
        for task in tasks:
            task.cancel()
        after = asyncio.create_task(concurrency.run_shielded_with_limit(str, 5))
        await asyncio.gather(*tasks[concurrency.MAX_CONCURRENT :], return_exceptions=True)
        assert not after.done()
        for event in crowd.let_go:
            event.set()
        assert await asyncio.wait_for(after, 30) == "5"
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)

    crowd = Crowd(count)
    asyncio.run(crowded())
    assert sorted(begun) == list(range(concurrency.MAX_CONCURRENT))
    assert crowd.inside == 0


def test_a_search_that_fails_or_is_given_up_leaves_its_place():
    def failing():
        raise ValueError("no")

    async def attempts():
        for _ in range(3 * concurrency.MAX_CONCURRENT):
            await asyncio.gather(concurrency.run_with_limit(failing), return_exceptions=True)
        crowd = Crowd(1)
        held = [asyncio.create_task(crowd.request(0)) for _ in range(3 * concurrency.MAX_CONCURRENT)]
        for task in held:
            task.cancel()
        crowd.let_go[0].set()
        await asyncio.wait(held, timeout=30)
        return await asyncio.wait_for(concurrency.run_with_limit(str, 5), 30)

    assert asyncio.run(attempts()) == "5"


def test_each_event_loop_has_turns_of_its_own():
    def at_once():
        async def crowded():
            crowd = Crowd(1)
            crowd.let_go[0].set()
            return await asyncio.gather(*(crowd.request(0) for _ in range(20)))

        return asyncio.run(crowded())

    assert at_once() == at_once() == [0] * 20
