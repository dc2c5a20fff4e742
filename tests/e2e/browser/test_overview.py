"""The overview in Chromium, with an item that needs attention."""

import re

import pytest
from playwright.sync_api import expect

from tests.support import browser as driving

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(240),
]


@pytest.mark.parametrize("theme", driving.THEMES)
def test_axe_reports_nothing_with_everything_open(populated, open_page, theme):
    page = open_page(color_scheme=theme)
    page.goto("/")
    page.get_by_text("Definitions", exact=True).click()
    expect(page.get_by_text("95th percentile of answered calls")).to_be_visible()
    assert driving.run_axe(page) == []


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_the_page_does_not_scroll_horizontally(populated, open_page, width):
    page = open_page(width=width)
    page.goto("/")
    assert not driving.scrolls_sideways(page)


def test_a_failing_server_is_reached_with_the_keyboard_alone(populated, open_page):
    page = open_page()
    page.goto("/servers")
    page.keyboard.press("g")
    page.keyboard.press("o")
    expect(page).to_have_url(f"{populated.url}/")
    expect(page).to_have_title(re.compile(r"^\(\d+\) Overview · Toolcrib$"))
    page.get_by_role("link", name="Skip to content").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="View server")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{populated.url}/servers/nobody")


def test_first_steps_can_be_dismissed_without_javascript(populated, open_page):
    page = open_page(java_script_enabled=False)
    page.goto("/")
    page.get_by_role("button", name="Dismiss first steps").click()
    expect(page.get_by_role("heading", name="Last 24 hours")).to_be_visible()
    expect(page.get_by_role("heading", name="First steps")).to_have_count(0)
