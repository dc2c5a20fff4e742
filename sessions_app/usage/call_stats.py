"""Recent calls of tools and servers, for the lists of both and for the group board.

Reads only, in a fixed number of queries. Calls that people tried are not counted.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db.models import CharField, Count, Exists, OuterRef, Q, QuerySet
from django.db.models.functions import Cast, Substr
from django.utils import timezone

from sessions_app.models import Call, CallPath
from sessions_app.usage.filters import FAILED
from toolcrib.lib.percentile import percentile

DAYS = 30
HOURS = 24
SAMPLE = 10_000  # newest answered calls that p95 is read from


@dataclass(frozen=True)
class ToolCalls:
    """How a tool was called in the last 30 days."""

    calls: int = 0
    errors: int = 0

    @property
    def error_rate(self) -> float:
        return 100 * self.errors / self.calls if self.calls else 0.0


@dataclass
class ServerCalls:
    """How a server was called in the last 24 hours, by the hour, oldest first."""

    hours: list[int] = field(default_factory=lambda: [0] * HOURS)
    p95_ms: int | None = None

    @property
    def calls(self) -> int:
        return sum(self.hours)


def _calls() -> QuerySet[Call]:
    return Call.objects.exclude(path=CallPath.TRY).order_by()


def never() -> Q:
    """Match tools that no agent ever called."""
    return Q(~Exists(_calls().filter(tool=OuterRef("pk"))))


def of_tools(tools: Collection[int]) -> dict[int, ToolCalls]:
    """Count the calls of these tools, by primary key; those without any are left out."""
    if not tools:
        return {}
    since = timezone.now() - timedelta(days=DAYS)
    rows = _calls().filter(tool__in=tools, accepted_at__gte=since).values_list("tool")
    counted = rows.annotate(calls=Count("pk"), errors=Count("pk", filter=FAILED))
    return {pk: ToolCalls(calls, errors) for pk, calls, errors in counted}


def of_servers(servers: Collection[int]) -> dict[int, ServerCalls]:
    """Count the calls of these servers by the hour, and read how long they took."""
    found: defaultdict[int, ServerCalls] = defaultdict(ServerCalls)
    wanted = set(servers)
    if not wanted:
        return found
    now = timezone.now().replace(minute=0, second=0, microsecond=0)
    since = now - timedelta(hours=HOURS - 1)
    # Of all servers, by the time alone: asked for some, SQLite reads all that these ever did.
    calls = _calls().filter(accepted_at__gte=since)
    # Cutting the database's own text of a time costs less than any function on times.
    hour = Substr(Cast("accepted_at", CharField()), 1, 13)
    count = Count("pk")
    for pk, text, made in calls.annotate(hour=hour).values_list("server", "hour", count):
        if pk not in wanted:
            continue
        began = datetime.fromisoformat(f"{text}:00").replace(tzinfo=now.tzinfo)
        at = int((began - since).total_seconds() // 3600)
        found[pk].hours[max(0, min(at, HOURS - 1))] += made
    answered = calls.filter(sent_at__isnull=False, finished_at__isnull=False)
    times: defaultdict[int, list[int]] = defaultdict(list)
    # As text: Django takes ten times as long to read times from SQLite.
    texts = [Cast(name, CharField()) for name in ("accepted_at", "finished_at")]
    rows = answered.order_by("-accepted_at").values_list("server", *texts)
    for pk, start, end in rows[:SAMPLE]:
        took = datetime.fromisoformat(end) - datetime.fromisoformat(start)
        times[pk].append(round(took.total_seconds() * 1000))
    for pk in wanted & times.keys():
        found[pk].p95_ms = percentile(times[pk], 0.95)
    return found
