"""Agent pages in Chromium, against a real installation."""

import re

import pytest
from playwright.sync_api import Error, expect

from tests.support import browser as driving

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(240),
]

PAGES = [
    "/agents",
    "/agents/new/add",
    "/agents/scout",
    "/agents/scout/keys",
    "/agents/scout/connect",
    "/agents/scout/settings",
    "/agents/everything",
    "/agents/drifter",
    "/agents/drifter/settings",
    "/agents/drifter/keys",
    "/agents/nobody-of-this-name",
]


@pytest.fixture(scope="module")
def with_agents(populated):
    """The shared installation with three agents: some groups, all groups, none (disabled)."""
    groups = ["mcp:weather", "mcp:demo"]
    for body in (
        {"name": "scout", "groups": groups, "description": "Looks things up for the desk."},
        {"name": "everything", "all_groups": True},
        {"name": "drifter"},
    ):
        assert populated.api("POST", "/agents", body)[0] == 201
    for name in ("laptop", "server"):
        key = populated.api("POST", "/agents/scout/keys", {"name": name})[1]
    populated.api("POST", f"/keys/{key['id']}/revoke")
    populated.api("POST", "/agents/scout/keys", {"name": "a month", "days": 30})
    populated.api("PATCH", "/agents/drifter", {"enabled": False})
    yield populated
    for name in ("scout", "everything", "drifter"):
        populated.api("DELETE", f"/agents/{name}")


def test_create_an_agent_copy_its_key_and_order_its_groups(populated, open_page):
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    page.goto("/groups")
    page.keyboard.press("g")
    page.keyboard.press("a")
    expect(page.get_by_label("Name", exact=True)).to_be_focused()
    page.get_by_label("Name", exact=True).fill("ranger")
    page.get_by_label("mcp:weather").check()
    page.get_by_role("button", name="Create agent and key").click()

    expect(page.get_by_role("heading", name="Created ranger")).to_be_focused()
    key = page.locator(".new-key code").inner_text()
    assert re.fullmatch(r"tcb_[\w-]{43}", key)
    page.locator(".new-key").get_by_role("button", name="Copy").click()
    expect(page.locator("#live")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == key
    assert key not in page.url
    assert key not in page.evaluate("JSON.stringify([localStorage, sessionStorage])")
    assert key not in str(page.context.cookies())
    expect(page.locator("main")).to_contain_text(f"export TOOLCRIB_KEY={key}")

    page.get_by_role("link", name="I have stored the key").click()
    expect(page).to_have_url(f"{populated.url}/agents/ranger")
    with pytest.raises(Error, match="ERR_CACHE_MISS"):  # the response was not cached
        page.go_back()
    page = page.context.new_page()
    page.goto("/agents/ranger")
    page.get_by_label("Group", exact=True).select_option("mcp:demo")
    page.get_by_role("button", name="Add group").click()
    expect(page.get_by_text("Added mcp:demo to ranger.")).to_be_visible()
    page.get_by_role("button", name="Up mcp:demo").click()
    expect(page.locator("tbody th a")).to_have_text(["mcp:demo", "mcp:weather"])
    expect(page.get_by_role("button", name="Up mcp:demo")).to_be_disabled()

    page.goto("/agents/ranger/keys")
    page.get_by_role("group").filter(has_text="Revoke").locator("summary").click()
    expect(page.get_by_text("ranger has 0 open sessions.")).to_be_visible()
    page.get_by_role("button", name="Revoke key").click()
    expect(page.get_by_text("Requests with this key are rejected.")).to_be_visible()
    page.goto("/agents/ranger/settings")
    page.get_by_label("to confirm").fill("ranger")
    page.get_by_role("button", name="Delete agent").click()
    expect(page.get_by_text("Deleted ranger")).to_be_visible()


def test_an_invalid_form_moves_the_focus_to_the_errors(with_agents, open_page):
    page = open_page()
    page.goto("/agents/new/add")
    page.get_by_label("Name", exact=True).fill("scout")
    page.get_by_role("button", name="Create agent").click()

    expect(page.locator(".error-summary")).to_be_focused()
    expect(page.locator(".error-summary")).to_contain_text("An agent named scout already exists")
    expect(page.get_by_label("Name", exact=True)).to_have_value("scout")


@pytest.mark.needs_npm
@pytest.mark.parametrize("theme", ["light"])  # test_every_page.py covers both
def test_axe_finds_nothing_on_any_page(theme, with_agents, open_page):
    page = open_page(color_scheme=theme, bypass_csp=True)
    violations = []
    for path in PAGES:
        page.goto(path)
        for details in page.locator("main details").all():
            details.locator("summary").click()
        violations += driving.run_axe(page)
    page.goto("/agents/scout/keys")
    page.get_by_role("button", name="Create key").click()
    page.locator(".new-key").wait_for()
    violations += driving.run_axe(page)

    assert violations == []


def test_no_page_scrolls_sideways_at_320_pixels(with_agents, open_page):
    page = open_page(width=320, height=640)
    wide = []
    for path in PAGES:
        page.goto(path)
        for details in page.locator("main details").all():
            details.locator("summary").click()
        if driving.scrolls_sideways(page):
            wide.append(path)
    page.goto("/agents/scout/keys")
    page.get_by_role("button", name="Create key").click()
    page.locator(".new-key").wait_for()
    if driving.scrolls_sideways(page):
        wide.append("the new key")

    assert wide == []


def test_everything_works_without_javascript(populated, open_page):
    page = open_page(java_script_enabled=False)
    page.goto("/agents/new/add")
    page.get_by_label("Name", exact=True).fill("plain")
    page.get_by_role("button", name="Create agent").click()
    first = page.locator(".new-key code").inner_text()
    page.get_by_role("link", name="I have stored the key").click()
    page.get_by_label("Group", exact=True).select_option("mcp:demo")
    page.get_by_role("button", name="Add group").click()
    expect(page.get_by_text("Added mcp:demo to plain.")).to_be_visible()

    page.goto("/agents/plain/keys")
    page.get_by_role("group").filter(has_text="Rotate").locator("summary").click()
    page.get_by_role("button", name="Rotate key").click()
    assert page.locator(".new-key code").inner_text() != first
    page.goto("/agents/plain/settings")
    page.get_by_role("button", name="Disable agent").click()
    expect(page.get_by_text("Disabled plain.")).to_be_visible()
    page.get_by_label("to confirm").fill("plain")
    page.get_by_role("button", name="Delete agent").click()
    expect(page.get_by_text("Deleted plain")).to_be_visible()
