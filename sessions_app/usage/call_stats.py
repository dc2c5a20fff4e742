"""Recent call counts and latency of tools and servers. Trial calls are not counted."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta

from django.db.models import Count, Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from sessions_app.models import Call, CallPath
from sessions_app.usage import tool_usage
from sessions_app.usage.filters import FAILED, UsageFilter
from toolcrib.lib.percentile import percentile

DAYS = 30
SAMPLE = 10_000  # newest answered calls, from which p95 is computed


@dataclass(frozen=True)
class ToolCalls:
    """Calls and errors of a tool in the last 30 days."""

    calls: int = 0
    errors: int = 0

    @property
    def error_rate(self) -> float:
        return 100 * self.errors / self.calls if self.calls else 0.0


@dataclass(frozen=True)
class ServerCalls:
    """Calls of a server in the last 24 hours, per hour, oldest first."""

    hours: list[int]
    p95_ms: int | None

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
    """Return the calls of these servers by primary key; servers without calls are omitted."""
    if not servers:
        return {}
    # Filter by time alone: with a filter on servers, SQLite reads every call they ever had.
    filters = UsageFilter(within="24h")
    hours = tool_usage.trends_by("server", filters)
    durations: defaultdict[int, list[int]] = defaultdict(list)
    for pk, _, duration in tool_usage.answered_calls(filters.calls(), SAMPLE, by="server"):
        durations[pk].append(duration)
    return {
        pk: ServerCalls(hours[pk], percentile(durations[pk], 0.95)) for pk in servers if pk in hours
    }
