"""Ledger writer: hand-written SQL, and commits of all jobs that wait, in one transaction.

Building these queries with the ORM takes twenty times as long as running them. A row is a plain
`CallRow` until it is written; all other code reads `models.Call`.

A call waits until its own rows are committed, but shares the transaction with other calls. On
SQLite the event loop itself writes what was queued during one of its turns, or at once what comes
alone, as long as nobody else writes: a switch to another thread takes longer than the commit.
Otherwise a thread writes. Without a running writer, as in a command or a test, the caller's own
thread reads and writes. If a job (a function of a cursor) raises, each is retried alone.
"""

import asyncio
import json
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Generic, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import (
    DEFAULT_DB_ALIAS,
    DatabaseError,
    InterfaceError,
    OperationalError,
    connection,
    connections,
    transaction,
)
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone

from sessions_app.models import (
    Agent,
    AgentSession,
    Call,
    CallAnswer,
    CallState,
    Event,
    EventKind,
    Expansion,
    ShownDefinition,
)
from sessions_app.models.encryption import encrypt_text
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.figures import CODES_WITH_SCHEMA
from toolcrib.lib.payloads import redacted_json
from toolcrib.lib.telemetry import metrics
from toolcrib.lib.telemetry.metrics import Series

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
MAX_BATCH = 64  # jobs in one transaction
MAX_QUEUED = 2_000
RETRY_SECONDS = 10.0  # how long a caller waits for its result while the database is unavailable
KEEP_SECONDS = 600.0  # how long the result is kept for the ledger after that
RETRY_INTERVAL = 0.1
STALE_CONNECTION_SECONDS = 1.0  # a failure that takes longer is not due to a stale connection
# A commit on the event loop that works or waits longer is followed by a pause, in which the thread
# writes. The limit of work is processor time: being preempted says nothing about the database.
MAX_LOOP_WORK, MAX_LOOP_WAIT, LOOP_PAUSE = 0.005, 0.05, 0.1

Row = tuple[Any, ...]


@dataclass(slots=True)
class CallRow:
    """One row of the ledger before it is written. Most fields are columns of models.Call."""

    call_id: str
    tool_name: str
    path: str
    idempotency_key: str | None
    arguments: str
    accepted_at: datetime
    deadline: datetime
    holder: str
    session_id: int | None = None
    agent_id: int | None = None
    run_id: int | None = None  # of the script that made the call
    actor: str = ""
    request_digest: str = ""
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
    storage: str = "masked"  # of arguments and result: nothing, masked or all
    continues: str = ""  # id of the call that asked the user what this request answers

    @classmethod
    def from_model(cls, call: Call) -> "CallRow":
        return cls(**{name: getattr(call, name) for name in COLUMNS}, pk=call.pk)

    @property
    def duration_ms(self) -> int:
        end = self.finished_at or self.accepted_at
        return round((end - self.accepted_at).total_seconds() * 1000)


@dataclass(slots=True)
class ExpansionRow:
    """What a session has loaded of a group. The fields are the columns of models.Expansion."""

    session_id: int
    group_id: str
    names: list[str] | None
    listed: list[str] | None
    pins: str
    sequence: int


NOT_COLUMNS = ("pk", "storage", "continues")
COLUMNS = tuple(field.name for field in fields(CallRow) if field.name not in NOT_COLUMNS)
RESULT_COLUMNS = (
    *("state", "is_error", "sent_at", "finished_at", "tokens", "error_code", "error_message"),
    *("result_bytes", "result_sha256", "result_copy", "idempotency_key"),
)
read_columns, read_result_columns = attrgetter(*COLUMNS), attrgetter(*RESULT_COLUMNS)
# The encrypted columns, in the values of a new row and of a result.
PAYLOAD_POSITIONS = COLUMNS.index("arguments"), COLUMNS.index("result_copy")
RESULT_POSITIONS = (RESULT_COLUMNS.index("result_copy"),)
AGENT, SESSION, CALL, ANSWER, EVENT, EXPANSION, SHOWN = (
    model._meta.db_table
    for model in (Agent, AgentSession, Call, CallAnswer, Event, Expansion, ShownDefinition)
)


