"""Servers that are down, so that everybody dials (R10), and lists without an end (R14)."""

import asyncio
import json
import time
import urllib.request
from functools import partial
from typing import Any

from bench.fault_bed import Bed, Callers, Row, percentile, register, remove, upstream
from tests.support.waiting import wait_for

APART = 0.3  # seconds between requests that belong to two tries


def _get(url: str) -> dict[str, list[float]]:
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310 - our own
        found: dict[str, list[float]] = json.load(response)
    return found


def _tries(times: list[float], since: int) -> int:
    """How often a server was tried; a dial may take more than one request."""
    later = times[since:]
    return sum(at == 0 or later[at] - later[at - 1] > APART for at in range(len(later)))


def reconnect_storm(bed: Bed, size: str) -> Row:
    """R10: many servers go down under calls, stay down, and come back; one answers 404."""
    servers, down = {"tiny": (2, 2.0), "short": (20, 30.0), "full": (50, 600.0)}[size]
    row = Row("R10", f"{servers} servers down for {down:g} s, with callers")
    slugs = [f"moody-{at}" for at in range(servers)]
    with upstream("moody") as ill, upstream("moody") as gone:
        for slug in slugs:
            register(bed.toolcrib, slug, url=f"{ill.url}/at/{slug}", wait=False)
        register(bed.toolcrib, "no-more", url=f"{gone.url}/at/no-more")
        wait_for(lambda: all(bed.toolcrib.tool_names(slug) for slug in slugs), 120, every=0.5)
        before, before_404 = _get(f"{ill.url}/_asked"), _get(f"{gone.url}/_asked")
        _get(f"{ill.url}/_be/reset")
        _get(f"{gone.url}/_be/404")
        bed.toolcrib.kill()  # so that every connection has to be made anew
        bed.toolcrib.start()
        called = asyncio.run(_calls(bed, [*slugs, "no-more"], down))
        asked, asked_404 = _get(f"{ill.url}/_asked"), _get(f"{gone.url}/_asked")
        _get(f"{ill.url}/_be/well")
        began = time.monotonic()
        # Nobody calls any more: the installation has to find out by itself.
        wait_for(lambda: _connected(bed, slugs), 120, every=0.5, what="all servers are back")
        back = time.monotonic() - began
        for slug in [*slugs, "no-more"]:
            remove(bed.toolcrib, slug)
    tries = [
        _tries(asked[path], len(before.get(path, []))) for path in (f"/at/{slug}" for slug in slugs)
    ]
    parked = _tries(asked_404["/at/no-more"], len(before_404.get("/at/no-more", [])))
    row.done = (
        f"{servers} servers hang up on everybody for {down:g} s, one answers 404; {called:,} calls "
        "to them meanwhile; then all are well again"
    )
    row.figures = {
        "tries_per_server_p50": percentile([float(n) for n in tries], 50),
        "tries_per_server_max": max(tries),
        "tries_per_server_and_30_s": round(sum(tries) / servers * 30 / down, 2),
        "tries_of_the_404_server": parked,
        "back_after_s": round(back, 1),
    }
    row.some("calls to servers that were down", called)
    row.some("tries", sum(tries))
    # The first dials come 1, 2, 4, 8, 16 s apart, and three for calls: they are allowed for.
    allowed = 10 + down / 30
    row.at_most("tries of one server", max(tries), allowed, timed=False)
    row.at_most("tries of a server that answers 404", parked, 4 + 2 * down / 3600, timed=False)
    if size == "full":
        row.at_most("tries per server and 30 s", sum(tries) / servers * 30 / down, 1)
    row.at_most("last server back", back, 60, " s")
    return row


def _connected(bed: Bed, slugs: list[str]) -> bool:
    rows = bed.query("select slug, state from servers_server")
    return all(state == "connected" for slug, state in rows if slug in slugs)


async def _calls(bed: Bed, slugs: list[str], seconds: float) -> int:
    """Call each of them about once a second."""
    session = bed.agent.open(groups=[f"mcp:{slug}" for slug in slugs], mode="deferred")
    ends = time.monotonic() + seconds
    called = 0
    async with Callers(bed.agent) as callers:
        while time.monotonic() < ends:
            turn = time.monotonic()
            for at in range(0, len(slugs), 5):
                some = [callers.call(session, f"{slug}__ping", {}) for slug in slugs[at : at + 5]]
                called += len(await asyncio.gather(*some))
                if time.monotonic() > ends:
                    break
            await asyncio.sleep(max(0.0, turn + 1 - time.monotonic()))
    return called


# --- Lists ----------------------------------------------------------------------------------------

LOOPS = {
    "same": "cursor_repeated",
    "cycle": "cursor_loop",
    "new": "page_limit",
    "empty": "cursor_repeated",
}


def cursor_loops(bed: Bed, size: str) -> Row:
    """R14: a list whose cursors lead nowhere fails with its own code; the old list stands."""
    row = Row("R14", "lists of tools whose cursors lead nowhere")
    ends: dict[str, str] = {}
    requests: dict[str, int] = {}
    took: dict[str, float] = {}
    with upstream("moody") as server:
        register(bed.toolcrib, "cursors", url=f"{server.url}/at/cursors")
        session = bed.session("cursors")
        for mood in LOOPS:
            last = _runs(bed)[0]["id"]
            asked = len(_get(f"{server.url}/_asked")["/at/cursors"])
            _get(f"{server.url}/_be/{mood}")
            began = time.monotonic()
            assert bed.toolcrib.api("POST", "/servers/cursors/sync")[0] == 202
            wait_for(partial(_ended_after, bed, last), 120, what=f"the sync with {mood} ends")
            took[mood] = time.monotonic() - began
            ends[mood] = _runs(bed)[0]["code"]
            requests[mood] = len(_get(f"{server.url}/_asked")["/at/cursors"]) - asked
        names = bed.toolcrib.tool_names("cursors")
        answered = session.call("ping")["state"]
        remove(bed.toolcrib, "cursors")
    row.done = "a sync with each of: " + ", ".join(LOOPS)
    row.figures = {"codes": ends, "requests": requests, "slowest_s": round(max(took.values()), 1)}
    row.exactly("codes", ends, LOOPS)
    row.exactly("tools served as before", names, ["ping"])
    row.exactly("a call afterwards", answered, "succeeded")
    row.at_most("requests of one sync", max(requests.values()), 110, timed=False)
    row.at_most("slowest to fail", max(took.values()), 60, " s")
    return row


def _runs(bed: Bed) -> list[dict[str, Any]]:
    found: list[dict[str, Any]]
    found = bed.toolcrib.api("GET", "/servers/cursors/sync-runs")[1]["items"]
    return found


def _ended_after(bed: Bed, last: int) -> bool:
    newest = _runs(bed)[0]
    return bool(newest["id"] > last and newest["finished_at"])
