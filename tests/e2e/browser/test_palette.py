"""The command palette in Chromium: keyboard, mouse and without JavaScript."""

import re

import pytest
from playwright.sync_api import expect

from tests.support import browser as driving

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(240),
]


def open_palette(page, key="Control+k"):
    page.keyboard.press(key)
    field = page.get_by_role("combobox", name="Search pages")
    expect(field).to_be_focused()
    return field


def selected(page):
    return page.locator('#palette [aria-selected="true"]')


def test_a_tool_is_found_and_opened_with_the_keyboard_alone(populated, open_page):
    page = open_page()
    page.goto("/servers")
    field = open_palette(page)
    expect(selected(page)).to_contain_text("Overview")
    page.keyboard.type("get forecast")
    expect(selected(page)).to_contain_text("weather__get_forecast")
    active = field.get_attribute("aria-activedescendant")
    assert active == selected(page).get_attribute("id")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/tools/weather__get_forecast$"))


def test_arrow_keys_wrap_around_and_the_focus_stays_in_the_field(populated, open_page):
    page = open_page()
    page.goto("/servers")
    field = open_palette(page)
    expect(selected(page)).to_contain_text("Overview")
    page.keyboard.press("ArrowDown")
    expect(selected(page)).to_contain_text("Servers")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    expect(selected(page)).to_contain_text("Invite a person")
    page.keyboard.press("ArrowDown")
    expect(selected(page)).to_contain_text("Overview")
    expect(field).to_be_focused()


def test_escape_closes_the_palette_and_restores_the_focus(populated, open_page):
    page = open_page()
    page.goto("/servers")
    page.get_by_label("Search servers").focus()
    open_palette(page, "Meta+k")
    page.keyboard.press("Escape")
    expect(page.locator("#palette")).to_be_hidden()
    expect(page.get_by_label("Search servers")).to_be_focused()
    open_palette(page)
    page.keyboard.press("Control+k")
    expect(page.locator("#palette")).to_be_hidden()


def test_enter_pressed_early_waits_for_the_results(populated, open_page):
    page = open_page()
    page.goto("/servers")
    open_palette(page)
    expect(selected(page)).to_contain_text("Overview")
    page.keyboard.type("sessions")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/sessions$"))


def test_a_sync_is_queued_from_the_palette(populated, open_page):
    page = open_page()
    page.goto("/groups")
    open_palette(page)
    page.keyboard.type("sync weather")
    expect(selected(page)).to_contain_text("Sync weather")
    with page.expect_response(lambda reply: reply.url.endswith("/servers/weather/sync")) as sync:
        page.keyboard.press("Enter")
    assert sync.value.status in (302, 303)


def test_an_empty_result_is_shown_and_announced(populated, open_page):
    page = open_page()
    page.goto("/servers")
    open_palette(page)
    page.keyboard.type("<img src=x>zz")
    expect(page.locator(".palette-none")).to_have_text("No results for “<img src=x>zz”.")
    expect(page.locator("[data-palette-status]")).to_have_text("No results for “<img src=x>zz”")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/servers$"))


def test_the_button_opens_the_palette_and_a_click_selects_a_result(populated, open_page):
    page = open_page()
    page.goto("/servers")
    page.locator("[data-palette]").click()
    page.locator("#palette").get_by_role("option", name="Audit log").click()
    expect(page).to_have_url(re.compile("/audit$"))


def test_the_palette_is_a_page_without_javascript(populated, open_page):
    page = open_page(java_script_enabled=False)
    page.goto("/servers")
    page.locator("[data-palette]").click()
    expect(page.get_by_role("heading", name="Global search")).to_be_visible()
    page.get_by_role("searchbox", name="Search pages").fill("sync weather")
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_role("button", name="Sync weather").click()
    expect(page.get_by_role("heading", name="weather")).to_be_visible()


@pytest.mark.needs_npm
@pytest.mark.parametrize("theme", driving.THEMES)
def test_axe_reports_nothing_in_the_open_palette(theme, populated, open_page):
    page = open_page(color_scheme=theme, bypass_csp=True)
    page.goto("/servers")
    open_palette(page)
    violations = []
    for typed in ("", "weather", "nothing-like-it"):
        page.keyboard.type(typed)
        expect(page.locator("[data-palette-said]")).to_be_attached()
        violations += driving.run_axe(page)
        page.get_by_role("combobox", name="Search pages").fill("")
    assert "\n".join(violations) == ""


def test_the_palette_fits_320_pixels(populated, open_page):
    page = open_page(width=320, height=640)
    page.goto("/servers")
    page.locator("[data-palette]").click()
    page.keyboard.type("weather")
    expect(selected(page)).to_be_visible()
    assert not driving.scrolls_sideways(page)
    box = page.locator("#palette").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 320
