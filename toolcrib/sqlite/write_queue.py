"""Writers of this process take turns at the database, who came first first.

SQLite lets one write at a time and has the others ask again, after pauses of up to a tenth of a
second: under load some wait a second and more while the database is free. Here the next one is
woken when the last is done. Writers of other processes are waited for as before.
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
        self._taken = False

    def take(self, patience: float) -> None:
        """Wait for a turn; whoever takes one gives it back."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        if mine.acquire(timeout=patience):
            return
        with self._lock:
            if mine not in self._waiting:  # it came after all
                return
            self._waiting.remove(mine)
        raise OperationalError("database is locked")

    def give_back(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

    @contextmanager
    def turn(self, patience: float) -> Iterator[None]:
        self.take(patience)
        try:
            yield
        finally:
            self.give_back()