def _encrypted(values: Row, positions: tuple[int, ...]) -> list[Any]:
    encrypted = list(values)
    for position in positions:
        encrypted[position] = encrypt_text(values[position])
    return encrypted


@lru_cache(maxsize=64)
def _as_sqlite(sql: str) -> str:
    return sql.replace("%s", "?")


@lru_cache(maxsize=16)  # a call writes each of its times in several statements
def _encode_time(value: datetime) -> str:
    """Return a time as SQLite stores it: in UTC, without the offset."""
    return value.isoformat(" ", "microseconds")[:26]


class LedgerCursor:
    """Executes the ledger's statements on a SQLite or PostgreSQL connection."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        connection.ensure_connection()
        self.is_sqlite = connection.vendor == "sqlite"
        # The driver's cursor: Django's cursor rewrites and logs each statement.
        self._cursor: Any = connection.connection.cursor()
        self._connection = connection
        self.counted: list[tuple[Series, float]] = []  # metrics of rows that are not committed yet

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Any:
        if self.is_sqlite:
            sql = _as_sqlite(sql)
            values = [_encode_time(value) if type(value) is datetime else value for value in values]
        return self._cursor.execute(sql, values)

    def fetch_one(self, sql: str, values: Sequence[Any] = ()) -> Row | None:
        row: Row | None = self.execute(sql, values).fetchone()
        return row

    def decode_time(self, value: Any) -> datetime | None:
        """Return a time column's value as an aware datetime."""
        time: datetime | None = datetime.fromisoformat(value) if isinstance(value, str) else value
        return time.replace(tzinfo=UTC) if time is not None and time.tzinfo is None else time

    def now(self) -> datetime:
        """Return the current time of the database's clock."""
        (value,) = self.execute("SELECT CURRENT_TIMESTAMP").fetchone()
        return self.decode_time(value) or timezone.now()

    def lock_session(self, session: int) -> None:
        """Lock a session's row until commit, so that what it did is written serially."""
        if not self.is_sqlite:
            self.execute(f"SELECT id FROM {SESSION} WHERE id = %s FOR UPDATE", (session,))  # noqa: S608

    def lock_agents(self, agents: Sequence[int]) -> None:
        """Lock these agents' rows until commit, so that their calls in flight are counted serially.

        SQLite needs no lock: it has a single writer.
        """
        if not self.is_sqlite:
            sql = f"SELECT id FROM {AGENT} WHERE id IN ({_placeholders(len(agents))}) "  # noqa: S608
            self.execute(sql + "ORDER BY id FOR NO KEY UPDATE", agents)

    def count(self, *changes: tuple[Series, float]) -> None:
        """Add to metrics once the rows are committed."""
        if self._connection.in_atomic_block:
            transaction.on_commit(partial(metrics.record, changes), using=self._connection.alias)
        else:
            self.counted += changes

    # --- Calls --------------------------------------------------------------------------------

    def insert(self, entry: CallRow) -> bool:
        """Insert a new row; return False if its idempotency key is already used."""
        row = self.fetch_one(INSERT_CALL, _encrypted(read_columns(entry), PAYLOAD_POSITIONS))
        entry.pk = row[0] if row else None
        return row is not None

    def waits_for_answer(self, entry: CallRow) -> bool:
        """Return whether the call that this request continues waits for its user's answer."""
        values = entry.continues, entry.session_id
        return bool(entry.continues) and self.fetch_one(FIND_ASKING, values) is not None

    def reopen(self, entry: CallRow) -> bool:
        """Continue the call that asked the user; return False if it does not wait for an answer.

        Its row, its event and its place in the session's figures are this request's from now on.
        """
        if not self.waits_for_answer(entry) or entry.session_id is None:
            return False
        keys = (entry.agent_id, entry.idempotency_key)
        values = (entry.deadline, entry.holder, entry.idempotency_key, entry.continues, *keys)
        if (row := self.fetch_one(REOPEN_CALL, values)) is None:
            return False
        entry.pk, accepted_at = row
        entry.call_id, entry.implicit_load = entry.continues, False  # which is recorded
        entry.accepted_at = self.decode_time(accepted_at) or entry.accepted_at
        self.increment(entry.session_id, timezone.now(), {"calls": -1})
        self.execute(DELETE_EVENT, (entry.pk, str(EventKind.CALLED)))
        return True

    def finish(self, entry: CallRow) -> bool:
        """Write a call's result, and return whether the call was still open.

        A call that recovery has marked `unknown` is overwritten with its actual result.
        """
        values = _encrypted((*read_result_columns(entry), entry.pk), RESULT_POSITIONS)
        was_open: bool = self.execute(FINISH_OPEN_CALL, values).rowcount > 0
        if not was_open:
            self.execute(FINISH_CALL, values)
        return was_open

    def mark_sent(self, entry: CallRow) -> None:
        self.execute(MARK_SENT, (entry.sent_at, entry.pk))

    def store_answer(self, call: int, body: str, now: datetime) -> None:
        self.execute(STORE_ANSWER, (call, encrypt_text(body), now))

    def set_shown_definition(self, session: int, tool: int, definition: int, override: str) -> None:
        """Record the definition of a tool that the session was last shown."""
        self.execute(SET_SHOWN_DEFINITION, (session, tool, definition, override))
        self.execute(INCREMENT_LOADS_VERSION, (session,))

    def read_expansions(self, session: int) -> list[ExpansionRow]:
        """Return what a session has loaded, in the order of its groups."""
        rows = self.execute(READ_EXPANSIONS, (session,)).fetchall()
        return [
            ExpansionRow(session, group, _decode_json(names), _decode_json(listed), pins, sequence)
            for group, names, listed, pins, sequence in rows
        ]

    def save_expansion(self, row: ExpansionRow) -> None:
        lists = (None if value is None else json.dumps(value) for value in (row.names, row.listed))
        values = (row.session_id, row.group_id, *lists, row.pins, row.sequence)
        self.execute(SAVE_EXPANSION, values)

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
        """Append an event. The caller has locked the session or has it updated."""
        names = tool_name[:200], group_id[:80]
        self.execute(INSERT_EVENT, (session, at, str(kind), *names, tokens, details, call))

    def increment(self, session: int, at: datetime, columns: Mapping[str, int]) -> None:
        """Set a session's last use, and add to the given counter columns."""
        self.execute(_increment_sql(tuple(columns)), (at, *columns.values(), session))


