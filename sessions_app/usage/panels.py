"""Chart panels and metrics over time of all agents or of one thing, and the breakdown of calls."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from urllib.parse import urlencode

from django.urls import reverse

from catalog.models import Tool
from servers.models import Server
from sessions_app.models import Agent, UsageKind
from sessions_app.usage import series as series_reads
from sessions_app.usage.series import Figures, Series, Uncounted, read_series
from toolcrib.lib import charts, display, figures
from toolcrib.lib.display import group_digits
from toolcrib.lib.figures import Money, signed
from toolcrib.lib.text import plural

TICKS = 6
WITH_TOKENS = (UsageKind.ALL, UsageKind.AGENT, UsageKind.MODEL)
BREAKDOWNS = (UsageKind.AGENT, UsageKind.SERVER, UsageKind.TOOL, UsageKind.MODEL)
BREAKDOWN_ROWS = 25
CHARTED = 5  # drawn one by one in the chart of a breakdown; the rest is one part


@dataclass(frozen=True)
class PanelRow:
    """One hour or day: the values of the table, the text of the tooltip, the sessions behind it."""

    at: datetime
    values: tuple[str, ...]
    label: str
    url: str


@dataclass(frozen=True)
class Panel:
    slug: str
    title: str
    summary: str
    trend: charts.Trend
    axis: tuple[str, ...]  # labels from top to bottom
    legend: tuple[tuple[str, str], ...]  # kind and label
    rows: list[PanelRow]
    ticks: list[datetime]
    by_hour: bool
    is_empty: bool

    @property
    def columns(self) -> list[tuple[charts.TrendColumn, PanelRow]]:
        return list(zip(self.trend.columns, self.rows, strict=True))


def read_panels(
    within: str,
    kind: UsageKind = UsageKind.ALL,
    key: str | Collection[str] = "",
    *,
    sessions: dict[str, str] | None = None,
    now: datetime | None = None,
    former: Collection[str] = (),
    uncounted: Uncounted | None = None,
) -> tuple[Series, list[Panel]]:
    """Return the figures of one thing and their charts; `sessions` filters the linked sessions."""
    keys = {key} if isinstance(key, str) else set(key)
    series = read_series(within, kind, keys | set(former), now, uncounted)
    return series, draw_panels(series, kind, sessions or {})


def draw_panels(series: Series, kind: UsageKind, sessions: dict[str, str]) -> list[Panel]:
    panels = [_calls(series, sessions), _latency(series, sessions)]
    if kind in WITH_TOKENS:
        panels.append(_tokens(series, sessions))
    return panels


# --- Metrics ------------------------------------------------------------------------------------

CALLS = "All calls by agents, whatever their outcome. Test calls are not counted."
ERROR_RATE = "Share of calls that failed, were rejected, timed out or returned an error."
P50 = "50th percentile of answered calls, within a fifth."
P95 = "95th percentile of answered calls, within a fifth."
TOKENS_GIVEN = figures.GIVEN
TOKENS_SAVED = f"{figures.SAVING} Baseline: {figures.BASELINE} Given: {figures.GIVEN}"


@dataclass(frozen=True)
class Metric:
    """A metric of the time range, with its change against the period before. "–": no data."""

    label: str
    value: str
    unit: str
    url: str
    definition: str
    change: float | None = None  # percent, or percentage points of a rate
    note: str = ""


def list_metrics(
    series: Series,
    kind: UsageKind = UsageKind.ALL,
    *,
    sessions: dict[str, str] | None = None,
    money: Money | None = None,
) -> list[Metric]:
    """Return the figures of a series as metrics; tools and servers have no token figures."""
    total, before = series.total, series.before
    rate, rate_before = total.error_rate, before.error_rate
    rate_change = None if rate is None or rate_before is None else rate - rate_before
    query = {**(sessions or {}), "since": f"{series.starts[0]:%Y-%m-%dT%H:%M}"}
    url = f"{reverse('sessions')}?{urlencode(query)}"
    calls, p50, p95 = (series.change(name) for name in ("calls", "p50", "p95"))
    metrics = [
        Metric("Calls", f"{group_digits(total.calls)}", "", url, CALLS, calls),
        Metric("Error rate", *_value(rate, "%"), f"{url}&errors=1", ERROR_RATE, rate_change),
        Metric("p50 latency", *_value(total.p50, "ms"), "", P50, p50),
        Metric("p95 latency", *_value(total.p95, "ms"), "", P95, p95),
    ]
    if kind in WITH_TOKENS:
        given, saved = f"≈{group_digits(total.tokens_given)}", signed(total.tokens_saved)
        cost, saving = (f"≈{money.cost_text}", f"≈{money.saving_text}") if money else ("", "")
        given_change, saved_change = series.change("tokens_given"), series.change("tokens_saved")
        metrics += [
            Metric("Tokens given", given, "", url, TOKENS_GIVEN, given_change, cost),
            Metric("Tokens saved", saved, "", url, TOKENS_SAVED, saved_change, saving),
        ]
    return metrics


def _value(number: float | None, unit: str) -> tuple[str, str]:
    if number is None:
        return "–", ""
    return (f"{number:.1f}", unit) if unit == "%" else (f"{group_digits(int(number))}", unit)


# --- Breakdown ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BreakdownRow:
    """The figures of one agent, server, tool or model in the time range."""

    name: str
    url: str
    sessions_url: str
    figures: Figures
    change: float | None  # of calls, in percent of the period before

    @property
    def saved(self) -> str:
        return signed(self.figures.tokens_saved)


@dataclass(frozen=True)
class Breakdown:
    kind: UsageKind
    rows: list[BreakdownRow]
    total: int  # rows, also those not listed
    panel: Panel

    @property
    def with_tokens(self) -> bool:
        return self.kind in WITH_TOKENS


def read_breakdown(
    series: Series, within: str, kind: UsageKind, uncounted: Uncounted | None = None
) -> Breakdown:
    """Return who or what made the calls of a range, most calls first, with a chart of the first.

    `series` is that of all calls.
    """
    found = series_reads.read_breakdown(
        within, kind, CHARTED, uncounted=uncounted, listed=BREAKDOWN_ROWS
    )
    keys = list(found.totals)
    names = _names(kind, keys[:BREAKDOWN_ROWS])
    since = f"{series.starts[0]:%Y-%m-%dT%H:%M}"
    rows = []
    for key in keys[:BREAKDOWN_ROWS]:
        name, url = names[key]
        sessions = f"{reverse('sessions')}?{urlencode({kind.value: name, 'since': since})}"
        if kind == UsageKind.AGENT and not url:
            sessions = ""  # its sessions are deleted too
        total, before = found.totals[key], found.before.get(key, Figures())
        change = 100 * (total.calls - before.calls) / before.calls if before.calls else None
        rows.append(BreakdownRow(name, url, sessions, total, change))
    panel = _breakdown_panel(series, kind, found.calls, [row.name for row in rows])
    return Breakdown(kind, rows, len(keys), panel)


def _breakdown_panel(
    series: Series, kind: UsageKind, calls: dict[str, list[int]], names: Sequence[str]
) -> Panel:
    bars = {f"key-{at}": values for at, values in enumerate(calls.values(), 1)}
    listed = [sum(column) for column in zip(*bars.values(), strict=True)]
    listed = listed or [0] * len(series.points)
    everything = [point.calls for point in series.points]
    if not listed:
        listed = [0] * len(everything)
    bars["others"] = [max(all_ - sum_, 0) for all_, sum_ in zip(everything, listed, strict=True)]
    texts = zip(*bars.values(), strict=True)
    legend = list(zip(bars, names, strict=False))
    legend[len(calls) :] = [("others", "Others")]

    def values(_: Figures) -> tuple[str, ...]:
        return tuple(f"{group_digits(value)}" for value in next(texts))

    summary = f"The {len(calls)} with most calls." if len(calls) > 1 else ""
    trend = charts.trend_bars(bars)
    return _panel("breakdown", f"Calls by {kind.value}", summary, trend, legend, series, values, {})


def _names(kind: UsageKind, keys: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the name and the page of each key; what was deleted has no page."""
    if kind == UsageKind.AGENT:
        agents = Agent.objects.in_bulk([int(key) for key in keys])
        return {
            key: (agent.name, reverse("agent-activity", args=[agent.name]))
            if (agent := agents.get(int(key)))
            else (f"deleted agent {key}", "")
            for key in keys
        }
    if kind == UsageKind.SERVER:
        slugs = set(Server.objects.filter(slug__in=keys).values_list("slug", flat=True))
        return {key: (key, reverse("server", args=[key]) if key in slugs else "") for key in keys}
    if kind == UsageKind.TOOL:
        tools = Tool.objects.filter(public_name__in=keys)
        known = set(tools.values_list("public_name", flat=True))
        return {key: (key, reverse("tool", args=[key]) if key in known else "") for key in keys}
    return {key: (key, "") for key in keys}


