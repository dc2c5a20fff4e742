"""Coordination between processes: reconnect claims, ended sessions, current server settings.

Reconnects to an unreachable server are claimed in the database, so that twenty processes with
their own backoff do not try twenty times as often. A single process needs no claim.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Protocol

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now

from catalog.models import ASKS, Revision
from servers.connections.pool import Pool, PoolWatcher
from servers.models import ConnectionPolicy, Isolation, Server
from servers.registration.actions import build_spec
from servers.spec import ServerSpec
from toolcrib.lib.db_threads import run_in_db_thread

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
MAX_POLL_SECONDS = 5.0  # between two reads of a table that does not change
OpenSessionsSource = Callable[[Collection[str]], Collection[str]]
_open_sessions: OpenSessionsSource | None = None


def claim_reconnect(server_id: int, interval: float) -> bool:
    """Claim the next reconnect to a server, at most one per `interval` seconds."""
    if settings.EMBEDDED:
        return True
    free = Q(dialled_at=None) | Q(dialled_at__lt=Now() - timedelta(seconds=interval))
    return Server.objects.filter(free, pk=server_id).update(dialled_at=Now()) > 0


def clear_reconnect_claim(server_id: int) -> None:
    """Let all processes connect again: the server is reachable."""
    if not settings.EMBEDDED:
        Server.objects.filter(pk=server_id).exclude(dialled_at=None).update(dialled_at=None)


@transaction.atomic
def record_asking(server_id: int) -> None:
    """Remember that a server asks users of clients: sessions then have connections of their own."""
    server = Server.objects.select_for_update().filter(pk=server_id).first()
    if server is not None and ASKS not in server.capabilities:
        server.capabilities = [*server.capabilities, ASKS]
        server.save(update_fields=["capabilities"])
        Revision.bump()


def set_open_sessions_source(source: OpenSessionsSource) -> None:
    global _open_sessions
    _open_sessions = source


def ended_sessions(sessions: Collection[str]) -> set[str]:
    """Return which of these sessions have ended; none without a source."""
    if _open_sessions is None or not sessions:
        return set()
    return {*sessions} - {*_open_sessions(sessions)}


def current_spec(server_id: int) -> ServerSpec | None:
    server = Server.objects.filter(pk=server_id, enabled=True).first()
    return build_spec(server) if server else None


class Changes(Protocol):
    """Tells when something was committed to the database."""

    changes: int

    async def wait(self, seen: int, least: float, most: float) -> int: ...


async def maintain_forever(
    pool: Pool,
    *,
    persistent: bool,
    database: Changes | None = None,
    on_poll: Callable[[], None] = lambda: None,
) -> None:
    """Maintain the pool's connections by the server table until cancelled.

    The table is read after every commit if `database` tells of them, otherwise polled.
    `persistent`: also keep connections open that no call needs, from the start.
    """
    if not persistent:
        await asyncio.sleep(POLL_SECONDS)
    while True:
        seen = database.changes if database else 0
        try:
            if persistent or pool.owners:
                state = await run_in_db_thread(_load_state, pool.sessions, persistent)
                await pool.maintain(*state)
            on_poll()
        except Exception:  # nothing restarts this loop
            logger.exception("Connection maintenance failed; retrying")
        if database is None:
            await asyncio.sleep(POLL_SECONDS)
        else:
            await database.wait(seen, POLL_SECONDS, MAX_POLL_SECONDS)


def _load_state(
    sessions: set[str], persistent: bool
) -> tuple[dict[int, int], dict[int, int], set[str]]:
    """Return the servers with persistent connections, all enabled ones, and the ended sessions."""
    fields = ("pk", "generation", "connection_policy", "isolation")
    rows = list(Server.objects.filter(enabled=True).values_list(*fields))
    kept = [ConnectionPolicy.ALWAYS, Isolation.SHARED] if persistent else None
    return (
        {pk: generation for pk, generation, *policy in rows if policy == kept},
        {pk: generation for pk, generation, *_ in rows},
        ended_sessions(sessions),
    )


class DatabaseWatcher(PoolWatcher):
    """Reads settings from the database and claims reconnects there. Reports nothing else."""

    async def spec(self, server_id: int) -> ServerSpec | None:
        return await run_in_db_thread(current_spec, server_id)

    async def may_reconnect(self, server_id: int, interval: float) -> bool:
        return await run_in_db_thread(claim_reconnect, server_id, interval)

    async def connected(self, spec: ServerSpec, *, persistent: bool) -> None:
        await run_in_db_thread(clear_reconnect_claim, spec.server_id)
