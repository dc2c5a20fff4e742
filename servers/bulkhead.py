"""How many calls a server is given at once, and how many may wait for their turn."""

import asyncio
from collections import deque

from django.conf import settings

from servers.faults import UpstreamError


class Busy(UpstreamError):
    """A server has as much to do as it is given, and as many wait as may."""

    code = "busy"
    status = 503


class Bulkhead:
    """Turns at one server, first come first served. Lives on one loop."""

    def __init__(self) -> None:
        self.running = 0
        self.refused = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def enter(self, size: int) -> None:
        """Wait for a turn, or raise Busy at once where too many wait already."""
        if self.running < size and not self._queue:
            self.running += 1
            return
        if len(self._queue) >= settings.CALLS_QUEUED:
            self.refused += 1
            raise Busy(
                f"The server has {self.running} calls to answer and {len(self._queue)} more wait.",
                hint="Try again in a few seconds.",
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # the turn came as we went
            elif turn in self._queue:
                self._queue.remove(turn)
            raise

    def leave(self) -> None:
        """Give the turn to whoever has waited longest."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1
