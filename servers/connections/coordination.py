"""Who dials a server that does not answer: one of all processes, every so often.

Each has pauses of its own; twenty of them would dial twenty times as often. Where there is only
one process nobody has to be asked.
"""

from datetime import timedelta

from django.conf import settings
from django.db.models import Q
from django.db.models.functions import Now

from servers.models import Server


def claim(server_id: int, apart: float) -> bool:
    """Take the next dial of a server, unless one was taken that lately (in seconds)."""
    if settings.EMBEDDED:
        return True
    lately = Now() - timedelta(seconds=apart)
    free = Q(dialled_at=None) | Q(dialled_at__lt=lately)
    return Server.objects.filter(free, pk=server_id).update(dialled_at=Now()) > 0


def answered(server_id: int) -> None:
    """Let all processes dial a server: it is there again."""
    if not settings.EMBEDDED:
        Server.objects.filter(pk=server_id).exclude(dialled_at=None).update(dialled_at=None)
