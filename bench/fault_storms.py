"""Reconnects to servers that are down (R10), and tool lists with endless pagination (R14)."""

import asyncio
import json
import time
import urllib.request
from functools import partial
from typing import Any

from bench.fault_bed import Bed, Callers, Row, percentile, register, remove, running_upstream
from tests.support.waiting import wait_for

ATTEMPT_GAP = 0.3  # seconds between requests of two attempts


def _get(url: str) -> dict[str, list[float]]:
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310 - our own
        body: dict[str, list[float]] = json.load(response)
    return body


def _count_attempts(times: list[float], since: int) -> int:
    """Return the connection attempts; one attempt may take more than one request."""
    later = times[since:]
    return sum(at == 0 or later[at] - later[at - 1] > ATTEMPT_GAP for at in range(len(later)))


def reconnect_storm(bed: Bed, size: str) -> Row:
    """R10: many servers go down under load, stay down and recover; one answers 404."""
    servers, down = {"tiny": (2, 2.0), "short": (20, 30.0), "full": (50, 600.0)}[size]
    row = Row("R10", f"{servers} servers down for {down:g} s under load")
    slugs = [f"moody-{at}" for at in range(servers)]
    with running_upstream("moody") as failing, running_upstream("moody") as missing:
        for slug in slugs:
            register(bed.toolcrib, slug, url=f"{failing.url}/at/{slug}", wait=False)
        register(bed.toolcrib, "no-more", url=f"{missing.url}/at/no-more")
        wait_for(lambda: all(bed.toolcrib.tool_names(slug) for slug in slugs), 120, every=0.5)
        before, before_404 = _get(f"{failing.url}/_asked"), _get(f"{missing.url}/_asked")
        _get(f"{failing.url}/_be/reset")
        _get(f"{missing.url}/_be/404")
        bed.toolcrib.kill()  # so that every connection must be opened again
        bed.toolcrib.start()
        calls = asyncio.run(_calls(bed, [*slugs, "no-more"], down))
        after, after_404 = _get(f"{failing.url}/_asked"), _get(f"{missing.url}/_asked")
        _get(f"{failing.url}/_be/well")
        started = time.monotonic()
        # Without calls: the installation must reconnect by itself.
        wait_for(lambda: _connected(bed, slugs), 120, every=0.5, what="all servers are connected")
        recovered = time.monotonic() - started
        for slug in [*slugs, "no-more"]:
            remove(bed.toolcrib, slug)
    attempts = [
        _count_attempts(after[path], len(before.get(path, [])))
        for path in (f"/at/{slug}" for slug in slugs)
    ]
    parked = _count_attempts(after_404["/at/no-more"], len(before_404.get("/at/no-more", [])))
    row.procedure = (
        f"{servers} servers reset all connections for {down:g} s, one answers 404; {calls:,} calls "
        "to them at the same time; then all recover"
    )
    row.figures = {
        "attempts_per_server_p50": percentile([float(n) for n in attempts], 50),
        "attempts_per_server_max": max(attempts),
        "attempts_per_server_and_30_s": round(sum(attempts) / servers * 30 / down, 2),
        "attempts_of_the_404_server": parked,
        "recovered_after_s": round(recovered, 1),
    }
    row.check_positive("calls to servers that were down", calls)
    row.check_positive("attempts", sum(attempts))
    # The first retries come after 1, 2, 4, 8, 16 s, and three more for calls.
    allowed = 10 + down / 30
    row.check_at_most("attempts of one server", max(attempts), allowed, timed=False)
    row.check_at_most(
        "attempts of a server that answers 404", parked, 4 + 2 * down / 3600, timed=False
    )
    if size == "full":
        row.check_at_most("attempts per server and 30 s", sum(attempts) / servers * 30 / down, 1)
    row.check_at_most("last server connected after", recovered, 60, " s")
    return row


def _connected(bed: Bed, slugs: list[str]) -> bool:
    rows = bed.query("select slug, state from servers_server")
    return all(state == "connected" for slug, state in rows if slug in slugs)


async def _calls(bed: Bed, slugs: list[str], seconds: float) -> int:
    """Call each server about once per second; return the number of calls."""
    session = bed.agent.open(groups=[f"mcp:{slug}" for slug in slugs], mode="deferred")
    ends = time.monotonic() + seconds
    calls = 0
    async with Callers(bed.agent) as callers:
        while time.monotonic() < ends:
            turn = time.monotonic()
            for at in range(0, len(slugs), 5):
                some = [callers.call(session, f"{slug}__ping", {}) for slug in slugs[at : at + 5]]
                calls += len(await asyncio.gather(*some))
                if time.monotonic() > ends:
                    break
            await asyncio.sleep(max(0.0, turn + 1 - time.monotonic()))
    return calls


# --- Tool lists -----------------------------------------------------------------------------------

LOOPS = {
    "same": "cursor_repeated",
    "cycle": "cursor_loop",
    "new": "page_limit",
    "empty": "cursor_repeated",
}


def cursor_loops(bed: Bed, size: str) -> Row:
    """R14: a tool list with endless cursors fails with a specific code; the old list stays."""
    row = Row("R14", "tool lists with endless cursors")
    codes: dict[str, str] = {}
    requests: dict[str, int] = {}
    durations: dict[str, float] = {}
    with running_upstream("moody") as server:
        register(bed.toolcrib, "cursors", url=f"{server.url}/at/cursors")
        session = bed.session("cursors")
        for mode in LOOPS:
            last = _runs(bed)[0]["id"]
            before = len(_get(f"{server.url}/_asked")["/at/cursors"])
            _get(f"{server.url}/_be/{mode}")
            started = time.monotonic()
            assert bed.toolcrib.api("POST", "/servers/cursors/sync")[0] == 202
            wait_for(partial(_has_run_after, bed, last), 120, what=f"the sync with {mode} finishes")
            durations[mode] = time.monotonic() - started
            codes[mode] = _runs(bed)[0]["code"]
            requests[mode] = len(_get(f"{server.url}/_asked")["/at/cursors"]) - before
        names = bed.toolcrib.tool_names("cursors")
        state = session.call("ping")["state"]
        remove(bed.toolcrib, "cursors")
    row.procedure = "a sync with each of: " + ", ".join(LOOPS)
    row.figures = {
        "codes": codes,
        "requests": requests,
        "slowest_s": round(max(durations.values()), 1),
    }
    row.check_equal("codes", codes, LOOPS)
    row.check_equal("tools as before", names, ["ping"])
    row.check_equal("a call afterwards", state, "succeeded")
    row.check_at_most("requests of one sync", max(requests.values()), 110, timed=False)
    row.check_at_most("slowest failure", max(durations.values()), 60, " s")
    return row


def _runs(bed: Bed) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]]
    runs = bed.toolcrib.api("GET", "/servers/cursors/sync-runs")[1]["items"]
    return runs


def _has_run_after(bed: Bed, last: int) -> bool:
    newest = _runs(bed)[0]
    return bool(newest["id"] > last and newest["finished_at"])