def _decode_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _placeholders(count: int) -> str:
    return ", ".join(["%s"] * count)


# Only table and column names are formatted into these statements, never a value.
INSERT_CALL = (
    f"INSERT INTO {CALL} ({', '.join(COLUMNS)}) VALUES ({_placeholders(len(COLUMNS))}) "  # noqa: S608
    "ON CONFLICT (agent_id, idempotency_key) DO NOTHING RETURNING id"
)
ASKING = "call_id = %s AND state = 'succeeded' AND error_code = 'input_required'"
FIND_ASKING = f"SELECT 1 FROM {CALL} WHERE {ASKING} AND session_id = %s"  # noqa: S608
REOPEN_CALL = (
    f"UPDATE {CALL} SET state = 'accepted', deadline = %s, holder = %s, idempotency_key = %s, "  # noqa: S608
    f"sent_at = NULL, finished_at = NULL, error_code = '', error_message = '' WHERE {ASKING} "
    f"AND NOT EXISTS (SELECT 1 FROM {CALL} used WHERE used.agent_id = %s "
    "AND used.idempotency_key = %s) RETURNING id, accepted_at"
)
DELETE_EVENT = f"DELETE FROM {EVENT} WHERE call_id = %s AND kind = %s"  # noqa: S608
FINISH_CALL = (
    f"UPDATE {CALL} SET {', '.join(f'{name} = %s' for name in RESULT_COLUMNS)} WHERE id = %s"  # noqa: S608
)
FINISH_OPEN_CALL = f"{FINISH_CALL} AND state IN ('accepted', 'sent', 'held', 'approved')"
MARK_SENT = f"UPDATE {CALL} SET state = 'sent', sent_at = %s WHERE id = %s AND state = 'accepted'"  # noqa: S608
STORE_ANSWER = (
    f"INSERT INTO {ANSWER} (call_id, body, created_at) VALUES (%s, %s, %s) "  # noqa: S608
    "ON CONFLICT (call_id) DO UPDATE SET body = excluded.body"
)
SET_SHOWN_DEFINITION = (
    f"INSERT INTO {SHOWN} (session_id, tool_id, definition_id, override) "  # noqa: S608
    "VALUES (%s, %s, %s, %s) ON CONFLICT (session_id, tool_id) DO UPDATE SET "
    "definition_id = excluded.definition_id, override = excluded.override"
)
READ_EXPANSIONS = (
    f"SELECT group_id, names, listed, pins, sequence FROM {EXPANSION} "  # noqa: S608
    "WHERE session_id = %s ORDER BY sequence"
)
SAVE_EXPANSION = (
    f"INSERT INTO {EXPANSION} (session_id, group_id, names, listed, pins, sequence) "  # noqa: S608
    f"VALUES ({_placeholders(6)}) ON CONFLICT (session_id, group_id) DO UPDATE SET "
    "names = excluded.names, listed = excluded.listed, pins = excluded.pins"
)
INCREMENT_LOADS_VERSION = f"UPDATE {SESSION} SET loads_version = loads_version + 1 WHERE id = %s"  # noqa: S608
INSERT_EVENT = (
    f"INSERT INTO {EVENT} (session_id, at, kind, tool_name, group_id, tokens, details, call_id) "  # noqa: S608
    f"VALUES ({_placeholders(8)})"
)


