"""GC schedule and malloc arena tuning for web processes.

A full collection over the objects of 10,000 tools stops all threads for a tenth of a second, and
Python runs one whenever many objects were created, as during a search. Here young objects are
collected once a minute and survivors are frozen, which excludes them from later collections. A full
collection, frozen objects included, runs while no request is in progress.
"""

import asyncio
import ctypes
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

# Thresholds of the two younger generations, which Python still collects itself in milliseconds.
YOUNG, MIDDLE = 5_000, 10
NEVER = 1_000_000_000
CHECK_INTERVAL = 1.0  # seconds
COLLECT_INTERVAL = 60.0
FULL_INTERVAL, MAX_FULL_INTERVAL = 600.0, 3_600.0  # while idle, and in any case
IDLE_AFTER = 1.0  # seconds without a request

M_ARENA_MAX = -8  # of mallopt(3)
MAX_ARENAS = 2


def limit_malloc_arenas() -> bool:
    """Limit glibc malloc to two arenas for all threads; return whether it was possible.

    By default each thread gets its own arena, up to eight per processor. Freed memory stays in the
    thread's arena, so memory use grows as work moves between threads. Python runs one thread at a
    time, so contention for two arenas is low.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(M_ARENA_MAX, MAX_ARENAS))
    except (OSError, AttributeError):  # not glibc
        return False


class GcSchedule:
    def __init__(self) -> None:
        self._last_request = self._collected = self._collected_all = time.monotonic()

    def record_request(self) -> None:
        """Record that a request is in progress."""
        self._last_request = time.monotonic()

    def collect_if_due(self, now: float) -> None:
        """Run the collection that is due, if any."""
        since_full = now - self._collected_all
        is_idle = now - self._last_request >= IDLE_AFTER
        if since_full >= MAX_FULL_INTERVAL or (since_full >= FULL_INTERVAL and is_idle):
            gc.unfreeze()
            self._collected_all = now
        elif now - self._collected < COLLECT_INTERVAL:
            return
        gc.collect()
        gc.freeze()
        self._collected = now

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Replace Python's GC schedule while the context is open."""
        thresholds = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG, MIDDLE, NEVER)
        task = asyncio.create_task(self._run(), name="gc")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            gc.set_threshold(*thresholds)
            gc.unfreeze()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            self.collect_if_due(time.monotonic())


gc_schedule = GcSchedule()
