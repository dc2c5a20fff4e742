"""Ledger writer: hand-written SQL, and commits of all jobs that wait, in one transaction.

Building these queries with the ORM takes twenty times as long as running them. A row is a plain
`CallRow` until it is written; all other code reads `models.Call`.

A call waits until its own rows are committed, but shares the transaction with other calls. On
SQLite the event loop itself writes what was queued during one of its turns, as long as nobody else
writes: a switch to another thread and back takes longer than the commit. Otherwise a thread writes.
Without a running writer, as in a command or a test, the caller's own thread reads and writes. A job
is a function of a cursor. If a job raises, the batch is rolled back and each job is retried alone.
"""

import asyncio
import json
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import lru_cache
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
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.json_codec import canonical

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
MAX_BATCH = 64  # jobs in one transaction
MAX_QUEUED = 2_000
RETRY_SECONDS = 10.0  # how long a call's result is retried while the database is unavailable
RETRY_INTERVAL = 0.1
STALE_CONNECTION_SECONDS = 1.0  # a failure that takes longer is not due to a stale connection
# A commit on the event loop that takes longer is followed by a pause, in which the thread writes.
MAX_LOOP_SECONDS, LOOP_PAUSE = 0.005, 0.1

Row = tuple[Any, ...]


@dataclass(slots=True)
class CallRow:
    """One row of the ledger before it is written. The fields are the columns of models.Call."""

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

    @classmethod
    def from_model(cls, call: Call) -> "CallRow":
        return cls(**{name: getattr(call, name) for name in COLUMNS}, pk=call.pk)

    @property
    def duration_ms(self) -> int:
        if self.finished_at is None:
            return 0
        return round((self.finished_at - self.accepted_at).total_seconds() * 1000)


@dataclass(slots=True)
class ExpansionRow:
    """What a session has loaded of a group. The fields are the columns of models.Expansion."""

    session_id: int
    group_id: str
    names: list[str] | None
    listed: list[str] | None
    pins: str
    sequence: int


COLUMNS = tuple(field.name for field in fields(CallRow) if field.name != "pk")
RESULT_COLUMNS = (
    *("state", "is_error", "sent_at", "finished_at", "tokens", "error_code", "error_message"),
    *("result_bytes", "result_sha256", "result_copy", "idempotency_key"),
)
read_columns, read_result_columns = attrgetter(*COLUMNS), attrgetter(*RESULT_COLUMNS)
AGENT, SESSION, CALL, ANSWER, EVENT, EXPANSION, SHOWN = (
    model._meta.db_table
    for model in (Agent, AgentSession, Call, CallAnswer, Event, Expansion, ShownDefinition)
)


@lru_cache(maxsize=64)
def _as_sqlite(sql: str) -> str:
    return sql.replace("%s", "?")


