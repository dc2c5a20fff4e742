"""The pages of groups in a real Chromium: by mouse, by keyboard and without JavaScript."""

import re

import pytest
from playwright.sync_api import expect

from tests.browser import driving

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.xdist_group("browser"),
    pytest.mark.timeout(240),
]
OPEN_ALL = "document.querySelectorAll('main details').forEach(one => { one.open = true })"
PAGES = [
    "/groups",
    "/groups/mcp:demo",
    "/groups/research",
    "/groups/research?q=nothing-like-it",
    "/groups/bare",
]
LONG = "A-group-with-a-very-long-name-that-nobody-would-break-" + "x" * 60


@pytest.fixture(scope="package")
def grouped(browser, filled, cookies):
    """The shared installation with a mixed group made on its pages, and an empty one."""
    context = browser.new_context(base_url=filled.url, storage_state=cookies)
    page = context.new_page()
    for group_id, name in (("research", "Research"), ("bare", LONG)):
        page.goto("/groups")
        page.get_by_text("Create group").first.click()
        page.get_by_label("Display name").fill(name)
        page.get_by_label("Id", exact=True).fill(group_id)
        page.get_by_role("button", name="Create group").click()
        expect(page.get_by_text(f"Made {group_id}.")).to_be_visible()
    page.goto("/groups/research?q=e")
    for box in page.locator("#add input[type=checkbox]").all()[:12]:
        box.check()
    page.get_by_role("button", name="Add to group").click()
    expect(page.get_by_text("Added 12 tools to research.")).to_be_visible()
    context.close()
    return filled


def names(page):
    return page.locator(".members tbody th a").all_inner_texts()


def test_a_group_is_filled_ordered_and_preloaded_and_each_act_undone(grouped, open_page):
    page = open_page()
    page.goto("/groups/research")
    before = names(page)
    second = before[1]

    page.get_by_role("button", name=f"Move {second} up").click()
    expect(page.get_by_text(f"Moved {second} up.")).to_be_visible()
    assert names(page)[:2] == [second, before[0]]
    page.keyboard.press("u")
    expect(page.get_by_text("Undone.", exact=True)).to_be_visible()
    assert names(page) == before

    given = page.get_by_role("group", name=f"How {second} is given")
    given.get_by_role("button", name="Preload").click()
    expect(given.get_by_role("button", name="Preload")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Undo").click()
    expect(given.get_by_role("button", name="Default")).to_have_attribute("aria-pressed", "true")

    page.get_by_role("button", name=f"Remove {second}").click()
    expect(page.get_by_text(f"Took {second} out of research.")).to_be_visible()
    assert second not in names(page)
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_role("link", name=second, exact=True)).to_be_visible()
    assert names(page) == before


def test_members_are_picked_by_keys_and_set_together(grouped, open_page):
    page = open_page()
    page.goto("/groups/research")
    expect(page.locator("[data-select-bar]")).to_be_hidden()
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.locator("[data-select-count]")).to_have_text("2 selected")
    page.get_by_role("button", name="Preload always").click()
    expect(page.get_by_text("2 tools: preloaded.")).to_be_visible()
    expect(page.locator('.segment[name=always][aria-pressed="true"]')).to_have_count(2)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator('.segment[name=always][aria-pressed="true"]')).to_have_count(0)


def test_everything_works_without_javascript(grouped, open_page):
    page = open_page(java_script_enabled=False)
    page.goto("/groups/bare")
    page.get_by_label("Search tools to add").fill("base64")
    page.get_by_role("button", name="Find tools").click()
    page.get_by_label("demo__encode_base64").check()
    page.get_by_role("button", name="Add to group").click()
    expect(page.locator(".members tbody tr")).to_have_count(1)

    page.get_by_label("Preload its tools").check()
    page.get_by_role("button", name="Save settings").click()
    expect(page.get_by_text("By default preloaded.")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_text("By default on demand.")).to_be_visible()

    page.get_by_label("to confirm").fill("bare")
    page.get_by_role("button", name="Delete group").click()
    expect(page.get_by_text("Deleted bare.")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_role("heading", name="bare")).to_be_visible()
    page.get_by_role("button", name="Remove demo__encode_base64").click()
    expect(page.get_by_text("This group is empty")).to_be_visible()


@pytest.mark.needs_npm
@pytest.mark.parametrize("theme", driving.THEMES)
def test_axe_finds_nothing_on_any_page(theme, grouped, open_page):
    page = open_page(color_scheme=theme, bypass_csp=True)
    found = []
    for path in PAGES:
        page.goto(path)
        page.evaluate(OPEN_ALL)
        found += driving.axe(page)
    page.goto("/groups/research")
    page.get_by_role("button", name="down").first.click()
    expect(page.locator(".toast")).to_be_visible()
    found += driving.axe(page)
    page.get_by_role("button", name="Undo").click()

    assert "\n".join(found) == ""


def test_no_page_scrolls_sideways_at_320_pixels(grouped, open_page):
    page = open_page(width=320, height=640)
    wide = []
    for path in PAGES:
        page.goto(path)
        page.evaluate(OPEN_ALL)
        name = re.sub(r"\W+", "-", path).strip("-")
        page.screenshot(path=driving.PICTURES / f"{name}-320.png", full_page=True)
        if driving.scrolls_sideways(page):
            wide.append(path)

    assert wide == []
