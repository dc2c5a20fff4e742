"""Background tasks of the web process, started and stopped by the ASGI lifespan.

Embedded: the listener (its connections also serve calls), a Celery worker in threads, the schedule
and SQLite checkpoints. Production: the connections for calls; worker, beat and listener are
separate processes. Both: the watches for new revisions and revoked keys.
"""

import asyncio
import gc
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TypeVar

from celery.worker import WorkController
from django.conf import settings
from django.db import DatabaseError, InterfaceError, connection

from catalog.tasks import send_embedding
from servers.connections import calls as upstream_calls
from servers.connections.metrics import all_server_metrics
from servers.sync import scheduling
from servers.sync.listener import Listener
from sessions_app.dispatch import key_revocation
from sessions_app.held_calls.execution import Executor
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger import writer as ledger_writer
from sessions_app.models.encryption import ensure_data_key
from sessions_app.scripts import runs as script_runs
from sessions_app.scripts.runner import Continuer
from sessions_app.sessions import scope as session_scope
from sessions_app.tasks import queue_golden, send_notifications, tidy
from toolcrib.celery import app as celery_app
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.telemetry import exchange, metrics
from toolcrib.lib.telemetry.metrics import Series
from toolcrib.runtime.audit_chain import extend_chain
from toolcrib.runtime.database_watch import DatabaseWatch
from toolcrib.runtime.idle_memory import release_when_idle
from toolcrib.runtime.loop_monitor import LoopMonitor
from toolcrib.runtime.revision_watch import RevisionWatch
from toolcrib.sqlite import checkpoints

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIDY_INTERVAL = 10.0  # seconds
SCHEDULE_INTERVAL = 1.0  # seconds between two passes while the database changes
# By default a Python thread runs for 5 ms while others wait, and the event loop waits for each.
SWITCH_INTERVAL = 0.0002  # seconds
# A full collection over the objects of 10,000 tools takes a tenth of a second. Modules and settings
# are frozen at startup, and the thresholds make collections of what comes later rare.
GC_THRESHOLDS = (50_000, 20, 100)
# Threads of the event loop for database work. The default is six on two processors: if all of them
# wait for a lock, revoked keys are not noticed. Each thread costs memory.
DB_THREADS = 10
STOP_TIMEOUT = 2.5  # seconds; supervised children end by themselves after this process


