"""Django's SQLite backend with a fair write queue and connection reuse.

Opening and closing a connection takes longer than most queries, and every request runs in its own
thread and so has its own connection.
"""

import os
import re
import sqlite3
from collections import deque
from pathlib import Path
from typing import Any
from weakref import WeakSet

from django.db.backends.sqlite3 import base

from toolcrib.sqlite.write_queue import WriteQueue

Database = sqlite3.dbapi2  # required here by Django
WRITES = re.compile(r"\s*(?:INSERT|UPDATE|DELETE|REPLACE)\b", re.IGNORECASE)
MAX_IDLE_CONNECTIONS = 8
FileId = tuple[int, int] | None  # device and inode of the database file

_write_queues: dict[Any, WriteQueue] = {}  # by database name
_idle: dict[str, deque[tuple[FileId, "Connection"]]] = {}
# Connections inherited by a fork: SQLite allows neither using nor closing them.
_inherited: list[object] = []


def _reset_after_fork() -> None:
    """Drop locks and connections of the parent process."""
    _write_queues.clear()
    _inherited.extend(_idle.values())
    _idle.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


class Connection(sqlite3.Connection):
    """Tracks its cursors: an unfinished one would keep an old snapshot of the database."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cursors: WeakSet[sqlite3.Cursor] = WeakSet()

    def cursor(self, factory: Any = sqlite3.Cursor) -> Any:
        cursor = super().cursor(factory)
        self._cursors.add(cursor)
        return cursor

    def execute(self, *args: Any) -> Any:
        return self.cursor().execute(*args)

    def close_cursors(self) -> None:
        for cursor in list(self._cursors):
            cursor.close()


class Cursor(base.SQLiteCursorWrapper):
    """A cursor whose writes take the write lock unless a transaction holds it."""

    wrapper: "DatabaseWrapper"

    def execute(self, query: str, params: Any = None) -> Any:
        if self.wrapper.holds_write_lock or not WRITES.match(query):
            return super().execute(query, params)
        with self.wrapper.write_queue.locked(self.wrapper.write_timeout):
            return super().execute(query, params)

    def executemany(self, query: str, param_list: Any) -> Any:
        if self.wrapper.holds_write_lock:
            return super().executemany(query, param_list)
        with self.wrapper.write_queue.locked(self.wrapper.write_timeout):
            return super().executemany(query, param_list)


class DatabaseWrapper(base.DatabaseWrapper):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.holds_write_lock = False
        self._file_id: FileId = None

    @property
    def write_timeout(self) -> float:
        return float(self.settings_dict["OPTIONS"].get("timeout", 5.0))

    @property
    def write_queue(self) -> WriteQueue:
        name = self.settings_dict["NAME"]
        return _write_queues.get(name) or _write_queues.setdefault(name, WriteQueue())

    @property
    def _idle_connections(self) -> deque[tuple[FileId, Connection]]:
        return _idle.setdefault(str(self.settings_dict["NAME"]), deque())

    def _current_file_id(self) -> FileId:
        try:
            status = Path(self.settings_dict["NAME"]).stat()
        except OSError:  # in memory, or deleted
            return None
        return status.st_dev, status.st_ino

    def get_new_connection(self, conn_params: dict[str, Any]) -> Connection:
        file_id = self._current_file_id()
        while self._idle_connections:
            try:
                idle_file_id, idle = self._idle_connections.pop()
            except IndexError:  # another thread took the last one
                break
            if idle_file_id == file_id:
                self._file_id = idle_file_id
                return idle
            idle.close()  # the file was replaced, for example by a restore
        opened: Connection = super().get_new_connection({**conn_params, "factory": Connection})
        file_id_after = self._current_file_id()
        # If the file changed while opening, which one this connection uses is unknown.
        self._file_id = file_id_after if file_id in (None, file_id_after) else None
        return opened

    def is_usable(self) -> bool:
        """Return False after an error: the connection may be its cause, so it is not reused."""
        return not self.errors_occurred

    def create_cursor(self, name: str | None = None) -> Cursor:
        cursor: Cursor = self.connection.cursor(factory=Cursor)
        cursor.wrapper = self
        return cursor

    def _close(self) -> None:
        self.release_write_lock()
        closing = self.connection
        is_reusable = (
            closing is not None
            and not self.errors_occurred
            and not closing.in_transaction
            and closing.isolation_level is None
        )
        has_room = len(self._idle_connections) < MAX_IDLE_CONNECTIONS
        if is_reusable and self._file_id is not None and has_room:
            closing.close_cursors()
            self._idle_connections.append((self._file_id, closing))
        else:
            super()._close()  # type: ignore[misc]

    def _start_transaction_under_autocommit(self) -> None:
        self.acquire_write_lock()
        try:
            super()._start_transaction_under_autocommit()  # type: ignore[misc]
        except BaseException:
            self.release_write_lock()
            raise

    def _commit(self) -> None:
        super()._commit()  # type: ignore[misc]  # if it fails, a rollback follows
        self.release_write_lock()

    def _rollback(self) -> None:
        try:
            super()._rollback()  # type: ignore[misc]
        finally:
            self.release_write_lock()

    def acquire_write_lock(self) -> None:
        """Wait for the write lock. Released by commit, rollback or `release_write_lock`."""
        self.write_queue.acquire(self.write_timeout)
        self.holds_write_lock = True

    def release_write_lock(self) -> None:
        if self.holds_write_lock:
            self.holds_write_lock = False
            self.write_queue.release()
