"""Tool usage: calls, errors, latency, tokens and loads by tool, and calls over time.

Reads only. Counting is done by the database, in one pass over an index for each way of counting.
Latencies and loads are parsed from the newest rows up to a limit, so that a long ledger costs no
more than a short one.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from django.db.models import CharField, Count, Max, QuerySet, Sum
from django.db.models.functions import Cast, Substr

from sessions_app.ledger.event_details import read_names, read_object
from sessions_app.models import Call, Event, EventKind
from sessions_app.usage.filters import FAILED, OF_A_TOOL, UsageFilter
from toolcrib.lib.pagination import Page, page_by_offset
from toolcrib.lib.percentile import percentile

PAGE = 25
DURATIONS = 5_000  # newest answered calls that percentiles are computed from
SAMPLE = 50_000  # the same for the API, and the newest loads that are read


@dataclass
class ToolUsage:
    """How one tool was used in a time; `trend` is filled in by `add_trends`."""

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

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        del found["trend"]
        return found


@dataclass(frozen=True)
class Bucket:
    """The calls of one hour or day; `calls` is None where nothing was recorded yet."""

    at: datetime
    calls: int | None
    errors: int = 0


@dataclass(frozen=True)
class UsageReport:
    """All calls of a time, by bucket and by tool."""

    buckets: list[Bucket]
    tools: list[ToolUsage]
    calls: int
    errors: int
    unknown_tools: int  # calls of names that no tool had

    def page(self, offset: int, size: int = PAGE) -> Page[ToolUsage]:
        return page_by_offset(self.tools, offset, size)


# --- By tool ------------------------------------------------------------------------------------


def by_tool(calls: QuerySet[Call], durations: int) -> dict[str, ToolUsage]:
    """Count the calls of each tool, with percentiles from the newest `durations` answered calls."""
    counted = (
        calls.filter(OF_A_TOOL)
        .order_by()
        .values_list("tool_name")
        .annotate(
            count=Count("pk"),
            failed=Count("pk", filter=FAILED),
            paid=Sum("tokens"),
            last_called=Max("accepted_at"),
        )
    )
    found = {
        name: ToolUsage(name, count, errors, tokens or 0, last_called)
        for name, count, errors, tokens, last_called in counted
    }
    times: defaultdict[str, list[int]] = defaultdict(list)
    for name, _, took in answered(calls, durations):
        times[name].append(took)
    for name in times.keys() & found.keys():
        found[name].p50_ms = percentile(times[name], 0.5)
        found[name].p95_ms = percentile(times[name], 0.95)
    return found


def tool_usage(wanted: UsageFilter, tool: str = "") -> list[ToolUsage]:
    """Return the usage of each tool by name, with how often it was loaded."""
    calls, loads = wanted.calls(), wanted.events(EventKind.LOADED)
    if tool:
        calls, loads = calls.filter(tool_name=tool), loads.filter(details__contains=tool)
    found = by_tool(calls, DURATIONS if tool else SAMPLE)
    for name, count in _load_counts(loads).items():
        if not tool or name == tool:
            found.setdefault(name, ToolUsage(name)).loads = count
    return [found[name] for name in sorted(found)]


def answered(calls: QuerySet[Call], most: int) -> Iterator[tuple[str, datetime, int]]:
    """Yield name, start and milliseconds of calls that a server answered, newest first."""
    rows = calls.filter(sent_at__isnull=False, finished_at__isnull=False).order_by("-accepted_at")
    # As text, which PostgreSQL ends with +00: Django takes ten times as long to read SQLite's.
    times = [Cast(name, CharField()) for name in ("accepted_at", "finished_at")]
    for name, *texts in rows.values_list("tool_name", *times)[:most]:
        start, end = (datetime.fromisoformat(text).replace(tzinfo=UTC) for text in texts)
        yield name, start, round((end - start).total_seconds() * 1000)


def _load_counts(events: QuerySet[Event]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for details in events.order_by("-pk").values_list("details", flat=True)[:SAMPLE]:
        counts.update(read_names(read_object(details), "names"))
    return counts


# --- Over time ----------------------------------------------------------------------------------


def usage_report(wanted: UsageFilter) -> UsageReport:
    """Count calls and errors by bucket and by tool."""
    calls: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    for bucket, count, failed in (
        _by_bucket(wanted)
        .values_list("bucket")
        .annotate(n=Count("pk"), failed=Count("pk", filter=FAILED))
    ):
        calls[bucket], errors[bucket] = count, failed
    tools = by_tool(wanted.calls(), DURATIONS)
    return UsageReport(
        buckets=_buckets(wanted, calls, errors),
        tools=_sorted(tools.values(), wanted.sort),
        calls=calls.total(),
        errors=errors.total(),
        unknown_tools=calls.total() - sum(one.calls for one in tools.values()),
    )


def add_trends(wanted: UsageFilter, tools: Sequence[ToolUsage]) -> None:
    """Fill in how often each of these tools was called in each bucket."""
    rows = _by_bucket(wanted).filter(tool_name__in=[one.tool_name for one in tools])
    counts = {
        (name, bucket): count
        for name, bucket, count in rows.values_list("tool_name", "bucket").annotate(Count("pk"))
    }
    names = _bucket_names(wanted)
    for one in tools:
        one.trend = [counts.get((one.tool_name, name), 0) for name in names]


def _by_bucket(wanted: UsageFilter) -> QuerySet[Any]:
    # Cutting the database's own text of a time costs less than any function on times.
    text = Cast("accepted_at", CharField())
    return wanted.calls().annotate(bucket=Substr(text, 1, wanted.range.digits))


def _bucket_names(wanted: UsageFilter) -> list[str]:
    return [at.strftime("%Y-%m-%d %H")[: wanted.range.digits] for at in wanted.buckets]


def _buckets(wanted: UsageFilter, calls: Counter[str], errors: Counter[str]) -> list[Bucket]:
    first, names = recorded_since(), _bucket_names(wanted)
    return [
        Bucket(at, calls[name], errors[name])
        if first and at + wanted.range.step > first
        else Bucket(at, None)
        for at, name in zip(wanted.buckets, names, strict=True)
    ]


def recorded_since() -> datetime | None:
    """Return when the oldest call in the ledger was made."""
    return Call.objects.order_by("accepted_at").values_list("accepted_at", flat=True).first()


def _sorted(tools: Iterable[ToolUsage], sort: str) -> list[ToolUsage]:
    keys = {
        "calls": lambda one: one.calls,
        "errors": lambda one: (one.error_rate, one.calls),
        "p50": lambda one: one.p50_ms or 0,
        "p95": lambda one: one.p95_ms or 0,
        "tokens": lambda one: one.tokens,
        "each": lambda one: one.tokens_per_call,
    }
    by_name = sorted(tools, key=lambda one: one.tool_name, reverse=sort == "-name")
    key = keys.get(sort.removeprefix("-"))
    return sorted(by_name, key=key, reverse=sort.startswith("-")) if key else by_name