class LedgerCursor:
    """Executes the ledger's statements on a SQLite or PostgreSQL connection."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        connection.ensure_connection()
        self.is_sqlite = connection.vendor == "sqlite"
        # The driver's cursor: Django's cursor rewrites and logs each statement.
        self._cursor: Any = connection.connection.cursor()

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Any:
        if self.is_sqlite:
            sql = _as_sqlite(sql)
            # A time is stored in UTC, without the offset.
            values = [
                value.isoformat(" ", "microseconds")[:26] if isinstance(value, datetime) else value
                for value in values
            ]
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
        row = self.fetch_one("SELECT CURRENT_TIMESTAMP")
        time = self.decode_time(row[0]) if row else None
        assert time is not None  # noqa: S101 - the statement always returns a row
        return time

    def lock_session(self, session: int) -> None:
        """Lock a session's row until commit, so that its loads are written serially."""
        if not self.is_sqlite:
            self.execute(f"SELECT id FROM {SESSION} WHERE id = %s FOR UPDATE", (session,))  # noqa: S608

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
        row = self.fetch_one(INSERT_CALL, read_columns(entry))
        entry.pk = row[0] if row else None
        return row is not None

    def finish(self, entry: CallRow) -> bool:
        """Write a call's result, and return whether the call was still open.

        A call that recovery has marked `unknown` is overwritten with its actual result.
        """
        values = (*read_result_columns(entry), entry.pk)
        was_open: bool = self.execute(FINISH_OPEN_CALL, values).rowcount > 0
        if not was_open:
            self.execute(FINISH_CALL, values)
        return was_open

    def mark_sent(self, entry: CallRow) -> None:
        self.execute(MARK_SENT, (entry.sent_at, entry.pk))

    def store_answer(self, call: int, body: str, now: datetime) -> None:
        self.execute(STORE_ANSWER, (call, body, now))

    def set_shown_definition(self, session: int, tool: int, definition: int, override: str) -> None:
        """Record the definition of a tool that the session was last shown."""
        self.execute(SET_SHOWN_DEFINITION, (session, tool, definition, override))
        self.execute(INCREMENT_LOADS_VERSION, (session,))

    def read_expansions(self, session: int) -> list[ExpansionRow]:
        """Return what a session has loaded, in the order of its groups."""
        rows = self.execute(READ_EXPANSIONS, (session,)).fetchall()
        return [
            ExpansionRow(
                session, group_id, _decode_json(names), _decode_json(listed), pins, sequence
            )
            for group_id, names, listed, pins, sequence in rows
        ]

    def save_expansion(self, row: ExpansionRow) -> None:
        names, listed = (
            None if value is None else json.dumps(value) for value in (row.names, row.listed)
        )
        values = (row.session_id, row.group_id, names, listed, row.pins, row.sequence)
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
FINISH_CALL = (
    f"UPDATE {CALL} SET {', '.join(f'{name} = %s' for name in RESULT_COLUMNS)} WHERE id = %s"  # noqa: S608
)
FINISH_OPEN_CALL = f"{FINISH_CALL} AND state IN ('accepted', 'sent')"
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


# The session column to which an event's tokens are added.
TOKEN_COLUMNS = {
    EventKind.OPENED: "tokens_catalog",
    EventKind.SEARCHED: "tokens_search",
    EventKind.DETAILS: "tokens_load",
    EventKind.LOADED: "tokens_load",
    EventKind.CALLED: "tokens_call",
    EventKind.REFUSED: "tokens_call",
}


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
    """Append an event and add its tokens; `increments` are added to other session columns."""
    at = at or timezone.now()
    if tokens and kind in TOKEN_COLUMNS:
        increments[TOKEN_COLUMNS[kind]] = tokens
    cursor.insert_event(
        session,
        kind,
        at,
        tool_name=tool_name,
        group_id=group_id,
        call=call,
        tokens=tokens,
        details=canonical(details) if details else "{}",
    )
    cursor.increment(session, at, increments)


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
        started = time.monotonic()
        if started < self._paused_until or not self._database.write_queue.try_acquire():
            return None
        try:
            return _commit_in_sqlite(self._database, self._cursor, batch)
        except Exception:  # noqa: BLE001 - the thread tries again, and reports it
            return None
        finally:
            self._database.write_queue.release()
            now = time.monotonic()
            if now - started > MAX_LOOP_SECONDS:
                self._paused_until = now + LOOP_PAUSE

    def close(self) -> None:
        """Close the connection: with its timeout nobody else may reuse it."""
        self._database.connection.close()


