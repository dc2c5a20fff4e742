"""How well the event loop of this process keeps time: everything waits while it is held up.

It is asked to wake us in a moment, and what it is late by is noted. Read from any thread.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

EVERY = 0.05  # seconds
WINDOW = 60.0  # seconds that are remembered
LONG = 0.25  # seconds that people notice


@dataclass(frozen=True)
class Stalls:
    """By how much the loop was late lately, in milliseconds."""

    longest_ms: float
    p99_ms: float
    seconds: int  # that were looked at

    @property
    def is_long(self) -> bool:
        return self.longest_ms >= LONG * 1000


class LoopMonitor:
    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque(maxlen=int(WINDOW / EVERY))

    def note(self, late: float, now: float) -> None:
        self._late.append((now, max(0.0, late)))

    def stalls(self, now: float | None = None) -> Stalls:
        """The stalls of the last minute; one that lasts shows once it is over."""
        now = time.monotonic() if now is None else now
        found = sorted(late for at, late in list(self._late) if now - at <= WINDOW)
        if not found:
            return Stalls(0.0, 0.0, 0)
        p99 = found[min(len(found) - 1, int(len(found) * 0.99))]
        return Stalls(round(found[-1] * 1000, 1), round(p99 * 1000, 1), int(WINDOW))

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        beat = asyncio.create_task(self._beat(), name="pulse")
        try:
            yield
        finally:
            beat.cancel()
            with suppress(asyncio.CancelledError):
                await beat

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + EVERY
            await asyncio.sleep(EVERY)
            self.note(loop.time() - due, time.monotonic())