@contextmanager
def rare_collections() -> Iterator[None]:
    """Exclude what startup created from garbage collections, and make collections rare."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


class Runtime:
    """The running background tasks, readable by the health page and by tests."""

    def __init__(self) -> None:
        self.database = DatabaseWatch()
        self.revision = RevisionWatch(self.database, session_scope.warm_indexes_in_background)
        self.loop_monitor = LoopMonitor()
        self.listener: Listener | None = None
        self.worker: WorkController | None = None
        self.tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        sys.setswitchinterval(SWITCH_INTERVAL)
        threads = ThreadPoolExecutor(DB_THREADS, thread_name_prefix="work")
        asyncio.get_running_loop().set_default_executor(threads)
        await run_in_db_thread(ensure_data_key)
        with rare_collections():
            async with (
                self.loop_monitor.running(),
                self.database.running(),
                ledger_writer.run_writer(),
                key_revocation.watch_revocations(),
                self._background_tasks(),
            ):
                yield

    @asynccontextmanager
    async def _background_tasks(self) -> AsyncIterator[None]:
        self.tasks.append(asyncio.create_task(self.revision.run(), name="revision"))
        self.tasks.append(asyncio.create_task(release_when_idle(), name="memory"))
        executor = Executor(self.database)
        self.tasks.append(asyncio.create_task(executor.run(), name="held calls"))
        continuer = Continuer(self.database)
        self.tasks.append(asyncio.create_task(continuer.run(), name="scripts"))
        self.tasks.append(asyncio.create_task(extend_chain(self.database), name="audit chain"))
        if metrics.enabled and not settings.EMBEDDED:
            self.tasks.append(asyncio.create_task(self._publish_metrics(), name="metrics"))
        worker_thread = None
        if settings.EMBEDDED:
            self.listener = Listener(self.database)
            # Created in a thread because it closes database connections.
            worker: WorkController = await asyncio.to_thread(_create_worker)
            self.worker = worker
            worker_thread = threading.Thread(target=worker.start, name="worker", daemon=True)
            worker_thread.start()
            self.tasks.append(asyncio.create_task(self.listener.run(), name="listener"))
            self.tasks.append(asyncio.create_task(self._run_schedule(), name="schedule"))
            self.tasks.append(asyncio.create_task(self._run_checkpoints(), name="checkpoints"))
        else:
            self.tasks.append(asyncio.create_task(upstream_calls.run(), name="calls"))
            self.tasks.append(asyncio.create_task(_recover_calls(), name="recovery"))
        try:
            yield
        finally:
            # A sync that waits on a connection ends with it, so all tasks can be cancelled at once.
            for task in self.tasks:
                task.cancel()
            if self.worker is not None:
                threading.Thread(target=self.worker.stop, daemon=True).start()
            await asyncio.wait(self.tasks, timeout=STOP_TIMEOUT)
            if worker_thread is not None:
                await asyncio.to_thread(worker_thread.join, 1.0)
            self.tasks.clear()

    async def _run_schedule(self) -> None:
        """Run due work, as Celery beat does in production."""
        next_tidy = 0.0
        while True:
            seen = self.database.changes
            for step in (scheduling.queue_due_syncs, send_embedding, queue_golden):
                await _attempt(step)
            await _attempt(send_notifications)
            if time.monotonic() >= next_tidy:
                next_tidy = time.monotonic() + TIDY_INTERVAL
                await _attempt(tidy)
            due = await _attempt(scheduling.seconds_to_next_sync) or 0.0
            await self.database.wait(seen, SCHEDULE_INTERVAL, min(due, TIDY_INTERVAL))

    def gauges(self) -> dict[Series, float]:
        """Return this process's gauges."""
        lag, values = self.loop_monitor.lag(), dict[Series, float]()
        for server in all_server_metrics():
            values["toolcrib_calls_in_flight", server.server] = server.in_flight
            values["toolcrib_calls_queued", server.server] = server.waiting
            values["toolcrib_connections", server.server, server.connection] = 1
        values["toolcrib_event_loop_lag_seconds", "max"] = lag.longest_ms / 1000
        values["toolcrib_event_loop_lag_seconds", "p99"] = lag.p99_ms / 1000
        return values

    async def _publish_metrics(self) -> None:
        while True:
            await _attempt(lambda: exchange.publish(self.gauges()))
            await asyncio.sleep(exchange.INTERVAL)

    async def _run_checkpoints(self) -> None:
        while True:
            seen = self.database.changes
            await _attempt(partial(checkpoints.checkpoint, connection))
            await self.database.wait(seen, checkpoints.INTERVAL, TIDY_INTERVAL)


runtime = Runtime()


def _create_worker() -> WorkController:
    return WorkController(
        app=celery_app,
        pool="threads",
        concurrency=settings.SYNC_WORKERS,
        queues=["sync", "index"],
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )


async def _recover_calls() -> None:
    """Settle calls and scripts of processes that died on this machine, the only one to tell."""
    while True:
        await _attempt(call_ledger.recover_lost_calls)
        await _attempt(script_runs.recover)
        await asyncio.sleep(TIDY_INTERVAL)


async def _attempt(step: Callable[[], T]) -> T | None:
    """Run one step and log any failure: the loop continues and retries it later."""
    try:
        return await run_in_db_thread(step)
    except (DatabaseError, InterfaceError) as error:
        name = getattr(step, "__name__", step)
        logger.warning("Background task %s failed; retrying: %s", name, error)
        return None
    except Exception:
        logger.exception("Background task %s failed; retrying", getattr(step, "__name__", step))
        return None
