"""Keep a live connection to every server that wants one, and ask for a sync when one changes.

Embedded, this is a task in the web process; in production it is `manage.py listen`.
"""

import asyncio
import logging
from collections.abc import Callable

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

SETTLE = 0.1  # notifications within this time make one request


class Listener(PoolWatcher):
    """Watches a pool and tells the catalog. Database work happens in threads."""

    def __init__(self, on_look: Callable[[], None] | None = None) -> None:
        self.pool = Pool(self)
        self.on_look = on_look  # called after each look at the table of servers
        self.noticed: set[int] = set()
        self.asking: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follow the table of servers until cancelled."""
        self.pool.open()
        try:
            while True:
                try:
                    await self.pool.keep(*await run_in_db_thread(_look, self.pool.sessions))
                    if self.on_look:
                        self.on_look()
                except Exception:  # nobody would start this loop again
                    logger.exception("The connections could not be looked after; trying again")
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for task in list(self.asking.values()):
                task.cancel()
            await self.pool.close()

    async def spec(self, server_id: int) -> ServerSpec | None:
        return await run_in_db_thread(current_spec, server_id)

    async def may_dial(self, server_id: int, apart: float) -> bool:
        return await run_in_db_thread(coordination.claim_reconnect, server_id, apart)

    async def connecting(self, spec: ServerSpec) -> None:
        await run_in_db_thread(
            _report, spec.server_id, spec.generation, ServerState.CONNECTING, None
        )

    async def connected(self, spec: ServerSpec, *, kept: bool) -> None:
        await run_in_db_thread(
            _report, spec.server_id, spec.generation, ServerState.CONNECTED, None
        )
        await run_in_db_thread(coordination.clear_reconnect_claim, spec.server_id)
        if kept:  # a change may have been missed while we were away
            await run_in_db_thread(_sync_if_stale, spec.server_id)

    async def failed(self, server_id: int, generation: int, error: ToolcribError) -> None:
        await run_in_db_thread(_report, server_id, generation, ServerState.FAILING, error)

    def list_changed(self, server_id: int) -> None:
        """Note a notification; thousands of them make a handful of requests."""
        self.noticed.add(server_id)
        if server_id not in self.asking:
            self.asking[server_id] = asyncio.create_task(self._ask(server_id))

    async def _ask(self, server_id: int) -> None:
        try:
            while server_id in self.noticed:
                self.noticed.discard(server_id)
                try:
                    await run_in_db_thread(scheduling.request_sync, server_id, Trigger.LIST_CHANGED)
                except DatabaseError:
                    logger.exception("A change of server %s could not be noted yet", server_id)
                    self.noticed.add(server_id)
                await asyncio.sleep(SETTLE)
        finally:
            del self.asking[server_id]


def _look(sessions: set[str]) -> tuple[dict[int, int], dict[int, int], set[str]]:
    """Return which servers to stay connected to, which may be connected to at all, and which of
    these sessions have ended.
    """
    fields = ("pk", "generation", "connection_policy", "isolation")
    rows = list(Server.objects.filter(enabled=True).values_list(*fields))
    kept = [ConnectionPolicy.ALWAYS, Isolation.SHARED]
    return (
        {pk: generation for pk, generation, *how in rows if how == kept},
        {pk: generation for pk, generation, *_ in rows},
        coordination.ended_sessions(sessions),
    )


def _report(server_id: int, generation: int, state: str, error: ToolcribError | None) -> None:
    if state == ServerState.CONNECTING:
        # Only a first attempt is news; a failing server stays failing until it is reached.
        Server.objects.filter(
            pk=server_id, generation=generation, enabled=True, state=ServerState.NEW
        ).update(state=state)
        return
    report_state(
        server_id,
        generation,
        state,
        code=error.code if error else "",
        reason=error.sentence if error else "",
        detail=getattr(error, "detail", "") if error else "",
    )


def _sync_if_stale(server_id: int) -> None:
    # A sync that runs now opened this connection, or will list over it.
    rows = Server.objects.filter(pk=server_id, sync_lease_until=None)
    if rows.exclude(last_sync_started_at=None).exists():
        scheduling.request_sync(server_id, Trigger.SCHEDULE)
