"""Event-loop lag monitor: how late the loop of this process wakes a periodic timer.

Everything on the loop waits while it is blocked. Can be read from any thread.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

INTERVAL = 0.05  # seconds between two timers
IDLE_INTERVAL = 0.25  # while the process uses less of a processor than IDLE_SHARE
IDLE_SHARE = 0.03
WINDOW = 60.0  # seconds of history
LONG_LAG = 0.25  # seconds; noticeable to people


@dataclass(frozen=True)
class LoopLag:
    """Event-loop lag in the last window, in milliseconds."""

    longest_ms: float
    p99_ms: float
    seconds: int  # length of the window; 0 if there is no measurement

    @property
    def is_long(self) -> bool:
        return self.longest_ms >= LONG_LAG * 1000


class LoopMonitor:
    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=int(WINDOW / INTERVAL))

    def record(self, lag: float, now: float) -> None:
        self._samples.append((now, max(0.0, lag)))

    def lag(self, now: float | None = None) -> LoopLag:
        """Return the lag of the last minute. A block in progress appears once it has ended."""
        now = time.monotonic() if now is None else now
        lags = sorted(lag for at, lag in list(self._samples) if now - at <= WINDOW)
        if not lags:
            return LoopLag(0.0, 0.0, 0)
        p99 = lags[min(len(lags) - 1, int(len(lags) * 0.99))]
        return LoopLag(round(lags[-1] * 1000, 1), round(p99 * 1000, 1), int(WINDOW))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Measure while the context is open."""
        self._start_timer(asyncio.get_running_loop(), INTERVAL)
        try:
            yield
        finally:
            self._timer.cancel()

    def _start_timer(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        # A callback: waking a task takes several times as long.
        due, cpu = loop.time() + interval, time.process_time()
        self._timer = loop.call_later(interval, self._measure, loop, due, interval, cpu)

    def _measure(
        self, loop: asyncio.AbstractEventLoop, due: float, interval: float, cpu: float
    ) -> None:
        self.record(loop.time() - due, time.monotonic())
        is_idle = time.process_time() - cpu < IDLE_SHARE * interval
        self._start_timer(loop, IDLE_INTERVAL if is_idle else INTERVAL)