# --- Panels -------------------------------------------------------------------------------------


def _calls(series: Series, sessions: dict[str, str]) -> Panel:
    def values(point: Figures) -> tuple[str, ...]:
        return f"{group_digits(point.calls)}", f"{group_digits(point.errors)}"

    total = series.total
    bars = {
        "ok": [point.calls - point.errors for point in series.points],
        "bad": [point.errors for point in series.points],
    }
    summary = f"{plural(total.calls, 'call')}, {plural(total.errors, 'error')}."
    trend = charts.trend_bars(bars)
    legend = (("ok", "Calls"), ("bad", "Errors"))
    return _panel("calls", "Calls and errors", summary, trend, legend, series, values, sessions)


def _latency(series: Series, sessions: dict[str, str]) -> Panel:
    def values(point: Figures) -> tuple[str, ...]:
        return _milliseconds(point.p50), _milliseconds(point.p95)

    total = series.total
    summary = f"p50 {_milliseconds(total.p50)}, p95 {_milliseconds(total.p95)}."
    lines = {
        "line-1": [point.p50 for point in series.points],
        "line-2": [point.p95 for point in series.points],
    }
    legend = (("line-1", "p50"), ("line-2", "p95"))
    trend = charts.trend_lines(lines)
    return _panel("latency", "Latency", summary, trend, legend, series, values, sessions, " ms")


