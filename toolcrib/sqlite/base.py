"""Django's SQLite backend, where writers take turns and closed connections are used again.

To open and close a connection takes longer than most questions that are asked of it, and every
request has a thread, and so a connection, of its own.
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

Database = sqlite3.dbapi2  # Django looks for it here
WRITES = re.compile(r"\s*(?:INSERT|UPDATE|DELETE|REPLACE)\b", re.IGNORECASE)
MOST_IDLE = 8
File = tuple[int, int] | None  # which file a name stands for

_turns: dict[str, WriteQueue] = {}  # by the database's name
_idle: dict[str, deque[tuple[File, "Connection"]]] = {}
_of_parent: list[object] = []  # SQLite wants them neither used nor closed


def _forget() -> None:
    """In a process that was forked, nobody has a turn, and connections are the parent's."""
    _turns.clear()
    _of_parent.extend(_idle.values())
    _idle.clear()


os.register_at_fork(after_in_child=_forget)


class Connection(sqlite3.Connection):
    """Knows its cursors: one that was not read to its end would hold on to the past."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._made: WeakSet[sqlite3.Cursor] = WeakSet()

    def cursor(self, factory: Any = sqlite3.Cursor) -> Any:
        made = super().cursor(factory)
        self._made.add(made)
        return made

    def execute(self, *args: Any) -> Any:
        return self.cursor().execute(*args)

    def finish(self) -> None:
        for cursor in list(self._made):
            cursor.close()


class Cursor(base.SQLiteCursorWrapper):
    """A cursor whose writes take a turn where no transaction holds one."""

    wrapper: "DatabaseWrapper"

    def execute(self, query: str, params: Any = None) -> Any:
        if self.wrapper.holds_turn or not WRITES.match(query):
            return super().execute(query, params)
        with self.wrapper.turns.turn(self.wrapper.patience):
            return super().execute(query, params)

    def executemany(self, query: str, param_list: Any) -> Any:
        if self.wrapper.holds_turn:
            return super().executemany(query, param_list)
        with self.wrapper.turns.turn(self.wrapper.patience):
            return super().executemany(query, param_list)


class DatabaseWrapper(base.DatabaseWrapper):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.holds_turn = False
        self._opened: File = None

    @property
    def patience(self) -> float:
        return float(self.settings_dict["OPTIONS"].get("timeout", 5.0))

    @property
    def turns(self) -> WriteQueue:
        return _turns.setdefault(str(self.settings_dict["NAME"]), WriteQueue())

    @property
    def _spare(self) -> deque[tuple[File, Connection]]:
        return _idle.setdefault(str(self.settings_dict["NAME"]), deque())

    def _file(self) -> File:
        try:
            found = Path(self.settings_dict["NAME"]).stat()
        except OSError:  # in memory, or gone
            return None
        return found.st_dev, found.st_ino

    def get_new_connection(self, conn_params: dict[str, Any]) -> Connection:
        now = self._file()
        while self._spare:
            try:
                of, spare = self._spare.pop()
            except IndexError:  # another thread took the last
                break
            if of == now:
                self._opened = of
                return spare
            spare.close()  # the file was put aside, as by a restore
        made: Connection = super().get_new_connection({**conn_params, "factory": Connection})
        after = self._file()
        self._opened = after if now in (None, after) else None  # else which one it is is not known
        return made

    def is_usable(self) -> bool:
        """Django asks after an error: the connection may be its cause, so none is used again."""
        return not self.errors_occurred

    def create_cursor(self, name: str | None = None) -> Cursor:
        cursor: Cursor = self.connection.cursor(factory=Cursor)
        cursor.wrapper = self
        return cursor

    def _close(self) -> None:
        self.give_back()
        found = self.connection
        clean = (
            found is not None
            and not self.errors_occurred
            and not found.in_transaction
            and found.isolation_level is None
        )
        if clean and self._opened is not None and len(self._spare) < MOST_IDLE:
            found.finish()
            self._spare.append((self._opened, found))
        else:
            super()._close()  # type: ignore[misc]

    def _start_transaction_under_autocommit(self) -> None:
        self.take_turn()
        try:
            super()._start_transaction_under_autocommit()  # type: ignore[misc]
        except BaseException:
            self.give_back()
            raise

    def _commit(self) -> None:
        super()._commit()  # type: ignore[misc]  # if it fails, a rollback follows
        self.give_back()

    def _rollback(self) -> None:
        try:
            super()._rollback()  # type: ignore[misc]
        finally:
            self.give_back()

    def take_turn(self) -> None:
        """Wait for this connection's turn to write. Given back by a commit, or by itself."""
        self.turns.take(self.patience)
        self.holds_turn = True

    def give_back(self) -> None:
        if self.holds_turn:
            self.holds_turn = False
            self.turns.give_back()
