"""Rules in a browser: presets, order by keyboard, the form, the test, a rule from a call."""

import pytest
from playwright.sync_api import expect

from tests.support import browser as driving
from tests.support.agents import make_agent

FORECAST = {"city": "Oslo", "days": 1}


@pytest.fixture
def no_rules(populated):
    yield
    for rule in populated.api("GET", "/rules")[1]["items"]:
        populated.api("DELETE", f"/rules/{rule['name'].replace(' ', '%20')}")


def test_presets_are_switched_on_and_rules_moved_by_keyboard(populated, open_page, no_rules):
    page = open_page()
    page.goto("/rules")
    page.get_by_role("button", name="Switch on Ask before destructive tools").click()
    expect(page.get_by_text("Created the rule Ask before destructive tools.")).to_be_visible()
    page.get_by_role("button", name="Switch on Ask on the first use").click()
    up = page.get_by_role("button", name="Up Ask on the first use of a tool by an agent")
    up.focus()
    page.keyboard.press("Enter")
    rows = page.locator("table.rules tbody th")
    expect(rows.first).to_contain_text("Ask on the first use")
    page.get_by_role("button", name="Disable Ask before destructive tools").click()
    expect(page.get_by_role("row", name="Ask before destructive tools")).to_contain_text("Disabled")
    assert driving.run_axe(page) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_rule_is_made_from_a_call_tested_and_saved(populated, open_page, no_rules, theme):
    session = make_agent(populated, f"ruler-{theme}").open()
    assert session.call("weather__get_forecast", FORECAST)["state"] == "succeeded"
    page = open_page(color_scheme=theme)
    number = [event["kind"] for event in session.events()].index("called") + 1
    page.goto(f"/sessions/{session.id}?step={number}")
    page.get_by_role("link", name="Make a rule from this call").click()
    expect(page.get_by_label("Path of condition 1")).to_have_value("/city")
    page.get_by_label("Effect").select_option("deny")
    page.get_by_role("button", name="Test against the last 7 days").click()
    expect(page.get_by_role("status").first).to_contain_text("denied")
    assert driving.run_axe(page) == []
    page.get_by_role("button", name="Save rule").click()
    expect(page.get_by_role("heading", name="Rules")).to_be_visible()
    answer = session.call("weather__get_forecast", FORECAST)
    assert answer["error"]["code"] == "denied_by_rule"
    other = session.call("weather__get_forecast", {"city": "Rome", "days": 1})
    assert other["state"] == "succeeded"


def test_the_pages_fit_a_narrow_window(populated, open_page, no_rules):
    page = open_page(width=320)
    for path in ("/rules", "/rules/new"):
        page.goto(path)
        assert not driving.scrolls_sideways(page)
