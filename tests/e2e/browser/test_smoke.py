"""One path through the product in a real Chromium: setup, servers, group board, session."""

import re

import pytest
from playwright.sync_api import expect

from tests.support import browser as driving

pytestmark = [pytest.mark.needs_chromium, pytest.mark.timeout(240), pytest.mark.smoke]


def test_an_admin_sets_up_adds_a_server_edits_a_group_and_reads_a_session(fresh, browser):
    context = browser.new_context(base_url=fresh.url)
    console_errors = driving.collect_console_errors(context)
    page = context.new_page()
    driving.set_up(page, fresh)
    page.get_by_role("button", name="Use the demo server").click()
    page.get_by_role("button", name="Create groups").click(timeout=driving.SYNC_TIMEOUT_MS)

    expect(page).to_have_url(f"{fresh.url}/groups/mcp:demo")
    row = page.locator("[data-given=demand]").first
    name = row.get_attribute("data-row")
    row.get_by_role("switch", name=f"Preload {name}").check()
    expect(page.locator(f'[data-given=preload][data-row="{name}"]')).to_be_visible()

    page.get_by_role("button", name="Connect an agent").click()
    key = page.locator(".new-key code").inner_text()
    status, opened = fresh.api("POST", "/sessions", {}, key)
    assert status == 201
    assert name in [tool["name"] for tool in opened["tools"]]

    page.goto("/servers")
    expect(page.get_by_role("link", name="demo", exact=True).first).to_be_visible()
    page.goto("/sessions")
    page.locator(f'a[href$="/sessions/{opened["id"]}"]').first.click()
    expect(page).to_have_url(re.compile(f"/sessions/{opened['id']}$"))
    expect(page.get_by_role("heading", level=1)).to_contain_text("scout")
    context.close()
    assert console_errors == []
