"""Batch writer of the call ledger: one thread that commits queued write jobs in one transaction.

A call waits until its own rows are committed, but shares the transaction with other calls. Without
a running writer, as in a command or a test, the caller writes its rows itself. A job is a function
of a cursor. If a job raises, the batch is rolled back and each job is retried alone.
"""

import asyncio
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from asgiref.sync import sync_to_async
from django.db import DatabaseError, InterfaceError, OperationalError, connection, transaction

from sessions_app.ledger.sql import LedgerCursor
from toolcrib.lib.errors import ToolcribError

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_BATCH = 64  # jobs in one transaction
MAX_QUEUED = 2_000
RETRY_SECONDS = 10.0  # how long a call's result is retried while the database is unavailable
RETRY_INTERVAL = 0.1
STALE_CONNECTION_SECONDS = 1.0  # a failure that takes longer is not due to a stale connection


class QueueFull(ToolcribError):
    """The ledger accepts no more jobs. Nothing was sent to a server."""

    code = "busy"
    status = 503


@dataclass(eq=False)
class WriteJob(Generic[T]):
    """Rows to write. Jobs of one batch run sorted by `order`, so that processes cannot deadlock."""

    work: Callable[[LedgerCursor], T]
    order: int = 0
    agent: int = 0  # locked first, so that the agent's calls in flight are counted serially
    must_commit: bool = False  # a call's result: retried while the database is unavailable
    on_abandoned: Callable[[T], None] | None = None  # gets the result if the caller has left
    done: "asyncio.Future[T] | None" = field(default=None, repr=False)
    loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)


class BatchWriter:
    def __init__(self) -> None:
        self._queue: deque[WriteJob[Any]] = deque()
        self._wakeups = threading.Semaphore(0)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    async def submit(self, job: WriteJob[T]) -> T:
        """Queue a job, and return its result once it is committed."""
        if self._stopping or not self._thread.is_alive():
            raise QueueFull("Toolcrib is stopping.", hint="Try again.", details={"retry_after": 1})
        if len(self._queue) >= MAX_QUEUED and not job.must_commit:
            raise QueueFull(
                "The ledger queue is full.", hint="Try again.", details={"retry_after": 1}
            )
        job.loop = asyncio.get_running_loop()
        job.done = job.loop.create_future()
        self._queue.append(job)
        self._wakeups.release()
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

    def stop(self) -> None:
        """Write the queued jobs, then stop the thread."""
        self._stopping = True
        self._wakeups.release()
        self._thread.join(5)
        unwritten = [self._queue.popleft() for _ in range(len(self._queue))]
        _deliver(
            (job, None, QueueFull("Toolcrib is stopping.", hint="Try again.")) for job in unwritten
        )

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
        batch: list[WriteJob[Any]] = []
        while self._queue and len(batch) < MAX_BATCH:
            job = self._queue.popleft()
            assert job.done is not None  # noqa: S101 - set by submit
            batch.append(job)
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
        loop = outcome[0].loop
        assert loop is not None  # noqa: S101 - set by submit
        by_loop.setdefault(loop, []).append(outcome)
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
    results: list[Any] = [None] * len(batch)
    with connection.wrap_database_errors, _transaction():
        cursor = LedgerCursor(connection)
        agents = sorted({job.agent for job in batch if job.agent})
        if agents:
            cursor.lock_agents(agents)
        for position in sorted(range(len(batch)), key=lambda position: batch[position].order):
            results[position] = batch[position].work(cursor)
    return results


@contextmanager
def _transaction() -> Iterator[None]:
    """Open a transaction.

    On SQLite without `transaction.atomic`, which adds a fifth to the time of the statements.
    """
    connection.ensure_connection()
    if connection.vendor != "sqlite" or connection.in_atomic_block:
        with transaction.atomic():
            yield
        return
    driver = connection.connection
    connection.acquire_write_lock()  # type: ignore[attr-defined]
    try:
        driver.execute("BEGIN IMMEDIATE")
        yield
        driver.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            driver.rollback()
        raise
    finally:
        connection.release_write_lock()  # type: ignore[attr-defined]


# --- Public interface -------------------------------------------------------------------------

_writer: BatchWriter | None = None


def is_running() -> bool:
    return _writer is not None


async def commit(job: WriteJob[T]) -> T:
    """Commit a job's rows, and return the job's result."""
    writer = _writer
    if writer is not None:
        return await writer.submit(job)
    result: T = await sync_to_async(lambda: write_batch([job])[0])()
    return result


@asynccontextmanager
async def run_writer() -> AsyncIterator[None]:
    """Run the writer for the duration of the block."""
    global _writer
    own = _writer = BatchWriter()
    try:
        yield
    finally:
        await asyncio.to_thread(own.stop)
        if _writer is own:
            _writer = None
