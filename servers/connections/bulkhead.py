"""How many calls a server is given at once, and how many may wait for their turn."""

import asyncio
from collections import deque

from django.conf import settings

from servers.errors import UpstreamError


class Busy(UpstreamError):
    """A server has as much to do as it is given, and as many wait as may."""

    code = "busy"
    status = 503


class Slot:
    """One call's turn. A late call keeps it, since its server still works, until it is `needed`."""

    def __init__(self, bulkhead: "Bulkhead") -> None:
        self.is_late = False
        self.needed = asyncio.Event()
        self._bulkhead = bulkhead

    def linger(self) -> None:
        """Keep the turn though nobody waits for the call any more, unless another needs it."""
        self.is_late = True
        self._bulkhead.linger(self)

    def leave(self) -> None:
        self._bulkhead.leave(self)


class Bulkhead:
    """Turns at one server, first come first served. Lives on one loop."""

    def __init__(self) -> None:
        self.running = 0  # calls that somebody waits for
        self.refused = 0
        self._late: list[Slot] = []
        self._queue: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def waiting(self) -> int:
        """Calls without a turn, besides those that get one as soon as a late call ended."""
        return max(0, len(self._queue) - len(self._late))

    async def enter(self, size: int) -> Slot:
        """Wait for a turn, or raise Busy at once where too many wait already."""
        if self._has_room(size) and not self._queue:
            self.running += 1
            return Slot(self)
        if len(self._queue) >= settings.CALLS_QUEUED + len(self._late):
            self.refused += 1
            raise Busy(
                f"The server has {self.running} calls to answer and {self.waiting} more wait.",
                hint="Try again in a few seconds.",
            )
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (granted, size)
        self._queue.append(place)
        self._hurry()
        try:
            await granted
        except asyncio.CancelledError:
            if place in self._queue:
                self._queue.remove(place)
            elif not granted.cancelled():
                self.running -= 1  # the turn came as we went
            self._give()
            raise
        return Slot(self)

    def linger(self, turn: Slot) -> None:
        self.running -= 1
        self._late.append(turn)
        self._hurry()

    def leave(self, turn: Slot) -> None:
        """Give the turn to whoever has waited longest."""
        if turn.is_late:
            self._late.remove(turn)
        else:
            self.running -= 1
        self._give()

    def _has_room(self, size: int) -> bool:
        return self.running + len(self._late) < size

    def _give(self) -> None:
        while self._queue and self._has_room(self._queue[0][1]):
            granted, _ = self._queue.popleft()
            if not granted.done():
                self.running += 1
                granted.set_result(None)
        self._hurry()

    def _hurry(self) -> None:
        """Have as many late calls end as others wait, the oldest first."""
        for turn, _ in zip(self._late, self._queue, strict=False):
            turn.needed.set()
