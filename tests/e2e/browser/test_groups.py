"""Group pages in Chromium: by mouse, by keyboard and without JavaScript."""

import json
import re
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from tests.support import browser as driving

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(240),
]
OPEN_ALL = "document.querySelectorAll('main details').forEach(element => { element.open = true })"
PAGES = [
    "/groups",
    "/groups/mcp:demo",
    "/groups/research",
    "/groups/research/edit",
    "/groups/research?q=nothing-like-it",
    "/groups/research?tab=json",
    "/groups/research?tab=curl",
    "/groups/research?tab=change",
    "/groups/all/compare?group=research&group=mcp:demo",
    "/groups/bare",
]
LONG = "A-group-with-a-very-long-name-that-nobody-would-break-" + "x" * 60


@pytest.fixture(scope="package")
def grouped(browser, populated, cookies):
    """The shared installation with a mixed group and an empty group, created in the browser."""
    context = browser.new_context(base_url=populated.url, storage_state=cookies)
    page = context.new_page()
    for group_id, name in (("research", "Research"), ("bare", LONG)):
        page.goto("/groups")
        page.get_by_text("Create group").first.click()
        page.get_by_label("Display name").fill(name)
        page.get_by_label("Id", exact=True).fill(group_id)
        page.get_by_role("button", name="Create group").click()
        expect(page.get_by_text(f"Created {group_id}.")).to_be_visible()
    page.goto("/groups/research?q=e")
    for box in page.locator("#board-list [data-select-row]").all()[:12]:
        box.check()
    page.get_by_role("button", name="Add to group").click()
    expect(page.get_by_text("Added 12 tools to research.")).to_be_visible()
    context.close()
    return populated


def test_the_id_of_a_new_group_is_suggested_from_its_name(grouped, open_page):
    page = open_page()
    page.goto("/groups")
    page.get_by_text("Create group").first.click()
    page.get_by_label("Display name").press_sequentially("Café & Tickets!")
    expect(page.get_by_label("Id", exact=True)).to_have_value("cafe-tickets")
    page.get_by_label("Id", exact=True).fill("mine")
    page.get_by_label("Display name").fill("Other")
    expect(page.get_by_label("Id", exact=True)).to_have_value("mine")


def rows_of_kind(page, kind):
    return page.locator(f"[data-given={kind}]").evaluate_all("all => all.map(r => r.dataset.row)")


def row(page, name):
    return page.locator(f'[data-row="{name}"]')


def expect_announced(page, text):
    expect(page.locator("#live")).to_have_text(re.compile(text))


def test_a_toggle_moves_the_row_keeps_the_focus_and_is_undone_with_a_key(grouped, open_page):
    page = open_page()
    page.goto("/groups/research")
    name = rows_of_kind(page, "demand")[1]
    box = page.get_by_role("switch", name=f"Preload {name}")

    box.focus()
    page.keyboard.press("Space")

    expect(page.locator(f'[data-given=preload][data-row="{name}"]')).to_be_visible()
    expect_announced(page, f"{name} is preloaded in research, now about [0-9,]+ tokens.")
    expect(page.get_by_role("switch", name=f"Preload {name}")).to_be_focused()
    page.keyboard.press("u")
    expect(page.locator(f'[data-given=demand][data-row="{name}"]')).to_be_visible()
    assert rows_of_kind(page, "preload") == []


def test_tools_are_selected_with_keys_and_added_with_m_and_a_group_id(grouped, open_page):
    page = open_page()
    page.goto("/groups/research?q=a&in=no")
    expect(page.locator("[data-select-bar]")).to_be_hidden()
    picks = page.locator("[data-pick]").evaluate_all("all => all.map(r => r.dataset.pick)")[:2]
    for key in "jxjx":
        page.keyboard.press(key)
    expect(page.locator("[data-select-count]")).to_have_text("2 selected")

    page.keyboard.press("m")
    expect(page.get_by_label("Add to group", exact=False).first).to_be_focused()
    page.keyboard.type("bare")
    page.keyboard.press("Enter")

    expect_announced(page, "Added 2 tools to bare, now about [0-9,]+ tokens.")
    assert page.url.endswith("/groups/research?q=a&in=no")
    other = open_page()
    other.goto("/groups/bare")
    assert rows_of_kind(other, "demand") == sorted(picks)
    page.keyboard.press("u")
    expect_announced(page, "Undone.")


