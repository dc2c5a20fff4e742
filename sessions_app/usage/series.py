"""Figures over time for charts: by hour or day, with the totals of the period before."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property

from django.db.models import CharField, Count, QuerySet, Sum
from django.db.models.functions import Cast, Substr
from django.utils import timezone

from sessions_app.models import UsageDay, UsageHour, UsageKind
from sessions_app.usage import latency, rollups
from toolcrib.lib.figures import TokenFigures
from toolcrib.lib.time_ranges import RANGES, Range

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

    def add(self, row: "_Sum") -> None:
        for name, value in zip(rollups.SUMS, row.values, strict=True):
            setattr(self, name, getattr(self, name) + value)
        self.add_latencies(row.latencies)

    def add_latencies(self, latencies: Iterable[tuple[int, int]]) -> None:
        for bucket, calls in latencies:
            if calls:
                self.latencies[bucket] += calls

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
    """The newest hours, which the task has not counted yet, and how far days are summed."""

    rows: list[UsageHour]
    is_partial: bool  # there are more of them

    @cached_property
    def summed_until(self) -> datetime | None:
        """Return the end of the last summed day, read by ranges of days only."""
        return rollups.summed_until()


def read_uncounted(now: datetime | None = None) -> Uncounted:
    """Count the hours that the task has not counted yet, at most the newest two days."""
    start = rollups.first_uncounted_hour()
    if start is None:
        return Uncounted([], False)
    end = rollups.hour_of(now or timezone.now()) + rollups.HOUR
    earliest = end - rollups.HOUR * MAX_UNCOUNTED_HOURS
    rows = list(rollups.count_hours(max(start, earliest), end))
    return Uncounted(rows, start < earliest)


@dataclass(frozen=True)
class _Sum:
    """Figures that begin at a time: of an hour, a day or, from the database, of many."""

    key: str
    at: datetime
    values: tuple[int, ...]  # in the order of SUMS
    latencies: Iterable[tuple[int, int]] = ()


@dataclass(frozen=True)
class _Period:
    """Some time of one kind, read from summed days, counted hours and the ledger, in this order.

    A range of days reads days as far as they are summed, so that three months cost little more
    than a week.
    """

    kind: UsageKind
    first: datetime
    last: datetime  # the last hour
    uncounted: Uncounted
    by_day: bool
    keys: Collection[str] | None = None  # None: all of the kind

    @property
    def hours_from(self) -> datetime:
        """Return the first hour that is read as an hour."""
        days_end = self.uncounted.summed_until if self.by_day else None
        return max(self.first, days_end) if days_end else self.first

    def days(self) -> QuerySet[UsageDay]:
        days = UsageDay.objects.filter(
            kind=self.kind, day__gte=self.first.date(), day__lt=self.hours_from.date()
        )
        days = days.filter(day__lte=self.last.date()).order_by()
        return days if self.keys is None else days.filter(key__in=self.keys)

    def hours(self) -> QuerySet[UsageHour]:
        hours = UsageHour.objects.filter(
            kind=self.kind, hour__gte=self.hours_from, hour__lte=self.last
        ).order_by()
        return hours if self.keys is None else hours.filter(key__in=self.keys)

    def live(self) -> Iterator[_Sum]:
        for row in self.uncounted.rows:
            is_read = row.kind == self.kind and self.first <= row.hour <= self.last
            if is_read and (self.keys is None or row.key in self.keys):
                values = tuple(getattr(row, name) for name in rollups.SUMS)
                yield _Sum(row.key, row.hour, values, [(row.latency, row.calls)])

    def over_time(self, span: Range) -> Iterator[_Sum]:
        """Yield the figures of all keys together, by bucket."""
        if self.hours_from > self.first:
            nothing = (0,) * len(rollups.SUMS)
            sums = self.days().values_list("day").annotate(*map(Sum, rollups.SUMS))
            for day, *values in sums:
                yield _Sum("", rollups.start_of(day), tuple(values))
            # Most days of a tool have few calls, so that many rows have the same latencies.
            for day, text, times in (
                self.days().values_list("day", "latencies").annotate(Count("pk"))
            ):
                of = [(bucket, calls * times) for bucket, calls in latency.parse_latencies(text)]
                yield _Sum("", rollups.start_of(day), nothing, of)
        rows = self.hours().annotate(bucket=_bucket(span)).values_list("bucket", "latency")
        for bucket, of, *values in rows.annotate(*map(Sum, rollups.SUMS)):
            yield _Sum("", _parse_bucket(bucket, span), tuple(values), [(of, values[0])])
        yield from self.live()

    def by_key(self) -> Iterator[_Sum]:
        """Yield the figures of the whole period by key, without latencies."""
        for query in self.queries():
            for key, *values in query.values_list("key").annotate(*map(Sum, rollups.SUMS)):
                yield _Sum(key, self.first, tuple(values))
        yield from (replace(row, latencies=()) for row in self.live())

    def latencies(self) -> Iterator[tuple[str, Iterable[tuple[int, int]]]]:
        """Yield the latencies of the whole period by key."""
        if self.hours_from > self.first:
            for key, text in self.days().values_list("key", "latencies").iterator():
                yield key, latency.parse_latencies(text)
        rows = self.hours().values_list("key", "latency").annotate(Sum("calls"))
        for key, of, calls in rows:
            yield key, [(of, calls)]
        for row in self.live():
            yield row.key, row.latencies

    def calls(self, span: Range) -> Iterator[tuple[str, datetime, int]]:
        """Yield the calls of each key, by bucket."""
        if self.hours_from > self.first:
            for key, day, calls in self.days().values_list("key", "day", "calls").iterator():
                yield key, rollups.start_of(day), calls
        rows = self.hours().annotate(bucket=_bucket(span)).values_list("key", "bucket")
        for key, bucket, calls in rows.annotate(Sum("calls")):
            yield key, _parse_bucket(bucket, span), calls
        for row in self.live():
            yield row.key, row.at, row.values[0]

    def queries(self) -> Iterator[QuerySet[UsageDay] | QuerySet[UsageHour]]:
        if self.hours_from > self.first:
            yield self.days()
        yield self.hours()


def _bucket(span: Range) -> Substr:
    # Truncating the timestamp's text is cheaper than any database function on timestamps.
    return Substr(Cast("hour", CharField()), 1, span.digits)


def _parse_bucket(text: str, span: Range) -> datetime:
    start = text if span.digits == 10 else f"{text}:00"
    return datetime.fromisoformat(start).replace(tzinfo=UTC)


def read_series(
    within: str,
    kind: UsageKind = UsageKind.ALL,
    key: str | Collection[str] = "",
    now: datetime | None = None,
    uncounted: Uncounted | None = None,
) -> Series:
    """Return the figures of one or several agents, servers, tools or models, or of all.

    `uncounted` is read once for several charts of a page.
    """
    now, span = now or timezone.now(), RANGES[within]
    starts = span.starts(now)
    points = [Figures() for _ in starts]
    total, before = Figures(), Figures()
    period = _period(within, kind, now, uncounted, key, with_former=True)
    for row in period.over_time(span):
        position = (row.at - starts[0]) // span.step
        if position < 0:
            before.add(row)
        else:
            total.add(row)
            points[min(position, len(points) - 1)].add(row)
    return Series(span, starts, points, total, before, period.uncounted.is_partial)


def read_totals(
    within: str,
    kind: UsageKind,
    now: datetime | None = None,
    uncounted: Uncounted | None = None,
    keys: Collection[str] | None = None,
    *,
    latencies: bool = True,
) -> dict[str, Figures]:
    """Return the figures of the whole range by agent, server, tool or model."""
    period = _period(within, kind, now or timezone.now(), uncounted, keys)
    totals = _add_by_key(period)
    if latencies:
        _add_latencies(period, totals)
    return totals


def add_latencies(
    within: str,
    kind: UsageKind,
    totals: dict[str, Figures],
    now: datetime | None = None,
    uncounted: Uncounted | None = None,
) -> None:
    """Add the latencies of the whole range to totals that were read without."""
    period = _period(within, kind, now or timezone.now(), uncounted, list(totals))
    _add_latencies(period, totals)


def read_calls(
    within: str,
    kind: UsageKind,
    keys: Collection[str],
    now: datetime | None = None,
    uncounted: Uncounted | None = None,
) -> dict[str, list[int]]:
    """Return the calls of these agents, servers, tools or models in each bucket."""
    now, span = now or timezone.now(), RANGES[within]
    starts = span.starts(now)
    calls = {key: [0] * len(starts) for key in keys}
    for key, at, number in _period(within, kind, now, uncounted, keys).calls(span):
        calls[key][min((at - starts[0]) // span.step, len(starts) - 1)] += number
    return calls


def read_called_tools(uncounted: Uncounted | None = None) -> set[str]:
    """Return the names of the tools that agents called in the last 30 days."""
    period = _period("30d", UsageKind.TOOL, timezone.now(), uncounted)
    names = {row.key for row in period.live() if row.values[0]}
    for query in period.queries():
        names.update(query.values_list("key", flat=True).distinct())
    return names


@dataclass(frozen=True)
class Breakdown:
    """Figures by agent, server, tool or model, and the calls of the first over time."""

    totals: dict[str, Figures]  # most calls first; those listed with latencies
    before: dict[str, Figures]  # of the period before, of those listed
    calls: dict[str, list[int]]  # of each bucket


def read_breakdown(
    within: str,
    kind: UsageKind,
    charted: int,
    now: datetime | None = None,
    uncounted: Uncounted | None = None,
    listed: int | None = None,
) -> Breakdown:
    """Return the figures by agent, server, tool or model, with the first `charted` over time."""
    now, span = now or timezone.now(), RANGES[within]
    uncounted = uncounted or read_uncounted(now)
    totals = read_totals(within, kind, now, uncounted, latencies=False)
    keys = sorted(totals, key=lambda key: (-totals[key].calls, key))
    add_latencies(within, kind, {key: totals[key] for key in keys[:listed]}, now, uncounted)
    whole = _period(within, kind, now, uncounted, keys[:listed], with_former=True)
    before = _add_by_key(replace(whole, last=span.starts(now)[0] - rollups.HOUR))
    calls = read_calls(within, kind, keys[:charted], now, uncounted)
    return Breakdown({key: totals[key] for key in keys}, before, calls)


def _period(
    within: str,
    kind: UsageKind,
    now: datetime,
    uncounted: Uncounted | None,
    key: str | Collection[str] | None = None,
    *,
    with_former: bool = False,
) -> _Period:
    """Return a range up to now, optionally with as much time before it."""
    span = RANGES[within]
    first = span.starts(now)[0] - (span.step * span.buckets if with_former else timedelta(0))
    keys = {key} if isinstance(key, str) else None if key is None else set(key)
    by_day = span.step == rollups.DAY
    return _Period(kind, first, now, uncounted or read_uncounted(now), by_day, keys)


def _add_by_key(period: _Period) -> dict[str, Figures]:
    totals: defaultdict[str, Figures] = defaultdict(Figures)
    for row in period.by_key():
        totals[row.key].add(row)
    return dict(totals)


def _add_latencies(period: _Period, totals: dict[str, Figures]) -> None:
    for key, latencies in period.latencies():
        totals[key].add_latencies(latencies)
