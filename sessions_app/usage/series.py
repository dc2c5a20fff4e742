"""Figures over time for charts: by hour or day, with the totals of the period before."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from django.db.models import CharField, F, QuerySet, Sum, Value
from django.db.models.functions import Cast, Substr
from django.utils import timezone

from sessions_app.models import UsageHour, UsageKind
from sessions_app.usage import latency, rollups
from toolcrib.lib.figures import TokenFigures
from toolcrib.lib.time_ranges import RANGES, Range

SUMS = (
    *("calls", "errors", "sessions", "searches", "loads"),
    *("tokens_call", "tokens_all", "tokens_catalog", "tokens_search", "tokens_load"),
)
MAX_UNCOUNTED_HOURS = 48  # read from the ledger; more are left to the task


@dataclass
class Figures:
    """Sums over some time. `toolcrib.lib.figures` defines the token figures."""

    calls: int = 0
    errors: int = 0
    sessions: int = 0
    searches: int = 0
    loads: int = 0
    tokens_call: int = 0
    tokens_all: int = 0
    tokens_catalog: int = 0
    tokens_search: int = 0
    tokens_load: int = 0
    latencies: Counter[int] = field(default_factory=Counter)

    def add(self, row: UsageHour) -> None:
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(row, name))
        self.latencies[row.latency] += row.calls

    @property
    def error_rate(self) -> float | None:
        return 100 * self.errors / self.calls if self.calls else None

    @property
    def p50(self) -> int | None:
        return latency.percentile(self.latencies, 0.5)

    @property
    def p95(self) -> int | None:
        return latency.percentile(self.latencies, 0.95)

    @property
    def token_figures(self) -> TokenFigures:
        return TokenFigures(
            baseline=self.tokens_all,
            catalog=self.tokens_catalog,
            searches=self.tokens_search,
            definitions=self.tokens_load,
            results=self.tokens_call,
        )

    @property
    def tokens_given(self) -> int:
        return self.token_figures.given

    @property
    def tokens_saved(self) -> int:
        return self.token_figures.saved


@dataclass(frozen=True)
class Series:
    """The figures of each bucket of a range, of the whole range, and of the period before."""

    range: Range
    starts: list[datetime]
    points: list[Figures]
    total: Figures
    before: Figures
    is_partial: bool  # some hours are still to be counted

    def change(self, name: str) -> float | None:
        """Return the change of a figure in percent of the period before, if there was one."""
        now: float | None = getattr(self.total, name)
        before: float | None = getattr(self.before, name)
        return 100 * (now - before) / before if before and now is not None else None


@dataclass(frozen=True)
class Uncounted:
    """The newest hours, which the task has not counted yet."""

    rows: list[UsageHour]
    is_partial: bool  # there are more of them


def read_uncounted(now: datetime | None = None) -> Uncounted:
    """Count the hours that the task has not counted yet, at most the newest two days."""
    start = rollups.first_uncounted_hour()
    if start is None:
        return Uncounted([], False)
    end = rollups.hour_of(now or timezone.now()) + rollups.HOUR
    earliest = end - rollups.HOUR * MAX_UNCOUNTED_HOURS
    return Uncounted(list(rollups.count_hours(max(start, earliest), end)), start < earliest)


def read_series(
    within: str,
    kind: UsageKind = UsageKind.ALL,
    key: str | Collection[str] = "",
    now: datetime | None = None,
    uncounted: Uncounted | None = None,
) -> Series:
    """Return the figures of one or several agents, servers, tools or models, or of all.

    The database sums the hours of each bucket, so that three months cost little more than a week.
    `uncounted` is read once for several charts of a page.
    """
    now, span = now or timezone.now(), RANGES[within]
    keys = {key} if isinstance(key, str) else set(key)
    starts = span.starts(now)
    points = [Figures() for _ in starts]
    total, before = Figures(), Figures()
    first = starts[0] - span.step * span.buckets
    hours = UsageHour.objects.filter(kind=kind, key__in=keys, hour__gte=first, hour__lte=now)
    uncounted = uncounted or read_uncounted(now)
    live = (
        row for row in uncounted.rows if row.kind == kind and row.key in keys and row.hour >= first
    )
    for row in (*_sum(hours, span), *live):
        position = (row.hour - starts[0]) // span.step
        if position < 0:
            before.add(row)
        else:
            total.add(row)
            points[min(position, len(points) - 1)].add(row)
    return Series(span, starts, points, total, before, uncounted.is_partial)


def read_totals(
    within: str,
    kind: UsageKind,
    now: datetime | None = None,
    uncounted: Uncounted | None = None,
) -> dict[str, Figures]:
    """Return the figures of the whole range by agent, server, tool or model."""
    now = now or timezone.now()
    first = RANGES[within].starts(now)[0]
    return _totals(kind, first, now, uncounted or read_uncounted(now))


@dataclass(frozen=True)
class Breakdown:
    """Figures by agent, server, tool or model, and the calls of the first over time."""

    totals: dict[str, Figures]  # most calls first
    before: dict[str, Figures]  # of the period before
    calls: dict[str, list[int]]  # of each bucket


def read_breakdown(
    within: str,
    kind: UsageKind,
    charted: int,
    now: datetime | None = None,
    uncounted: Uncounted | None = None,
) -> Breakdown:
    """Return the figures by agent, server, tool or model, with the first `charted` over time."""
    now, span = now or timezone.now(), RANGES[within]
    starts = span.starts(now)
    first = starts[0] - span.step * span.buckets
    uncounted = uncounted or read_uncounted(now)
    totals = _totals(kind, starts[0], now, uncounted)
    before = _totals(kind, first, starts[0] - rollups.HOUR, uncounted)
    keys = sorted(totals, key=lambda key: (-totals[key].calls, key))
    calls = {key: [0] * len(starts) for key in keys[:charted]}
    hours = UsageHour.objects.filter(kind=kind, key__in=list(calls), hour__lte=now)
    live = (row for row in uncounted.rows if row.kind == kind and row.key in calls)
    for row in (*_sum(hours.filter(hour__gte=starts[0]), span, by_key=True), *live):
        position = (row.hour - starts[0]) // span.step
        if position >= 0:
            calls[row.key][min(position, len(starts) - 1)] += row.calls
    return Breakdown({key: totals[key] for key in keys}, before, calls)


def _totals(
    kind: UsageKind, first: datetime, last: datetime, uncounted: Uncounted
) -> dict[str, Figures]:
    totals: defaultdict[str, Figures] = defaultdict(Figures)
    hours = UsageHour.objects.filter(kind=kind, hour__gte=first, hour__lte=last)
    for row in _sum(hours, by_key=True):
        totals[row.key].add(row)
    for row in uncounted.rows:
        if row.kind == kind and first <= row.hour <= last:
            totals[row.key].add(row)
    return dict(totals)


def _sum(
    hours: QuerySet[UsageHour], span: Range | None = None, *, by_key: bool = False
) -> Iterator[UsageHour]:
    """Sum hours by latency, by bucket of a range and by key; a bucket is named by its start."""
    # Truncating the timestamp's text is cheaper than any database function on timestamps.
    text = Substr(Cast("hour", CharField()), 1, span.digits) if span else Value("")
    key = F("key") if by_key else Value("")
    rows = hours.order_by().annotate(bucket=text, of=key).values_list("of", "bucket", "latency")
    for name, bucket, latency_bucket, *values in rows.annotate(*map(Sum, SUMS)):
        row = UsageHour(key=name, latency=latency_bucket, **dict(zip(SUMS, values, strict=True)))
        if span:
            start = bucket if span.digits == 10 else f"{bucket}:00"
            row.hour = datetime.fromisoformat(start).replace(tzinfo=UTC)
        yield row