def test_a_selection_from_two_searches_is_added_together(grouped, open_page):
    page = open_page()
    page.goto("/groups/bare")
    for query, name in (("base64", "demo__encode_base64"), ("uuid", "demo__make_uuid")):
        page.get_by_label("Search tools").press_sequentially(query)
        expect(page.get_by_label(f"Select {name}", exact=True)).to_be_visible()
        page.get_by_label(f"Select {name}", exact=True).check()
        page.get_by_label("Search tools").fill("")
        expect(page).to_have_url(re.compile("/groups/bare$"))
    assert page.locator("#board-list").count() == 1
    page.locator("#board-server").select_option("weather")
    expect(page.locator("[data-pick]").first).to_have_attribute(
        "data-pick", re.compile("weather__")
    )
    assert page.locator("#board-list").count() == 1
    expect(page.locator("[data-select-count]")).to_have_text("2 selected")
    expect(page.locator("[data-select-elsewhere]")).to_contain_text("demo__make_uuid")

    page.get_by_role("button", name="Add to group").click()

    expect_announced(page, "Added 2 tools to bare")
    assert rows_of_kind(page, "demand") == ["demo__encode_base64", "demo__make_uuid"]
    expect(page.locator("[data-select-bar]")).to_be_hidden()
    page.get_by_role("button", name="Undo").click()
    expect_announced(page, "Undone.")


def test_x_on_a_member_selects_it_without_changing_its_preload(grouped, open_page):
    page = open_page()
    page.goto("/groups/research?in=yes")
    before = rows_of_kind(page, "demand")
    row(page, before[0]).locator("[data-open]").focus()
    page.keyboard.press("x")
    expect(page.get_by_label(f"Select {before[0]}", exact=True)).to_be_checked()
    expect(page.locator("[data-select-count]")).to_have_text("1 selected")
    page.keyboard.press("j")
    page.keyboard.press("Shift+X")
    expect(page.locator("[data-select-count]")).to_have_text("2 selected")
    page.keyboard.press("x")
    expect(page.locator("[data-select-count]")).to_have_text("1 selected")
    assert (rows_of_kind(page, "preload"), rows_of_kind(page, "demand")) == ([], before)


def test_a_row_is_ordered_and_moved_with_its_menu(grouped, open_page):
    page = open_page()
    page.goto("/groups/research")
    before = rows_of_kind(page, "demand")
    second = before[1]

    row(page, second).locator("summary").click()
    page.get_by_role("button", name=f"Move up {second}").click()
    expect_announced(page, f"Moved {second} up")
    assert rows_of_kind(page, "demand")[:2] == [second, before[0]]
    assert page.evaluate("document.activeElement.closest('[data-row]').dataset.row") == second

    page.keyboard.press("m")
    page.keyboard.type("bare")
    page.keyboard.press("Enter")
    expect_announced(page, f"Moved {second} to bare, now about")
    assert second not in rows_of_kind(page, "demand")
    assert page.evaluate("document.activeElement.closest('[data-row]').dataset.row") == before[0]
    page.keyboard.press("u")
    expect(row(page, second)).to_be_visible()


def test_a_row_is_dragged_from_one_section_to_the_other(grouped, open_page):
    page = open_page()
    page.goto("/groups/research")
    name = rows_of_kind(page, "demand")[0]

    row(page, name).drag_to(page.locator("[data-drop=preload]"))

    expect(page.locator(f'[data-given=preload][data-row="{name}"]')).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(f'[data-given=demand][data-row="{name}"]')).to_be_visible()


def test_the_preview_is_updated_and_its_tab_is_in_the_url(grouped, open_page):
    page = open_page()
    page.goto("/groups/research")
    name = rows_of_kind(page, "demand")[0]
    page.get_by_role("link", name="JSON", exact=True).click()
    expect(page).to_have_url(re.compile("tab=json"))
    expect(page.locator("#board-preview")).to_contain_text('"etag"')

    page.get_by_role("switch", name=f"Preload {name}").check()

    expect(page.locator("#board-preview")).to_contain_text(f'"name": "{name}"')
    page.get_by_role("link", name="Change", exact=True).click()
    expect(page.locator("#board-preview ins").first).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(f'[data-given=demand][data-row="{name}"]')).to_be_visible()


