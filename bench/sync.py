"""Duration of a sync, and its growth from 100 to 10,000 tools.

    python bench/sync.py [--rounds 5] [--json]

A real server process offers N tools of typical size (about 200 tokens) in pages over HTTP. Measured
in interleaved rounds: the SDK's own client listing every page without storing anything (the
alternative of a user), a first sync into an empty SQLite catalog, and a sync without changes.
Medians with minimum and maximum.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
folder = tempfile.TemporaryDirectory(prefix="toolcrib-bench-")
os.environ["TOOLCRIB_DATA"] = folder.name
os.environ["DJANGO_SETTINGS_MODULE"] = "toolcrib.settings"
for name in ("DATABASE_URL", "REDIS_URL"):
    os.environ.pop(name, None)

import django  # noqa: E402

django.setup()

from django.core.management import call_command  # noqa: E402
from mcp import Client  # noqa: E402

from catalog.audit import SYSTEM  # noqa: E402
from catalog.models import Definition, DefinitionChange, Tool  # noqa: E402
from servers.models import Server, SyncRun, Trigger  # noqa: E402
from servers.registration import actions as server_actions  # noqa: E402
from servers.registration.drafts import ServerDraft  # noqa: E402
from servers.sync import runner  # noqa: E402
from tests.support.upstreams.running import running_http  # noqa: E402

SIZES = ((100, 1), (1_000, 10), (10_000, 100))


async def list_with_sdk(url: str) -> int:
    count, cursor = 0, None
    async with Client(url, cache=None) as client:
        while True:
            page = await client.list_tools(cursor=cursor)
            count += len(page.tools)
            cursor = page.next_cursor
            if cursor is None:
                return count


def run_timed(work, *args) -> tuple[float, object]:
    started = time.perf_counter()
    result = work(*args)
    return time.perf_counter() - started, result


def measure(tools: int, pages: int, rounds: int) -> dict[str, object]:
    times: dict[str, list[float]] = {"sdk": [], "first": [], "again": []}
    with running_http("many", "--tools", str(tools), "--pages", str(pages), "--real") as url:
        for _ in range(rounds):
            seconds, count = run_timed(lambda: asyncio.run(list_with_sdk(url)))
            assert count == tools, count
            times["sdk"].append(seconds)
            Server.objects.all().delete()
            DefinitionChange.objects.all().delete()
            Definition.objects.all().delete()
            draft = ServerDraft(name="many", slug="many", transport="http", url=url)
            server = server_actions.add_server(draft, actor=SYSTEM)
            for kind in ("first", "again"):
                seconds, run = run_timed(runner.sync_now, server.pk, Trigger.MANUAL)
                assert isinstance(run, SyncRun)
                assert run.outcome == "ok", run.error
                times[kind].append(seconds)
            assert Tool.objects.count() == tools
    row: dict[str, object] = {"tools": tools, "pages": pages}
    for kind, seconds in times.items():
        row[kind] = statistics.median(seconds)
        row[f"{kind}_spread"] = (min(seconds), max(seconds))
    row["tools_per_second"] = tools / statistics.median(times["first"])
    ratios = [first / sdk for first, sdk in zip(times["first"], times["sdk"], strict=True)]
    row["ratio_to_sdk"] = statistics.median(ratios)
    row["ratio_spread"] = (min(ratios), max(ratios))
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    call_command("migrate", verbosity=0)
    rows = [measure(tools, pages, options.rounds) for tools, pages in SIZES]
    small, large = rows[0], rows[-1]
    growth = (large["first"] / small["first"]) / (large["tools"] / small["tools"])  # type: ignore[operator]
    if options.json:
        print(json.dumps({"rows": rows, "growth_per_tool": growth}))
        return
    print(f"{options.rounds} interleaved rounds; seconds as median (min–max)")
    print(
        f"{'tools':>7} {'pages':>6}  {'SDK list, not stored':>24}  {'first sync':>22}  "
        f"{'no changes':>22}  {'tools/s':>8}  {'first ÷ SDK':>18}"
    )
    for row in rows:
        cells = [
            f"{row[kind]:.2f} ({row[f'{kind}_spread'][0]:.2f}–{row[f'{kind}_spread'][1]:.2f})"  # type: ignore[index]
            for kind in ("sdk", "first", "again")
        ]
        ratio = (
            f"{row['ratio_to_sdk']:.1f} ({row['ratio_spread'][0]:.1f}–{row['ratio_spread'][1]:.1f})"  # type: ignore[index]
        )
        print(
            f"{row['tools']:>7,} {row['pages']:>6}  {cells[0]:>24}  {cells[1]:>22}  "
            f"{cells[2]:>22}  {row['tools_per_second']:>8,.0f}  {ratio:>18}"
        )
    print(
        f"growth: 100 times the tools takes {large['first'] / small['first']:.0f} times the time "  # type: ignore[operator]
        f"({growth:.2f} per tool; 1 is linear)"
    )


if __name__ == "__main__":
    main()