def _tokens(series: Series, sessions: dict[str, str]) -> Panel:
    def values(point: Figures) -> tuple[str, ...]:
        given = f"≈{group_digits(point.tokens_given)}"
        return given, signed(point.tokens_saved), f"≈{group_digits(point.tokens_call)}"

    points, total = series.points, series.total
    bars = {
        "given": [min(point.tokens_given, point.tokens_all) for point in points],
        "over": [max(-point.tokens_saved, 0) for point in points],
        "saved": [max(point.tokens_saved, 0) for point in points],
    }
    summary = (
        f"≈{group_digits(total.tokens_given)} given for tools, {signed(total.tokens_saved)} saved."
    )
    legend = (("given", "Given"), ("saved", "Saved"), ("call", "Results"))
    trend = charts.trend_bars(bars)
    return _panel("tokens", "Tokens for tools", summary, trend, legend, series, values, sessions)


def _panel(
    slug: str,
    title: str,
    summary: str,
    trend: charts.Trend,
    legend: Sequence[tuple[str, str]],
    series: Series,
    values: Callable[[Figures], tuple[str, ...]],
    sessions: dict[str, str],
    unit: str = "",
) -> Panel:
    step = series.range.step
    by_hour = step < timedelta(days=1)
    rows = []
    for start, point in zip(series.starts, series.points, strict=True):
        texts = values(point)
        named = ", ".join(
            f"{label}: {text}" for (_, label), text in zip(legend, texts, strict=True)
        )
        label = f"{_time_label(start, by_hour=by_hour)}: {named}"
        rows.append(PanelRow(start, texts, label, _sessions_url(start, start + step, sessions)))
    ticks = [round(tick * (len(rows) - 1) / (TICKS - 1)) for tick in range(TICKS)]
    return Panel(
        slug=slug,
        title=title,
        summary=summary,
        trend=trend,
        axis=(*(_axis_label(value, unit) for value in (trend.top, trend.top / 2)), "0"),
        legend=tuple(legend),
        rows=rows,
        ticks=[rows[tick].at for tick in ticks],
        by_hour=by_hour,
        is_empty=not any(column.parts for column in trend.columns)
        and not any(line.runs for line in trend.lines),
    )


def _sessions_url(since: datetime, until: datetime, filters: dict[str, str]) -> str:
    times = {"since": f"{since:%Y-%m-%dT%H:%M}", "until": f"{until:%Y-%m-%dT%H:%M}"}
    return f"{reverse('sessions')}?{urlencode({**filters, **times})}"


def _time_label(at: datetime, *, by_hour: bool) -> str:
    at = display.local(at) if by_hour else at  # days are counted in UTC
    day = f"{at:%a} {at.day} {at:%b}"
    return f"{day} {at:%H:%M %Z}" if by_hour else day


def _milliseconds(value: int | None) -> str:
    return "–" if value is None else f"{group_digits(value)} ms"


def _axis_label(value: float, unit: str) -> str:
    if unit == " ms" and value >= 1_000:
        return f"{value / 1_000:g} s"
    return _compact(int(value)) + unit


def _compact(value: int) -> str:
    """Return a number as short text for an axis: 400, 12k, 3M."""
    for size, suffix in ((1_000_000, "M"), (1_000, "k")):
        if value >= 10 * size or (value >= size and value % size == 0):
            return f"{value / size:g}{suffix}"
    return f"{group_digits(value)}"
