"""What Toolcrib does when something goes wrong: a row a fault, against the bound it has to keep.

    python bench/faults.py [--only R3,R8] [--short] [--json]

Real processes on 127.0.0.1: an embedded installation that most rows share, production with
PostgreSQL and Redis for R16 and R19p, real MCP servers that misbehave. Nothing of the project is
replaced; what is known is what clients were told, what the servers wrote down, the database, and
what the system says of the processes. Agents' limits are raised out of the way. In full it takes
an hour and a half or more (`make soak`); --short looks at every row once, with fewer rounds and
less time, and judges by the same bounds where they make sense. Times want a quiet machine. Exits
with 1 if a bound was not kept.
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
    "R7": fault_crashes.programs_left_behind,
    "R8": fault_large.far_too_large,
    "R10": fault_storms.reconnect_storm,
    "R14": fault_storms.cursor_loops,
    "R19": fault_services.many_writers,
    "R21": fault_sessions.many_sessions,
    "R22": fault_sessions.model_of_sessions,
    "R23": fault_sessions.soak,
    "R26": fault_slow.callers_who_leave,
}
PRODUCTION: dict[str, Callable[[fault_services.Services, str], Row]] = {
    "R16": fault_services.redis_stopped,
    "R19p": fault_services.postgres_restarted,
}
# Long runs want a process that has done nothing before.
ALONE = ("R21", "R23")


def rows(wanted: list[str], size: str) -> Iterator[tuple[Row, float]]:
    """Do them one after the other, and give each row with the seconds it took."""
    shared = [
        name for name in EMBEDDED if name in wanted and not (size == "full" and name in ALONE)
    ]
    alone = [name for name in EMBEDDED if name in wanted and name not in shared]
    for names in (shared, *([name] for name in alone)):
        if names:
            yield from _embedded(names, size)
    names = [name for name in PRODUCTION if name in wanted]
    if names and not (parts.postgres_bin() and parts.redis_server()):
        sys.stderr.write(f"left out: {', '.join(names)}; python -m tests.support.parts says why\n")
    elif names:
        with fault_services.services() as found:
            for name in names:
                yield _timed(name, PRODUCTION[name], found, size)


def _embedded(names: list[str], size: str) -> Iterator[tuple[Row, float]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrib-faults-")))
        bed = stack.enter_context(Bed(folder))
        for name in names:
            if not bed.running:  # a row that broke off may leave it so
                bed.toolcrib.start()
            yield _timed(name, EMBEDDED[name], bed, size)


def _timed(name: str, fault: Callable[[Any, str], Row], where: Any, size: str) -> tuple[Row, float]:
    began = time.monotonic()
    try:
        row = fault(where, size)
    except Exception as problem:  # noqa: BLE001 - the rows after this one are wanted, too
        traceback.print_exc()
        row = Row(name, (fault.__doc__ or "").strip())
        row.checks.append(Check("done to the end", repr(problem)[:500], ok=False))
    return row, time.monotonic() - began


def tell(row: Row, seconds: float) -> None:
    print(f"{row.number:<5} {'OK    ' if row.ok else 'FAILED'} {row.fault} ({seconds:.0f} s)")
    print(f"      did:  {row.done}")
    shown = "; ".join(f"{name} {_plain(value)}" for name, value in row.figures.items())
    print(f"      saw:  {shown}")
    for check in row.checks:
        print(f"      {'  ok' if check.ok else 'FAIL'}  {check.what}: {check.found}")
    sys.stdout.flush()


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {_plain(of)}" for name, of in value.items()) + ")"
    return " → ".join(map(str, value)) if isinstance(value, list) else str(value)


def main() -> int:
    known = [*EMBEDDED, *PRODUCTION]
    parser = argparse.ArgumentParser(description="The fault table.")
    parser.add_argument("--only", help=f"rows by their number, with commas: {','.join(known)}")
    parser.add_argument("--short", action="store_true", help="a look at each, in minutes")
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else known
    if unknown := set(wanted) - set(known):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    size = options.size or ("short" if options.short else "full")
    found = []
    for row, seconds in rows(wanted, size):
        found.append(row)
        if not options.json:
            tell(row, seconds)
    if options.json:
        print(json.dumps({"size": size, "rows": [row.as_json() for row in found]}))
    else:
        failed = [row.number for row in found if not row.ok]
        print(f"{len(found) - len(failed)} of {len(found)} rows keep their bounds"
              + (f"; not: {', '.join(failed)}" if failed else ""))  # fmt: skip
    return int(not all(row.ok for row in found))


if __name__ == "__main__":
    sys.exit(main())