@lru_cache(maxsize=64)
def _increment_sql(columns: tuple[str, ...]) -> str:
    known = {field.name for field in AgentSession._meta.concrete_fields}
    assert known.issuperset(columns)  # noqa: S101 - the names come from our own code
    assignments = "".join(f", {name} = {name} + %s" for name in columns)
    return f"UPDATE {SESSION} SET last_used_at = %s{assignments} WHERE id = %s"  # noqa: S608


# The session column to which an event's tokens are added; see also `token_column`.
TOKEN_COLUMNS = {
    EventKind.OPENED: "tokens_catalog",
    EventKind.SEARCHED: "tokens_search",
    EventKind.DETAILS: "tokens_load",
    EventKind.LOADED: "tokens_load",
    EventKind.CALLED: "tokens_call",
    EventKind.REFUSED: "tokens_call",
    EventKind.HELD: "tokens_call",
    EventKind.SCRIPT: "tokens_call",
}


def token_column(kind: str, code: object = "") -> str | None:
    """Return the session column of an event's tokens; an error with a schema is a definition."""
    if kind == EventKind.REFUSED and code in CODES_WITH_SCHEMA:
        return "tokens_load"
    return TOKEN_COLUMNS.get(EventKind(kind))


def write_event(
    cursor: LedgerCursor,
    session: int,
    kind: EventKind,
    *,
    tokens: int = 0,
    tool_name: str = "",
    group_id: str = "",
    call: int | None = None,
    details: Mapping[str, object] | None = None,
    at: datetime | None = None,
    **increments: int,
) -> None:
    """Append an event and add its tokens; `increments` are added to other session columns.

    The session's row comes first: it is locked until commit, so that the numbers of a session's
    events grow in the order of their commits, which event streams rely on.
    """
    at = at or timezone.now()
    column = token_column(kind, details.get("code") if details else "")
    if tokens and column is not None:
        increments[column] = tokens
        if metrics.enabled:
            part = metrics.TOKEN_PARTS[column]
            cursor.count(metrics.counted("toolcrib_tokens", part, by=tokens))
    if kind == EventKind.SCRIPT and details and metrics.enabled:
        cursor.count(*_script_counts(details))
    cursor.increment(session, at, increments)
    cursor.insert_event(
        session,
        kind,
        at,
        tool_name=tool_name,
        group_id=group_id,
        call=call,
        tokens=tokens,
        details=redacted_json(details) if details else "{}",
    )


def _script_counts(details: Mapping[str, object]) -> Iterator[tuple[Series, float]]:
    """Yield the metrics of a script that ended."""
    yield metrics.counted("toolcrib_scripts", str(details.get("state")))
    for name, key in (("calls", "calls"), ("tokens_spared", "spared")):
        value = details.get(key)
        yield metrics.counted(f"toolcrib_script_{name}", by=value if isinstance(value, int) else 0)


