"""Slots for requests that compute: as many at once as there are processors, fair between keys.

Searches, loads and catalogs compete for the GIL with each other and with the event loop, which
serves the calls of all agents: more of them at once give no more throughput. One key gets half of
the slots, and keys that wait get them in turn, so that a flood of one agent delays itself.
"""

import asyncio
import os
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from sessions_app.ledger import writer as ledger_writer

P = ParamSpec("P")
T = TypeVar("T")

MAX_CONCURRENT = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)
MAX_OF_KEY = max(1, MAX_CONCURRENT // 2)


class FairSlots:
    def __init__(self, total: int = MAX_CONCURRENT, of_key: int = MAX_OF_KEY) -> None:
        self._free, self._of_key = total, of_key
        self._used: Counter[str] = Counter()
        # By key, the key whose turn is next first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def acquire(self, key: str) -> None:
        if key not in self._waiting and self._has_room(key):
            self._take(key)
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # at the same moment
                self.release(key)
            raise

    def release(self, key: str) -> None:
        self._free += 1
        self._used[key] -= 1
        if not self._used[key]:
            del self._used[key]
        for waiting in list(self._waiting):
            if not self._free:
                break
            if self._has_room(waiting):
                self._grant(waiting)

    def _has_room(self, key: str) -> bool:
        return self._free > 0 and self._used[key] < self._of_key

    def _take(self, key: str) -> None:
        self._free -= 1
        self._used[key] += 1

    def _grant(self, key: str) -> None:
        """Give a slot to the first request of a key that still waits; its next turn is the last."""
        queue = self._waiting.pop(key)
        while queue and queue[0].cancelled():
            queue.popleft()
        if queue:
            self._take(key)
            queue.popleft().set_result(None)
        if queue:
            self._waiting[key] = queue


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, FairSlots] = WeakKeyDictionary()


@asynccontextmanager
async def slot(key: str) -> AsyncIterator[None]:
    """Wait for a slot of this process, and hold it for the block. `key` is the API key's digest."""
    slots = _slots.setdefault(asyncio.get_running_loop(), FairSlots())
    await slots.acquire(key)
    try:
        yield
    finally:
        slots.release(key)


async def run(key: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread when a slot is free.

    Cancelled while waiting, it never runs. Cancelled while running, it keeps its slot until done.
    """
    async with slot(key):
        task = asyncio.ensure_future(ledger_writer.run_off_loop(function, *args, **kwargs))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # mark as retrieved
            raise
