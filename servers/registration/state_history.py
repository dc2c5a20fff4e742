"""Changes of servers' states, kept for 90 days: the source of uptime."""

from datetime import datetime, timedelta

from django.db.models import Max
from django.utils import timezone

from servers.models import StateChange

KEPT = timedelta(days=90)


def record(server_id: int, state: str, at: datetime | None = None) -> None:
    """Record a state of a server, unless it is the last one that was recorded."""
    last = StateChange.objects.filter(server=server_id).order_by("-at", "-pk").first()
    if last is None or last.state != state:
        StateChange.objects.create(server_id=server_id, state=state, at=at or timezone.now())


def prune(now: datetime | None = None) -> int:
    """Delete old changes, except the one that tells the state at the start of the time kept."""
    old = StateChange.objects.filter(at__lt=(now or timezone.now()) - KEPT)
    newest = old.order_by().values("server").annotate(newest=Max("pk")).values("newest")
    return old.exclude(pk__in=list(newest.values_list("newest", flat=True))).delete()[0]
