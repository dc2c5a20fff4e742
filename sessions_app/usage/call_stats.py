"""Recent call counts and latency of tools and servers, for their lists and the group board.

Reads only, in a fixed number of queries. Trial calls are not counted.
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
SAMPLE = 10_000  # newest answered calls, from which p95 is computed


@dataclass(frozen=True)
class ToolCalls:
    """Calls and errors of a tool in the last 30 days."""

    calls: int = 0
    errors: int = 0

    @property
    def error_rate(self) -> float:
        return 100 * self.errors / self.calls if self.calls else 0.0


@dataclass
class ServerCalls:
    """Calls of a server in the last 24 hours, per hour, oldest first."""

    hours: list[int] = field(default_factory=lambda: [0] * HOURS)
    p95_ms: int | None = None

    @property
    def calls(self) -> int:
        return sum(self.hours)


def _calls() -> QuerySet[Call]:
    return Call.objects.exclude(path=CallPath.TRY).order_by()


def never_called() -> Q:
    """Return a condition for tools that no agent has ever called."""
    return Q(~Exists(_calls().filter(tool=OuterRef("pk"))))


def count_tool_calls(tools: Collection[int]) -> dict[int, ToolCalls]:
    """Return the calls of these tools by primary key; tools without calls are omitted."""
    if not tools:
        return {}
    since = timezone.now() - timedelta(days=DAYS)
    rows = _calls().filter(tool__in=tools, accepted_at__gte=since).values_list("tool")
    counts = rows.annotate(calls=Count("pk"), errors=Count("pk", filter=FAILED))
    return {pk: ToolCalls(calls, errors) for pk, calls, errors in counts}


def count_server_calls(servers: Collection[int]) -> dict[int, ServerCalls]:
    """Return the hourly calls and p95 latency of these servers by primary key."""
    stats: defaultdict[int, ServerCalls] = defaultdict(ServerCalls)
    pks = set(servers)
    if not pks:
        return stats
    now = timezone.now().replace(minute=0, second=0, microsecond=0)
    since = now - timedelta(hours=HOURS - 1)
    # Filter by time alone: with a filter on servers, SQLite reads every call they ever had.
    calls = _calls().filter(accepted_at__gte=since)
    # Truncating the timestamp's text is cheaper than any database function on timestamps.
    hour = Substr(Cast("accepted_at", CharField()), 1, 13)
    rows = calls.annotate(hour=hour).values_list("server", "hour", Count("pk"))
    for pk, text, count in rows:
        if pk not in pks:
            continue
        start_of_hour = datetime.fromisoformat(f"{text}:00").replace(tzinfo=now.tzinfo)
        index = int((start_of_hour - since).total_seconds() // 3600)
        stats[pk].hours[max(0, min(index, HOURS - 1))] += count
    answered = calls.filter(sent_at__isnull=False, finished_at__isnull=False)
    durations: defaultdict[int, list[int]] = defaultdict(list)
    # As text: Django parses timestamps from SQLite ten times more slowly.
    texts = [Cast(name, CharField()) for name in ("accepted_at", "finished_at")]
    timed = answered.order_by("-accepted_at").values_list("server", *texts)
    for pk, start, end in timed[:SAMPLE]:
        duration = datetime.fromisoformat(end) - datetime.fromisoformat(start)
        durations[pk].append(round(duration.total_seconds() * 1000))
    for pk in pks & durations.keys():
        stats[pk].p95_ms = percentile(durations[pk], 0.95)
    return stats