# --- Batches --------------------------------------------------------------------------------------


class QueueFull(ToolcribError):
    """The ledger accepts no more jobs. Nothing was sent to a server."""

    code = "busy"
    status = 503

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="Try again.", details={"retry_after": 1})


@dataclass(eq=False)
class WriteJob(Generic[T]):
    """Rows to write. Jobs of one batch run sorted by `order`, so that processes cannot deadlock."""

    work: Callable[[LedgerCursor], T]
    order: int = 0
    agent: int = 0  # locked first, so that the agent's calls in flight are counted serially
    must_commit: bool = False  # a call's result: retried while the database is unavailable
    on_abandoned: Callable[[T], None] | None = None  # gets the result if the caller has left
    on_unavailable: Callable[[], None] | None = None  # the database failed, perhaps after a commit
    failed_at: float | None = None  # first failure of a result
    answered: bool = False  # the caller of a result was told that it is not written
    done: "asyncio.Future[T] | None" = field(default=None, repr=False)


class LoopWriter:
    """Writes batches on the event loop, with a connection that waits for no other writer."""

    def __init__(self) -> None:
        """Connect. Called in a thread, where Django permits that."""
        self._database: Any = connections.create_connection(DEFAULT_DB_ALIAS)
        self._database.inc_thread_sharing()
        self._cursor = LedgerCursor(self._database)
        self._cursor.execute("PRAGMA busy_timeout = 0")
        self._paused_until = 0.0

    def write(self, batch: list[WriteJob[Any]]) -> list[Any] | None:
        """Write a batch and return the results; None if the thread has to write it."""
        started, work_before = time.monotonic(), time.thread_time()
        if started < self._paused_until or not self._database.write_queue.try_acquire():
            return None
        try:
            return _commit_in_sqlite(self._database, self._cursor, batch)
        except Exception:  # noqa: BLE001 - the thread tries again, and reports it
            return None
        finally:
            self._database.write_queue.release()
            now = time.monotonic()
            work = time.thread_time() - work_before
            if work > MAX_LOOP_WORK or now - started > MAX_LOOP_WAIT:
                self._paused_until = now + LOOP_PAUSE

    def close(self) -> None:
        """Close the connection: with its timeout nobody else may reuse it."""
        self._database.connection.close()


