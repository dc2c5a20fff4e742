"""An operator's afternoon, by keyboard and mouse: what failed, why, what nobody uses, and back."""

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
def morning(filled):
    """What happened before: one run went well, one failed, and one preload earned nothing."""
    done = filled.command("create_agent", "clerk", "--all-groups", "--json")
    assert done.returncode == 0, done.stderr
    key = json.loads(done.stdout)["key"]
    change = {"tools": [UNUSED], "preload": True}
    assert filled.api("PATCH", "/groups/mcp:weather/members", change)[0] == 200
    failed = Run(filled, key)
    failed.send("/search", {"query": "weather forecast"})
    failed.call("weather__get_forecast", town="Oslo")
    well = Run(filled, key)
    well.call("weather__get_forecast", city="Oslo")
    yield failed
    filled.api("PATCH", "/groups/mcp:weather/members", change | {"preload": None})
    filled.api("DELETE", "/agents/clerk")


def preloaded(toolcrib):
    members = toolcrib.api("GET", "/groups/mcp:weather")[1]["members"]
    return next(one["preload"] for one in members if one["name"] == UNUSED)


def test_an_operators_afternoon(morning, filled, open_page):
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
    expect(page).to_have_url(re.compile(morning.id))

    # Why? The first step that went wrong is chosen.
    step = page.locator("#step")
    expect(step).to_contain_text("Toolcrib refused it invalid_arguments")
    expect(step.get_by_role("region", name="Arguments of step")).to_contain_text('"town": "Oslo"')

    # Which tool does nobody use?
    page.keyboard.press("g")
    page.keyboard.press("u")
    expect(page).to_have_url(re.compile("/usage$"))
    page.locator("select[name=agent]").select_option("clerk")
    expect(page).to_have_url(re.compile("agent=clerk"))
    unused = page.locator("#unused tr", has_text=UNUSED)
    expect(unused).to_be_visible()
    assert preloaded(filled) is True

    # On demand, and back.
    unused.get_by_role("button", name="Make on demand").click()
    toast = page.locator("#toasts")
    expect(toast).to_contain_text(f"{UNUSED} in mcp:weather is given on demand in new sessions.")
    expect(page).to_have_url(re.compile(r"agent=clerk#unused$"))
    expect(unused).to_have_count(0)
    assert preloaded(filled) is False

    page.keyboard.press("u")
    expect(unused).to_be_visible()
    expect(toast).to_contain_text("Undone.")
    assert preloaded(filled) is True
