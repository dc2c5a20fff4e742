"""Who dials a server that does not answer: one of all processes, every so often.

Each has pauses of its own; twenty of them would dial twenty times as often. Where there is only
one process nobody has to be asked.
"""

from collections.abc import Callable, Collection
from datetime import timedelta

from django.conf import settings
from django.db.models import Q
from django.db.models.functions import Now

from servers.models import Server
from servers.registration.actions import spec_of
from servers.spec import ServerSpec

POLL_SECONDS = 0.5
StillOpen = Callable[[Collection[str]], Collection[str]]
_knows: StillOpen | None = None


def claim_reconnect(server_id: int, apart: float) -> bool:
    """Take the next dial of a server, unless one was taken that lately (in seconds)."""
    if settings.EMBEDDED:
        return True
    lately = Now() - timedelta(seconds=apart)
    free = Q(dialled_at=None) | Q(dialled_at__lt=lately)
    return Server.objects.filter(free, pk=server_id).update(dialled_at=Now()) > 0


def clear_reconnect_claim(server_id: int) -> None:
    """Let all processes dial a server: it is there again."""
    if not settings.EMBEDDED:
        Server.objects.filter(pk=server_id).exclude(dialled_at=None).update(dialled_at=None)


# --- Sessions that have a connection of their own -------------------------------------------------


def set_open_sessions_source(knows: StillOpen) -> None:
    """Have this function say which of some sessions are open."""
    global _knows
    _knows = knows


def ended_sessions(sessions: Collection[str]) -> set[str]:
    """Return those of these sessions that are over; none where nobody knows."""
    if _knows is None or not sessions:
        return set()
    return {*sessions} - {*_knows(sessions)}


def server_generations() -> dict[int, int]:
    """Return the generation of every server that may be connected to."""
    return dict(Server.objects.filter(enabled=True).values_list("pk", "generation"))


def current_spec(server_id: int) -> ServerSpec | None:
    """Return how to reach a server as it is configured now, None where it must not be."""
    server = Server.objects.filter(pk=server_id, enabled=True).first()
    return spec_of(server) if server else None
