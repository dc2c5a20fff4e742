"""Watch for commits, so that periodic tasks need not query a database in which nothing changed.

SQLite counts the commits of other connections, in whichever process; reading the counter takes
microseconds. On PostgreSQL the tasks poll.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection

INTERVAL = 0.25  # seconds


class DatabaseWatch:
    def __init__(self) -> None:
        self.changes = 0  # commits that were noticed; several in one interval count once
        self.is_running = False
        self._changed = asyncio.Event()
        self._state: tuple[Any, ...] = ()
        self._database: sqlite3.Connection | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch while the context is open."""
        if connection.vendor != "sqlite":
            yield
            return
        task = asyncio.create_task(self._run(), name="database watch")
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def wait(self, seen: int, least: float, most: float) -> int:
        """Sleep `least` seconds, then until `changes` differs from `seen`; return `changes`.

        Returns after `most` seconds in any case, and after `least` if nothing watches.
        """
        await asyncio.sleep(least)
        if self.is_running:
            with suppress(TimeoutError):
                async with asyncio.timeout(most - least):
                    while self.changes == seen:
                        await self._changed.wait()
        return self.changes

    async def _run(self) -> None:
        try:
            while True:
                state = self._read()
                if state != self._state:
                    self._state = state
                    self.changes += 1
                    self._changed.set()
                    self._changed.clear()
                await asyncio.sleep(INTERVAL)
        finally:
            self._close()

    def _read(self) -> tuple[Any, ...]:
        """Return a value that differs after every commit of another connection."""
        path = Path(str(settings.DATABASES["default"]["NAME"]))
        try:
            file = path.stat().st_ino
            if self._database is None or file != self._state[0]:  # a restore replaces the file
                self._close()
                self._database = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
            return file, self._database.execute("PRAGMA data_version").fetchone()[0]
        except (OSError, sqlite3.Error):
            return -1, self.changes  # the tasks report what is wrong

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
