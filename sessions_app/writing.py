"""The one writer of the ledger: a thread with its own connection that commits what waits together.

Each call waits for its own rows to be committed, not for a transaction of its own. Where no writer
runs, as in a command or a test, rows are written by whoever has them. Work is a function of a
cursor; it must not fail for reasons of its own, since it shares a transaction: where one does, the
whole lot is rolled back and each is tried alone.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from asgiref.sync import sync_to_async
from django.db import DatabaseError, InterfaceError, OperationalError, connection, transaction

from sessions_app.rows import Cursor
from toolcrib.errors import ToolcribError

logger = logging.getLogger(__name__)

T = TypeVar("T")
TOGETHER = 64  # jobs in one transaction
MOST_WAITING = 2_000
AGAIN_WITHIN = 10.0  # seconds for which a call's end is tried again while the database is away
PAUSE = 0.1


class Full(ToolcribError):
    """The ledger cannot take more: nothing was sent."""

    code = "busy"
    status = 503


@dataclass(eq=False)
class Job(Generic[T]):
    """Rows to be written. `order` keeps two writers from waiting for each other crosswise."""

    work: Callable[[Cursor], T]
    order: int = 0
    agent: int = 0  # to be locked first, so that its calls are counted one after another
    must: bool = False  # a call's end: tried again while the database is away
    done: "asyncio.Future[T] | None" = field(default=None, repr=False)
    loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)


class Writer:
    def __init__(self) -> None:
        self._waiting: deque[Job[Any]] = deque()
        self._news = threading.Semaphore(0)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    async def take(self, job: Job[T]) -> T:
        """Wait until the job is committed."""
        if len(self._waiting) >= MOST_WAITING and not job.must:
            raise Full(
                "Toolcrib has more calls to record than it can.",
                hint="Try again.",
                details={"retry_after": 1},
            )
        job.loop = asyncio.get_running_loop()
        job.done = job.loop.create_future()
        self._waiting.append(job)
        self._news.release()
        return await job.done

    def stop(self) -> None:
        """Write what waits, then end."""
        self._stopping = True
        self._news.release()
        self._thread.join(5)

    def _run(self) -> None:
        try:
            while True:
                self._news.acquire()
                batch = self._next()
                if batch:
                    self._write(batch)
                elif self._stopping:
                    return
        finally:
            connection.close()

    def _next(self) -> list[Job[Any]]:
        batch: list[Job[Any]] = []
        while self._waiting and len(batch) < TOGETHER:
            job = self._waiting.popleft()
            assert job.done is not None  # noqa: S101 - set by take
            batch.append(job)
        for _ in range(len(batch) - 1):  # one was taken to get here
            self._news.acquire()
        return batch

    def _write(self, batch: list[Job[Any]]) -> None:
        try:
            results = together(batch)
        except Exception as error:  # noqa: BLE001 - told to whoever waits, below
            if len(batch) == 1 and not batch[0].must:
                _fresh_connection(error)
                _tell([(batch[0], None, error)])
                return
            _fresh_connection(error)
            for job in batch:
                _tell([_alone(job)])
            return
        _tell([(job, result, None) for job, result in zip(batch, results, strict=True)])


Outcome = tuple[Job[Any], Any, BaseException | None]


def _alone(job: Job[Any]) -> Outcome:
    """Write one job by itself; a call's end for as long as the database may come back."""
    gives_up = time.monotonic() + AGAIN_WITHIN
    while True:
        try:
            return job, together([job])[0], None
        except (OperationalError, InterfaceError) as error:
            _fresh_connection(error)
            if not job.must or time.monotonic() > gives_up:
                return job, None, error
            time.sleep(PAUSE)
        except Exception as error:  # noqa: BLE001 - told to whoever waits
            return job, None, error


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
            continue
        if error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(result)


def together(batch: list[Job[Any]]) -> list[Any]:
    """Run jobs in one transaction, in the order that locks are taken in; results as given."""
    results: list[Any] = [None] * len(batch)
    with transaction.atomic(), connection.wrap_database_errors:
        cursor = Cursor(connection)
        agents = sorted({job.agent for job in batch if job.agent})
        if agents:
            cursor.lock_agents(agents)
        for at in sorted(range(len(batch)), key=lambda at: batch[at].order):
            results[at] = batch[at].work(cursor)
    return results


# --- Where rows are handed in -----------------------------------------------------------------

_here: Writer | None = None


def is_running() -> bool:
    return _here is not None


async def committed(job: Job[T]) -> T:
    """Have a job's rows committed and return what the job found."""
    writer = _here
    if writer is not None:
        return await writer.take(job)
    result: T = await sync_to_async(lambda: together([job])[0])()
    return result


@asynccontextmanager
async def running() -> AsyncIterator[None]:
    """Run the writer in this block."""
    global _here
    own = _here = Writer()
    try:
        yield
    finally:
        await asyncio.to_thread(own.stop)
        if _here is own:
            _here = None
