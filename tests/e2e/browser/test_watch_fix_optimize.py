"""An admin in Chromium: watch a session live, receive an alert, fix the failing server, Optimize.

Prints how long each part took and how many clicks it needed (`pytest -s`); asserts neither.
"""

import hashlib
import hmac
import json
import re
import sys
import time
from contextlib import contextmanager

import pytest
from playwright.sync_api import expect

from tests.e2e.browser.test_sessions import Run
from tests.support import browser as driving
from tests.support.installation import free_port
from tests.support.receiver import running_receiver

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(240),
]
UNUSED = "weather__list_stations"
PRELOAD = "/groups/mcp:weather/members"


@pytest.fixture
def agent(populated):
    """An agent whose sessions never call their preloaded tool."""
    done = populated.command("create_agent", "watched", "--all-groups", "--json")
    assert done.returncode == 0, done.stderr
    assert populated.api("PATCH", PRELOAD, {"tools": [UNUSED], "preload": True})[0] == 200
    yield json.loads(done.stdout)["key"]
    populated.api("PATCH", PRELOAD, {"tools": [UNUSED], "preload": None})
    populated.api("DELETE", "/agents/watched")


@pytest.fixture
def receiver(populated):
    """A webhook receiver on this machine; servers that fail raise an alert at once."""
    items = populated.api("GET", "/settings")[1]["items"]
    before = next(item["value"] for item in items if item["name"] == "alert_failing_seconds")
    settings = {"values": {"alert_failing_seconds": 0}}
    assert populated.api("PATCH", "/settings", settings)[0] == 200
    with running_receiver() as running:
        yield running
    for hook in populated.api("GET", "/webhooks")[1]["items"]:
        populated.api("DELETE", f"/webhooks/{hook['id']}")
    populated.api("PATCH", "/settings", {"values": {"alert_failing_seconds": before}})


@pytest.fixture
def lost(populated):
    """Add a server whose address has a wrong port."""

    def add():
        assert populated.api("POST", "/servers", body)[0] == 201

    url = f"http://127.0.0.1:{free_port()}/mcp"
    body = {"name": "lost", "slug": "lost", "transport": "http", "url": url}
    yield add
    populated.api("DELETE", "/servers/lost")


class Clicks:
    """Counts clicks and measures time, by part."""

    def __init__(self):
        self.count = 0

    def click(self, locator):
        self.count += 1
        locator.click()

    @contextmanager
    def part(self, name):
        began, self.count = time.perf_counter(), 0
        yield
        sys.stdout.write(f"\n{name}: {self.count} clicks, {time.perf_counter() - began:.1f} s\n")


def alert_of(slug):
    """Return a function that finds the alert about a server in what a webhook received."""

    def find(posted):
        alerts = [(each, json.loads(each.body)) for each in posted]
        return [each for each, body in alerts if body["data"].get("key") == slug]

    return find


def is_signed(posted, secret):
    """Check the signature as a receiver does: HMAC-SHA256 of the time, a dot and the body."""
    parts = dict(part.split("=") for part in posted.headers["toolcrib-signature"].split(","))
    signed = parts["t"].encode() + b"." + posted.body
    return parts["v1"] == hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()


def test_a_session_is_watched_a_server_fixed_and_advice_applied_and_undone(
    populated, agent, receiver, lost, weather_url, open_page
):
    runs = [Run(populated, agent) for _ in range(3)]
    page, clicks = open_page(), Clicks()
    page.goto("/")

    with clicks.part("Watch a session live"):
        clicks.click(page.get_by_role("link", name="All sessions"))
        clicks.click(page.locator(f'a[href="/sessions/{runs[-1].id}"]'))
        expect(page.get_by_role("button", name="Live")).to_be_visible()
        runs[-1].send("/search", {"query": "weather forecast"})
        expect(page.locator("#timeline")).to_contain_text("weather forecast")
        runs[-1].call("weather__get_forecast", city="Oslo")
        expect(page.locator("#timeline")).to_contain_text("weather__get_forecast")
        expect(page.locator("#session-numbers")).to_contain_text(re.compile(r"Calls\s*1"))

    page.goto("/settings/notifications")
    with clicks.part("Receive an alert by webhook"):
        page.get_by_label("Name", exact=True).fill("ops")
        page.get_by_label("Address").fill(f"{receiver.url}/hook")
        clicks.click(page.get_by_role("button", name="Add receiver"))
        secret = page.locator("[role=status] .mono").inner_text()
        lost()
        (alert,) = receiver.wait_for(alert_of("lost"), 60)
        assert is_signed(alert, secret)
        page.reload()
        expect(page.get_by_role("region", name="Table: Alerts")).to_contain_text("lost is failing")

    page.goto("/")
    with clicks.part("Find and fix a failing server"):
        item = page.locator(".attention li", has_text="lost: failing")
        expect(item).to_be_visible(timeout=driving.SYNC_TIMEOUT_MS)
        clicks.click(item.get_by_role("link", name="View server"))
        clicks.click(page.get_by_role("link", name="Settings", exact=True).last)
        page.get_by_label("URL").fill(weather_url)
        clicks.click(page.get_by_role("button", name="Save connection"))
        page.goto("/servers/lost")
        expect(page.locator("main")).to_contain_text("Connected", timeout=driving.SYNC_TIMEOUT_MS)

    page.goto("/usage")
    with clicks.part("Apply and undo Optimize"):
        clicks.click(page.locator("#main").get_by_role("link", name="Optimize"))
        row = page.locator("tr", has_text=UNUSED)
        expect(row).to_contain_text("Make on demand")
        clicks.click(page.get_by_role("button", name="Apply selected changes"))
        expect(row).to_have_count(0)
        assert _preloaded(populated) is False
        clicks.click(page.locator("#toasts").get_by_role("button", name="Undo"))
        expect(row).to_be_visible()
        assert _preloaded(populated) is True


def _preloaded(toolcrib):
    members = toolcrib.api("GET", "/groups/mcp:weather")[1]["members"]
    return next(member["preload"] for member in members if member["name"] == UNUSED)
