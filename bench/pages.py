"""Response time, queries and size of every page, on a large installation.

    python bench/pages.py [--tools 10000] [--groups 200] [--calls 1000000] [--sessions 50000]
                          [--short] [--rounds 7] [--only TEXT] [--keep FOLDER] [--json]
    DATABASE_URL=postgres://... python bench/pages.py

Without DATABASE_URL on SQLite. On PostgreSQL it needs a database that it may fill, which stays.
Seeds a database in a temporary folder with generated rows (in bulk: the product's writes are
measured elsewhere) and requests every page of the URL conf as an admin in this process, through all
middleware: pages, filtered variants, fragments and downloads. Rounds are interleaved: each requests
every page once, after a warm-up. `ms` is the median wall time, `cpu` the median CPU time of this
process, which other work on the machine affects less; the target is 300 ms.
Hourly roll-ups and 90 days of state changes are seeded too, so charts read as much as in use.
`--short` seeds one hundredth. `--keep` keeps the database in a folder and reuses it next time.
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

TARGET_MS = 300
MAX_KB = 1024
SIZES = {"tools": 10_000, "groups": 200, "calls": 1_000_000, "sessions": 50_000}
ON_POSTGRESQL = {
    "REDIS_URL": "redis://127.0.0.1:1/0",  # no listener: pages do without
    "TOOLCRIB_SECRET_KEY": "k" * 48,
    "TOOLCRIB_ENCRYPTION_KEYS": "e" * 48,
    "TOOLCRIB_HOSTS": "testserver,localhost",
    "TOOLCRIB_HTTPS": "0",
}


def set_up_django(folder):
    """Set up Django with the database in this folder, or the one of DATABASE_URL."""
    os.environ.update(
        DJANGO_SETTINGS_MODULE="toolcrib.settings",
        TOOLCRIB_DATA=str(folder),
        TOOLCRIB_LOG_LEVEL="ERROR",
    )
    if "DATABASE_URL" in os.environ:  # what production requires besides
        for name, value in ON_POSTGRESQL.items():
            os.environ.setdefault(name, value)
    import django
    from django.core.management import call_command
    from django.test.utils import setup_test_environment

    django.setup()
    setup_test_environment()
    call_command("migrate", verbosity=0)


def seed_database(folder, sizes):
    """Seed the database unless it is already seeded; return the example ids of its pages."""
    from tests.support.seeding import count_usage, seed

    file = Path(folder) / "examples.json"
    if file.exists():
        return json.loads(file.read_text())
    examples = seed(**sizes)
    count_usage()
    file.write_text(json.dumps(examples))
    return examples


def inspect(page, client):
    """Return the constant properties of a page: status, queries, kB, the slowest query."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    page.send(client)  # fills the caches of the process
    with CaptureQueriesContext(connection) as captured:
        response = page.send(client)
        body = b"".join(response) if response.streaming else response.content
    queries = list(captured.captured_queries)  # the next request empties the log
    slowest = max(queries, key=lambda query: float(query["time"]), default=None)
    return {
        "page": page.label,
        "status": response.status_code,
        "queries": len(queries),
        "kB": round(len(body) / 1024, 1),
        "slowest": slowest,
    }


def time_pages(pages, client, rounds):
    """Return the (wall, CPU) milliseconds of each page by round."""
    times = {page.label: [] for page in pages}
    for _ in range(rounds):
        for page in pages:
            wall, cpu = time.perf_counter(), time.process_time()
            page.send(client)
            times[page.label].append(
                (
                    (time.perf_counter() - wall) * 1000,
                    (time.process_time() - cpu) * 1000,
                )
            )
    return times


def run(options, folder, sizes):
    from django.test import Client

    from tests.support import every_page
    from tests.support.seeding import make_admin

    started = time.perf_counter()
    examples = seed_database(folder, sizes)
    seconds = time.perf_counter() - started
    client = Client()
    client.force_login(make_admin(), backend="django.contrib.auth.backends.ModelBackend")
    pages = [page for page in every_page.page_requests(examples) if options.only in page.label]
    inspected = {page.label: inspect(page, client) for page in pages}
    pages = [page for page in pages if inspected[page.label]["status"] != 405]
    rows = []
    for label, times in time_pages(pages, client, options.rounds).items():
        wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        rows.append(inspected[label] | {"ms": round(wall, 1), "cpu": round(cpu, 1)})
    rows.sort(key=lambda row: -row["ms"])
    print_report(rows, options, sizes, seconds)


def print_report(rows, options, sizes, seconds):
    write = sys.stdout.write
    database = "PostgreSQL" if "DATABASE_URL" in os.environ else "SQLite"
    if options.json:
        write(
            json.dumps(
                {"database": database, "sizes": sizes, "rounds": options.rounds, "pages": rows}
            )
            + "\n"
        )
        return
    counts = ", ".join(f"{number:,} {name}" for name, number in sizes.items())
    write(
        f"{counts} on {database} (seeded in {seconds:.0f} s); median of {options.rounds} rounds\n"
    )
    write(f"{'page':56}{'status':>7}{'ms':>9}{'cpu':>9}{'queries':>9}{'kB':>9}\n")
    for row in rows:
        slow = "  over target" if row["ms"] > TARGET_MS else ""
        large = "  large" if row["kB"] > MAX_KB else ""
        figures = f"{row['status']:7}{row['ms']:9.1f}{row['cpu']:9.1f}{row['queries']:9}"
        write(f"{row['page'][:55]:56}{figures}{row['kB']:9.1f}{slow}{large}\n")
        if options.slowest and row["slowest"]:
            write(f"    {row['slowest']['time']} s: {row['slowest']['sql'][:1500]}\n")
    over = sum(row["ms"] > TARGET_MS for row in rows)
    write(f"{len(rows)} pages, {over} of them over the target of {TARGET_MS} ms\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=f"default: {size:,}")
    parser.add_argument("--short", action="store_true", help="Seed one hundredth.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="Pages whose name contains this text.")
    parser.add_argument("--keep", type=Path, help="Keep the database in this folder.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--slowest", action="store_true", help="Print the slowest query of each page."
    )
    options = parser.parse_args()
    sizes = {
        name: getattr(options, name) or (size // 100 if options.short else size)
        for name, size in SIZES.items()
    }
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        set_up_django(options.keep)
        run(options, options.keep, sizes)
        return
    with tempfile.TemporaryDirectory(prefix="toolcrib-pages-") as folder:
        set_up_django(folder)
        run(options, folder, sizes)


if __name__ == "__main__":
    main()
