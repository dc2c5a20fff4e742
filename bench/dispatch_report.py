"""Tables of bench/dispatch.py, and comparison of Toolcrib with its latency and rate targets."""

import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Missing = Mapping[str, Mapping[str, str]]  # reason by row, by transport
Cell = tuple[str, int, int, bool, str]  # transport, size, callers, pinned, row

MCP_ROWS = (
    *("dispatcher 2026", "dispatcher 2026, URL", "dispatcher 2025"),
    *("load", "load 2025", "search, bm25", "search, cached", "search 2025, bm25"),
)
# Ratios to direct of p50 at one caller: the limit, and the goal.
P50_LIMITS = {
    **dict.fromkeys(MCP_ROWS, (1.6, 1.3)),
    "REST, socket": (1.1, 1.0),
    "REST, httpx": (1.5, 1.2),
}
RATE_LIMITS = {True: 0.70, False: 0.45}  # of direct with several callers, pinned and not
QUICK_ROWS = ("direct 2026", "direct 2025", "REST, socket", "dispatcher 2026", "dispatcher 2025")
HEAD = ("row", "p50", "÷ direct", "p99", "calls/s", "÷ direct", "CPU in the middle", "CPU, all",
        "CPU, caller")  # fmt: skip
WIDTHS = (22, 19, 19, 19, 21, 19, 21, 19, 19)


class Report:
    def __init__(
        self,
        rows: Sequence[Row],
        missing: Missing,
        options: Namespace,
        directs: Mapping[str, str],
        encoder: Sequence[float],
    ) -> None:
        self.rows, self.missing, self.options = rows, missing, options
        self.directs, self.encoder = directs, encoder

    def print_all(self, limits: Mapping[str, int], concurrency: int) -> None:
        options = self.options
        print(
            f"{options.rounds} interleaved rounds of {options.seconds:g} s per cell, at least one "
            "call per caller; median (min–max). Latency in ms; CPU in ms per call: in the middle "
            "(Toolcrib or the peer), of all processes, and of the caller alone. Ratios are to the "
            "direct call of the same era in the same round."
        )
        print(
            f"Limits raised: agent {limits['calls_in_flight']:,} calls in flight, as many calls, "
            "searches and cost per minute (defaults: 20, 600, 120, 3,000), server concurrency "
            f"{concurrency} (default: 8). Deferred mode, {options.tools} other tools in scope, "
            "embedded, SQLite. Over MCP all use the SDK's client."
        )
        for over in options.over:
            for size in options.sizes:
                for callers in options.at:
                    for pinned in (False, True) if callers > 1 and options.pinned else (False,):
                        how = ", pinned" if pinned else ""
                        print(f"\n{over} server, {size:,} bytes, {callers} concurrent{how}")
                        print(format_cells(HEAD))
                        for path in options.only:
                            if line := self.format_row((over, size, callers, pinned, path)):
                                print(line)
        print()
        for text in self.verdicts():
            print(text)

    def format_row(self, key: Cell) -> str:
        over, *_, path = key
        if path in self.missing[over]:
            return f"{path:>{WIDTHS[0]}}  skipped: {self.missing[over][path]}"
        attempts = [row for row in self.rows if cell_key(row) == key]
        measured = [row for row in attempts if "error" not in row]
        error = next((row["error"] for row in attempts if "error" in row), "")
        count = len(attempts) - len(measured)
        failed = f"failed in {count} of {len(attempts)} rounds: {error}" if error else ""
        if not measured:
            return f"{path:>{WIDTHS[0]}}  {failed}" if failed else ""
        cells = [path]
        for name in ("p50", "p99", "rate", "middle", "cpu", "caller"):
            cells.append(spread([row[name] for row in measured]))
            if name in ("p50", "rate"):
                cells.append(spread(self.ratios(name, key)))
        return format_cells(cells) + (f"  {failed}" if failed else "")

    def ratios(self, name: str, key: Cell) -> list[float]:
        """Return the figure of a row divided by that of its direct call, by round."""
        figures = {
            (row["round"], row["path"]): row[name]
            for row in self.rows
            if cell_key(row)[:4] == key[:4] and "error" not in row
        }
        direct = self.directs[key[4]]
        return [
            value / figures[number, direct]
            for (number, other), value in sorted(figures.items())
            if other == key[4] and figures.get((number, direct))
        ]

    def verdicts(self) -> Iterator[str]:
        """Compare the ratios of the smallest calls over HTTP with the limits."""
        size = min(self.options.sizes)
        for path, (limit, goal) in P50_LIMITS.items():
            values = self.ratios("p50", ("http", size, 1, False, path))
            if values:
                ratio = statistics.median(values)
                mark = "OK  " if ratio <= limit else "MISS"
                yield (
                    f"{mark} {path}: p50 is {spread(values)} × direct, limit {limit:.2f} "
                    f"(goal {goal:.2f})"
                )
        yield from self._new_search(size)
        for path in MCP_ROWS:
            for callers in self.options.at[1:]:
                for pinned, limit in RATE_LIMITS.items():
                    values = self.ratios("rate", ("http", size, callers, pinned, path))
                    if values:
                        mark = "OK  " if statistics.median(values) >= limit else "MISS"
                        how = "pinned" if pinned else "not pinned"
                        yield (
                            f"{mark} {path}: calls/s at {callers}, {how}, is {spread(values)} of "
                            f"direct, limit {limit:.2f}"
                        )

    def _new_search(self, size: int) -> Iterator[str]:
        """Compare a new hybrid query, without the time of the sentence model."""
        key = ("http", size, 1, False, "search, new")
        rows = [row for row in self.rows if cell_key(row) == key and "error" not in row]
        if not rows or not self.encoder:
            return
        directs = {
            row["round"]: row["p50"]
            for row in self.rows
            if cell_key(row) == (*key[:4], self.directs[key[4]]) and "error" not in row
        }
        model = statistics.median(self.encoder)
        values = [
            (row["p50"] - model) / directs[row["round"]] for row in rows if row["round"] in directs
        ]
        mark = "OK  " if statistics.median(values) <= 1.6 else "MISS"
        yield (
            f"{mark} search, new: p50 without the sentence model is {spread(values)} × direct, "
            f"limit 1.60; the model takes {spread(list(self.encoder))} ms, the whole request "
            f"{spread([row['p50'] for row in rows])} ms"
        )


def format_cells(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{wide}}" for cell, wide in zip(cells, WIDTHS, strict=True))


def cell_key(row: Row) -> Cell:
    return row["over"], row["size"], row["callers"], row["pinned"], row["path"]


def spread(values: Sequence[float]) -> str:
    """Format the median with minimum and maximum."""
    if len(values) < 2:
        return format_figure(values[0]) if values else "–"
    middle, least, most = map(format_figure, (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least}–{most})"


def format_figure(value: float) -> str:
    """Format with two or three significant digits; more would exceed the precision."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
