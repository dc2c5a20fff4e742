"""When Python looks for garbage in a web process.

To look through everything that 10,000 tools are made of halts all threads for a tenth of a
second, and Python does it whenever much was made, as when an agent searches. Here it is done once
a minute: at once where it is short, else while nobody is being answered. What was loaded at the
start is never garbage, and left out.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

YOUNG, MIDDLE = 5_000, 10  # the lesser looks, as Python does them by itself: a few milliseconds
NEVER = 1_000_000_000
LOOK = 1.0  # seconds between two looks at whether it is time
EVERY, AT_LATEST = 60.0, 900.0
SHORT = 0.02
QUIET = 1.0  # seconds without a request


class Collector:
    def __init__(self) -> None:
        self._touched = self._collected = time.monotonic()
        self._took = 0.0

    def touch(self) -> None:
        """Note that somebody is being answered."""
        self._touched = time.monotonic()

    def is_due(self, now: float) -> bool:
        since = now - self._collected
        if since < EVERY:
            return False
        return self._took <= SHORT or now - self._touched >= QUIET or since >= AT_LATEST

    def collect(self) -> None:
        began = time.monotonic()
        gc.collect()
        self._collected = time.monotonic()
        self._took = self._collected - began

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
            if self.is_due(time.monotonic()):
                self.collect()


collector = Collector()