class BatchWriter:
    def __init__(self, loop: asyncio.AbstractEventLoop, loop_writer: LoopWriter | None) -> None:
        self._loop, self._loop_writer = loop, loop_writer
        self._loop_queue: list[WriteJob[Any]] = []  # for the next turn of the event loop
        self._queue: deque[WriteJob[Any]] = deque()
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
        job.done = loop.create_future()
        # Threads that compute would take the GIL at every statement of the event loop.
        if self._loop_writer is not None and loop is self._loop and not _threads_running:
            if not self._loop_queue:
                self._loop.call_soon(self._write_on_loop)
            self._loop_queue.append(job)
        else:
            self._enqueue(job)
        try:
            return await job.done
        except asyncio.CancelledError:
            # The caller may be cancelled after the result was set and before it was delivered.
            succeeded = (
                job.done.done() and not job.done.cancelled() and job.done.exception() is None
            )
            if succeeded and job.on_abandoned is not None:
                job.on_abandoned(job.done.result())
            raise

    def _enqueue(self, job: WriteJob[Any]) -> None:
        """Hand a job to the thread."""
        self._queue.append(job)
        self._wakeups.release()

    def _write_on_loop(self) -> None:
        assert self._loop_writer is not None  # noqa: S101 - checked by submit
        jobs, self._loop_queue = self._loop_queue, []
        for start in range(0, len(jobs), MAX_BATCH):
            batch = jobs[start : start + MAX_BATCH]
            results = None if self._queue else self._loop_writer.write(batch)
            if results is None:
                for job in batch:
                    self._enqueue(job)
            else:
                _resolve([(job, result, None) for job, result in zip(batch, results, strict=True)])

    def stop(self) -> None:
        """Write the queued jobs, then stop the thread."""
        self._stopping = True
        self._wakeups.release()
        self._thread.join(5)
        if self._loop_writer is not None:
            self._loop_writer.close()
        unwritten = [self._queue.popleft() for _ in range(len(self._queue))]
        _deliver((job, None, QueueFull("Toolcrib is stopping.")) for job in unwritten)

    def _run(self) -> None:
        try:
            while True:
                self._wakeups.acquire()
                batch = self._take_batch()
                if batch:
                    self._write_safely(batch)
                elif self._stopping:
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
            _write(batch)
        except Exception as error:
            logger.exception("Ledger writer failed")
            _deliver([(job, None, error) for job in batch])


Outcome = tuple[WriteJob[Any], Any, BaseException | None]


def _write(batch: list[WriteJob[Any]]) -> None:
    """Write a batch in one transaction; if a job is at fault, write each job alone."""
    try:
        results = _write_with_retries(batch)
    except (OperationalError, InterfaceError) as error:
        # The database is unavailable, locked or full: writing each job alone would fail as well.
        _deliver([(job, None, error) for job in batch])
    except Exception as error:  # noqa: BLE001 - delivered to the callers
        _close_connection(error)
        if len(batch) == 1:
            _deliver([(batch[0], None, error)])
        for job in batch if len(batch) > 1 else ():
            _write([job])
    else:
        _deliver([(job, result, None) for job, result in zip(batch, results, strict=True)])


def _write_with_retries(batch: list[WriteJob[Any]]) -> list[Any]:
    """Retry once on a new connection, since the old one may be stale.

    Results of calls are retried for RETRY_SECONDS. Other jobs fail after the second attempt.
    """
    deadline = time.monotonic() + RETRY_SECONDS
    retried = False
    while True:
        started = time.monotonic()
        try:
            return write_batch(batch)
        except (OperationalError, InterfaceError) as error:
            _close_connection(error)
            if retried or time.monotonic() - started > STALE_CONNECTION_SECONDS:
                _deliver([(job, None, error) for job in batch if not job.must_commit])
                batch[:] = [job for job in batch if job.must_commit]
                if not batch or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_INTERVAL)
            retried = True


def _close_connection(error: BaseException) -> None:
    """Close the connection, since it may be the cause of the error."""
    if isinstance(error, DatabaseError | InterfaceError):
        logger.warning("Ledger write failed: %s", error)
    connection.close()


def _deliver(outcomes: Iterable[Outcome]) -> None:
    """Deliver outcomes to their callers, with one callback for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        done = outcome[0].done
        assert done is not None  # noqa: S101 - set by submit
        by_loop.setdefault(done.get_loop(), []).append(outcome)
    for loop, loop_outcomes in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, loop_outcomes)
        except RuntimeError:  # the event loop is closed
            logger.warning("Dropped %d ledger results: event loop closed", len(loop_outcomes))


def _resolve(outcomes: list[Outcome]) -> None:
    for job, result, error in outcomes:
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
        results = _run_jobs(cursor, batch)
        cursor.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            database.connection.rollback()
        raise
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
