"""Hand-written SQL of the call ledger, for SQLite and PostgreSQL.

Building these queries with the ORM takes twenty times as long as running them. A row is a plain
`CallRow` until it is written; all other code reads `models.Call`.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from sessions_app.models import (
    Agent,
    AgentSession,
    Call,
    CallAnswer,
    CallState,
    Event,
    ShownDefinition,
)

Row = tuple[Any, ...]


@dataclass(slots=True)
class CallRow:
    """One row of the ledger before it is written. The fields are the columns of models.Call."""

    call_id: str
    session_id: int | None
    agent_id: int | None
    actor: str
    tool_name: str
    path: str
    idempotency_key: str | None
    request_digest: str
    arguments: str
    accepted_at: datetime
    deadline: datetime
    holder: str
    state: str = CallState.ACCEPTED.value
    tool_id: int | None = None
    server_id: int | None = None
    server_slug: str = ""
    definition_id: int | None = None
    is_error: bool = False
    implicit_load: bool = False
    sent_at: datetime | None = None
    finished_at: datetime | None = None
    tokens: int = 0
    result_bytes: int = 0
    result_sha256: str = ""
    result_copy: str = ""
    error_code: str = ""
    error_message: str = ""
    note: str = ""
    pk: int | None = None

    @classmethod
    def from_model(cls, call: Call) -> "CallRow":
        """Return the row of a call that is in the database."""
        values = {name: getattr(call, name) for name in COLUMNS}
        return cls(**values, pk=call.pk)

    @property
    def duration_ms(self) -> int:
        if self.finished_at is None:
            return 0
        return round((self.finished_at - self.accepted_at).total_seconds() * 1000)


COLUMNS = tuple(field.name for field in fields(CallRow) if field.name != "pk")
TIME_COLUMNS = frozenset({"accepted_at", "deadline", "sent_at", "finished_at"})
RESULT_COLUMNS = (
    *("state", "is_error", "sent_at", "finished_at", "tokens", "error_code", "error_message"),
    *("result_bytes", "result_sha256", "result_copy", "idempotency_key"),
)
read_columns, read_result_columns = attrgetter(*COLUMNS), attrgetter(*RESULT_COLUMNS)
TIME_POSITIONS, RESULT_TIME_POSITIONS = (
    [position for position, name in enumerate(names) if name in TIME_COLUMNS]
    for names in (COLUMNS, RESULT_COLUMNS)
)
AGENT, SESSION, CALL, ANSWER, EVENT, SHOWN = (
    model._meta.db_table
    for model in (Agent, AgentSession, Call, CallAnswer, Event, ShownDefinition)
)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@lru_cache(maxsize=64)
def _with_placeholder(sql: str, placeholder: str) -> str:
    return sql.replace("%s", placeholder)


class LedgerCursor:
    """Executes the ledger's statements on a SQLite or PostgreSQL connection."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        connection.ensure_connection()
        self.is_sqlite = connection.vendor == "sqlite"
        self._placeholder = "?" if self.is_sqlite else "%s"
        # The driver's cursor: Django's cursor rewrites and logs each statement.
        self._cursor: Any = connection.connection.cursor()

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Any:
        return self._cursor.execute(_with_placeholder(sql, self._placeholder), values)

    def fetch_one(self, sql: str, values: Sequence[Any] = ()) -> Row | None:
        row: Row | None = self.execute(sql, values).fetchone()
        return row

    def encode_time(self, time: datetime | None) -> Any:
        if time is None or not self.is_sqlite:
            return time
        return time.replace(tzinfo=None).isoformat(" ")

    def decode_time(self, value: Any) -> datetime | None:
        """Return a time column's value as an aware datetime; the inverse of `encode_time`."""
        time: datetime | None = datetime.fromisoformat(value) if isinstance(value, str) else value
        return time.replace(tzinfo=UTC) if time is not None and time.tzinfo is None else time

    def now(self) -> datetime:
        """Return the current time of the database's clock."""
        row = self.fetch_one("SELECT CURRENT_TIMESTAMP")
        time = self.decode_time(row[0]) if row else None
        assert time is not None  # noqa: S101 - the statement always returns a row
        return time

    def lock_agents(self, agents: Sequence[int]) -> None:
        """Lock these agents' rows until commit, so that their calls in flight are counted serially.

        SQLite needs no lock: it has a single writer.
        """
        if not self.is_sqlite:
            sql = f"SELECT id FROM {AGENT} WHERE id IN ({_placeholders(len(agents))}) "  # noqa: S608
            self.execute(sql + "ORDER BY id FOR NO KEY UPDATE", agents)

    # --- Calls --------------------------------------------------------------------------------

    def insert(self, entry: CallRow) -> bool:
        """Insert a new row; return False if its idempotency key is already used."""
        row = self.fetch_one(INSERT_CALL, self._values(entry, read_columns, TIME_POSITIONS))
        entry.pk = row[0] if row else None
        return row is not None

    def finish(self, entry: CallRow) -> bool:
        """Write a call's result, and return whether the call was still open.

        A call that recovery has marked `unknown` is overwritten with its actual result.
        """
        values = [*self._values(entry, read_result_columns, RESULT_TIME_POSITIONS), entry.pk]
        was_open: bool = self.execute(FINISH_OPEN_CALL, values).rowcount > 0
        if not was_open:
            self.execute(FINISH_CALL, values)
        return was_open

    def mark_sent(self, entry: CallRow) -> None:
        self.execute(MARK_SENT, (self.encode_time(entry.sent_at), entry.pk))

    def count_in_flight(self, agent: int, now: datetime) -> int:
        row = self.fetch_one(COUNT_IN_FLIGHT, (agent, self.encode_time(now)))
        return int(row[0]) if row else 0

    def store_answer(self, call: int, body: str, now: datetime) -> None:
        self.execute(STORE_ANSWER, (call, body, self.encode_time(now)))

    def set_shown_definition(self, session: int, tool: int, definition: int, override: str) -> None:
        """Record the definition of a tool that the session was last shown."""
        self.execute(SET_SHOWN_DEFINITION, (session, tool, definition, override))

    def insert_event(
        self,
        session: int,
        kind: str,
        at: datetime,
        *,
        tool_name: str = "",
        group_id: str = "",
        call: int | None = None,
        tokens: int = 0,
        details: str = "{}",
    ) -> None:
        """Append an event to a session's timeline."""
        names = tool_name[:200], group_id[:80]
        values = (session, self.encode_time(at), str(kind), *names, tokens, details, call)
        self.execute(INSERT_EVENT, values)

    def touch_session(
        self, session: int, at: datetime, tokens: int = 0, calls: int = 0, errors: int = 0
    ) -> None:
        """Set a session's last use, and add to its call counters."""
        self.execute(TOUCH_SESSION, (self.encode_time(at), tokens, calls, errors, session))

    def increment(self, session: int, at: datetime, columns: Mapping[str, int]) -> None:
        """Set a session's last use, and add to the given counter columns."""
        values = (self.encode_time(at), *columns.values(), session)
        self.execute(_increment_sql(tuple(columns)), values)

    def _values(
        self, entry: CallRow, read: Callable[[CallRow], Row], time_positions: Sequence[int]
    ) -> Sequence[Any]:
        values = list(read(entry))
        for position in time_positions:
            values[position] = self.encode_time(values[position])
        return values


