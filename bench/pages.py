"""How long each page takes, how many queries and bytes, on a large installation on SQLite.

    python bench/pages.py [--tools 10000] [--groups 200] [--calls 100000] [--sessions 5000]
                          [--quick] [--rounds 5] [--only TEXT] [--keep FOLDER] [--json]

Fills a database in a temporary folder with made-up rows (in bulk: the product's own writes are
measured elsewhere) and asks every page of the URL conf for an admin in this process, through all
the middleware: pages, their filtered faces, fragments and downloads. Rounds are interleaved: each
asks every page once, after one that warms up. `ms` is the median of the clock, `cpu` that of this
process's own time, which other work on the machine disturbs less; the aim is 300 ms.
`--quick` fills a hundredth. `--keep` leaves the database in a folder and finds it there next time.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

AIM = 300  # milliseconds
LARGE = 1024  # kilobytes that no page should send
SIZES = {"tools": 10_000, "groups": 200, "calls": 100_000, "sessions": 5_000}


def start(folder):
    """Set Django up on the database in this folder."""
    os.environ.update(
        DJANGO_SETTINGS_MODULE="toolcrib.settings",
        TOOLCRIB_DATA=str(folder),
        TOOLCRIB_LOG_LEVEL="ERROR",
    )
    os.environ.pop("DATABASE_URL", None)
    import django
    from django.core.management import call_command
    from django.test.utils import setup_test_environment

    django.setup()
    setup_test_environment()
    call_command("migrate", verbosity=0)


def fill(folder, sizes):
    """Fill the database, or find it filled; return the example ids of its pages."""
    from tests.support.seeding import seed

    kept = Path(folder) / "examples.json"
    if kept.exists():
        return json.loads(kept.read_text())
    examples = seed(**sizes)
    kept.write_text(json.dumps(examples))
    return examples


def look(ask, client):
    """Ask once and return what does not vary: status, queries, kilobytes, the slowest query."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    ask.of(client)  # what a process keeps is kept after this
    with CaptureQueriesContext(connection) as asked:
        answer = ask.of(client)
        body = b"".join(answer) if answer.streaming else answer.content
    queries = list(asked.captured_queries)  # the next request empties the log
    slowest = max(queries, key=lambda one: float(one["time"]), default=None)
    return {
        "page": ask.label,
        "status": answer.status_code,
        "queries": len(queries),
        "kB": round(len(body) / 1024, 1),
        "slowest": slowest,
    }


def time_all(asks, client, rounds):
    """Return for each page its (clock, processor) milliseconds, a round at a time."""
    times = {ask.label: [] for ask in asks}
    for _ in range(rounds):
        for ask in asks:
            clock, processor = time.perf_counter(), time.process_time()
            ask.of(client)
            times[ask.label].append(
                (
                    (time.perf_counter() - clock) * 1000,
                    (time.process_time() - processor) * 1000,
                )
            )
    return times


def run(options, folder, sizes):
    from django.test import Client

    from tests.support import every_page
    from tests.support.seeding import make_admin

    began = time.perf_counter()
    examples = fill(folder, sizes)
    seeded = time.perf_counter() - began
    client = Client()
    client.force_login(make_admin(), backend="django.contrib.auth.backends.ModelBackend")
    asks = [ask for ask in every_page.page_requests(examples) if options.only in ask.label]
    seen = {ask.label: look(ask, client) for ask in asks}
    asks = [ask for ask in asks if seen[ask.label]["status"] != 405]
    rows = []
    for label, found in time_all(asks, client, options.rounds).items():
        clock, processor = (statistics.median(column) for column in zip(*found, strict=True))
        rows.append(seen[label] | {"ms": round(clock, 1), "cpu": round(processor, 1)})
    rows.sort(key=lambda row: -row["ms"])
    say(rows, options, sizes, seeded)


def say(rows, options, sizes, seeded):
    write = sys.stdout.write
    if options.json:
        write(json.dumps({"sizes": sizes, "rounds": options.rounds, "pages": rows}) + "\n")
        return
    filled = ", ".join(f"{number:,} {name}" for name, number in sizes.items())
    write(f"{filled} on SQLite (filled in {seeded:.0f} s); median of {options.rounds}\n")
    write(f"{'page':56}{'status':>7}{'ms':>9}{'cpu':>9}{'queries':>9}{'kB':>9}\n")
    for row in rows:
        late = "  over the aim" if row["ms"] > AIM else ""
        large = "  large" if row["kB"] > LARGE else ""
        figures = f"{row['status']:7}{row['ms']:9.1f}{row['cpu']:9.1f}{row['queries']:9}"
        write(f"{row['page'][:55]:56}{figures}{row['kB']:9.1f}{late}{large}\n")
        if options.slowest and row["slowest"]:
            write(f"    {row['slowest']['time']} s: {row['slowest']['sql'][:1500]}\n")
    over = sum(row["ms"] > AIM for row in rows)
    write(f"{len(rows)} pages, {over} of them over the aim of {AIM} ms\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=f"{size:,} where not given")
    parser.add_argument("--quick", action="store_true", help="Fill a hundredth.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="Pages whose name has this text.")
    parser.add_argument("--keep", type=Path, help="Leave the database in this folder.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--slowest", action="store_true", help="Show each page's slowest query.")
    options = parser.parse_args()
    sizes = {
        name: getattr(options, name) or (size // 100 if options.quick else size)
        for name, size in SIZES.items()
    }
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        start(options.keep)
        run(options, options.keep, sizes)
        return
    with tempfile.TemporaryDirectory(prefix="toolcrib-pages-") as folder:
        start(folder)
        run(options, folder, sizes)


if __name__ == "__main__":
    main()
