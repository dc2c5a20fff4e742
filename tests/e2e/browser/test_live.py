"""Pages that update by themselves, in Chromium: session, sessions, overview; pause and polling."""

import json

import pytest
from playwright.sync_api import expect

from tests.e2e.browser.test_sessions import Run

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(240),
]


@pytest.fixture
def run(populated):
    done = populated.command("create_agent", "liver", "--all-groups", "--json")
    assert done.returncode == 0, done.stderr
    yield Run(populated, json.loads(done.stdout)["key"])
    populated.api("DELETE", "/agents/liver")


def test_a_call_appears_on_the_page_of_an_open_session(run, open_page):
    page = open_page()
    page.goto(f"/sessions/{run.id}")
    mark = page.get_by_role("button", name="Live")
    expect(mark).to_be_visible()
    with page.expect_response(lambda response: response.request.headers.get("x-live") == "1"):
        run.call("weather__get_forecast", city="Oslo")
    expect(page.locator("#timeline")).to_contain_text("weather__get_forecast")

    mark.click()
    paused = page.get_by_role("button", name="Paused")
    expect(paused).to_be_visible()
    run.call("weather__list_stations", country="Norway")
    expect(page.locator("#timeline")).not_to_contain_text("weather__list_stations")
    paused.click()
    expect(page.locator("#timeline")).to_contain_text("weather__list_stations")


def test_lists_wait_until_the_pointer_has_left_them(run, open_page):
    page = open_page()
    page.goto("/sessions")
    rows = page.locator("#sessions tbody tr")
    before = rows.count()
    page.locator("#sessions tbody").hover()
    other = Run(run.toolcrib, run.key)
    expect(page.get_by_role("button", name="update waiting")).to_be_visible(timeout=15_000)
    assert rows.count() == before
    page.mouse.move(5, 5)
    expect(page.locator(f'#sessions a[href="/sessions/{other.id}"]')).to_be_visible(timeout=15_000)


def test_a_change_before_the_stream_opens_is_shown(run, open_page):
    page = open_page()

    def call_first(route):
        run.call("weather__get_forecast", city="Oslo")
        route.continue_()

    page.route("**/live?*", call_first, times=1)
    page.goto(f"/sessions/{run.id}")
    expect(page.locator("#timeline")).to_contain_text("weather__get_forecast")


def test_without_a_stream_the_page_polls(run, open_page):
    page = open_page()
    page.route("**/live?*", lambda route: route.fulfill(status=204))
    page.goto(f"/sessions/{run.id}")
    expect(page.get_by_role("button", name="every 5 s")).to_be_visible(timeout=15_000)
    run.call("weather__get_forecast", city="Oslo")
    expect(page.locator("#timeline")).to_contain_text("weather__get_forecast", timeout=15_000)
