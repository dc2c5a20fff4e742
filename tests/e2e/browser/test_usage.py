"""Usage page in Chromium: filters, tables, CSV files, themes and widths."""

import json

import pytest
from playwright.sync_api import expect

from tests.e2e.browser.test_sessions import OPEN_ALL, Run
from tests.support import browser as driving

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(240),
]
PAGES = ["/usage", "/usage?range=24h&sort=-errors", "/usage?agent=nobody"]


@pytest.fixture(scope="module")
def used(populated):
    """An agent with a search without results, a successful and a failed call."""
    done = populated.command("create_agent", "runner", "--all-groups", "--json")
    assert done.returncode == 0, done.stderr
    run = Run(populated, json.loads(done.stdout)["key"])
    run.send("/search", {"query": "zzzzqqqq"})
    run.call("weather__get_forecast", city="Oslo")
    run.call("weather__get_forecast", town="Oslo")
    yield run
    populated.api("DELETE", "/agents/runner")


def test_filters_change_the_url_and_the_tables(used, open_page):
    page = open_page()
    page.goto("/")
    page.keyboard.press("g")
    page.keyboard.press("u")
    expect(page).to_have_url("/usage")
    page.locator("select[name=agent]").select_option("runner")
    expect(page).to_have_url("/usage?range=30d&agent=runner")
    tools = page.get_by_role("region", name="Called tools").last
    expect(tools.locator("tbody tr")).to_have_count(1)
    expect(tools).to_contain_text("50.0%")
    page.get_by_role("navigation", name="Time range").get_by_role("link", name="24 hours").click()
    expect(page).to_have_url("/usage?range=24h&agent=runner")
    expect(page.get_by_role("heading", name="Last 24 hours")).to_be_visible()
    expect(page.locator("#trend-calls")).to_contain_text("2 calls")
    expect(page.get_by_text("“zzzzqqqq”")).to_be_visible()

    with page.expect_download() as download:
        page.get_by_role("link", name="CSV of called tools").click()
    assert download.value.path().read_text().splitlines()[1].startswith("weather__get_forecast,2,1")


@pytest.mark.needs_npm
@pytest.mark.parametrize("theme", driving.THEMES)
def test_axe_finds_nothing(theme, used, open_page):
    page = open_page(color_scheme=theme, bypass_csp=True)
    violations = []
    for path in PAGES:
        page.goto(path)
        page.evaluate(OPEN_ALL)
        violations += driving.run_axe(page)

    assert "\n".join(violations) == ""


def test_nothing_scrolls_sideways_at_320_pixels(used, open_page):
    page = open_page(width=320, height=640)
    wide = []
    for path in PAGES:
        page.goto(path)
        page.evaluate(OPEN_ALL)
        if driving.scrolls_sideways(page):
            wide.append(path)

    assert wide == []
