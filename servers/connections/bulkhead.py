"""Concurrency limit per server, with a bounded FIFO queue (bulkhead)."""

import asyncio
from collections import deque

from django.conf import settings

from servers.errors import UpstreamError


class Busy(UpstreamError):
    """All slots of a server are in use and its queue is full."""

    code = "busy"
    status = 503


class Slot:
    """The right to make one call.

    A call that timed out keeps its slot, since the server still works on it, until `needed`.
    """

    def __init__(self, bulkhead: "Bulkhead") -> None:
        self.is_late = False
        self.needed = asyncio.Event()
        self._bulkhead = bulkhead

    def hold_after_timeout(self) -> None:
        """Keep the slot after the caller's deadline, until another call needs it."""
        self.is_late = True
        self._bulkhead.hold_after_timeout(self)

    def release(self) -> None:
        self._bulkhead.release(self)


class Bulkhead:
    """The slots of one server, granted in FIFO order. Bound to one event loop."""

    def __init__(self) -> None:
        self.running = 0  # calls within their deadline
        self.refused = 0
        self._late: list[Slot] = []
        self._queue: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def waiting(self) -> int:
        """Queued calls, without those that get the slot of a late call as soon as it ends."""
        return max(0, len(self._queue) - len(self._late))

    async def acquire(self, size: int) -> Slot:
        """Wait for one of `size` slots, or raise Busy at once if the queue is full."""
        if self._has_room(size) and not self._queue:
            self.running += 1
            return Slot(self)
        if len(self._queue) >= settings.CALLS_QUEUED + len(self._late):
            self.refused += 1
            raise Busy(
                f"The server is busy: {self.running} calls running, {self.waiting} queued.",
                hint="Try again in a few seconds.",
            )
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (granted, size)
        self._queue.append(entry)
        self._release_late_slots()
        try:
            await granted
        except asyncio.CancelledError:
            if entry in self._queue:
                self._queue.remove(entry)
            elif not granted.cancelled():
                self.running -= 1  # the slot was granted at the moment of the cancellation
            self._grant_slots()
            raise
        return Slot(self)

    def hold_after_timeout(self, slot: Slot) -> None:
        self.running -= 1
        self._late.append(slot)
        self._release_late_slots()

    def release(self, slot: Slot) -> None:
        """Return the slot and grant it to the first call in the queue."""
        if slot.is_late:
            self._late.remove(slot)
        else:
            self.running -= 1
        self._grant_slots()

    def _has_room(self, size: int) -> bool:
        return self.running + len(self._late) < size

    def _grant_slots(self) -> None:
        while self._queue and self._has_room(self._queue[0][1]):
            granted, _ = self._queue.popleft()
            if not granted.done():
                self.running += 1
                granted.set_result(None)
        self._release_late_slots()

    def _release_late_slots(self) -> None:
        """Ask one late call per queued call to end, oldest first."""
        for slot, _ in zip(self._late, self._queue, strict=False):
            slot.needed.set()
