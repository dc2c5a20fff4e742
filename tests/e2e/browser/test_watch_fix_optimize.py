"""An admin in Chromium: watch a session live, fix a failing server, apply and undo Optimize.

Prints how long each part took and how many clicks it needed (`pytest -s`); asserts neither.
"""

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
def lost(populated):
    """A server whose address has a wrong port."""
    url = f"http://127.0.0.1:{free_port()}/mcp"
    body = {"name": "lost", "slug": "lost", "transport": "http", "url": url}
    assert populated.api("POST", "/servers", body)[0] == 201
    yield
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


def test_a_session_is_watched_a_server_fixed_and_advice_applied_and_undone(
    populated, agent, lost, weather_url, open_page
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
