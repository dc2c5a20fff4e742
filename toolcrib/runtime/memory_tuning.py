"""When Python looks for garbage in a web process, and where it keeps what is not garbage.

To look through everything that 10,000 tools are made of halts all threads for a tenth of a
second, and Python does it whenever much was made, as when an agent searches. Here it is done once
a minute, among what came since the last time: what is older is left out. All is looked through
once nobody is being answered.
"""

import asyncio
import ctypes
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

YOUNG, MIDDLE = 5_000, 10  # the lesser looks, as Python does them by itself: a few milliseconds
NEVER = 1_000_000_000
LOOK = 1.0  # seconds between two looks at whether it is time
EVERY = 60.0
ALL_EVERY, AT_LATEST = 600.0, 3_600.0
QUIET = 1.0  # seconds without a request


ARENAS = -8, 2  # M_ARENA_MAX of mallopt, and how many


def limit_malloc_arenas() -> bool:
    """Have all threads use two heaps of the C library; say whether it could be done.

    By itself it gives each thread one, up to eight a processor. What a thread frees stays in its
    heap, so memory grows for as long as work comes to threads by chance. Python runs one at a
    time, and they hardly wait for each other's heap.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(*ARENAS))
    except (OSError, AttributeError):  # another C library
        return False


class GcSchedule:
    def __init__(self) -> None:
        self._touched = self._collected = self._collected_all = time.monotonic()

    def touch(self) -> None:
        """Note that somebody is being answered."""
        self._touched = time.monotonic()

    def look(self, now: float) -> None:
        """Do what is due."""
        since = now - self._collected_all
        if since >= AT_LATEST or (since >= ALL_EVERY and now - self._touched >= QUIET):
            gc.unfreeze()
            self._collected_all = now
        elif now - self._collected < EVERY:
            return
        gc.collect()
        gc.freeze()
        self._collected = now

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Take over from Python, and hand back at the end."""
        usual = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG, MIDDLE, NEVER)
        task = asyncio.create_task(self._run(), name="collecting")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            gc.set_threshold(*usual)
            gc.unfreeze()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            self.look(time.monotonic())


gc_schedule = GcSchedule()
