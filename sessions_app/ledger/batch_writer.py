"""The one writer of the ledger: a thread with its own connection that commits what waits together.

Each call waits for its own rows to be committed, not for a transaction of its own. Where no writer
runs, as in a command or a test, rows are written by whoever has them. Work is a function of a
cursor; it must not fail for reasons of its own, since it shares a transaction: where one does, the
whole lot is rolled back and each is tried alone.
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
TOGETHER = 64  # jobs in one transaction
MOST_WAITING = 2_000
AGAIN_WITHIN = 10.0  # seconds for which a call's end is tried again while the database is away
PAUSE = 0.1
PATIENT = 1.0  # seconds; what took longer to fail was not the fault of an old connection


class QueueFull(ToolcribError):
    """The ledger cannot take more: nothing was sent."""

    code = "busy"
    status = 503


@dataclass(eq=False)
class WriteJob(Generic[T]):
    """Rows to be written. `order` keeps two writers from waiting for each other crosswise."""

    work: Callable[[LedgerCursor], T]
    order: int = 0
    agent: int = 0  # to be locked first, so that its calls are counted one after another
    must: bool = False  # a call's end: tried again while the database is away
    left: Callable[[T], None] | None = None  # told the result where nobody waits for it any more
    done: "asyncio.Future[T] | None" = field(default=None, repr=False)
    loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)


class BatchWriter:
    def __init__(self) -> None:
        self._waiting: deque[WriteJob[Any]] = deque()
        self._news = threading.Semaphore(0)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    async def take(self, job: WriteJob[T]) -> T:
        """Wait until the job is committed."""
        if self._stopping or not self._thread.is_alive():
            raise QueueFull("Toolcrib is stopping.", hint="Try again.", details={"retry_after": 1})
        if len(self._waiting) >= MOST_WAITING and not job.must:
            raise QueueFull(
                "Toolcrib has more calls to record than it can.",
                hint="Try again.",
                details={"retry_after": 1},
            )
        job.loop = asyncio.get_running_loop()
        job.done = job.loop.create_future()
        self._waiting.append(job)
        self._news.release()
        try:
            return await job.done
        except asyncio.CancelledError:
            # Whoever waited may be told to go just after the result came: it is not theirs then.
            came = job.done.done() and not job.done.cancelled() and job.done.exception() is None
            if came and job.left is not None:
                job.left(job.done.result())
            raise

    def stop(self) -> None:
        """Write what waits, then end."""
        self._stopping = True
        self._news.release()
        self._thread.join(5)
        late = [self._waiting.popleft() for _ in range(len(self._waiting))]
        _tell((job, None, QueueFull("Toolcrib is stopping.", hint="Try again.")) for job in late)

    def _run(self) -> None:
        try:
            while True:
                self._news.acquire()
                batch = self._next()
                if batch:
                    self._survive(batch)
                elif self._stopping:
                    return
        finally:
            connection.close()

    def _next(self) -> list[WriteJob[Any]]:
        batch: list[WriteJob[Any]] = []
        while self._waiting and len(batch) < TOGETHER:
            job = self._waiting.popleft()
            assert job.done is not None  # noqa: S101 - set by take
            batch.append(job)
        for _ in range(len(batch) - 1):  # one was taken to get here
            self._news.acquire()
        return batch

    def _survive(self, batch: list[WriteJob[Any]]) -> None:
        """Write, and go on whatever happens: without this thread every call would wait for ever."""
        try:
            _write(batch)
        except Exception as error:
            logger.exception("The ledger's writer failed")
            _tell([(job, None, error) for job in batch])


Outcome = tuple[WriteJob[Any], Any, BaseException | None]


def _write(batch: list[WriteJob[Any]]) -> None:
    """Write all together; where one of them is at fault, each by itself."""
    try:
        results = _insisted(batch)
    except (OperationalError, InterfaceError) as error:
        # It is the database that is at fault: away, locked or full. Others need not find out again.
        _tell([(job, None, error) for job in batch])
    except Exception as error:  # noqa: BLE001 - told to whoever waits
        _fresh_connection(error)
        if len(batch) == 1:
            _tell([(batch[0], None, error)])
        for job in batch if len(batch) > 1 else ():
            _write([job])
    else:
        _tell([(job, result, None) for job, result in zip(batch, results, strict=True)])


def _insisted(batch: list[WriteJob[Any]]) -> list[Any]:
    """Try again on a new connection, once: it may have been the old one.

    Calls' ends are tried for as long as the database may come back; who waits with them for
    something else is told after the second time.
    """
    gives_up = time.monotonic() + AGAIN_WITHIN
    again = False
    while True:
        began = time.monotonic()
        try:
            return write_batch(batch)
        except (OperationalError, InterfaceError) as error:
            _fresh_connection(error)
            if again or time.monotonic() - began > PATIENT:
                _tell([(job, None, error) for job in batch if not job.must])
                batch[:] = [job for job in batch if job.must]
                if not batch or time.monotonic() > gives_up:
                    raise
                time.sleep(PAUSE)
            again = True


def _fresh_connection(error: BaseException) -> None:
    """Drop a connection that may be the reason."""
    if isinstance(error, DatabaseError | InterfaceError):
        logger.warning("The ledger could not be written: %s", error)
    connection.close()


def _tell(outcomes: Iterable[Outcome]) -> None:
    """Wake those who wait: one call into each loop, however many wait there."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        loop = outcome[0].loop
        assert loop is not None  # noqa: S101 - set by take
        by_loop.setdefault(loop, []).append(outcome)
    for loop, told in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake, told)
        except RuntimeError:  # the loop has ended, and who waited with it
            logger.warning("Nobody waits any more for %d rows of the ledger", len(told))


def _wake(told: list[Outcome]) -> None:
    for job, result, error in told:
        if job.done is None or job.done.done():
            if error is None and job.left is not None:
                job.left(result)
            continue
        if error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(result)


def write_batch(batch: list[WriteJob[Any]]) -> list[Any]:
    """Run jobs in one transaction, in the order that locks are taken in; results as given."""
    results: list[Any] = [None] * len(batch)
    with connection.wrap_database_errors, _transaction():
        cursor = LedgerCursor(connection)
        agents = sorted({job.agent for job in batch if job.agent})
        if agents:
            cursor.lock_agents(agents)
        for at in sorted(range(len(batch)), key=lambda at: batch[at].order):
            results[at] = batch[at].work(cursor)
    return results


@contextmanager
def _transaction() -> Iterator[None]:
    """A transaction; on SQLite without Django's, which takes a fifth of the time of the rows."""
    connection.ensure_connection()
    if connection.vendor != "sqlite" or connection.in_atomic_block:
        with transaction.atomic():
            yield
        return
    driver = connection.connection
    connection.take_turn()  # type: ignore[attr-defined]
    try:
        driver.execute("BEGIN IMMEDIATE")
        yield
        driver.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            driver.rollback()
        raise
    finally:
        connection.give_back()  # type: ignore[attr-defined]


# --- Where rows are handed in -----------------------------------------------------------------

_here: BatchWriter | None = None


def is_running() -> bool:
    return _here is not None


async def commit(job: WriteJob[T]) -> T:
    """Have a job's rows committed and return what the job found."""
    writer = _here
    if writer is not None:
        return await writer.take(job)
    result: T = await sync_to_async(lambda: write_batch([job])[0])()
    return result


@asynccontextmanager
async def run_writer() -> AsyncIterator[None]:
    """Run the writer in this block."""
    global _here
    own = _here = BatchWriter()
    try:
        yield
    finally:
        await asyncio.to_thread(own.stop)
        if _here is own:
            _here = None
