"""Onboarding in a real Chromium: from the setup link to an agent's first catalog."""

import re
import subprocess
import sys
import time

import pytest
from playwright.sync_api import expect

from tests.support import browser as driving
from tests.support.waiting import scaled

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(240),
]


def fits(page):
    """Return whether the page fits in the window without scrolling."""
    return page.evaluate("document.documentElement.scrollHeight <= innerHeight")


def run(command):
    """Run a displayed command in a shell, as a user would paste it."""
    return subprocess.run(
        ["bash", "-eu"],
        input=command,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=True,
    ).stdout


@pytest.fixture
def page(fresh, browser):
    context = browser.new_context(base_url=fresh.url, viewport={"width": 1280, "height": 800})
    console_errors = driving.collect_console_errors(context)
    yield context.new_page()
    context.close()
    assert console_errors == []


def connect_demo(page):
    page.get_by_role("button", name="Use the demo server").click()
    expect(page.get_by_role("heading", name="with all schemas")).to_be_visible(
        timeout=driving.SYNC_TIMEOUT_MS
    )


def test_onboarding_takes_three_decisions_from_the_setup_link_to_the_first_catalog(
    fresh, page, capsys
):
    started = time.monotonic()
    driving.set_up(page, fresh)
    expect(page.get_by_label("Paste your mcp.json")).to_be_focused()
    assert fits(page)

    connect_demo(page)  # the first decision
    heading = page.get_by_role("heading", name="with all schemas").inner_text()
    numbers = re.findall(r"≈([\d,]+)", heading)
    baseline, initial = (int(number.replace(",", "")) for number in numbers)
    assert initial < baseline / 2
    assert fits(page)

    page.get_by_role("button", name="Create groups").click()  # the second
    expect(page).to_have_url(f"{fresh.url}/groups/mcp:demo")

    page.get_by_role("button", name="Connect an agent").click()  # the third
    expect(page.get_by_role("heading", name="Created scout")).to_be_focused()
    expect(page.get_by_text("Waiting for the first request…")).to_be_visible()
    assert fits(page)
    command = page.get_by_label("Open a session and read the catalog").inner_text()

    answer = run(command)
    line = page.locator(".first-request")
    expect(line).to_contain_text(re.compile(r"scout fetched its catalog (just now|\d+ s ago)"))
    seconds = time.monotonic() - started
    with capsys.disabled():
        sys.stdout.write(
            f"\nFrom the setup link to the first catalog: {seconds:.1f} s, 3 decisions.\n"
        )

    session = re.search(r"ses_[0-9a-f]{32}", answer).group()
    expect(page.locator("#live")).to_contain_text("scout fetched its catalog.")
    opened = fresh.api("GET", f"/sessions/{session}")[1]
    assert opened["mode"] == "deferred"
    assert fresh.api("GET", "/agents/scout")[1]["all_groups"] is True
    rows = fresh.api("GET", "/sessions")[1]["items"]
    row = next(row for row in rows if row["id"] == session)
    assert row["tokens"]["by"]["catalog"] == initial  # as displayed before
    line.get_by_role("link", name="View session").click()
    expect(page).to_have_url(f"{fresh.url}/sessions/{session}")

    page.goto("/")
    expect(page.get_by_text("4 of 5 done")).to_be_visible()
    page.get_by_role("button", name="Dismiss").click()
    expect(page.get_by_role("heading", name="Recent sessions")).to_be_visible()
    expect(page.get_by_text("First steps")).to_have_count(0)


def test_every_step_can_be_reloaded_and_skipped(fresh, page):
    driving.set_up(page, fresh)
    page.reload()
    expect(page.get_by_role("heading", name="Connect your first server")).to_be_visible()
    connect_demo(page)
    page.reload()
    expect(page.get_by_role("button", name="Create groups")).to_be_visible()
    page.get_by_role("button", name="Create groups").click()
    page.reload()
    next_step = page.locator(".next-step")
    expect(next_step).to_contain_text("Connect an agent")
    next_step.get_by_role("button", name="Skip").click()
    expect(page.get_by_text("2 of 5 done")).to_be_visible()
    page.goto("/groups/mcp:demo")
    expect(page.locator(".next-step")).to_have_count(0)

    page.goto("/")
    page.get_by_role("link", name="Connect an agent").first.click()
    page.get_by_role("button", name="Create agent").click()
    key = page.locator(".new-key code").inner_text()
    page.goto("/welcome/agent")  # the key is not shown again, and the page keeps waiting
    expect(page.locator("main")).not_to_contain_text(key)
    expect(page.get_by_text("Waiting for the first request…")).to_be_visible()
    assert fresh.api("POST", "/sessions", {}, key)[0] == 201
    expect(page.locator(".first-request")).to_contain_text("scout fetched its catalog")
    page.reload()
    expect(page.locator(".first-request")).to_contain_text("scout fetched its catalog")


def test_onboarding_works_without_javascript(fresh, browser):
    context = browser.new_context(base_url=fresh.url, java_script_enabled=False)
    page = context.new_page()
    driving.set_up(page, fresh)
    page.get_by_role("button", name="Use the demo server").click()
    done = page.get_by_role("button", name="Create groups")
    while not done.is_visible():
        page.get_by_role("link", name="Refresh").click()
    done.click()
    page.get_by_role("button", name="Connect an agent").click()
    key = page.locator(".new-key code").inner_text()
    assert fresh.api("POST", "/sessions", {}, key)[0] == 201
    page.get_by_role("link", name="Refresh").click()
    expect(page.locator(".first-request")).to_contain_text("scout fetched its catalog")
    context.close()


@pytest.mark.parametrize("theme", driving.THEMES)
def test_no_step_has_axe_violations_or_scrolls_sideways(fresh, browser, theme):
    context = browser.new_context(
        base_url=fresh.url, color_scheme=theme, viewport={"width": 320, "height": 800}
    )
    page = context.new_page()
    violations = []

    def check_page():
        violations.extend(driving.run_axe(page))
        if driving.scrolls_sideways(page):
            violations.append(f"{page.url} scrolls sideways")

    driving.set_up(page, fresh)
    check_page()
    connect_demo(page)
    check_page()
    page.get_by_role("button", name="Create groups").click()
    expect(page.locator(".next-step")).to_be_visible()
    page.goto("/welcome/agent")
    check_page()
    page.get_by_role("button", name="Create agent").click()
    check_page()
    page.goto("/welcome/agent")
    check_page()
    page.goto("/")
    check_page()
    context.close()
    assert violations == []
