"""Listener: persistent connections to servers, and a sync request on every tool list change.

A task of the web process in embedded mode; `manage.py listen` in production.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from django.db import DatabaseError

from servers.connections import coordination
from servers.connections.coordination import POLL_SECONDS, current_spec
from servers.connections.pool import Pool, PoolWatcher
from servers.models import ConnectionPolicy, Isolation, Server, ServerState, Trigger
from servers.registration.actions import report_state
from servers.spec import ServerSpec
from servers.sync import scheduling
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import ToolcribError

logger = logging.getLogger(__name__)

DEBOUNCE_SECONDS = 0.1  # notifications within this time make one sync request
MAX_POLL_SECONDS = 5.0  # between two polls of a database in which nothing changes


class Changes(Protocol):
    """Tells when something was committed to the database."""

    changes: int

    async def wait(self, seen: int, least: float, most: float) -> int: ...


class Listener(PoolWatcher):
    """Pool watcher that records states and requests syncs. Database work runs in threads."""

    def __init__(
        self, database: Changes | None = None, on_poll: Callable[[], None] | None = None
    ) -> None:
        self.pool = Pool(self)
        self.database = database  # polled without
        self.on_poll = on_poll  # called after each poll of the server table
        self.changed: set[int] = set()
        self.requesting: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Poll the server table and maintain the connections until cancelled."""
        self.pool.open()
        try:
            while True:
                seen = self.database.changes if self.database else 0
                try:
                    sessions = self.pool.sessions
                    await self.pool.maintain(*await run_in_db_thread(_load_state, sessions))
                    if self.on_poll:
                        self.on_poll()
                except Exception:  # nothing restarts this loop
                    logger.exception("Connection maintenance failed; retrying")
                if self.database is None:
                    await asyncio.sleep(POLL_SECONDS)
                else:
                    await self.database.wait(seen, POLL_SECONDS, MAX_POLL_SECONDS)
        finally:
            for task in list(self.requesting.values()):
                task.cancel()
            await self.pool.close()

    async def spec(self, server_id: int) -> ServerSpec | None:
        return await run_in_db_thread(current_spec, server_id)

    async def may_reconnect(self, server_id: int, interval: float) -> bool:
        return await run_in_db_thread(coordination.claim_reconnect, server_id, interval)

    async def connecting(self, spec: ServerSpec) -> None:
        await run_in_db_thread(_report_connecting, spec)

    async def connected(self, spec: ServerSpec, *, persistent: bool) -> None:
        await run_in_db_thread(report_state, spec.server_id, spec.generation, ServerState.CONNECTED)
        await run_in_db_thread(coordination.clear_reconnect_claim, spec.server_id)
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
                except DatabaseError:
                    logger.exception("Sync request for server %s failed; retrying", server_id)
                    self.changed.add(server_id)
                await asyncio.sleep(DEBOUNCE_SECONDS)
        finally:
            del self.requesting[server_id]


def _load_state(sessions: set[str]) -> tuple[dict[int, int], dict[int, int], set[str]]:
    """Return the servers with persistent connections, all enabled ones, and the ended sessions."""
    fields = ("pk", "generation", "connection_policy", "isolation")
    rows = list(Server.objects.filter(enabled=True).values_list(*fields))
    persistent = [ConnectionPolicy.ALWAYS, Isolation.SHARED]
    return (
        {pk: generation for pk, generation, *policy in rows if policy == persistent},
        {pk: generation for pk, generation, *_ in rows},
        coordination.ended_sessions(sessions),
    )


def _report_connecting(spec: ServerSpec) -> None:
    # Only for new servers: a failing server stays failing until it is reached.
    servers = Server.objects.filter(pk=spec.server_id, generation=spec.generation, enabled=True)
    servers.filter(state=ServerState.NEW).update(state=ServerState.CONNECTING)


def _sync_if_stale(server_id: int) -> None:
    # A running sync opened this connection, or will use it.
    rows = Server.objects.filter(pk=server_id, sync_lease_until=None)
    if rows.exclude(last_sync_started_at=None).exists():
        scheduling.request_sync(server_id, Trigger.SCHEDULE)
