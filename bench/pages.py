"""How long each page takes, and how many queries, on a large installation on SQLite.

    python bench/pages.py [--tools 10000] [--groups 200] [--calls 100000] [--sessions 5000]
                          [--rounds 5] [--json]

Fills a database in a temporary folder with made-up rows (in bulk: the product's own writes are
measured elsewhere) and asks every page of the URL conf for an admin in this process, through all
the middleware. Times are the median of the rounds after one that warms up; the aim is 300 ms.
Statistics of SQLite are gathered after filling, as `PRAGMA optimize` does in an installation.
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


def start(folder):
    """Set Django up on an empty database in this folder."""
    os.environ.update(
        DJANGO_SETTINGS_MODULE="toolcrib.settings",
        TOOLCRIB_DATA=folder,
        TOOLCRIB_LOG_LEVEL="ERROR",
    )
    os.environ.pop("DATABASE_URL", None)
    import django
    from django.core.management import call_command
    from django.test.utils import setup_test_environment

    django.setup()
    setup_test_environment()
    call_command("migrate", verbosity=0)


def measure(client, path, rounds):
    """Return (status, milliseconds, queries, kilobytes) of a page."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    client.get(path)
    with CaptureQueriesContext(connection) as asked:
        answer = client.get(path)
    queries = list(asked.captured_queries)  # the next request empties the log
    times = []
    for _ in range(rounds):
        before = time.perf_counter()
        client.get(path)
        times.append((time.perf_counter() - before) * 1000)
    size = len(answer.content) if not answer.streaming else 0
    slowest = max(queries, key=lambda one: float(one["time"]), default=None)
    return answer.status_code, statistics.median(times), len(queries), size / 1024, slowest


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, size in (("tools", 10_000), ("groups", 200), ("calls", 100_000), ("sessions", 5_000)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--slowest", action="store_true", help="Show each page's slowest query.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="toolcrib-pages-") as folder:
        start(folder)
        run(options)


def run(options):
    from django.db import connection
    from django.test import Client

    from tests.browser import addresses
    from tests.seeding import admin, seed

    began = time.perf_counter()
    examples = seed(
        tools=options.tools,
        groups=options.groups,
        calls=options.calls,
        sessions=options.sessions,
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    seeded = time.perf_counter() - began
    client = Client()
    client.force_login(admin(), backend="django.contrib.auth.backends.ModelBackend")
    rows = []
    for pattern in addresses.patterns():
        if pattern.name in addresses.OUTSIDE:
            continue
        path = addresses.path_of(pattern, examples)
        for address in (path, *(path + face for face in addresses.FACES.get(pattern.name, ()))):
            status, took, queries, size, slowest = measure(client, address, options.rounds)
            if status == 405:
                break
            rows.append(
                {
                    "page": pattern.name + address.removeprefix(path),
                    "status": status,
                    "ms": round(took, 1),
                    "queries": queries,
                    "kB": round(size, 1),
                    "slowest": slowest,
                }
            )
    rows.sort(key=lambda row: -row["ms"])
    say(rows, options, seeded)


def say(rows, options, seeded):
    write = sys.stdout.write
    if options.json:
        write(json.dumps(rows, indent=2) + "\n")
        return
    write(
        f"{options.tools:,} tools, {options.groups:,} groups, {options.calls:,} calls, "
        f"{options.sessions:,} sessions on SQLite (filled in {seeded:.0f} s); "
        f"median of {options.rounds}\n"
    )
    write(f"{'page':34}{'status':>8}{'ms':>9}{'queries':>9}{'kB':>9}\n")
    for row in rows:
        late = "  over the aim" if row["ms"] > AIM else ""
        figures = f"{row['status']:8}{row['ms']:9.1f}{row['queries']:9}{row['kB']:9.1f}"
        write(f"{row['page']:34}{figures}{late}\n")
        if options.slowest and row["slowest"]:
            write(f"    {row['slowest']['time']} s: {row['slowest']['sql'][:1500]}\n")


if __name__ == "__main__":
    main()
