"""Tables of bench/dispatch.py, and comparison of Toolcrib with its latency and rate targets."""

import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Missing = Mapping[str, Mapping[str, str]]  # reason by path, by transport

# Ratios to direct of p50 at 1 caller and of calls/s at 32 callers: the limits, and the goals.
RATIO_LIMITS = {"REST": (2.0, 0.5), "MCP": (2.6, 0.4)}
RATIO_GOALS = (1.2, 1.0)
HEAD = ("path", "p50", "÷ direct", "p99", "÷ direct", "calls/s", "÷ direct", "CPU", "÷ direct",
        "CPU caller")  # fmt: skip
WIDTHS = (10, 20, 18, 20, 18, 20, 18, 20, 18, 20)


def print_report(
    rows: Sequence[Row],
    missing: Missing,
    options: Namespace,
    limits: Mapping[str, int],
    concurrency: int,
) -> None:
    print(
        f"{options.rounds} interleaved rounds of {options.seconds:g} s per cell, at least one call "
        "per caller; median (min–max). Latency in ms; CPU in ms per call, of all processes of a "
        "path, and of the caller alone; ratios are to direct in the same round."
    )
    print(
        f"Limits raised: agent {limits['calls_in_flight']:,} calls in flight and "
        f"{limits['calls_per_minute']:,} per minute (defaults: 20 and 600), server concurrency "
        f"{concurrency} (default: 8). Embedded mode, SQLite. The REST caller is plain asyncio; all "
        "others use the SDK's client. The client side of mcp-proxy is stdio if the server is HTTP."
    )
    for over in options.over:
        for size in options.sizes:
            for callers in options.at:
                print(f"\n{over} server, {size:,} bytes, {callers} concurrent")
                print(format_cells(HEAD))
                for path in options.only:
                    print(format_row(rows, missing, over, size, callers, path))
    print()
    for text in verdicts(rows, options):
        print(text)


def format_cells(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{wide}}" for cell, wide in zip(cells, WIDTHS, strict=True))


def format_row(
    rows: Sequence[Row], missing: Missing, over: str, size: int, callers: int, path: str
) -> str:
    if path in missing[over]:
        return f"{path:>{WIDTHS[0]}}  skipped: {missing[over][path]}"
    key = (over, size, callers, path)
    attempts = [row for row in rows if cell_key(row) == key]
    measured = [row for row in attempts if "error" not in row]
    error = next((row["error"] for row in attempts if "error" in row), "")
    count = len(attempts) - len(measured)
    failed = f"failed in {count} of {len(attempts)} rounds: {error}" if error else ""
    if not measured:
        return f"{path:>{WIDTHS[0]}}  {failed}"
    cells = [path]
    for name in ("p50", "p99", "rate", "cpu"):
        cells += [spread([row[name] for row in measured]), spread(ratios(rows, name, *key))]
    cells.append(spread([row["caller"] for row in measured]))
    return format_cells(cells) + (f"  {failed}" if failed else "")


def cell_key(row: Row) -> tuple[str, int, int, str]:
    return row["over"], row["size"], row["callers"], row["path"]


def spread(values: Sequence[float]) -> str:
    """Format the median with minimum and maximum."""
    if len(values) < 2:
        return format_figure(values[0]) if values else "–"
    middle, least, most = map(format_figure, (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least}–{most})"


def format_figure(value: float) -> str:
    """Format with two or three significant digits; more would exceed the precision."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratios(
    rows: Sequence[Row], name: str, over: str, size: int, callers: int, path: str
) -> list[float]:
    """Return the figure of a path divided by that of direct, by round."""
    figures = {
        (row["round"], row["path"]): row[name]
        for row in rows
        if cell_key(row)[:3] == (over, size, callers) and "error" not in row
    }
    return [
        value / figures[number, "direct"]
        for (number, other), value in sorted(figures.items())
        if other == path and figures.get((number, "direct"))
    ]


def verdicts(rows: Sequence[Row], options: Namespace) -> Iterator[str]:
    """Compare the ratios of the smallest calls over HTTP with the limits."""
    over, size = "http", min(options.sizes)
    for path, bounds in RATIO_LIMITS.items():
        for name, callers, title, sign, limit, goal in (
            ("p50", 1, "p50 at 1", "≤", bounds[0], RATIO_GOALS[0]),
            ("rate", 32, "calls/s at 32", "≥", bounds[1], RATIO_GOALS[1]),
        ):
            values = ratios(rows, name, over, size, callers, path)
            if not values:
                continue
            ratio = statistics.median(values)
            passed = ratio <= limit if name == "p50" else ratio >= limit
            yield (
                f"{'OK  ' if passed else 'MISS'} {path}: {title} is {ratio:.2f} × direct, limit "
                f"{sign} {limit:.2f} (goal: {goal:.2f})"
            )