def _placeholders(count: int) -> str:
    return ", ".join(["%s"] * count)


# Only table and column names are formatted into these statements, never a value.
INSERT_CALL = (
    f"INSERT INTO {CALL} ({', '.join(COLUMNS)}) VALUES ({_placeholders(len(COLUMNS))}) "  # noqa: S608
    "ON CONFLICT (agent_id, idempotency_key) DO NOTHING RETURNING id"
)
FINISH_CALL = (
    f"UPDATE {CALL} SET {', '.join(f'{name} = %s' for name in RESULT_COLUMNS)} WHERE id = %s"  # noqa: S608
)
FINISH_OPEN_CALL = f"{FINISH_CALL} AND state IN ('accepted', 'sent')"
MARK_SENT = f"UPDATE {CALL} SET state = 'sent', sent_at = %s WHERE id = %s AND state = 'accepted'"  # noqa: S608
COUNT_IN_FLIGHT = (
    f"SELECT COUNT(*) FROM {CALL} WHERE agent_id = %s "  # noqa: S608
    "AND state IN ('accepted', 'sent') AND deadline > %s"
)
STORE_ANSWER = (
    f"INSERT INTO {ANSWER} (call_id, body, created_at) VALUES (%s, %s, %s) "  # noqa: S608
    "ON CONFLICT (call_id) DO UPDATE SET body = excluded.body"
)
SET_SHOWN_DEFINITION = (
    f"INSERT INTO {SHOWN} (session_id, tool_id, definition_id, override, version) "  # noqa: S608
    "VALUES (%s, %s, %s, %s, 1) ON CONFLICT (session_id, tool_id) DO UPDATE SET "
    f"definition_id = excluded.definition_id, override = excluded.override, "
    f"version = {SHOWN}.version + 1"
)
INSERT_EVENT = (
    f"INSERT INTO {EVENT} (session_id, at, kind, tool_name, group_id, tokens, details, call_id) "  # noqa: S608
    f"VALUES ({_placeholders(8)})"
)
TOUCH_SESSION = (
    f"UPDATE {SESSION} SET last_used_at = %s, tokens_call = tokens_call + %s, "  # noqa: S608
    "calls = calls + %s, errors = errors + %s WHERE id = %s"
)


@lru_cache(maxsize=64)
def _increment_sql(columns: tuple[str, ...]) -> str:
    known = {field.name for field in AgentSession._meta.concrete_fields}
    assert known.issuperset(columns)  # noqa: S101 - the names come from our own code
    assignments = "".join(f", {name} = {name} + %s" for name in columns)
    return f"UPDATE {SESSION} SET last_used_at = %s{assignments} WHERE id = %s"  # noqa: S608
