"""How busy servers are with calls of this process, for operators: turns, queues, breakers.

Read from any thread; the numbers are of one moment, and each web process has its own.
"""

import math
import time
from dataclasses import dataclass

from django.conf import settings

from servers.connections import calls as upstream_calls
from servers.connections.pool import ConnectionOwner
from servers.models import Server


@dataclass(frozen=True)
class ServerMetrics:
    """One server's turns. `connection`: ready, connecting, pausing (its breaker is open), none."""

    server: str  # its slug
    in_flight: int
    at_once: int  # how many it is given
    waiting: int
    may_wait: int
    refused: int  # since this process started
    connection: str
    retry_in: int | None  # seconds until it is dialled again, while pausing

    @property
    def is_full(self) -> bool:
        return self.in_flight >= self.at_once

    @property
    def sentence(self) -> str:
        """What an operator should know; nothing where all is well."""
        if self.connection == "pausing":
            return (
                f"It could not be reached, so calls are refused at once. Toolcrib tries again in "
                f"{self.retry_in} s."
            )
        if not self.is_full:
            return ""
        full = f"All {self.at_once} of its slots are taken" if self.at_once > 1 else "It is busy"
        if self.waiting >= self.may_wait:
            return f"{full} and {self.waiting} calls wait, the most that may: more are refused."
        if self.waiting:
            wait = "1 call waits" if self.waiting == 1 else f"{self.waiting} calls wait"
            return f"{full}, and {wait}."
        return f"{full}: the next call waits."


def server_metrics(server: Server) -> ServerMetrics:
    """How busy a server is now."""
    shared = upstream_calls._pool()
    turns = shared.bulkheads.get(server.pk) if shared is not None else None
    owners = [] if shared is None else list(shared.owners.items())
    connection, retry_in = _connection([owner for key, owner in owners if key[0] == server.pk])
    return ServerMetrics(
        server=server.slug,
        in_flight=turns.running if turns else 0,
        at_once=server.concurrency or settings.CALLS_IN_FLIGHT,
        waiting=turns.waiting if turns else 0,
        may_wait=settings.CALLS_QUEUED,
        refused=turns.refused if turns else 0,
        connection=connection,
        retry_in=retry_in,
    )


def all_server_metrics() -> list[ServerMetrics]:
    """The servers that calls of this process went to, or that are connected."""
    shared = upstream_calls._pool()
    if shared is None:
        return []
    known = {*list(shared.bulkheads), *(key[0] for key in list(shared.owners))}
    return [
        server_metrics(server) for server in Server.objects.filter(pk__in=known).order_by("slug")
    ]


def _connection(owners: list[ConnectionOwner]) -> tuple[str, int | None]:
    """The state of a server's connections, the best of them where sessions have their own."""
    now = time.monotonic()
    left = [ends - now for owner in owners if (ends := owner.pause_ends) is not None]
    if any(owner.is_ready for owner in owners):
        return "ready", None
    if left and len(left) == len(owners) and all(owner.is_barred for owner in owners):
        return "pausing", max(1, math.ceil(min(left)))
    return ("connecting", None) if owners else ("none", None)
