"""Server pages in a real Chromium, against a real installation."""

import re

import pytest
from playwright.sync_api import expect

from tests.support import browser as driving

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(240),
]

PAGES = [
    "/",
    "/servers",
    "/servers?state=failing",
    "/servers?q=nothing-like-it",
    "/servers/add",
    "/servers/add?source=url",
    "/servers/add?source=command",
    "/servers/add?source=demo",
    "/servers/weather",
    "/servers/weather/tools",
    "/servers/weather/syncs",
    "/servers/weather/settings",
    "/servers/demo/settings",
    "/servers/nobody",
    "/servers/nobody/syncs",
    "/servers/no-such-server",
    "/tools",
    "/groups",
    "/audit",
    "/patterns/",
]


def test_from_the_setup_link_to_the_demo_tools(fresh, browser):
    context = browser.new_context(base_url=fresh.url, viewport={"width": 1280, "height": 800})
    console_errors = driving.collect_console_errors(context)
    page = context.new_page()
    driving.set_up(page, fresh)
    expect(page.get_by_label("Paste your mcp.json")).to_be_focused()
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")

    page.goto("/servers")  # the setup card connects the demo server directly
    page.get_by_role("button", name="Use the demo server").click()
    expect(page.get_by_role("heading", name="2 Check")).to_be_focused()
    expect(page.get_by_text("Runs a command on this machine")).to_be_visible()
    page.get_by_label("Allow this command").check()
    page.get_by_role("button", name=re.compile("^Connect")).click()

    expect(page.get_by_role("heading", name="3 Connect")).to_be_focused()
    expect(page.locator(".progress")).to_contain_text(
        re.compile(r"24 tools · ≈[\d,]+ tokens"), timeout=driving.SYNC_TIMEOUT_MS
    )
    expect(page.get_by_text("with all schemas")).to_be_visible()
    expect(page.locator("#live")).to_contain_text("demo 24 tools")
    page.get_by_role("link", name="Show tools").click()
    expect(page.locator("main")).to_contain_text("count_words")
    context.close()
    assert console_errors == []


def test_pasting_opens_the_check_and_a_failing_server_does_not_affect_the_others(
    fresh, browser, weather_url
):
    context = browser.new_context(base_url=fresh.url)
    console_errors = driving.collect_console_errors(context)
    page = context.new_page()
    driving.set_up(page, fresh)
    # Simulate the paste: the clipboard is shared by all running browsers.
    box = page.get_by_label("Paste your mcp.json")
    box.fill(driving.three_servers(weather_url))
    box.dispatch_event("paste")

    expect(page.get_by_role("heading", name="2 Check")).to_be_focused()
    expect(page.get_by_text("1 secret found and masked, 1 command to allow.")).to_be_visible()
    page.get_by_label("Allow this command").check()
    page.get_by_role("button", name=re.compile("^Connect")).click()

    rows = page.locator(".progresses > .progress")
    expect(rows).to_have_count(3)
    expect(page.get_by_text("with all schemas")).to_be_visible(timeout=driving.SYNC_TIMEOUT_MS)
    expect(rows.filter(has_text="weather")).to_contain_text("7 tools")
    expect(rows.filter(has_text="demo")).to_contain_text("24 tools")
    expect(rows.filter(has_text="nobody")).to_contain_text("refused")
    rows.filter(has_text="nobody").get_by_role("button", name="Retry").click()
    expect(page).to_have_url(f"{fresh.url}/servers/add/progress")
    expect(rows.filter(has_text="nobody")).to_contain_text(
        "Failed", timeout=driving.SYNC_TIMEOUT_MS
    )
    context.close()
    assert console_errors == []


def test_a_json_syntax_error_is_shown_beside_the_text(populated, open_page):
    page = open_page()
    page.goto("/servers/add")
    box = page.get_by_label("Paste your mcp.json")
    box.fill('{\n "mcpServers": {\n  "a" 1')
    page.get_by_role("button", name="Check servers").click()

    expect(page.locator("#source-problem")).to_contain_text("Line 3, column")
    expect(box).to_have_value(re.compile("mcpServers"))


def test_the_list_is_navigated_filtered_and_changed_by_keyboard(populated, open_page):
    page = open_page()
    page.goto("/servers")
    page.keyboard.press("j")
    expect(page.get_by_role("link", name="demo")).to_be_focused()
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.get_by_role("link", name="weather")).to_be_focused()
    page.keyboard.press("x")
    expect(page.locator("[data-select-count]")).to_have_text("1 selected")
    page.get_by_role("link", name="weather").focus()
    page.keyboard.press("s")
    expect(page.get_by_role("row", name="weather")).to_contain_text("just now")

    page.keyboard.press("/")
    page.keyboard.type("wea")
    expect(page.get_by_role("row")).to_have_count(2)
    expect(page).to_have_url(re.compile(r"\?.*q=wea"))
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("d")
    expect(page.get_by_text("Disabled weather.")).to_be_visible()
    page.get_by_role("button", name="Enable weather").click()
    expect(page.get_by_text("Enabled weather.")).to_be_visible()

    page.goto("/servers")
    page.keyboard.press("a")
    expect(page.get_by_label("Paste your mcp.json")).to_be_focused()
    page.goto("/servers/weather")
    page.keyboard.press("g")
    page.keyboard.press("s")
    expect(page).to_have_url(f"{populated.url}/servers")