def test_two_admins_on_one_board_see_each_others_changes(grouped, open_page, browser):
    mine, theirs = open_page(), open_page(storage_state=second_admin(browser, grouped))
    mine.goto("/groups/research")
    theirs.goto("/groups/research")
    first, second = rows_of_kind(mine, "demand")[:2]

    theirs.get_by_role("switch", name=f"Preload {first}").check()
    expect_announced(theirs, "is preloaded")
    mine.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(mine.locator(".concurrent-edits")).to_contain_text(
        f"changed the preloads of group research: {first}"
    )
    mine.get_by_role("switch", name=f"Preload {first}").check()
    expect(row(mine, first)).to_contain_text(f"bea@example.org changed {first} in the meantime.")
    mine.get_by_role("switch", name=f"Preload {second}").check()
    expect(mine.locator(f'[data-given=preload][data-row="{second}"]')).to_be_visible()
    assert sorted(rows_of_kind(mine, "preload")) == sorted([first, second])
    for name in (first, second):
        mine.get_by_role("switch", name=f"Preload {name}").uncheck()
        expect(mine.locator(f'[data-given=demand][data-row="{name}"]')).to_be_visible()


def second_admin(browser, toolcrib):
    """Invite another admin, accept the invitation, and return the cookies."""
    invited = toolcrib.command("invite", "bea@example.org", "--role", "admin", "--json")
    link = urlsplit(json.loads(invited.stdout)["link"])
    context = browser.new_context(base_url=toolcrib.url)
    page = context.new_page()
    page.goto(link.path)
    for field in page.locator("input[type=password]").all():
        field.fill(driving.PASSWORD)
    page.get_by_role("button", name="Set password").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    state = context.storage_state()
    context.close()
    return state


def test_everything_works_without_javascript(grouped, open_page):
    page = open_page(java_script_enabled=False)
    page.goto("/groups/bare")
    page.get_by_label("Search tools").fill("base64")
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_label("Select demo__encode_base64").check()
    page.get_by_role("button", name="Add to group").click()
    assert rows_of_kind(page, "demand") == ["demo__encode_base64"]

    page.goto("/groups/bare")
    page.get_by_role("switch", name="Preload demo__encode_base64").check()
    page.get_by_role("button", name="Save").click()
    assert rows_of_kind(page, "preload") == ["demo__encode_base64"]
    page.get_by_role("button", name="Undo").click()
    assert rows_of_kind(page, "preload") == []

    page.get_by_role("link", name="Settings").last.click()
    page.get_by_label("Preload tools by default").check()
    page.get_by_role("button", name="Save settings").click()
    page.goto("/groups/bare")
    expect(page.get_by_text("Default: preloaded.")).to_be_visible()
    page.goto("/groups/bare/edit")
    page.get_by_label("Preload tools by default").uncheck()
    page.get_by_role("button", name="Save settings").click()

    page.get_by_label("to confirm").fill("bare")
    page.get_by_role("button", name="Delete group").click()
    expect(page.get_by_text("Deleted bare.")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_role("heading", name="bare", exact=True)).to_be_visible()
    row(page, "demo__encode_base64").locator("summary").click()
    page.get_by_role("button", name="Remove demo__encode_base64").click()
    expect(page.get_by_text("This group is empty")).to_be_visible()


@pytest.mark.needs_npm
@pytest.mark.parametrize("theme", ["light"])  # test_every_page.py covers both
def test_no_page_has_accessibility_violations(theme, grouped, open_page):
    page = open_page(color_scheme=theme, bypass_csp=True)
    violations = []
    for path in PAGES:
        page.goto(path)
        page.evaluate(OPEN_ALL)
        violations += driving.run_axe(page)
    page.goto("/groups/research")
    page.locator("[data-pick] input").first.check()
    page.locator("[data-given=demand] input[name=on]").first.check()
    expect(page.locator(".toast")).to_be_visible()
    violations += driving.run_axe(page)
    page.get_by_role("button", name="Undo").click()

    assert "\n".join(violations) == ""


def test_no_page_scrolls_horizontally_at_320_pixels(grouped, open_page):
    page = open_page(width=320, height=640)
    wide = []
    for path in PAGES:
        page.goto(path)
        page.evaluate(OPEN_ALL)
        name = re.sub(r"\W+", "-", path).strip("-")
        page.screenshot(path=driving.SCREENSHOTS / f"{name}-320.png", full_page=True)
        if driving.scrolls_sideways(page):
            wide.append(path)

    assert wide == []