class BatchWriter:
    def __init__(self, loop: asyncio.AbstractEventLoop, loop_writer: LoopWriter | None) -> None:
        self._loop, self._loop_writer = loop, loop_writer
        self._loop_queue: list[WriteJob[Any]] = []  # for the next turn of the event loop
        self._turn_jobs = 0  # submitted in this turn
        self._is_calm = True  # the last turn had one job: the first is written without a wait
        self._queue: deque[WriteJob[Any]] = deque()
        self._unwritten: deque[WriteJob[Any]] = deque()  # results that wait for the database
        self._wakeups = threading.Semaphore(0)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    async def submit(self, job: WriteJob[T]) -> T:
        """Queue a job, and return its result once it is committed."""
        if self._stopping or not self._thread.is_alive():
            raise QueueFull("Toolcrib is stopping.")
        if len(self._queue) >= MAX_QUEUED and not job.must_commit:
            raise QueueFull("The ledger queue is full.")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        job.done = done
        # Threads that compute would take the GIL at every statement of the event loop.
        if self._loop_writer is not None and loop is self._loop and not _threads_running:
            self._turn_jobs += 1
            if self._turn_jobs == 1:
                loop.call_soon(self._end_turn)
                if self._is_calm and (results := self._write_on_loop([job])) is not None:
                    result: T = results[0]
                    return result
            self._loop_queue.append(job)
        else:
            self._enqueue(job)
        try:
            return await done
        except asyncio.CancelledError:
            # The caller may be cancelled after the result was set and before it was delivered.
            if job.on_abandoned and done.done() and not done.cancelled() and not done.exception():
                job.on_abandoned(done.result())
            raise

    def _enqueue(self, job: WriteJob[Any]) -> None:
        """Hand a job to the thread."""
        self._queue.append(job)
        self._wakeups.release()

    def _end_turn(self) -> None:
        """Write what was queued during one turn of the event loop."""
        self._is_calm, self._turn_jobs = self._turn_jobs == 1, 0
        jobs, self._loop_queue = self._loop_queue, []
        for start in range(0, len(jobs), MAX_BATCH):
            batch = jobs[start : start + MAX_BATCH]
            results = self._write_on_loop(batch)
            _resolve(
                [(job, result, None) for job, result in zip(batch, results or (), strict=False)]
            )
            for job in batch if results is None else ():
                self._enqueue(job)

    def _write_on_loop(self, batch: list[WriteJob[Any]]) -> list[Any] | None:
        assert self._loop_writer is not None  # noqa: S101 - checked by submit
        return None if self._queue else self._loop_writer.write(batch)

    def stop(self) -> None:
        """Write the queued jobs, then stop the thread."""
        self._stopping = True
        self._wakeups.release()
        self._thread.join(5)
        if self._loop_writer is not None:
            self._loop_writer.close()
        unwritten = [*self._queue, *self._unwritten]
        self._queue.clear()
        _deliver((job, None, QueueFull("Toolcrib is stopping.")) for job in unwritten)

    def _run(self) -> None:
        try:
            while True:
                interval = RETRY_INTERVAL if self._unwritten else None
                batch = self._take_batch() if self._wakeups.acquire(timeout=interval) else []
                if batch:
                    self._write_safely(batch)
                else:
                    self._write_unwritten()
                    if self._stopping:
                        return
        finally:
            connection.close()

    def _take_batch(self) -> list[WriteJob[Any]]:
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
        for _ in range(len(batch) - 1):  # _run has acquired the first
            self._wakeups.acquire()
        return batch

    def _write_safely(self, batch: list[WriteJob[Any]]) -> None:
        """Write a batch and survive any error: without this thread every call would hang."""
        try:
            self._unwritten += _write(batch)
        except Exception as error:
            logger.exception("Ledger writer failed")
            _deliver([(job, None, error) for job in batch])

    def _write_unwritten(self) -> None:
        """Write results that failed, one by one, until one fails again: it goes to the end."""
        while self._unwritten and not self._queue:
            before = len(self._unwritten)
            self._write_safely([self._unwritten.popleft()])
            if len(self._unwritten) == before:
                return


Outcome = tuple[WriteJob[Any], Any, BaseException | None]


def _write(batch: list[WriteJob[Any]]) -> list[WriteJob[Any]]:
    """Write a batch in one transaction; if a job is at fault, write each job alone.

    Returns the results of calls to write later, since the database is unavailable.
    """
    try:
        results = _write_with_retry(batch)
    except (OperationalError, InterfaceError) as error:
        # The database is unavailable, locked or full: writing each job alone would fail as well.
        return _keep_results(batch, error)
    except Exception as error:  # noqa: BLE001 - delivered to the callers
        _close_connection(error)
        if len(batch) > 1:
            return [unwritten for job in batch for unwritten in _write([job])]
        _deliver([(batch[0], None, error)])
    else:
        _deliver([(job, result, None) for job, result in zip(batch, results, strict=True)])
    return []


def _write_with_retry(batch: list[WriteJob[Any]]) -> list[Any]:
    """Retry once on a new connection, since the old one may be stale."""
    started = time.monotonic()
    try:
        return write_batch(batch)
    except (OperationalError, InterfaceError) as error:
        _close_connection(error)
        if time.monotonic() - started > STALE_CONNECTION_SECONDS:
            raise
    try:
        return write_batch(batch)
    except (OperationalError, InterfaceError) as error:
        _close_connection(error)
        raise


def _keep_results(batch: list[WriteJob[Any]], error: BaseException) -> list[WriteJob[Any]]:
    """Fail the jobs of a batch, and return the results of calls, which are retried.

    Their callers wait for RETRY_SECONDS; the ledger gets them also later.
    """
    now = time.monotonic()
    failed, kept = [], []
    for job in batch:
        job.failed_at = job.failed_at or now
        if not job.must_commit:
            failed.append(job)
            continue
        if not job.answered and now - job.failed_at >= RETRY_SECONDS:
            job.answered = True
            failed.append(job)
        if now - job.failed_at < KEEP_SECONDS:
            kept.append(job)
        else:
            logger.error("Dropped the result of a call: %s", error)
    _deliver([(job, None, error) for job in failed])
    return kept


