"""The ledger's rows as SQL, for both databases: what a call costs is counted in statements.

By hand, since building these queries costs twenty times what running them does. A row is a plain
`Entry` until it is written; models.Call is what everybody else reads.
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
    """One row of the ledger on its way. The fields are the columns of models.Call."""

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
    def of(cls, call: Call) -> "CallRow":
        """The row of a call that is in the database."""
        found = {name: getattr(call, name) for name in COLUMNS}
        return cls(**found, pk=call.pk)

    @property
    def duration_ms(self) -> int:
        if self.finished_at is None:
            return 0
        return round((self.finished_at - self.accepted_at).total_seconds() * 1000)


COLUMNS = tuple(field.name for field in fields(CallRow) if field.name != "pk")
TIMES = frozenset({"accepted_at", "deadline", "sent_at", "finished_at"})
FINISHED = (
    *("state", "is_error", "sent_at", "finished_at", "tokens", "error_code", "error_message"),
    *("result_bytes", "result_sha256", "result_copy", "idempotency_key"),
)
COLUMN_VALUES, FINISHED_VALUES = attrgetter(*COLUMNS), attrgetter(*FINISHED)
COLUMN_TIMES, FINISHED_TIMES = (
    [at for at, name in enumerate(names) if name in TIMES] for names in (COLUMNS, FINISHED)
)
AGENT, SESSION, CALL, ANSWER, EVENT, SHOWN = (
    model._meta.db_table
    for model in (Agent, AgentSession, Call, CallAnswer, Event, ShownDefinition)
)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@lru_cache(maxsize=64)
def _sql(text: str, marks: str) -> str:
    return text.replace("%s", marks)


class LedgerCursor:
    """Runs the ledger's statements on a connection of either database."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        connection.ensure_connection()
        self.is_sqlite = connection.vendor == "sqlite"
        self._marks = "?" if self.is_sqlite else "%s"
        # The driver's own cursor: Django's would rewrite each statement and log it.
        self._cursor: Any = connection.connection.cursor()

    def run(self, text: str, values: Sequence[Any] = ()) -> Any:
        return self._cursor.execute(_sql(text, self._marks), values)

    def one(self, text: str, values: Sequence[Any] = ()) -> Row | None:
        row: Row | None = self.run(text, values).fetchone()
        return row

    def time(self, moment: datetime | None) -> Any:
        if moment is None or not self.is_sqlite:
            return moment
        return moment.replace(tzinfo=None).isoformat(" ")

    def moment(self, found: Any) -> datetime | None:
        """What `time` wrote, as it is read back."""
        if isinstance(found, str):
            found = datetime.fromisoformat(found)
        read: datetime | None = found
        return read.replace(tzinfo=UTC) if read is not None and read.tzinfo is None else read

    def now(self) -> datetime:
        """The time, by the database's clock."""
        found = self.one("SELECT CURRENT_TIMESTAMP")
        moment = self.moment(found[0]) if found else None
        assert moment is not None  # noqa: S101 - every database knows the time
        return moment

    def lock_agents(self, agents: Sequence[int]) -> None:
        """Keep other processes from counting these agents' calls until this is committed.

        SQLite has one writer at a time anyway.
        """
        if not self.is_sqlite:
            marks = ", ".join(["%s"] * len(agents))
            text = f"SELECT id FROM {AGENT} WHERE id IN ({marks}) "  # noqa: S608 - no value in it
            self.run(text + "ORDER BY id FOR NO KEY UPDATE", agents)

    # --- Calls --------------------------------------------------------------------------------

    def insert(self, entry: CallRow) -> bool:
        """Write a new row; False where its idempotency key is taken."""
        found = self.one(INSERT_CALL, self._values(entry, COLUMN_VALUES, COLUMN_TIMES))
        entry.pk = found[0] if found else None
        return found is not None

    def finish(self, entry: CallRow) -> bool:
        """Write how a call ended, and say whether it was open until now.

        One that was given up meanwhile gets its true end after all.
        """
        values = [*self._values(entry, FINISHED_VALUES, FINISHED_TIMES), entry.pk]
        was_open: bool = self.run(FINISH_OPEN_CALL, values).rowcount > 0
        if not was_open:
            self.run(FINISH_CALL, values)
        return was_open

    def mark_sent(self, entry: CallRow) -> None:
        self.run(MARK_SENT, (self.time(entry.sent_at), entry.pk))

    def in_flight(self, agent: int, now: datetime) -> int:
        found = self.one(COUNT_IN_FLIGHT, (agent, self.time(now)))
        return int(found[0]) if found else 0

    def keep_answer(self, call: int, body: str, now: datetime) -> None:
        self.run(KEEP_ANSWER, (call, body, self.time(now)))

    def show_definition(self, session: int, tool: int, definition: int, override: str) -> None:
        """Record the definition of a tool that the session was last shown."""
        self.run(SHOW_DEFINITION, (session, tool, definition, override))

    def tell(
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
        """Append a line to a session's timeline."""
        names = tool_name[:200], group_id[:80]
        self.run(TELL, (session, self.time(at), str(kind), *names, tokens, details, call))

    def use(
        self, session: int, at: datetime, tokens: int = 0, calls: int = 0, errors: int = 0
    ) -> None:
        """Note that a session was used, and what for."""
        self.run(USE, (self.time(at), tokens, calls, errors, session))

    def raise_by(self, session: int, at: datetime, columns: Mapping[str, int]) -> None:
        """Note that a session was used, and add to what its columns count."""
        self.run(_raise(tuple(columns)), (self.time(at), *columns.values(), session))

    def _values(
        self, entry: CallRow, read: Callable[[CallRow], Row], times: Sequence[int]
    ) -> Sequence[Any]:
        values = list(read(entry))
        for at in times:
            values[at] = self.time(values[at])
        return values


def _marks(count: int) -> str:
    return ", ".join(["%s"] * count)


# No value is ever put into these texts, only names of tables and columns.
INSERT_CALL = (
    f"INSERT INTO {CALL} ({', '.join(COLUMNS)}) VALUES ({_marks(len(COLUMNS))}) "  # noqa: S608
    "ON CONFLICT (agent_id, idempotency_key) DO NOTHING RETURNING id"
)
FINISH_CALL = f"UPDATE {CALL} SET {', '.join(f'{name} = %s' for name in FINISHED)} WHERE id = %s"  # noqa: S608
FINISH_OPEN_CALL = f"{FINISH_CALL} AND state IN ('accepted', 'sent')"
MARK_SENT = f"UPDATE {CALL} SET state = 'sent', sent_at = %s WHERE id = %s AND state = 'accepted'"  # noqa: S608
COUNT_IN_FLIGHT = (
    f"SELECT COUNT(*) FROM {CALL} WHERE agent_id = %s "  # noqa: S608
    "AND state IN ('accepted', 'sent') AND deadline > %s"
)
KEEP_ANSWER = (
    f"INSERT INTO {ANSWER} (call_id, body, created_at) VALUES (%s, %s, %s) "  # noqa: S608
    "ON CONFLICT (call_id) DO UPDATE SET body = excluded.body"
)
SHOW_DEFINITION = (
    f"INSERT INTO {SHOWN} (session_id, tool_id, definition_id, override, version) "  # noqa: S608
    "VALUES (%s, %s, %s, %s, 1) ON CONFLICT (session_id, tool_id) DO UPDATE SET "
    f"definition_id = excluded.definition_id, override = excluded.override, "
    f"version = {SHOWN}.version + 1"
)
TELL = (
    f"INSERT INTO {EVENT} (session_id, at, kind, tool_name, group_id, tokens, details, call_id) "  # noqa: S608
    f"VALUES ({_marks(8)})"
)
USE = (
    f"UPDATE {SESSION} SET last_used_at = %s, tokens_call = tokens_call + %s, "  # noqa: S608
    "calls = calls + %s, errors = errors + %s WHERE id = %s"
)


@lru_cache(maxsize=64)
def _raise(columns: tuple[str, ...]) -> str:
    known = {field.name for field in AgentSession._meta.concrete_fields}
    assert known.issuperset(columns)  # noqa: S101 - names are the code's own
    more = "".join(f", {name} = {name} + %s" for name in columns)
    return f"UPDATE {SESSION} SET last_used_at = %s{more} WHERE id = %s"  # noqa: S608
