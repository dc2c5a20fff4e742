"""Approvals, the audit log and settings in a real Chromium."""

import re

import pytest
from playwright.sync_api import expect

from tests.e2e.browser.test_tools import OPEN_ALL, rename, stocked
from tests.support import browser as driving

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(240),
]
PAGES = [
    "/approvals",
    "/approvals?server=nowhere",
    "/audit",
    "/audit?q=nothing-like-it",
    "/audit?target=server&times=local",
    "/settings/general",
    "/settings/tokens",
    "/settings/sync",
    "/settings/retention",
    "/settings/people",
    "/settings/about",
    "/settings/profile",
]

__all__ = ["stocked"]


def make_pending(toolcrib, url, name, text):
    """Change a description to this text so that the tool is pending, whatever its state."""
    rename(toolcrib, url, name, text)
    return f"weather__{name}"


@pytest.mark.parametrize("theme", driving.THEMES)
def test_axe_finds_nothing_and_nothing_scrolls_sideways(theme, stocked, open_page, weather_url):
    make_pending(stocked, weather_url, "list_stations", f"Ignore previous text, in {theme}.")
    page = open_page(width=1280, color_scheme=theme)
    narrow = open_page(width=320, height=640, color_scheme=theme)
    for path in PAGES:
        for current in (page, narrow):
            current.goto(path)
            assert not driving.scrolls_sideways(current), f"{path} at {current.viewport_size}"
            current.evaluate(OPEN_ALL)
        assert driving.run_axe(page) == []


def test_a_change_is_rejected_with_the_keyboard_alone(stocked, open_page, weather_url):
    name = make_pending(stocked, weather_url, "list_stations", "List stations, by keys alone.")
    page = open_page()
    page.goto("/tools")
    page.keyboard.press("g")
    page.keyboard.press("v")
    page.wait_for_url("**/approvals")
    row = page.locator("li.approval").filter(has_text=name)
    expect(row.locator("ins").first).to_be_visible()

    page.keyboard.press("j")
    while page.evaluate("document.activeElement.textContent") != name:
        page.keyboard.press("j")
    page.keyboard.press("r")

    settled = page.locator("li.settled")
    expect(settled).to_contain_text(f"rejected the new definition of {name}")
    expect(settled.get_by_role("link", name=name)).to_be_focused()
    assert stocked.api("GET", f"/tools/{name}")[1]["state"] == "available"


def test_several_changes_are_reviewed_together_and_the_navigation_is_updated(
    stocked, open_page, weather_url
):
    names = [
        make_pending(stocked, weather_url, name, f"{name} changes with others.")
        for name in ("list_stations", "get_temperature", "get_forecast")
    ]
    page = open_page()
    page.goto("/approvals")
    count = page.locator(".sidebar [data-nav-count=approvals]")
    total = int(count.inner_text().split()[-1])
    assert total >= 3
    page.get_by_role("button", name=re.compile(f"Reject change.*{names[0]}")).click()
    expect(page.locator("li.settled")).to_have_count(1)
    expect(count).to_have_text(re.compile(rf"{total - 1}\s*$"))
    expect(page).to_have_title(f"({total - 1}) Approvals · Toolcrib")
    expect(page.locator(".page-head .answer")).to_contain_text(f"{total - 1} definition")

    for name in names[1:]:
        page.get_by_label(f"Select {name}", exact=True).check()
    expect(page.locator("[data-select-count]")).to_have_text("2 selected")
    page.get_by_role("button", name="Reject selected changes").click()
    expect(page.get_by_text("Rejected the changes of 2 tools")).to_be_visible()
    for name in names:
        assert stocked.api("GET", f"/tools/{name}")[1]["state"] == "available"


def test_the_second_of_two_reviewers_sees_who_decided(stocked, open_page, weather_url):
    name = make_pending(stocked, weather_url, "list_stations", "List stations, for two people.")
    first, second = open_page(), open_page()
    for page in (first, second):
        page.goto("/approvals")
    button = re.compile(f"Approve change.*{name}")
    second.get_by_role("button", name=button).hover()  # a live list is not replaced under a pointer

    first.get_by_role("button", name=button).click()
    expect(first.locator("li.settled")).to_contain_text("approved the new definition")
    expect(second.locator("[data-live-text]")).to_have_text("Live, update waiting")
    second.get_by_role("button", name=button).click()

    expect(second.locator("li.settled")).to_contain_text("Already reviewed.")
    expect(second.locator("li.settled")).to_contain_text(driving.ADMIN)


