"""First-in, first-out write lock for the threads of one process.

SQLite allows one writer at a time and makes the others retry after pauses of up to 100 ms: under
load some wait over a second while the database is free. Here a release wakes the next writer.
Writers of other processes are still handled by SQLite's busy timeout.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import OperationalError


class WriteQueue:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._locked = False

    def acquire(self, timeout: float) -> None:
        """Wait for the write lock. Raises OperationalError after the timeout."""
        with self._lock:
            if not self._locked:
                self._locked = True
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._waiting.append(ticket)
        if ticket.acquire(timeout=timeout):
            return
        with self._lock:
            if ticket not in self._waiting:  # granted after the timeout
                return
            self._waiting.remove(ticket)
        raise OperationalError("database is locked")

    def try_acquire(self) -> bool:
        """Take the write lock if it is free; return whether it was."""
        with self._lock:
            is_free = not self._locked
            self._locked = True
        return is_free

    def release(self) -> None:
        """Pass the lock to the next writer, or free it."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._locked = False

    @contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Hold the lock while the context is open."""
        self.acquire(timeout)
        try:
            yield
        finally:
            self.release()
