"""Chart geometry: numbers in, SVG coordinates out.

Imports no Django and nothing from the project. `templates/components/charts/*.svg` draws the
result; colours are set in the style sheets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
LANE_WIDTH = 64
MAX_LIMIT_RATIO = 2.5  # a limit further above the values would flatten them


@dataclass(frozen=True)
class StepLine:
    """A step line. `limit_y` is None if the limit is off scale."""

    points: str
    labels: tuple[str, ...]  # of the hairlines, top to bottom
    limit_y: float | None
    width: int = CHART_WIDTH
    height: int = CHART_HEIGHT


@dataclass(frozen=True)
class DayBar:
    """One bar starting at zero, with its errors at the top end."""

    x: float
    width: float
    y: float
    height: float
    error_height: float


@dataclass(frozen=True)
class DayBars:
    bars: tuple[DayBar, ...]
    labels: tuple[str, ...]
    width: int = CHART_WIDTH
    height: int = CHART_HEIGHT


@dataclass(frozen=True)
class Lane:
    """Position and duration of one span on the time scale of all spans."""

    x: float
    width: float


def round_up(value: float) -> int:
    """Return the next round even number as the top of an axis: 2, 4, 10, 20, 40, 100, 200, ..."""
    size = 1
    while True:
        for step in (2, 4, 10):
            if value <= step * size:
                return step * size
        size *= 10


def step_line(values: Sequence[int], *, limit: int | None = None) -> StepLine:
    """Lay out values as equal steps from zero, with the limit as a hairline."""
    highest = max(values, default=0)
    if limit is not None and limit > max(highest, 1) * MAX_LIMIT_RATIO:
        limit = None
    top = round_up(max(highest, limit or 0))
    unit = CHART_WIDTH / max(len(values), 1)
    points: list[str] = []
    for index, value in enumerate(values):
        y = _chart_y(value, top)
        points += [f"{index * unit:.4g},{y:g}", f"{(index + 1) * unit:.4g},{y:g}"]
    limit_y = None if limit is None else _chart_y(limit, top)
    return StepLine(" ".join(points), _labels(top), limit_y)


def _chart_y(value: float, top: int) -> float:
    return round(CHART_HEIGHT * (1 - value / top), 1)


def day_bars(days: Sequence[tuple[int, int] | None]) -> DayBars:
    """Lay out (calls, errors) per day. A day without data or without calls has no bar."""
    top = round_up(max((day[0] for day in days if day), default=0))
    unit = CHART_WIDTH / max(len(days), 1)
    bars = []
    for index, day in enumerate(days):
        if not day or not day[0]:
            continue
        calls, errors = day
        height = max(CHART_HEIGHT * calls / top, 1.0)
        error_height = max(CHART_HEIGHT * errors / top, 1.5) if errors else 0.0
        bars.append(
            DayBar(
                x=round((index + 0.15) * unit, 2),
                width=round(unit * 0.7, 2),
                y=round(CHART_HEIGHT - height, 1),
                height=round(height, 1),
                error_height=round(min(error_height, height), 1),
            )
        )
    return DayBars(tuple(bars), _labels(top))


def lanes(spans: Sequence[tuple[float, float]]) -> list[Lane]:
    """Place (start, end) spans between the first start and the last end, with a minimum width."""
    first = min((start for start, _ in spans), default=0.0)
    unit = LANE_WIDTH / max(max((end for _, end in spans), default=0.0) - first, 1e-9)
    placed = []
    for start, end in spans:
        lane_width = min(max((end - start) * unit, 2.0), float(LANE_WIDTH))
        x = min((start - first) * unit, LANE_WIDTH - lane_width)
        placed.append(Lane(round(x, 1), round(lane_width, 1)))
    return placed


def _labels(top: int) -> tuple[str, ...]:
    return f"{top:,}", f"{top // 2:,}", "0"
