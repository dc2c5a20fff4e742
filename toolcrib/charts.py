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