def _close_connection(error: BaseException) -> None:
    """Close the connection, since it may be the cause of the error."""
    if isinstance(error, DatabaseError | InterfaceError):
        logger.warning("Ledger write failed: %s", error)
    connection.close()


def _deliver(outcomes: Iterable[Outcome]) -> None:
    """Deliver outcomes to their callers, with one callback for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        if (done := outcome[0].done) is not None:  # set by submit
            by_loop.setdefault(done.get_loop(), []).append(outcome)
    for loop, loop_outcomes in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, loop_outcomes)
        except RuntimeError:  # the event loop is closed
            logger.warning("Dropped %d ledger results: event loop closed", len(loop_outcomes))


def _resolve(outcomes: list[Outcome]) -> None:
    for job, result, error in outcomes:
        unavailable = isinstance(error, OperationalError | InterfaceError)
        if unavailable and job.on_unavailable is not None:
            job.on_unavailable()
        if job.done is None or job.done.done():
            if error is None and job.on_abandoned is not None:
                job.on_abandoned(result)
            continue
        if error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(result)


def write_batch(batch: list[WriteJob[Any]]) -> list[Any]:
    """Run jobs in one transaction, sorted by `order`; return results in the order of `batch`."""
    # Not `django.db.connection`, which looks up the thread's connection at every attribute.
    database: Any = connections[DEFAULT_DB_ALIAS]
    with database.wrap_database_errors:
        cursor = LedgerCursor(database)
        if not cursor.is_sqlite or database.in_atomic_block:
            with transaction.atomic():
                return _run_jobs(cursor, batch)
        database.acquire_write_lock()
        try:
            return _commit_in_sqlite(database, cursor, batch)
        finally:
            database.release_write_lock()


def _commit_in_sqlite(database: Any, cursor: LedgerCursor, batch: list[WriteJob[Any]]) -> list[Any]:
    """Run jobs without `transaction.atomic`, which adds a fifth to the time of the statements."""
    try:
        cursor.execute("BEGIN IMMEDIATE")
        cursor.counted = []
        results = _run_jobs(cursor, batch)
        cursor.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            database.connection.rollback()
        raise
    if cursor.counted:
        metrics.record(cursor.counted)
    return results


def _run_jobs(cursor: LedgerCursor, batch: list[WriteJob[Any]]) -> list[Any]:
    results: list[Any] = [None] * len(batch)
    if agents := sorted({job.agent for job in batch if job.agent}):
        cursor.lock_agents(agents)
    for position in sorted(range(len(batch)), key=lambda position: batch[position].order):
        results[position] = batch[position].work(cursor)
    return results


# --- Public interface -------------------------------------------------------------------------

_writer: BatchWriter | None = None
_threads_running = 0  # that `run_off_loop` has started


async def commit(job: WriteJob[T]) -> T:
    """Commit a job's rows, and return the job's result."""
    if _writer is not None:
        return await _writer.submit(job)
    result: T = await sync_to_async(lambda: write_batch([job])[0])()
    return result


async def run_off_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run database code in a thread."""
    global _threads_running
    if _writer is None:
        return await sync_to_async(function)(*args, **kwargs)
    _threads_running += 1
    try:
        return await run_in_db_thread(function, *args, **kwargs)
    finally:
        _threads_running -= 1


@asynccontextmanager
async def run_writer(*, on_loop: bool = True) -> AsyncIterator[None]:
    """Run the writer for the duration of the block."""
    global _writer
    uses_loop = on_loop and connection.vendor == "sqlite"
    loop_writer = await asyncio.to_thread(LoopWriter) if uses_loop else None
    own = _writer = BatchWriter(asyncio.get_running_loop(), loop_writer)
    try:
        yield
    finally:
        await asyncio.to_thread(own.stop)
        if _writer is own:
            _writer = None
