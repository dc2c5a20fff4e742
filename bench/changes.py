"""Latency from a change of a server to the catalog, and syncs caused by many notifications.

    python bench/changes.py [--rounds 5] [--json]

A real installation (`manage.py serve`) and real servers of both protocol eras over HTTP. A tool is
added to the server, which sends a notification; the time ends when the API lists the tool. Measured
with the last sync over 5 s ago, right after a sync, and for comparison with the SDK's own client,
which lists again after the notification and stores nothing.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mcp import Client
from mcp.types import ToolListChangedNotification

from tests.support.installation import Installation
from tests.support.servers import call_upstream, list_sync_runs, register
from tests.support.upstreams.running import running_http
from tests.support.waiting import wait_for

ERAS = {"2026-07-28": (), "handshake": ("--legacy",)}


def last_sync_age(toolcrib, slug):
    last_start = max(run["started_at"] for run in list_sync_runs(toolcrib, slug))
    return (datetime.now(UTC) - datetime.fromisoformat(last_start)).total_seconds()


def seconds_until_in_catalog(toolcrib, slug, url, name):
    call_upstream(url, "add_tool", name=name)
    started = time.perf_counter()
    wait_for(lambda: name in toolcrib.tool_names(slug), 30, every=0.01)
    return time.perf_counter() - started


def seconds_until_sdk_lists(url, name, modern):
    """Measure an SDK client that lists again after a notification."""

    async def watch():
        notified = asyncio.Event()

        async def handler(message):
            if isinstance(message, ToolListChangedNotification):
                notified.set()

        async def listen(client):
            async with client.listen(tools_list_changed=True) as subscription:
                ready.set()
                async for _ in subscription:
                    notified.set()

        ready = asyncio.Event()
        async with Client(url, message_handler=handler, cache=None) as client:
            listening = asyncio.create_task(listen(client)) if modern else None
            if modern:
                await ready.wait()
            await asyncio.to_thread(call_upstream, url, "add_tool", name=name)
            started = time.perf_counter()
            while name not in {tool.name for tool in (await client.list_tools()).tools}:
                await notified.wait()
                notified.clear()
            duration = time.perf_counter() - started
            if listening:
                listening.cancel()
                with suppress(asyncio.CancelledError):
                    await listening
            return duration

    return asyncio.run(watch())


def measure(toolcrib, era, flags, rounds):
    times = {"quiet": [], "busy": [], "sdk": []}
    slug = "w-" + era.replace("-", "")[:10]
    with running_http("noisy", *flags) as url:
        register(toolcrib, slug, url)
        for number in range(rounds):
            wait_for(lambda: last_sync_age(toolcrib, slug) > 5.2, 30)
            times["quiet"].append(seconds_until_in_catalog(toolcrib, slug, url, f"a{number}"))
            times["busy"].append(seconds_until_in_catalog(toolcrib, slug, url, f"b{number}"))
            times["sdk"].append(seconds_until_sdk_lists(url, f"c{number}", modern=not flags))
        wait_for(lambda: last_sync_age(toolcrib, slug) > 7, 30)
        before = len(list_sync_runs(toolcrib, slug))
        sent = call_upstream(
            url, "flood", count=10_000, seconds=10, last_tool="last"
        ).structured_content
        flooded = time.perf_counter()
        wait_for(lambda: "last" in toolcrib.tool_names(slug), 30, every=0.01)
        delay = time.perf_counter() - flooded
        syncs = len(list_sync_runs(toolcrib, slug)) - before
    toolcrib.api("DELETE", f"/servers/{slug}")
    return {
        "era": era,
        **{kind: (statistics.median(t), min(t), max(t)) for kind, t in times.items()},
        "flood": {"notifications": sent["result"], "syncs": syncs, "seen_after": delay},
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Installation(Path(folder) / "data") as toolcrib:
        rows = [measure(toolcrib, era, flags, options.rounds) for era, flags in ERAS.items()]
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{options.rounds} rounds; seconds from the change to the catalog, median (min–max)")
    print(
        f"{'era':>12}  {'last sync over 5 s ago':>24}  {'right after a sync':>22}  "
        f"{'SDK client, not stored':>26}"
    )
    for row in rows:
        cells = ["{:.2f} ({:.2f}–{:.2f})".format(*row[kind]) for kind in ("quiet", "busy", "sdk")]
        print(f"{row['era']:>12}  {cells[0]:>24}  {cells[1]:>22}  {cells[2]:>26}")
    for row in rows:
        flood = row["flood"]
        print(
            f"{row['era']:>12}: {flood['notifications']:,} notifications in 10 s caused "
            f"{flood['syncs']} syncs; the last change was visible {flood['seen_after']:.1f} s later"
        )


if __name__ == "__main__":
    main()