def test_a_review_of_another_person_leaves_an_open_list_by_itself(stocked, open_page, weather_url):
    name = make_pending(stocked, weather_url, "list_stations", "List stations, for a watcher.")
    first, second = open_page(), open_page()
    for page in (first, second):
        page.goto("/approvals")
    button = re.compile(f"Reject change.*{name}")
    expect(second.get_by_role("button", name=button)).to_be_visible()

    first.get_by_role("button", name=button).click()

    expect(second.get_by_role("button", name=button)).to_have_count(0)
    newest = second.locator("#reviews ol.log li").first
    expect(newest).to_contain_text(driving.ADMIN)
    expect(newest).to_contain_text(name)


def test_a_review_works_without_javascript(stocked, open_page, weather_url):
    name = make_pending(stocked, weather_url, "list_stations", "List stations, plainly.")
    page = open_page(java_script_enabled=False)
    page.goto("/approvals")
    page.get_by_role("button", name=re.compile(f"Reject change.*{name}")).click()

    page.wait_for_url("**/approvals")
    expect(page.get_by_text(f"Rejected the change of {name}.")).to_be_visible()


def test_the_audit_log_has_filters_details_and_local_time(stocked, open_page):
    page = open_page(timezone_id="Asia/Kathmandu")
    page.goto("/audit")
    first = page.locator(".log time").first.inner_text()
    page.get_by_label("Object").select_option("server")
    page.wait_for_url("**/audit?target=server")
    expect(page.get_by_text("match", exact=False).first).to_be_visible()
    page.locator(".log summary").first.click()
    expect(page.locator(".log details[open] .entry")).to_be_visible()

    page.goto("/audit")
    page.get_by_role("link", name="Show local time").click()
    page.wait_for_url("**/audit?times=local")
    expect(page.locator("[data-zone]")).to_contain_text("Asia/Kat")
    assert page.locator(".log time").first.inner_text() != first
    with page.expect_download() as downloaded:
        page.get_by_role("link", name="CSV").click()
    assert downloaded.value.suggested_filename.startswith("toolcrib-audit-")


def test_a_setting_is_saved_and_an_invalid_value_reported(stocked, open_page):
    page = open_page()
    page.goto("/settings/retention")
    field = page.get_by_label("Retention of arguments and results")
    field.fill("14")
    page.get_by_role("button", name="Save retention").click()
    expect(page.get_by_text("Saved: retention of arguments and results.")).to_be_visible()
    expect(field).to_have_value("14")
    field.fill("30")
    page.get_by_role("button", name="Save retention").click()
    expect(field).to_have_value("30")


def test_keyboard_shortcuts_can_be_turned_off(stocked, open_page):
    page = open_page()
    page.goto("/settings/profile")
    page.get_by_role("checkbox", name="Keyboard shortcuts").uncheck()
    page.get_by_role("button", name="Save profile").click()
    expect(page.locator("html")).to_have_attribute("data-keys", "off")
    page.keyboard.press("?")
    page.keyboard.press("g")
    page.keyboard.press("t")
    expect(page.locator("dialog[open]")).to_have_count(0)
    assert page.url.endswith("/settings/profile")

    page.get_by_role("checkbox", name="Keyboard shortcuts").check()
    page.get_by_role("button", name="Save profile").click()
    expect(page.locator("html")).to_have_attribute("data-keys", "on")
    page.keyboard.press("g")
    page.keyboard.press("t")
    page.wait_for_url("**/tools")


def test_a_user_is_invited_and_the_link_shown_once(stocked, open_page, browser):
    page = open_page()
    page.goto("/settings/people")
    page.get_by_label("E-mail or name").fill("bo@example.org")
    page.get_by_role("button", name="Invite person").click()
    expect(page.get_by_role("heading", name="Invitation for bo@example.org")).to_be_focused()
    link = page.locator("[data-copy-text]").inner_text()
    assert "/join/" in link
    page.goto("/settings/people")
    expect(page.get_by_text("Invited")).to_be_visible()
    expect(page.locator("[data-copy-text]")).to_have_count(0)
