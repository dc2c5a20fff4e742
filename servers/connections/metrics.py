"""Call metrics per server for operators: concurrency, queue, circuit breaker.

Can be read from any thread. The numbers are a snapshot, and each web process has its own.
"""

import math
import time
from dataclasses import dataclass

from django.conf import settings

from servers.connections import calls as upstream_calls
from servers.connections.pool import ConnectionOwner
from servers.models import Server
from toolcrib.lib.text import plural


@dataclass(frozen=True)
class ServerMetrics:
    """One server's calls. `connection`: ready, connecting, pausing (circuit open), none."""

    server: str  # its slug
    in_flight: int
    at_once: int  # maximum concurrent calls
    waiting: int  # queued calls
    may_wait: int  # maximum queue length
    refused: int  # since this process started
    connection: str
    retry_in: int | None  # seconds until the next connection attempt, while pausing

    @property
    def sentence(self) -> str:
        """A warning for operators; empty if there is nothing to report."""
        if self.connection == "pausing":
            return f"Circuit open: calls fail fast, retry in {self.retry_in} s."
        if self.in_flight < self.at_once:
            return ""
        full = f"All {self.at_once} slots in use" if self.at_once > 1 else "The only slot is in use"
        queued = f"{plural(self.waiting, 'call')} queued"
        if self.waiting >= self.may_wait:
            return f"{full}, {queued} (maximum): further calls are rejected."
        if self.waiting:
            return f"{full}, {queued}."
        return f"{full}: the next call is queued."


def server_metrics(server: Server) -> ServerMetrics:
    active = upstream_calls.current_pool()
    bulkhead = active.bulkheads.get(server.pk) if active is not None else None
    owners = [] if active is None else list(active.owners.items())
    connection, retry_in = _connection([owner for key, owner in owners if key[0] == server.pk])
    return ServerMetrics(
        server=server.slug,
        in_flight=bulkhead.running if bulkhead else 0,
        at_once=server.concurrency or settings.CALLS_IN_FLIGHT,
        waiting=bulkhead.waiting if bulkhead else 0,
        may_wait=settings.CALLS_QUEUED,
        refused=bulkhead.refused if bulkhead else 0,
        connection=connection,
        retry_in=retry_in,
    )


def read_log(server: Server) -> str:
    """Return the last lines on stderr of a program that this process runs; empty without one."""
    active = upstream_calls.current_pool()
    owners = [] if active is None else list(active.owners.items())
    connections = (owner.live_connection for key, owner in owners if key[0] == server.pk)
    logs = (connection.read_log() for connection in connections if connection is not None)
    return next(filter(None, logs), "")


def all_server_metrics() -> list[ServerMetrics]:
    """Return the metrics of all servers that this process called or is connected to."""
    active = upstream_calls.current_pool()
    if active is None:
        return []
    server_ids = {*list(active.bulkheads), *(key[0] for key in list(active.owners))}
    return [
        server_metrics(server)
        for server in Server.objects.filter(pk__in=server_ids).order_by("slug")
    ]


def _connection(owners: list[ConnectionOwner]) -> tuple[str, int | None]:
    """Return the state of a server's connections: the best one, if sessions have their own."""
    now = time.monotonic()
    waits = [at - now for owner in owners if (at := owner.retry_at) is not None]
    if any(owner.live_connection for owner in owners):
        return "ready", None
    if waits and len(waits) == len(owners) and all(owner.is_circuit_open for owner in owners):
        return "pausing", max(1, math.ceil(min(waits)))
    return ("connecting", None) if owners else ("none", None)
