"""An operator in Chromium: find a failed session and its cause, change a preload, undo."""

import json
import re

import pytest
from playwright.sync_api import expect

from tests.e2e.browser.test_sessions import Run

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(240),
]
UNUSED = "weather__list_stations"


@pytest.fixture(scope="module")
def recorded(populated):
    """An agent with a successful and a failed session, and an unused preload."""
    done = populated.command("create_agent", "clerk", "--all-groups", "--json")
    assert done.returncode == 0, done.stderr
    key = json.loads(done.stdout)["key"]
    change = {"tools": [UNUSED], "preload": True}
    assert populated.api("PATCH", "/groups/mcp:weather/members", change)[0] == 200
    failed = Run(populated, key)
    failed.send("/search", {"query": "weather forecast"})
    failed.call("weather__get_forecast", town="Oslo")
    succeeded = Run(populated, key)
    succeeded.call("weather__get_forecast", city="Oslo")
    yield failed
    populated.api("PATCH", "/groups/mcp:weather/members", change | {"preload": None})
    populated.api("DELETE", "/agents/clerk")


def preloaded(toolcrib):
    members = toolcrib.api("GET", "/groups/mcp:weather")[1]["members"]
    return next(member["preload"] for member in members if member["name"] == UNUSED)


def test_an_operators_afternoon(recorded, populated, open_page):
    page = open_page()
    page.goto("/")

    # Which session failed?
    page.keyboard.press("g")
    page.keyboard.press("n")
    expect(page).to_have_url(re.compile("/sessions$"))
    page.locator("select[name=agent]").select_option("clerk")
    expect(page).to_have_url(re.compile("agent=clerk"))
    page.get_by_label("has errors").check()
    expect(page.locator("tbody tr")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(recorded.id))

    # Why? The first failed step is selected.
    step = page.locator("#step")
    expect(step).to_contain_text("Rejected by Toolcrib invalid_arguments")
    expect(step.get_by_role("region", name="Arguments of step")).to_contain_text('"town": "Oslo"')

    # Which preload is unused?
    page.keyboard.press("g")
    page.keyboard.press("u")
    expect(page).to_have_url(re.compile("/usage$"))
    page.locator("select[name=agent]").select_option("clerk")
    expect(page).to_have_url(re.compile("agent=clerk"))
    unused = page.locator("#unused tr", has_text=UNUSED)
    expect(unused).to_be_visible()
    assert preloaded(populated) is True

    # Make it on demand, then undo.
    unused.get_by_role("button", name="Make on demand").click()
    toast = page.locator("#toasts")
    expect(toast).to_contain_text(f"{UNUSED} in mcp:weather is on demand in new sessions.")
    expect(page).to_have_url(re.compile(r"agent=clerk#unused$"))
    expect(unused).to_have_count(0)
    assert preloaded(populated) is False

    page.keyboard.press("u")
    expect(unused).to_be_visible()
    expect(toast).to_contain_text("Undone. Redo")
    assert preloaded(populated) is True
