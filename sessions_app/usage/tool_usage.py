"""Tool usage: calls, errors, latency, tokens and loads by tool, and calls over time.

Reads only. The report of the page sums the counted hours and days. With a filter on an agent, and
for the API, the database counts calls, with one index scan per grouping; latencies and loads are
then parsed from the newest rows up to a limit, so that cost does not grow with the ledger.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from django.db.models import CharField, Count, Max, QuerySet, Sum
from django.db.models.functions import Cast, Substr

from sessions_app.ledger.event_details import read_names, read_object
from sessions_app.models import Call, Event, EventKind, UsageKind
from sessions_app.usage import latency
from sessions_app.usage.filters import FAILED, KNOWN_TOOL, UsageFilter
from sessions_app.usage.series import (
    Figures,
    Uncounted,
    add_latencies,
    read_calls,
    read_series,
    read_totals,
)

PAGE = 25
DURATIONS = 5_000  # newest answered calls, from which percentiles are computed
SAMPLE = 50_000  # the same for the API; also the newest loads read


@dataclass
class ToolUsage:
    """Usage of one tool in a time range; `add_trends` sets `trend`."""

    tool_name: str
    calls: int = 0
    errors: int = 0
    tokens: int = 0  # of results
    last_called: datetime | None = None
    p50_ms: int | None = None
    p95_ms: int | None = None
    loads: int = 0
    trend: list[int] = field(default_factory=list)

    @property
    def error_rate(self) -> float:
        return 100 * self.errors / self.calls if self.calls else 0.0

    @property
    def tokens_per_call(self) -> int:
        return round(self.tokens / self.calls) if self.calls else 0


@dataclass(frozen=True)
class Bucket:
    """The calls of one hour or day; `calls` is None before the first recorded call."""

    at: datetime
    calls: int | None
    errors: int = 0


@dataclass(frozen=True)
class UsageReport:
    """All calls in a time range, by tool."""

    tools: list[ToolUsage]
    calls: int
    errors: int
    unknown_tools: int  # calls to unknown tools
    is_sampled: bool  # percentiles come from the newest answered calls


def count_by_tool(calls: QuerySet[Call], durations: int) -> dict[str, ToolUsage]:
    """Count the calls of each tool, with percentiles from the newest `durations` answered calls."""
    rows = (
        calls.filter(KNOWN_TOOL)
        .order_by()
        .values_list("tool_name")
        .annotate(
            calls=Count("pk"),
            errors=Count("pk", filter=FAILED),
            result_tokens=Sum("tokens"),
            last_called=Max("accepted_at"),
        )
    )
    usage = {row[0]: ToolUsage(*row) for row in rows}
    milliseconds: defaultdict[str, list[int]] = defaultdict(list)
    for name, duration in _answered_calls(calls, durations):
        milliseconds[name].append(duration)
    for name in milliseconds.keys() & usage.keys():
        counts = latency.histogram(milliseconds[name])
        usage[name].p50_ms = latency.percentile(counts, 0.5)
        usage[name].p95_ms = latency.percentile(counts, 0.95)
    return usage


def tool_usage(filters: UsageFilter, tool: str = "") -> list[ToolUsage]:
    """Return the usage of each tool, including loads, sorted by name."""
    calls, loads = filters.calls(), filters.events(EventKind.LOADED)
    if tool:
        calls, loads = calls.filter(tool_name=tool), loads.filter(details__contains=tool)
    usage = count_by_tool(calls, DURATIONS if tool else SAMPLE)
    for name, count in _count_loads(loads).items():
        if not tool or name == tool:
            usage.setdefault(name, ToolUsage(name)).loads = count
    return [usage[name] for name in sorted(usage)]


def _answered_calls(calls: QuerySet[Call], limit: int) -> Iterator[tuple[str, int]]:
    """Yield the tool and milliseconds of calls that a server answered, newest first."""
    rows = calls.filter(sent_at__isnull=False, finished_at__isnull=False).order_by("-accepted_at")
    # As text, to which PostgreSQL appends +00: Django parses SQLite timestamps ten times slower.
    times = [Cast(name, CharField()) for name in ("accepted_at", "finished_at")]
    for name, *texts in rows.values_list("tool_name", *times)[:limit]:
        start, end = (datetime.fromisoformat(text).replace(tzinfo=UTC) for text in texts)
        yield name, round((end - start).total_seconds() * 1000)


def _count_loads(events: QuerySet[Event]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for details in events.order_by("-pk").values_list("details", flat=True)[:SAMPLE]:
        counts.update(read_names(read_object(details), "names"))
    return counts


def usage_report(
    filters: UsageFilter,
    uncounted: Uncounted | None = None,
    total: Figures | None = None,
    *,
    percentiles: bool = False,
) -> UsageReport:
    """Count calls and errors by tool; `total` are the figures of all calls, if already read.

    Percentiles are read on demand, and to sort by them.
    """
    if filters.agent:  # tools are not counted by agent
        usage = count_by_tool(filters.calls(), DURATIONS)
    else:
        percentiles = percentiles or filters.sort.endswith(("p50", "p95"))
        usage = _sum_by_tool(filters, uncounted, percentiles)
    known = sum(tool.calls for tool in usage.values())
    if filters.group:
        calls, errors = known, sum(tool.errors for tool in usage.values())
    else:
        total = (
            total
            or read_series(
                filters.within, *filters.counted_kind(), now=filters.now, uncounted=uncounted
            ).total
        )
        calls, errors = total.calls, total.errors
    return UsageReport(
        tools=_sort_tools(usage.values(), filters.sort),
        calls=calls,
        errors=errors,
        unknown_tools=calls - known,
        is_sampled=bool(filters.agent),
    )


def _sum_by_tool(
    filters: UsageFilter, uncounted: Uncounted | None, percentiles: bool
) -> dict[str, ToolUsage]:
    names = filters.tools_of_group() if filters.group else None
    totals = read_totals(
        filters.within, UsageKind.TOOL, filters.now, uncounted, names, latencies=percentiles
    )
    return {
        name: ToolUsage(
            name,
            total.calls,
            total.errors,
            total.tokens_call + total.tokens_load,
            p50_ms=total.p50,
            p95_ms=total.p95,
        )
        for name, total in totals.items()
    }


def add_details(
    filters: UsageFilter, tools: Sequence[ToolUsage], uncounted: Uncounted | None = None
) -> None:
    """Set `trend` of each tool, its calls in each bucket, and percentiles that were not read."""
    names = [tool.tool_name for tool in tools]
    if filters.agent:
        trends = trends_by("tool_name", filters, tool_name__in=names)
    else:
        of = filters.within, UsageKind.TOOL
        trends = read_calls(*of, names, filters.now, uncounted)
        latencies = {name: Figures() for name in names}
        add_latencies(*of, latencies, filters.now, uncounted)
        for tool in tools:
            tool.p50_ms, tool.p95_ms = latencies[tool.tool_name].p50, latencies[tool.tool_name].p95
    for tool in tools:
        tool.trend = trends[tool.tool_name]


def calls_by_bucket(filters: UsageFilter) -> list[Bucket]:
    """Return calls and errors of each hour or day of the range."""
    names = _bucket_names(filters)
    if filters.agent and filters.group:
        rows = _by_bucket(filters).values_list("bucket")
        rows = rows.annotate(calls=Count("pk"), errors=Count("pk", filter=FAILED))
        counts = {bucket: (calls, errors) for bucket, calls, errors in rows}
    else:
        series = read_series(filters.within, *filters.counted_kind(), now=filters.now)
        counts = {
            name: (point.calls, point.errors)
            for name, point in zip(names, series.points, strict=True)
            if point.calls
        }
    return _buckets(filters, counts)


def trends_by(field: str, filters: UsageFilter, **conditions: Any) -> dict[Any, list[int]]:
    """Return the calls in each bucket, by the value of a field."""
    positions = {name: position for position, name in enumerate(_bucket_names(filters))}
    trends: defaultdict[Any, list[int]] = defaultdict(lambda: [0] * len(positions))
    rows = _by_bucket(filters).filter(**conditions).values_list(field, "bucket")
    for value, bucket, count in rows.annotate(Count("pk")):
        if bucket in positions:
            trends[value][positions[bucket]] = count
    return trends


def _by_bucket(filters: UsageFilter) -> QuerySet[Any]:
    # Truncating the timestamp's text is cheaper than any database function on timestamps.
    text = Cast("accepted_at", CharField())
    return filters.calls().annotate(bucket=Substr(text, 1, filters.range.digits))


def _bucket_names(filters: UsageFilter) -> list[str]:
    return [at.strftime("%Y-%m-%d %H")[: filters.range.digits] for at in filters.buckets]


def _buckets(filters: UsageFilter, counts: Mapping[str, tuple[int, int]]) -> list[Bucket]:
    first = Call.objects.order_by("accepted_at").values_list("accepted_at", flat=True).first()
    return [
        Bucket(at, *counts.get(name, (0, 0)))
        if name in counts or (first and at + filters.range.step > first)
        else Bucket(at, None)
        for at, name in zip(filters.buckets, _bucket_names(filters), strict=True)
    ]


def _sort_tools(tools: Iterable[ToolUsage], sort: str) -> list[ToolUsage]:
    keys = {
        "calls": lambda tool: tool.calls,
        "errors": lambda tool: (tool.error_rate, tool.calls),
        "p50": lambda tool: tool.p50_ms or 0,
        "p95": lambda tool: tool.p95_ms or 0,
        "tokens": lambda tool: tool.tokens,
        "each": lambda tool: tool.tokens_per_call,
    }
    by_name = sorted(tools, key=lambda tool: tool.tool_name, reverse=sort == "-name")
    key = keys.get(sort.removeprefix("-"))
    return sorted(by_name, key=key, reverse=sort.startswith("-")) if key else by_name
