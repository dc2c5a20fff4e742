"""What the web process runs beside requests, started and stopped by the ASGI lifespan.

Embedded: the listener, whose connections serve calls too, a Celery worker in threads, the
schedule, and who empties SQLite's log. Production: the connections for calls; workers, beat and
the listener are processes of their own. Both: the watch for new revisions, and for keys that are
revoked.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

from celery.worker import WorkController
from django.conf import settings
from django.db import connection

from catalog.tasks import send_embedding
from servers.connections import calls as upstream_calls
from servers.sync import scheduling
from servers.sync.listener import Listener
from sessions_app.dispatch import key_revocation
from sessions_app.ledger import batch_writer
from sessions_app.ledger import calls as call_ledger
from sessions_app.sessions import scope as session_scope
from sessions_app.tasks import send_golden, tidy
from toolcrib.celery import app as celery_app
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.runtime.loop_monitor import LoopMonitor
from toolcrib.runtime.revision_watch import RevisionWatch
from toolcrib.sqlite import checkpoints

logger = logging.getLogger(__name__)

TIDY_EVERY = 10.0
# Python lets a thread run for 5 ms while another waits; the event loop waits for each in turn.
SWITCH_AFTER = 0.001
# Of the event loop, for what asks the database. By default there are six on two processors: where
# all of them wait for a lock, revoked keys would not be seen. Each costs memory.
THREADS = 10
STOP_WITHIN = 2.5  # seconds; supervised children end by themselves after we did


class Runtime:
    """The running parts, for the health page and for tests to look at."""

    def __init__(self) -> None:
        self.revision = RevisionWatch(session_scope.warm_indexes_soon)
        self.pulse = LoopMonitor()
        self.listener: Listener | None = None
        self.worker: WorkController | None = None
        self.tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        sys.setswitchinterval(SWITCH_AFTER)
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="work")
        asyncio.get_running_loop().set_default_executor(threads)
        async with (
            self.pulse.beating(),
            batch_writer.run_writer(),
            key_revocation.watch_revocations(),
            self._parts(),
        ):
            yield

    @asynccontextmanager
    async def _parts(self) -> AsyncIterator[None]:
        self.tasks.append(asyncio.create_task(self.revision.run(), name="revision"))
        worker_thread = None
        if settings.EMBEDDED:
            self.listener = Listener()
            # Made in a thread, since it closes database connections.
            worker: WorkController = await asyncio.to_thread(_worker)
            self.worker = worker
            worker_thread = threading.Thread(target=worker.start, name="worker", daemon=True)
            worker_thread.start()
            self.tasks.append(asyncio.create_task(self.listener.run(), name="listener"))
            self.tasks.append(asyncio.create_task(_schedule(), name="schedule"))
            self.tasks.append(asyncio.create_task(_move_log(), name="log"))
        else:
            self.tasks.append(asyncio.create_task(upstream_calls.run(), name="calls"))
            self.tasks.append(asyncio.create_task(_recover(), name="recovery"))
        try:
            yield
        finally:
            # A sync that waits on a connection ends with it, so all may end at once.
            for task in self.tasks:
                task.cancel()
            if self.worker is not None:
                threading.Thread(target=self.worker.stop, daemon=True).start()
            await asyncio.wait(self.tasks, timeout=STOP_WITHIN)
            if worker_thread is not None:
                await asyncio.to_thread(worker_thread.join, 1.0)
            self.tasks.clear()


runtime = Runtime()


def _worker() -> WorkController:
    return WorkController(
        app=celery_app,
        pool="threads",
        concurrency=settings.SYNC_WORKERS,
        queues=["sync", "index"],
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )


async def _schedule() -> None:
    """Stand in for beat where there is one process."""
    next_tidy = 0.0
    while True:
        for step in (scheduling.queue_due_syncs, send_embedding, send_golden):
            await _attempt(step)
        if time.monotonic() >= next_tidy:
            next_tidy = time.monotonic() + TIDY_EVERY
            await _attempt(tidy)
        await asyncio.sleep(1)


async def _recover() -> None:
    """Give up calls of web processes that died here: only here can they be known to be dead."""
    while True:
        await _attempt(call_ledger.recover_lost_calls)
        await asyncio.sleep(TIDY_EVERY)


async def _attempt(step: Callable[[], object]) -> None:
    """Do one thing; whatever goes wrong, the next one comes, and this one again."""
    try:
        await run_in_db_thread(step)
    except Exception:
        logger.exception("%s failed; it is tried again", getattr(step, "__name__", step))


async def _move_log() -> None:
    while True:
        await asyncio.sleep(checkpoints.EVERY)
        await _attempt(partial(checkpoints.move, connection))
