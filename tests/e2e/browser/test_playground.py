"""Search playground in Chromium: live results, keyboard only, and without scripts."""

import json
import re

import pytest
from playwright.sync_api import expect

from tests.e2e.browser.test_sessions import OPEN_ALL, Run
from tests.support import browser as driving

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(240),
]
TEMPERATURE = "weather__get_temperature"
PAGES = [
    "/search?q=get+the+temperature&agent=seeker",
    "/search?q=compound_interest&agent=narrow",
    "/search?q=%28&mode=regex",
    "/search/golden",
    "/search/missed",
    f"/tools/{TEMPERATURE}",
]


@pytest.fixture(scope="module")
def searched(populated):
    """Two agents, one of which has searched, and a golden query that regressed."""
    done = populated.command("create_agent", "seeker", "--all-groups", "--json")
    assert done.returncode == 0, done.stderr
    populated.api("POST", "/agents", {"name": "narrow", "groups": ["mcp:weather"]})
    run = Run(populated, json.loads(done.stdout)["key"])
    run.send("/search", {"query": "zzzzqqqq"})
    run.send("/search", {"query": "forecast"})
    golden = {"query": "report the weather", "tools": ["weather__report_weather"]}
    status, created = populated.api("POST", "/search/golden", golden)
    assert status == 201, created
    populated.api("POST", f"/tools/{TEMPERATURE}/hints", {"kind": "alias", "text": "thermometer"})
    populated.api("POST", "/tools/weather__report_weather/hold", {"reason": "A test."})
    populated.api("POST", "/search/golden/run")
    yield populated
    populated.api("POST", "/tools/weather__report_weather/release")
    populated.api("DELETE", f"/search/golden/{created['id']}")
    for name in ("seeker", "narrow"):
        populated.api("DELETE", f"/agents/{name}")


def test_results_update_while_typing_and_every_option_is_in_the_url(searched, open_page):
    page = open_page()
    page.goto("/")
    page.keyboard.press("g")
    page.keyboard.press("p")
    expect(page).to_have_url("/search")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(page.get_by_label("Agent query")).to_be_focused()

    page.keyboard.type("get temperature")

    first = page.locator(".hit").first
    expect(first).to_contain_text(TEMPERATURE)
    expect(first.locator("mark").first).to_be_visible()
    expect(page).to_have_url("/search?q=get+temperature")
    expect(page.locator("#live")).to_have_text(re.compile(r"^\d+ tools? found$"))
    expect(page.get_by_label("Agent query")).to_be_focused()
    page.locator("select[name=agent]").select_option("seeker")
    page.get_by_label("Regex").check()
    expect(page).to_have_url("/search?q=get+temperature&mode=regex&agent=seeker")
    expect(page.locator("#found-title")).to_have_text("0 tools found")
    page.reload()
    expect(page.locator("select[name=agent]")).to_have_value("seeker")
    expect(page.get_by_label("Regex")).to_be_checked()


def test_a_slow_response_never_replaces_a_newer_one(searched, open_page):
    page = open_page()
    pending = []
    page.route(re.compile(r"/search\?q=compound"), lambda route: pending.append(route))
    page.goto("/search")
    field = page.get_by_label("Agent query")
    with page.expect_request(re.compile("q=compound")):
        field.fill("compound interest")
    field.fill("get temperature")
    expect(page.locator(".hit").first).to_contain_text(TEMPERATURE)

    for route in pending:
        route.abort()
    expect(page.locator(".hit").first).to_contain_text(TEMPERATURE)
    expect(page).to_have_url("/search?q=get+temperature")


def test_results_are_navigated_opened_and_loaded_by_keyboard(searched, open_page):
    page = open_page()
    page.goto("/search?q=weather&agent=seeker")
    links = page.locator(".hit [data-open]")
    page.keyboard.press("/")
    page.keyboard.press("ArrowDown")
    expect(links.nth(0)).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(links.nth(1)).to_be_focused()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Agent query")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    expect(links.nth(0)).to_be_focused()
    name = links.nth(0).inner_text().split()[-1]
    page.keyboard.press("l")
    expect(page).to_have_url(re.compile("/sessions/ses_"))
    expect(page.locator("[data-steps]")).to_contain_text("preloaded")
    page.go_back()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"/tools/{name}")


def test_an_expected_tool_is_set_and_its_query_removed(searched, open_page):
    page = open_page()
    page.goto("/search?q=temperature+in+a+city")
    row = page.locator(".hit", has_text=TEMPERATURE)
    row.get_by_role("button", name="Set as expected").click()
    expect(row.get_by_text("Expected tool", exact=True)).to_be_visible()
    page.get_by_role("link", name="Golden queries").first.click()
    table = page.get_by_role("region", name="Table: Golden queries", exact=True)
    expect(table).to_contain_text("temperature in a city")
    table.locator("tr", has_text="temperature in a city").get_by_role("button").click()
    expect(page.get_by_text("Removed golden query")).to_be_visible()


def test_a_regression_is_shown_and_accepted(searched, open_page):
    page = open_page()
    page.goto("/")
    expect(page.get_by_text("Search regression: “report the weather”")).to_be_visible()
    page.get_by_role("link", name="View golden queries").click()
    regressions = page.get_by_role("region", name="Table: Regressions")
    expect(regressions).to_contain_text("not found")
    regressions.get_by_role("button", name="Accept new rank").click()
    expect(regressions).to_have_count(0)


def test_search_works_without_javascript(searched, open_page):
    page = open_page(java_script_enabled=False)
    page.goto("/search")
    page.get_by_label("Agent query").fill("get temperature")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.locator(".hit").first).to_contain_text(TEMPERATURE)
    page.get_by_text("zzzzqqqq").click()
    expect(page.locator("#found-title")).to_have_text("0 tools found")


@pytest.mark.needs_npm
@pytest.mark.parametrize("theme", driving.THEMES)
def test_axe_finds_nothing(theme, searched, open_page):
    page = open_page(color_scheme=theme, bypass_csp=True)
    violations = []
    for path in PAGES:
        page.goto(path)
        page.evaluate(OPEN_ALL)
        violations += driving.run_axe(page)

    assert "\n".join(violations) == ""


def test_nothing_scrolls_sideways_at_320_pixels(searched, open_page):
    page = open_page(width=320, height=640)
    wide = []
    for path in PAGES:
        page.goto(path)
        page.evaluate(OPEN_ALL)
        if driving.scrolls_sideways(page):
            wide.append(path)

    assert wide == []
