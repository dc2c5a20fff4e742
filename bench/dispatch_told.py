"""The tables of bench/dispatch.py, and whether Toolcrib is as fast as it is to be."""

import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Missing = Mapping[str, Mapping[str, str]]  # why, by path, by how the server is reached

# Of p50 at one caller, and of calls a second at 32: the bound, and what is aimed at.
TARGETS = {"REST": (2.0, 0.5), "MCP": (2.6, 0.4)}
AIM = (1.2, 1.0)
HEAD = ("path", "p50", "÷ direct", "p99", "÷ direct", "calls/s", "÷ direct", "CPU", "÷ direct",
        "of it caller")  # fmt: skip
WIDTHS = (10, 20, 18, 20, 18, 20, 18, 20, 18, 20)


def tell(
    rows: Sequence[Row],
    missing: Missing,
    options: Namespace,
    limits: Mapping[str, int],
    concurrency: int,
) -> None:
    print(
        f"{options.rounds} interleaved rounds, {options.seconds:g} s a cell and a call of each "
        "caller at least; median (least–most). Latency in ms; CPU in ms a call, of all processes "
        "of a path, and the caller's share; ratios are to direct in the same round."
    )
    print(
        f"Limits raised: agent {limits['calls_in_flight']:,} calls in flight and "
        f"{limits['calls_per_minute']:,} a minute (20 and 600 are usual), server concurrency "
        f"{concurrency} (8). Embedded, on SQLite. The REST caller is plain asyncio; all others "
        "are the SDK's client. mcp-proxy speaks stdio to its agents where the server is HTTP."
    )
    for over in options.over:
        for size in options.sizes:
            for callers in options.at:
                print(f"\n{over} server, {size:,} bytes, {callers} at once")
                print(line(HEAD))
                for path in options.only:
                    print(row(rows, missing, over, size, callers, path))
    print()
    for text in verdicts(rows, options):
        print(text)


def line(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{wide}}" for cell, wide in zip(cells, WIDTHS, strict=True))


def row(
    rows: Sequence[Row], missing: Missing, over: str, size: int, callers: int, path: str
) -> str:
    if path in missing[over]:
        return f"{path:>{WIDTHS[0]}}  left out: {missing[over][path]}"
    key = (over, size, callers, path)
    tried = [row for row in rows if of(row) == key]
    own = [row for row in tried if "error" not in row]
    why = next((row["error"] for row in tried if "error" in row), "")
    failed = f"failed in {len(tried) - len(own)} of {len(tried)} rounds: {why}" if why else ""
    if not own:
        return f"{path:>{WIDTHS[0]}}  {failed}"
    cells = [path]
    for what in ("p50", "p99", "rate", "cpu"):
        cells += [spread([row[what] for row in own]), spread(ratios(rows, what, *key))]
    cells.append(spread([row["caller"] for row in own]))
    return line(cells) + (f"  {failed}" if failed else "")


def of(row: Row) -> tuple[str, int, int, str]:
    return row["over"], row["size"], row["callers"], row["path"]


def spread(values: Sequence[float]) -> str:
    """A median with least and most."""
    if len(values) < 2:
        return figure(values[0]) if values else "–"
    least, most = figure(min(values)), figure(max(values))
    return f"{figure(statistics.median(values))} ({least}–{most})"


def figure(value: float) -> str:
    """Three digits are more than the spread allows."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratios(
    rows: Sequence[Row], what: str, over: str, size: int, callers: int, path: str
) -> list[float]:
    """The figure of a path divided by the direct one of the same round."""
    found = {
        (row["round"], row["path"]): row[what]
        for row in rows
        if of(row)[:3] == (over, size, callers) and "error" not in row
    }
    return [
        value / found[number, "direct"]
        for (number, name), value in sorted(found.items())
        if name == path and found.get((number, "direct"))
    ]


def verdicts(rows: Sequence[Row], options: Namespace) -> Iterator[str]:
    """What was promised, and what was found, with the smallest calls over HTTP."""
    over, size = "http", min(options.sizes)
    for path, bounds in TARGETS.items():
        for what, callers, name, sign, bound, aim in (
            ("p50", 1, "p50 at 1", "≤", bounds[0], AIM[0]),
            ("rate", 32, "calls/s at 32", "≥", bounds[1], AIM[1]),
        ):
            found = ratios(rows, what, over, size, callers, path)
            if not found:
                continue
            middle = statistics.median(found)
            good = middle <= bound if what == "p50" else middle >= bound
            yield (
                f"{'OK  ' if good else 'MISS'} {path}: {name} is {middle:.2f} × direct, to be "
                f"{sign} {bound:.2f} (aim: {aim:.2f})"
            )
