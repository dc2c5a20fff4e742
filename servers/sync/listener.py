"""Listener: persistent connections to servers, and a sync request on every tool list change.

A task of the web process in embedded mode; `manage.py listen` in production.
"""

import asyncio
import logging
from collections.abc import Callable

from django.db import DatabaseError

from servers.connections.coordination import Changes, DatabaseWatcher, maintain_forever
from servers.connections.pool import Pool
from servers.models import Server, ServerState, Trigger
from servers.registration.actions import report_state
from servers.spec import ServerSpec
from servers.sync import scheduling
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import ToolcribError

logger = logging.getLogger(__name__)

DEBOUNCE_SECONDS = 0.1  # notifications within this time make one sync request


class Listener(DatabaseWatcher):
    """Pool watcher that records states and requests syncs. Database work runs in threads."""

    def __init__(
        self, database: Changes | None = None, on_poll: Callable[[], None] = lambda: None
    ) -> None:
        self.pool = Pool(self)
        self.database, self.on_poll = database, on_poll
        self.changed: set[int] = set()
        self.requesting: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Keep persistent connections until cancelled. Calls `on_poll` after each poll."""
        self.pool.open()
        try:
            await maintain_forever(
                self.pool, persistent=True, database=self.database, on_poll=self.on_poll
            )
        finally:
            for task in list(self.requesting.values()):
                task.cancel()
            await self.pool.close()

    async def connecting(self, spec: ServerSpec) -> None:
        await run_in_db_thread(_report_connecting, spec)

    async def connected(self, spec: ServerSpec, *, persistent: bool) -> None:
        await run_in_db_thread(report_state, spec.server_id, spec.generation, ServerState.CONNECTED)
        await super().connected(spec, persistent=persistent)
        if persistent:  # a change may have been missed while disconnected
            await run_in_db_thread(_sync_if_stale, spec.server_id)

    async def failed(self, server_id: int, generation: int, error: ToolcribError) -> None:
        await run_in_db_thread(report_state, server_id, generation, ServerState.FAILING, error)

    def list_changed(self, server_id: int) -> None:
        """Record a notification. Debounced: thousands of them make a few sync requests."""
        self.changed.add(server_id)
        if server_id not in self.requesting:
            self.requesting[server_id] = asyncio.create_task(self._request_sync(server_id))

    async def _request_sync(self, server_id: int) -> None:
        try:
            while server_id in self.changed:
                self.changed.discard(server_id)
                try:
                    await run_in_db_thread(scheduling.request_sync, server_id, Trigger.LIST_CHANGED)
                except DatabaseError as error:
                    logger.warning("Sync request for a server failed; retrying: %s", error)
                    self.changed.add(server_id)
                await asyncio.sleep(DEBOUNCE_SECONDS)
        finally:
            del self.requesting[server_id]


def _report_connecting(spec: ServerSpec) -> None:
    # Only for new servers: a failing server stays failing until it is reached.
    servers = Server.objects.filter(pk=spec.server_id, generation=spec.generation, enabled=True)
    servers.filter(state=ServerState.NEW).update(state=ServerState.CONNECTING)


def _sync_if_stale(server_id: int) -> None:
    # A running sync opened this connection, or will use it.
    rows = Server.objects.filter(pk=server_id, sync_lease_until=None)
    if rows.exclude(last_sync_started_at=None).exists():
        scheduling.request_sync(server_id, Trigger.SCHEDULE)
