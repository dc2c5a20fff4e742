"""The palette in a real Chromium: by keys, by mouse and without JavaScript."""

import re

import pytest
from playwright.sync_api import expect

from tests.support import browser as driving

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(240),
]


def opened(page, key="Control+k"):
    page.keyboard.press(key)
    field = page.get_by_role("combobox", name="Find pages")
    expect(field).to_be_focused()
    return field


def chosen(page):
    return page.locator('#palette [aria-selected="true"]')


def test_a_tool_is_found_and_opened_by_keys_alone(filled, open_page):
    page = open_page()
    page.goto("/servers")
    field = opened(page)
    expect(chosen(page)).to_contain_text("Overview")
    page.keyboard.type("get forecast")
    expect(chosen(page)).to_contain_text("weather__get_forecast")
    active = field.get_attribute("aria-activedescendant")
    assert active == chosen(page).get_attribute("id")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/tools/weather__get_forecast$"))


def test_arrows_go_round_and_the_focus_stays_in_the_field(filled, open_page):
    page = open_page()
    page.goto("/servers")
    field = opened(page)
    expect(chosen(page)).to_contain_text("Overview")
    page.keyboard.press("ArrowDown")
    expect(chosen(page)).to_contain_text("Servers")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    expect(chosen(page)).to_contain_text("Export mcp.json")
    page.keyboard.press("ArrowDown")
    expect(chosen(page)).to_contain_text("Overview")
    expect(field).to_be_focused()


def test_escape_closes_it_and_gives_the_focus_back(filled, open_page):
    page = open_page()
    page.goto("/servers")
    page.get_by_label("Search servers").focus()
    opened(page, "Meta+k")
    page.keyboard.press("Escape")
    expect(page.locator("#palette")).to_be_hidden()
    expect(page.get_by_label("Search servers")).to_be_focused()
    opened(page)
    page.keyboard.press("Control+k")
    expect(page.locator("#palette")).to_be_hidden()


def test_enter_pressed_too_soon_waits_for_the_answer(filled, open_page):
    page = open_page()
    page.goto("/servers")
    opened(page)
    expect(chosen(page)).to_contain_text("Overview")
    page.keyboard.type("sessions")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/sessions$"))


def test_sync_is_asked_for_from_the_palette(filled, open_page):
    page = open_page()
    page.goto("/groups")
    opened(page)
    page.keyboard.type("sync weather")
    expect(chosen(page)).to_contain_text("Sync weather")
    with page.expect_response(lambda answer: answer.url.endswith("/servers/weather/sync")) as asked:
        page.keyboard.press("Enter")
    assert asked.value.status in (302, 303)


def test_nothing_found_is_said_and_announced(filled, open_page):
    page = open_page()
    page.goto("/servers")
    opened(page)
    page.keyboard.type("<img src=x>zz")
    expect(page.locator(".palette-none")).to_have_text("Nothing is called <img src=x>zz.")
    expect(page.locator("[data-palette-status]")).to_have_text("Nothing is called <img src=x>zz.")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/servers$"))


def test_the_button_opens_it_and_a_click_chooses(filled, open_page):
    page = open_page()
    page.goto("/servers")
    page.get_by_role("link", name="Find").click()
    page.locator("#palette").get_by_role("option", name="Audit log").click()
    expect(page).to_have_url(re.compile("/audit$"))


def test_it_is_a_page_without_javascript(filled, open_page):
    page = open_page(java_script_enabled=False)
    page.goto("/servers")
    page.get_by_role("link", name="Find").click()
    expect(page.get_by_role("heading", name="Find anything")).to_be_visible()
    page.get_by_role("searchbox", name="Find anything").fill("sync weather")
    page.get_by_role("button", name="Find").click()
    page.get_by_role("button", name="Sync weather").click()
    expect(page.get_by_role("heading", name="weather")).to_be_visible()


@pytest.mark.needs_npm
@pytest.mark.parametrize("theme", driving.THEMES)
def test_axe_finds_nothing_in_the_open_palette(theme, filled, open_page):
    page = open_page(color_scheme=theme, bypass_csp=True)
    page.goto("/servers")
    opened(page)
    found = []
    for typed in ("", "weather", "nothing-like-it"):
        page.keyboard.type(typed)
        expect(page.locator("[data-palette-said]")).to_be_attached()
        found += driving.axe(page)
        page.get_by_role("combobox", name="Find pages").fill("")
    assert "\n".join(found) == ""


def test_the_palette_fits_320_pixels(filled, open_page):
    page = open_page(width=320, height=640)
    page.goto("/servers")
    page.get_by_role("link", name="Find").click()
    page.keyboard.type("weather")
    expect(chosen(page)).to_be_visible()
    assert not driving.scrolls_sideways(page)
    box = page.locator("#palette").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 320
