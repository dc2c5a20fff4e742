"""Chart geometry: numbers in, SVG coordinates out.

Imports no Django and nothing from the project. `templates/components/charts/*.svg` draws the
result; colours are set in the style sheets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toolcrib.lib.display import group_digits

BAR_WIDTH = 120
BAR_HEIGHT = 8
SPARK_WIDTH = 96
SPARK_HEIGHT = 24
SPARK_MARGIN = 3  # room for the dot on the last point


@dataclass(frozen=True)
class Segment:
    """One part of a bar. `kind` is preload, stub, rest, over or value."""

    kind: str
    x: float
    width: float


@dataclass(frozen=True)
class Bar:
    segments: tuple[Segment, ...]
    width: int
    budget_x: float | None = None  # position of the budget's hairline
    height: int = BAR_HEIGHT


@dataclass(frozen=True)
class Sparkline:
    """Polylines, interrupted at missing values, and the last known point."""

    lines: tuple[str, ...]
    last: tuple[float, float] | None
    width: int = SPARK_WIDTH
    height: int = SPARK_HEIGHT


def token_bar(
    preload: int,
    stub: int,
    rest: int,
    scale: int,
    *,
    budget: int | None = None,
    width: int = BAR_WIDTH,
) -> Bar:
    """Lay out preloaded definitions, stubs and the loadable rest end to end.

    The part of preloads and stubs beyond the budget gets an `over` segment on top. The scale grows
    to fit every part, so nothing is drawn outside the bar.
    """
    initial = preload + stub
    unit = width / max(scale, initial + rest, budget or 0, 1)
    segments = _end_to_end([("preload", preload), ("stub", stub), ("rest", rest)], unit, width)
    budget_x = None if budget is None else round(budget * unit, 1)
    if budget is not None and budget_x is not None and initial > budget:
        segments.append(Segment("over", budget_x, max(round(initial * unit - budget_x, 1), 1.0)))
    return Bar(tuple(segments), width, budget_x)


def cost_bar(value: int, maximum: int, *, width: int = 64) -> Bar:
    unit = width / max(maximum, value, 1)
    return Bar(tuple(_end_to_end([("value", value)], unit, width)), width)


def sparkline(values: Sequence[float | None]) -> Sparkline:
    """Lay out values from zero to their maximum. A missing value is a gap, not zero."""
    known = [value for value in values if value is not None]
    top = max(known, default=0) or 1
    step = (SPARK_WIDTH - 2 * SPARK_MARGIN) / max(len(values) - 1, 1)
    room = SPARK_HEIGHT - 2 * SPARK_MARGIN
    runs: list[list[tuple[float, float]]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            runs.append([])
            continue
        x = round(SPARK_MARGIN + index * step, 1)
        y = round(SPARK_MARGIN + room * (1 - max(value, 0) / top), 1)
        runs[-1].append((x, y))
    points = [run for run in runs if run]
    lines = tuple(" ".join(f"{x:g},{y:g}" for x, y in run) for run in points if len(run) > 1)
    last = points[-1][-1] if points else None
    return Sparkline(lines, last)


def _end_to_end(parts: Sequence[tuple[str, int]], unit: float, width: int) -> list[Segment]:
    """Place the parts side by side; each non-empty part is at least one pixel wide."""
    segments: list[Segment] = []
    x = 0.0
    for kind, size in parts:
        if size <= 0:
            continue
        part_width = min(max(size * unit, 1.0), width - x)
        segments.append(Segment(kind, round(x, 1), round(part_width, 1)))
        x += part_width
    return segments


# Drawn at full page width, with hairlines at the top, the middle and zero.

CHART_WIDTH = 640
CHART_HEIGHT = 120
TIME_UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (0.001, "ms"))
TIME_STEPS = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)  # ends of a time scale
MAX_LIMIT_RATIO = 2.5  # a limit further above the values would flatten them


@dataclass(frozen=True)
class StackedArea:
    """Areas of (kind, points), bottom first. `limit_y` is None if the limit is off scale."""

    areas: tuple[tuple[str, str], ...]
    labels: tuple[str, ...]  # of the hairlines, top to bottom
    limit_y: float | None
    width: int = CHART_WIDTH
    height: int = CHART_HEIGHT


@dataclass(frozen=True)
class Span:
    """Position and duration on a time scale, in percent of its length."""

    x: float
    width: float


@dataclass(frozen=True)
class TimeScale:
    """A time scale from zero to a round number of seconds."""

    seconds: float
    ticks: tuple[str, ...]  # labels at equal distances, the first at zero


def round_up(value: float) -> int:
    """Return the next round even number as the top of an axis: 2, 4, 10, 20, 40, 100, 200, ..."""
    size = 1
    while True:
        for step in (2, 4, 10):
            if value <= step * size:
                return step * size
        size *= 10


def stacked_area(parts: Mapping[str, Sequence[int]], *, limit: int | None = None) -> StackedArea:
    """Stack the parts of each step from zero, first part at the bottom; the limit is a hairline."""
    count = max((len(values) for values in parts.values()), default=0)
    sums = [sum(values) for values in zip(*parts.values(), strict=True)]
    highest = max(sums, default=0)
    if limit is not None and limit > max(highest, 1) * MAX_LIMIT_RATIO:
        limit = None
    top = round_up(max(highest, limit or 0))
    unit = CHART_WIDTH / max(count, 1)
    below = [0] * count
    areas = []
    for kind, values in parts.items():
        above = [low + value for low, value in zip(below, values, strict=True)]
        if above != below:
            upper, lower = _steps(above, top, unit), _steps(below, top, unit)
            areas.append((kind, " ".join((*upper, *reversed(lower)))))
        below = above
    limit_y = None if limit is None else _chart_y(limit, top)
    return StackedArea(tuple(areas), _labels(top), limit_y)


def _steps(values: Sequence[int], top: int, unit: float) -> list[str]:
    points: list[str] = []
    for index, value in enumerate(values):
        y = _chart_y(value, top)
        points += [f"{index * unit:.4g},{y:g}", f"{(index + 1) * unit:.4g},{y:g}"]
    return points


def _chart_y(value: float, top: int) -> float:
    return round(CHART_HEIGHT * (1 - value / top), 1)


def time_scale(seconds: float) -> TimeScale:
    """Return a scale of four equal parts that ends at or after this time, on a round number."""
    unit, name = next((u for u in TIME_UNITS if seconds > 2 * u[0]), TIME_UNITS[-1])
    amount, size = max(seconds / unit, 1.0), 1
    while amount > 10 * size:
        size *= 10
    top = next(step * size for step in TIME_STEPS if amount <= step * size)
    labels = (f"{top * part / 4:g} {name}" for part in range(1, 5))
    return TimeScale(top * unit, ("0", *labels))


def place_span(scale: TimeScale, start: float, end: float) -> Span:
    """Place a span on a scale; a shorter one than half a percent is drawn as wide as that."""
    width = min(max(100 * (end - start) / scale.seconds, 0.5), 100.0)
    x = min(max(100 * start / scale.seconds, 0.0), 100.0 - width)
    return Span(round(x, 2), round(width, 2))


def _labels(top: int) -> tuple[str, ...]:
    return f"{group_digits(top)}", f"{group_digits(top // 2)}", "0"


# --- Trends: one column per hour or day, with bars or lines ------------------------------------

TREND_HEIGHT = 160


@dataclass(frozen=True)
class TrendColumn:
    """The slot of one hour or day. `parts` are (kind, y, height), drawn between the margins."""

    x: float
    width: float
    parts: tuple[tuple[str, float, float], ...] = ()

    @property
    def bar_x(self) -> float:
        return round(self.x + self.width * 0.15, 2)

    @property
    def bar_width(self) -> float:
        return round(self.width * 0.7, 2)

    @property
    def center(self) -> float:
        return round(self.x + self.width / 2, 2)


@dataclass(frozen=True)
class TrendLine:
    """A line, interrupted at missing values; a lone value is a short dash."""

    kind: str
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Trend:
    columns: tuple[TrendColumn, ...]
    lines: tuple[TrendLine, ...]
    top: int  # value at the upper end of the axis
    width: int = CHART_WIDTH
    height: int = TREND_HEIGHT

    @property
    def middle_y(self) -> float:
        return self.height / 2


def trend_bars(series: Mapping[str, Sequence[int]]) -> Trend:
    """Stack the values of each column, the first series at the bottom."""
    count = len(next(iter(series.values())))
    top = round_up(max((sum(values) for values in zip(*series.values(), strict=True)), default=0))
    columns = []
    for index in range(count):
        parts, y = [], float(TREND_HEIGHT)
        for kind, values in series.items():
            if values[index] <= 0:
                continue
            height = max(TREND_HEIGHT * values[index] / top, 1.0)
            y = max(y - height, 0.0)
            parts.append((kind, round(y, 1), round(height, 1)))
        columns.append(_column(index, count, tuple(parts)))
    return Trend(tuple(columns), (), top)


def trend_lines(series: Mapping[str, Sequence[float | None]]) -> Trend:
    count = len(next(iter(series.values())))
    top = round_up(max((v for values in series.values() for v in values if v), default=0))
    columns = tuple(_column(index, count) for index in range(count))
    lines = []
    for kind, values in series.items():
        runs: list[list[str]] = [[]]
        for column, value in zip(columns, values, strict=True):
            if value is None:
                runs.append([])
                continue
            y = round(TREND_HEIGHT * (1 - value / top), 1)
            runs[-1].append(f"{column.center:g},{y:g}")
        lines.append(TrendLine(kind, tuple(_as_polyline(run) for run in runs if run)))
    return Trend(columns, tuple(lines), top)


def _as_polyline(points: Sequence[str]) -> str:
    if len(points) > 1:
        return " ".join(points)
    x, _, y = points[0].partition(",")
    return f"{float(x) - 3:g},{y} {float(x) + 3:g},{y}"


def _column(
    index: int, count: int, parts: tuple[tuple[str, float, float], ...] = ()
) -> TrendColumn:
    width = CHART_WIDTH / count
    return TrendColumn(round(index * width, 2), round(width, 2), parts)
