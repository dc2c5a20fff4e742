"""Keyboard shortcuts in Chromium: where they work and where they do not."""

import re

import pytest
from playwright.sync_api import expect

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(240),
]


def test_g_and_a_letter_open_every_page_of_the_navigation(populated, open_page):
    page = open_page()
    page.goto("/")
    links = page.locator(".sidebar [data-go]")
    pages = [(link.get_attribute("data-go"), link.get_attribute("href")) for link in links.all()]
    assert len({key for key, _ in pages}) == len(pages) >= 7
    for key, path in pages:
        page.goto("/palette")
        page.keyboard.press("g")
        page.keyboard.press(key)
        expect(page).to_have_url(re.compile(re.escape(path) + "(/general)?$"))
        expect(page.locator(".sidebar a[aria-current=page]")).to_have_attribute("data-go", key)


def test_question_mark_lists_the_shortcuts_including_those_of_the_page(populated, open_page):
    page = open_page()
    page.goto("/servers")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(dialog).to_contain_text("Show shortcuts")
    expect(dialog.locator("[data-page-keys] div", has_text="Add server")).to_contain_text("a")
    for link in page.locator(".sidebar [data-go]").all():
        keys = f"g {link.get_attribute('data-go')}"
        expect(dialog.locator("dd", has_text=re.compile(f"^{re.escape(keys)}$"))).to_have_count(1)
    page.keyboard.press("g")
    page.keyboard.press("t")
    expect(page).to_have_url(re.compile("/servers$"))
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_slash_focuses_the_search_and_shortcuts_are_off_while_typing(populated, open_page):
    page = open_page()
    page.goto("/tools")
    page.keyboard.press("/")
    field = page.locator("[data-search]").first
    expect(field).to_be_focused()
    page.keyboard.type("gt?xj.u")
    expect(field).to_have_value("gt?xj.u")
    expect(page).to_have_url(re.compile("/tools"))
    expect(page.locator("dialog[open]")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(field).not_to_be_focused()


def test_rows_are_traversed_opened_and_selected_in_ranges(populated, open_page):
    page = open_page()
    page.goto("/tools")
    rows = page.locator("[data-rows] > *")
    page.keyboard.press("j")
    expect(rows.nth(0).locator("th a")).to_be_focused()
    page.keyboard.press("x")
    for _ in range(3):
        page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Shift+X")
    picked = [box.is_checked() for box in page.locator("[data-select-row]").all()[:4]]
    assert picked == [True, True, True, False]
    expect(page.locator("[data-select-count]").first).to_have_text("3 selected")

    address = rows.nth(2).locator("th a").get_attribute("href")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(re.escape(address) + "(/general)?$"))


def test_a_full_stop_opens_the_actions_of_the_row_and_escape_closes_them(populated, open_page):
    page = open_page()
    page.goto("/patterns/")
    row = page.locator("#tables [data-rows] > *").first
    row.locator("th a").focus()
    page.keyboard.press(".")
    menu = row.locator("details[data-menu]")
    expect(menu).to_have_attribute("open", "")
    expect(menu.locator(".menu-body :is(a, button)").first).to_be_focused()
    page.keyboard.press("Escape")
    expect(menu).not_to_have_attribute("open", "")
    expect(menu.locator("summary")).to_be_focused()


def test_shortcuts_that_are_off_do_nothing_and_the_palette_still_opens(populated, open_page):
    page = open_page()
    page.goto("/servers")
    page.evaluate("document.documentElement.dataset.keys = 'off'")
    for key in ("?", "j", "/", "g", "t"):
        page.keyboard.press(key)
    expect(page).to_have_url(re.compile("/servers$"))
    expect(page.locator("dialog[open]")).to_have_count(0)
    assert page.evaluate("document.activeElement === document.body")
    page.keyboard.press("Control+k")
    expect(page.locator("#palette")).to_be_visible()


# --- Polls --------------------------------------------------------------------------------------


def test_a_failing_poll_pauses_and_can_be_resumed(populated, browser, cookies):
    context = browser.new_context(base_url=populated.url, storage_state=cookies)
    page = context.new_page()
    page.clock.install()
    page.goto("/groups/mcp:weather")
    notice = page.locator(".concurrent-edits")
    note, resume = notice.locator("[data-poll-note]"), notice.locator("[data-poll-resume]")
    expect(resume).to_be_hidden()
    page.route("**/changes*", lambda route: route.abort())
    for _ in range(5):
        expect(note).to_be_empty()
        with page.expect_event("requestfailed"):
            page.clock.run_for(61_000)
    expect(note).to_have_text("Paused after five failed attempts.")
    expect(resume).to_be_visible()

    page.unroute("**/changes*")
    with page.expect_event("requestfinished"):
        resume.click()
    expect(resume).to_be_hidden()
    expect(note).to_be_empty()
    context.close()


# --- The toast ----------------------------------------------------------------------------------

TOAST = """
const toast = document.createElement("div");
toast.className = "toast";
toast.dataset.toast = "";
toast.innerHTML = document.querySelector("#states .toast").innerHTML;
toast.querySelector("form").action = "#pressed";
toast.querySelector("form").method = "get";
document.getElementById("toasts").append(toast);
"""


@pytest.fixture
def toasted(populated, open_page):
    """Return a page with a toast and a controllable clock."""
    page = open_page()
    page.clock.install()
    page.goto("/patterns/")
    page.evaluate(TOAST)
    expect(page.locator("#toasts .toast")).to_be_visible()
    return page


def test_a_toast_disappears_after_ten_seconds(toasted):
    toasted.clock.run_for(9_000)
    expect(toasted.locator("#toasts .toast")).to_have_count(1)
    toasted.clock.run_for(3_000)
    expect(toasted.locator("#toasts .toast")).to_have_count(0)


@pytest.mark.parametrize("how", ["hover", "focus"])
def test_a_toast_stays_while_it_has_hover_or_focus(how, toasted):
    toast = toasted.locator("#toasts .toast")
    if how == "hover":
        toast.hover()
    else:
        toast.get_by_role("button", name="Undo").focus()
    toasted.clock.run_for(60_000)
    expect(toast).to_have_count(1)


def test_a_toast_is_dismissed_and_undone_by_key(toasted):
    toast = toasted.locator("#toasts .toast")
    toasted.keyboard.press("u")
    expect(toasted).to_have_url(re.compile("#pressed|\\?"))
    toasted.evaluate(TOAST)
    toast.get_by_role("button", name="Dismiss").click()
    expect(toast).to_have_count(0)


def test_below_900_pixels_the_sidebar_is_a_disclosure_at_the_top(populated, open_page):
    page = open_page(width=899)
    page.goto("/servers")
    expect(page.locator(".sidebar")).to_be_hidden()
    summary = page.locator(".menu-bar > summary")
    page.keyboard.press("Tab")  # the skip link
    page.keyboard.press("Tab")
    expect(summary).to_be_focused()
    page.keyboard.press("Enter")
    page.locator(".menu-bar").get_by_role("link", name="Tools").click()
    expect(page).to_have_url(re.compile("/tools$"))
