"""Fault injection bench: one row per fault, checked against its limits.

    python bench/faults.py [--only R3,R8] [--short] [--json]

Real processes on 127.0.0.1: an embedded installation shared by most rows, a production deployment
with PostgreSQL and Redis for R16 and R19p, and real MCP servers that misbehave. No code of the
project is replaced; the checks use responses, journals of the servers, the database and process
statistics. The limits of the agents are raised. The full run takes at least 90 minutes
(`make soak`); --short runs every row with fewer rounds and less time, with the same limits where
they apply. Timings need an idle machine. The exit status is 1 if a limit is exceeded.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import (  # noqa: E402
    fault_crashes,
    fault_held,
    fault_large,
    fault_services,
    fault_sessions,
    fault_slow,
    fault_storms,
)
from bench.fault_bed import SIZES, Bed, Check, Row  # noqa: E402
from tests.support import parts  # noqa: E402

EMBEDDED: dict[str, Callable[[Bed, str], Row]] = {
    "R1": fault_crashes.killed_during_calls,
    "R3": fault_slow.hung_server,
    "R7": fault_crashes.orphaned_processes,
    "R8": fault_large.oversized_responses,
    "R10": fault_storms.reconnect_storm,
    "R14": fault_storms.cursor_loops,
    "R19": fault_services.many_writers,
    "R21": fault_sessions.many_sessions,
    "R22": fault_sessions.session_model,
    "R23": fault_sessions.soak,
    "R26": fault_slow.disconnecting_callers,
    "R27": fault_held.killed_during_held_calls,
}
PRODUCTION: dict[str, Callable[[fault_services.Services, str], Row]] = {
    "R16": fault_services.redis_stopped,
    "R19p": fault_services.postgres_restarted,
}
# Long runs need a new process.
SEPARATE = ("R21", "R23")


def run_rows(numbers: list[str], size: str) -> Iterator[tuple[Row, float]]:
    """Run the rows one after the other; yield each with the seconds it took."""
    shared = [
        name for name in EMBEDDED if name in numbers and not (size == "full" and name in SEPARATE)
    ]
    separate = [name for name in EMBEDDED if name in numbers and name not in shared]
    for names in (shared, *([name] for name in separate)):
        if names:
            yield from _embedded(names, size)
    names = [name for name in PRODUCTION if name in numbers]
    if names and not (parts.postgres_bin() and parts.redis_server()):
        sys.stderr.write(f"skipped: {', '.join(names)}; run python -m tests.support.parts\n")
    elif names:
        with fault_services.running_services() as services:
            for name in names:
                yield _run_timed(name, PRODUCTION[name], services, size)


def _embedded(names: list[str], size: str) -> Iterator[tuple[Row, float]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrib-faults-")))
        bed = stack.enter_context(Bed(folder))
        for name in names:
            if not bed.running:  # a failed row may have stopped it
                bed.toolcrib.start()
            yield _run_timed(name, EMBEDDED[name], bed, size)


def _run_timed(
    name: str, fault: Callable[[Any, str], Row], bed: Any, size: str
) -> tuple[Row, float]:
    started = time.monotonic()
    try:
        row = fault(bed, size)
    except Exception as error:  # noqa: BLE001 - continue with the next row
        traceback.print_exc()
        row = Row(name, (fault.__doc__ or "").strip())
        row.checks.append(Check("completed", repr(error)[:500], ok=False))
    return row, time.monotonic() - started


def print_row(row: Row, seconds: float) -> None:
    print(f"{row.number:<5} {'OK    ' if row.ok else 'FAILED'} {row.fault} ({seconds:.0f} s)")
    print(f"      procedure: {row.procedure}")
    figures = "; ".join(f"{name} {_format(value)}" for name, value in row.figures.items())
    print(f"      figures:   {figures}")
    for check in row.checks:
        print(f"      {'  ok' if check.ok else 'FAIL'}  {check.condition}: {check.value}")
    sys.stdout.flush()


def _format(value: object) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {_format(item)}" for name, item in value.items()) + ")"
    return " → ".join(map(str, value)) if isinstance(value, list) else str(value)


def main() -> int:
    known = [*EMBEDDED, *PRODUCTION]
    parser = argparse.ArgumentParser(description="Fault injection bench.")
    parser.add_argument("--only", help=f"row numbers, separated by commas: {','.join(known)}")
    parser.add_argument("--short", action="store_true", help="shorter runs, in minutes")
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    numbers = options.only.split(",") if options.only else known
    if unknown := set(numbers) - set(known):
        parser.error(f"unknown row: {', '.join(sorted(unknown))}; known rows: {', '.join(known)}")
    size = options.size or ("short" if options.short else "full")
    rows = []
    for row, seconds in run_rows(numbers, size):
        rows.append(row)
        if not options.json:
            print_row(row, seconds)
    if options.json:
        print(json.dumps({"size": size, "rows": [row.as_json() for row in rows]}))
    else:
        failed = [row.number for row in rows if not row.ok]
        print(f"{len(rows) - len(failed)} of {len(rows)} rows are within their limits"
              + (f"; failed: {', '.join(failed)}" if failed else ""))  # fmt: skip
    return int(not all(row.ok for row in rows))


if __name__ == "__main__":
    sys.exit(main())