def test_a_sync_updates_the_page_and_a_connection_test_stays_on_it(populated, open_page):
    page = open_page()
    polls = []
    page.on("request", lambda request: polls.append(request) if "/status?" in request.url else None)
    page.goto("/servers/weather/syncs")
    before = page.locator(".runs > li").count()
    page.get_by_role("button", name="Sync server").click()
    expect(page.locator("#live")).to_contain_text("weather synced", timeout=driving.SYNC_TIMEOUT_MS)
    expect(page.locator(".runs > li")).to_have_count(before + 1)
    assert polls
    assert all(request.headers.get("x-poll") for request in polls)  # polling keeps no session alive

    page.get_by_role("button", name="Test connection").click()
    expect(page.locator("#tested")).to_contain_text("Connected. 7 tools found.")
    expect(page).to_have_url(f"{populated.url}/servers/weather/syncs")


@pytest.mark.needs_npm
@pytest.mark.parametrize("theme", ["light"])  # test_every_page.py covers both
def test_axe_finds_nothing_on_any_page(theme, populated, open_page):
    page = open_page(color_scheme=theme, bypass_csp=True)
    violations = []
    for path in PAGES:
        page.goto(path)
        for details in page.locator(".runs details").all()[:1]:
            details.locator("summary").click()
        violations += driving.run_axe(page)
    page.goto("/servers/add")
    page.get_by_label("Paste your mcp.json").fill(
        '{"a": {"url": "https://a.example/${X}/mcp"}, "b": {"command": "npx"}, "c": {}}'
    )
    page.get_by_role("button", name="Check servers").click()
    page.wait_for_url("**/servers/add/check")
    violations += driving.run_axe(page)

    assert violations == []


@pytest.mark.needs_npm
@pytest.mark.parametrize("theme", driving.THEMES)
def test_axe_finds_nothing_before_any_server_is_connected(theme, fresh, browser):
    context = browser.new_context(base_url=fresh.url, color_scheme=theme, bypass_csp=True)
    page = context.new_page()
    page.goto("/sign-in")
    violations = driving.run_axe(page)
    page.goto(fresh.setup_url)
    violations += driving.run_axe(page)
    driving.set_up(page, fresh)
    violations += driving.run_axe(page)
    page.goto("/servers")
    violations += driving.run_axe(page)
    context.close()

    assert violations == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_program_is_confirmed_with_marked_variables_and_again_for_each_value(open_page, theme):
    page, violations = open_page(color_scheme=theme), []
    name = f"keyed-{theme}"
    entry = driving.demo_entry()  # which ignores its arguments
    entry["args"] += ["--theme", theme, "--api-key", "canary-of-the-arguments"]
    entry["env"] = {"MODE": "canary-of-the-environment"}
    page.goto("/servers/add")
    page.get_by_label("Paste your mcp.json").fill(driving.mcp_json({name: entry}))
    page.get_by_role("button", name="Check servers").click()
    expect(page.locator(".argv mark")).to_have_text(f"${{KEYED_{theme.upper()}_API_KEY}}")
    expect(page.get_by_text("Marked: values that are filled in")).to_be_visible()
    violations += driving.run_axe(page)
    page.get_by_label("Allow this command").check()
    page.get_by_role("button", name=re.compile("^Connect")).click()
    expect(page.locator(".progress")).to_contain_text(
        re.compile(r"24 tools"), timeout=driving.SYNC_TIMEOUT_MS
    )
    page.goto(f"/servers/{name}")
    expect(page.get_by_text("Sandbox", exact=True)).to_be_visible()
    violations += driving.run_axe(page)

    page.goto(f"/servers/{name}/settings")
    page.get_by_label("New value of MODE").fill("canary-of-a-change")
    page.get_by_role("button", name="Replace MODE").press("Enter")
    expect(page.get_by_text("Nothing has changed yet.")).to_be_visible()
    violations += driving.run_axe(page)
    page.get_by_label("Allow this command").check()
    page.locator("form.notice").get_by_role("button", name="Save credential").click()
    expect(page.get_by_text("Saved credential MODE. Sync queued.")).to_be_visible()
    assert "canary" not in page.content()
    assert violations == []


def test_no_page_scrolls_sideways_at_320_pixels(populated, open_page):
    page = open_page(width=320, height=640)
    wide = []
    for path in PAGES:
        page.goto(path)
        if driving.scrolls_sideways(page):
            wide.append(path)

    assert wide == []


def test_everything_works_without_javascript(populated, open_page, weather_url):
    page = open_page(java_script_enabled=False)
    page.goto("/servers/add?source=url")
    page.get_by_label("URL", exact=True).fill(weather_url + "?second=1")
    page.get_by_label("Name optional").fill("second")
    page.get_by_role("button", name="Check server").click()
    expect(page.get_by_role("link", name="Start over")).to_be_visible()
    page.get_by_role("button", name=re.compile("^Connect")).click()
    done = page.get_by_text("with all schemas")
    refresh = page.get_by_role("link", name="Refresh")
    while expect(done.or_(refresh).first).to_be_visible() or not done.is_visible():
        with page.expect_navigation():
            refresh.click()
    expect(done).to_be_visible()

    page.goto("/servers?q=second")
    page.get_by_label("Select second").check()
    page.get_by_role("button", name="Disable servers").click()
    expect(page.get_by_text("Disabled 1 server.")).to_be_visible()
    page.goto("/servers/second/settings")
    page.get_by_label("to confirm").fill("second")
    page.get_by_role("button", name="Delete server").click()
    expect(page.get_by_text("Deleted second")).to_be_visible()
