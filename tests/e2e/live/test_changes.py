"""Changes that servers announce reach the catalog, with few syncs for many notifications."""

from datetime import UTC, datetime

import pytest

from tests.support.servers import call_upstream, last_synced_at, list_sync_runs, register
from tests.support.upstreams.running import running_http
from tests.support.waiting import wait_for

# Run together: these tests measure how long a change takes.
ERAS = pytest.mark.parametrize("era", [(), ("--legacy",)], ids=["modern", "handshake"])


def age(moment):
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()


def started(toolcrib, slug):
    return max(run["started_at"] for run in list_sync_runs(toolcrib, slug))


def in_catalog(toolcrib, slug, name):
    return lambda: name in toolcrib.tool_names(slug)


@ERAS
def test_a_notified_change_reaches_the_catalog_automatically(toolcrib, era):
    slug = "weather" + "".join(era).strip("-")
    with running_http("healthy", *era) as url:
        register(toolcrib, slug, url)
        server = toolcrib.api("GET", f"/servers/{slug}")[1]
        assert (server["protocol_version"] == "2026-07-28") == (not era)
        wait_for(lambda: toolcrib.api("GET", f"/servers/{slug}")[1]["state"] == "connected", 10)
        wait_for(lambda: age(started(toolcrib, slug)) > 5.2, 15, what="the gap has passed")

        # bench/changes.py measures the time; this test also passes on a loaded machine.
        call_upstream(url, "add_tool", name="first_addition")
        wait_for(in_catalog(toolcrib, slug, "first_addition"), 15)
        call_upstream(url, "add_tool", name="second_addition")
        wait_for(in_catalog(toolcrib, slug, "second_addition"), 20)

        triggers = [run["trigger"] for run in list_sync_runs(toolcrib, slug)]
        assert triggers[:2] == ["list_changed", "list_changed"]
        first, second = sorted(run["started_at"] for run in list_sync_runs(toolcrib, slug))[-2:]
        assert age(first) - age(second) >= 4.9, "two syncs keep the gap"
        toolcrib.api("DELETE", f"/servers/{slug}")


@ERAS
def test_ten_thousand_notifications_in_ten_seconds_cause_three_syncs_and_lose_nothing(
    toolcrib, era
):
    slug = "noisy" + "".join(era).strip("-")
    with running_http("noisy", *era) as url:
        register(toolcrib, slug, url)
        wait_for(lambda: age(started(toolcrib, slug)) > 5.2, 15, what="the gap has passed")
        before = len(list_sync_runs(toolcrib, slug))

        flood = call_upstream(url, "flood", count=10_000, seconds=10, last_tool="came_last")
        wait_for(lambda: "came_last" in toolcrib.tool_names(slug), 12)

        sent = flood.structured_content["result"]
        assert sent == 10_000 or sent > 2_000, f"this machine sent only {sent}"
        assert len(list_sync_runs(toolcrib, slug)) - before <= 3
        toolcrib.api("DELETE", f"/servers/{slug}")


def test_a_hung_server_delays_no_other_server(toolcrib):
    with running_http("raw_http") as hung, running_http("healthy") as url:
        for number in range(3):
            body = {"name": f"hung {number}", "transport": "http", "url": f"{hung}/hang"}
            assert toolcrib.api("POST", "/servers", body)[0] == 201
        register(toolcrib, "quick", url)
        assert last_synced_at(toolcrib, "quick")
        states = [toolcrib.api("GET", f"/servers/hung-{n}")[1]["last_synced_at"] for n in range(3)]
        assert states == [None, None, None]
        for slug in ("hung-0", "hung-1", "hung-2", "quick"):
            toolcrib.api("DELETE", f"/servers/{slug}")


def test_ten_thousand_tools_in_a_hundred_pages_are_synced(toolcrib):
    with running_http("many", "--tools", "10000", "--pages", "100") as url:
        body = {"name": "many", "slug": "many", "transport": "http", "url": url}
        assert toolcrib.api("POST", "/servers", body)[0] == 201
        wait_for(lambda: last_synced_at(toolcrib, "many"), 90)
        assert toolcrib.api("GET", "/servers/many")[1]["tools"] == 10_000
        toolcrib.api("DELETE", "/servers/many")
