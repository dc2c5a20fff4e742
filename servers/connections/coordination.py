"""Coordination between processes: reconnect claims, ended sessions, current server settings.

Reconnects to an unreachable server are claimed in the database, so that twenty processes with
their own backoff do not try twenty times as often. A single process needs no claim.
"""

from collections.abc import Callable, Collection
from datetime import timedelta

from django.conf import settings
from django.db.models import Q
from django.db.models.functions import Now

from servers.models import Server
from servers.registration.actions import build_spec
from servers.spec import ServerSpec

POLL_SECONDS = 0.5
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


# --- Sessions with their own connections ----------------------------------------------------------


def set_open_sessions_source(source: OpenSessionsSource) -> None:
    """Set the function that returns which of the given sessions are open."""
    global _open_sessions
    _open_sessions = source


def ended_sessions(sessions: Collection[str]) -> set[str]:
    """Return which of these sessions have ended; none without a source."""
    if _open_sessions is None or not sessions:
        return set()
    return {*sessions} - {*_open_sessions(sessions)}


def server_generations() -> dict[int, int]:
    """Map the id of every enabled server to its generation."""
    return dict(Server.objects.filter(enabled=True).values_list("pk", "generation"))


def current_spec(server_id: int) -> ServerSpec | None:
    """Return the connection settings of a server; None if it is disabled or deleted."""
    server = Server.objects.filter(pk=server_id, enabled=True).first()
    return build_spec(server) if server else None
