"""Geometry of the charts: numbers in, coordinates out.

Pure and a leaf: imports no Django and nothing of the project. `templates/charts/*.svg` draws what
is computed here; colours belong to the style sheets.
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
    height: int
    budget_x: float | None = None  # where the budget's hairline stands


@dataclass(frozen=True)
class Sparkline:
    """Polylines, broken where values are missing, and the last known point."""

    lines: tuple[str, ...]
    last: tuple[float, float] | None
    width: int
    height: int


def token_bar(
    preload: int,
    stub: int,
    rest: int,
    scale: int,
    *,
    budget: int | None = None,
    width: int = BAR_WIDTH,
) -> Bar:
    """Lay preloaded definitions, stubs and the loadable rest end to end.

    Whatever of the first two lies beyond the budget is marked by an `over` segment upon them. The
    scale grows to hold every part, so that nothing is drawn outside the bar.
    """
    paid = preload + stub
    full = max(scale, paid + rest, budget or 0, 1)
    unit = width / full
    segments = _end_to_end([("preload", preload), ("stub", stub), ("rest", rest)], unit, width)
    budget_x = None if budget is None else round(budget * unit, 1)
    if budget is not None and budget_x is not None and paid > budget:
        segments.append(Segment("over", budget_x, max(round(paid * unit - budget_x, 1), 1.0)))
    return Bar(tuple(segments), width, BAR_HEIGHT, budget_x)


def cost_bar(value: int, maximum: int, *, width: int = 64) -> Bar:
    """Draw one value against the largest of its page."""
    unit = width / max(maximum, value, 1)
    return Bar(tuple(_end_to_end([("value", value)], unit, width)), width, BAR_HEIGHT)


def sparkline(
    values: Sequence[float | None], *, width: int = SPARK_WIDTH, height: int = SPARK_HEIGHT
) -> Sparkline:
    """Draw values from zero to their maximum. A missing value is a gap, not zero."""
    known = [value for value in values if value is not None]
    top = max(known, default=0) or 1
    step = (width - 2 * SPARK_MARGIN) / max(len(values) - 1, 1)
    room = height - 2 * SPARK_MARGIN
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
    return Sparkline(lines, last, width, height)


def _end_to_end(parts: Sequence[tuple[str, int]], unit: float, width: int) -> list[Segment]:
    """Place the parts side by side; one that exists is at least a pixel wide."""
    segments: list[Segment] = []
    x = 0.0
    for kind, size in parts:
        if size <= 0:
            continue
        drawn = max(size * unit, 1.0)
        drawn = min(drawn, width - x)
        segments.append(Segment(kind, round(x, 1), round(drawn, 1)))
        x += drawn
    return segments


# --- Charts with an axis ------------------------------------------------------------------------
# Drawn as wide as the page allows, with hairlines at the top, the middle and zero.

CHART_WIDTH = 640
CHART_HEIGHT = 120
LIMIT_STRETCH = 2.5  # a limit further above the values than this would flatten them


@dataclass(frozen=True)
class StepLine:
    """A line that rises where its value does. `limit_y` is None where the limit lies above it."""

    points: str
    labels: tuple[str, ...]  # of the hairlines, from the top
    limit_y: float | None
    width: int = CHART_WIDTH
    height: int = CHART_HEIGHT


@dataclass(frozen=True)
class DayBar:
    """One bar from zero up, its errors on top."""

    x: float
    width: float
    y: float
    height: float
    error_y: float
    error_height: float


@dataclass(frozen=True)
class DayBars:
    bars: tuple[DayBar, ...]
    labels: tuple[str, ...]
    width: int = CHART_WIDTH
    height: int = CHART_HEIGHT


@dataclass(frozen=True)
class Lane:
    """When something happened and how long it took, on a scale of everything beside it."""

    x: float
    width: float


def round_up(value: float) -> int:
    """Return the next even number of the kind people count in: 2, 4, 10, 20, 40, 50, 100, ..."""
    size = 1
    while True:
        for step in (2, 4, 10):
            if value <= step * size:
                return step * size
        if value <= 20 * size:
            return 20 * size
        size *= 10


def step_line(
    values: Sequence[int],
    *,
    limit: int | None = None,
    width: int = CHART_WIDTH,
    height: int = CHART_HEIGHT,
) -> StepLine:
    """Draw values in equal steps from zero, with a limit as a hairline."""
    highest = max(values, default=0)
    near = limit is not None and limit <= max(highest, 1) * LIMIT_STRETCH
    top = round_up(max(highest, limit if near and limit else 0))
    unit = width / max(len(values), 1)
    points: list[str] = []
    for index, value in enumerate(values):
        y = round(height * (1 - value / top), 1)
        points += [f"{index * unit:.4g},{y:g}", f"{(index + 1) * unit:.4g},{y:g}"]
    limit_y = round(height * (1 - limit / top), 1) if near and limit is not None else None
    return StepLine(" ".join(points), _labels(top), limit_y, width, height)


def day_bars(
    days: Sequence[tuple[int, int] | None],
    *,
    width: int = CHART_WIDTH,
    height: int = CHART_HEIGHT,
) -> DayBars:
    """Draw (all, errors) of each day. A day without data has no bar, nor has one without any."""
    top = round_up(max((day[0] for day in days if day), default=0))
    unit = width / max(len(days), 1)
    bars = []
    for index, day in enumerate(days):
        if not day or not day[0]:
            continue
        whole = max(height * day[0] / top, 1.0)
        bad = max(height * min(day[1], day[0]) / top, 1.5) if day[1] else 0.0
        bars.append(
            DayBar(
                x=round(index * unit + unit * 0.15, 2),
                width=round(unit * 0.7, 2),
                y=round(height - whole, 1),
                height=round(whole, 1),
                error_y=round(height - whole, 1),
                error_height=round(min(bad, whole), 1),
            )
        )
    return DayBars(tuple(bars), _labels(top), width, height)


def lanes(spans: Sequence[tuple[float, float]], *, width: int = 64) -> list[Lane]:
    """Place (start, end) spans between the first start and the last end; each is seen."""
    first = min((start for start, _ in spans), default=0.0)
    unit = width / max(max((end for _, end in spans), default=0.0) - first, 1e-9)
    placed = []
    for start, end in spans:
        drawn = min(max((end - start) * unit, 2.0), float(width))
        placed.append(Lane(round(min((start - first) * unit, width - drawn), 1), round(drawn, 1)))
    return placed


def _labels(top: int) -> tuple[str, ...]:
    return f"{top:,}", f"{top // 2:,}", "0"
