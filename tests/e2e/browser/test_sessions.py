"""Session pages in Chromium: a session of an agent, its timeline, and tool trials."""

import json
import re

import pytest
from playwright.sync_api import expect

from tests.support import browser as driving

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(240),
]

OPEN_ALL = "document.querySelectorAll('main details').forEach(element => { element.open = true })"
# Moves the opening of a session two hours back.
MOVE_OPENING_BACK = """
from datetime import timedelta
from django.db.models import F
from sessions_app.models import AgentSession, Event
session = AgentSession.objects.get(session_id="{}")
two_hours = timedelta(hours=2)
first = session.events.first()
Event.objects.filter(pk=first.pk).update(at=F("at") - two_hours)
AgentSession.objects.filter(pk=session.pk).update(created_at=F("created_at") - two_hours)
"""


class Run:
    """One session of an agent, over REST."""

    def __init__(self, toolcrib, key):
        self.toolcrib, self.key, self.id = toolcrib, key, ""
        self.id = self.send("/sessions", {"mode": "deferred", "metadata": {"task": "rain"}})["id"]

    def send(self, path, body):
        address = f"/sessions/{self.id}{path}" if self.id else path
        status, response = self.toolcrib.api("POST", address, body, self.key)
        assert status < 300, response
        return response

    def call(self, tool, **arguments):
        return self.send("/call", {"tool_name": tool, "arguments": arguments})


@pytest.fixture(scope="module")
def run(populated):
    """A session that searches, loads, calls, fails and is forked, two hours after its opening."""
    done = populated.command("create_agent", "walker", "--all-groups", "--json")
    assert done.returncode == 0, done.stderr
    run = Run(populated, json.loads(done.stdout)["key"])
    run.send("/search", {"query": "weather forecast", "limit": 2})
    run.send("/search", {"query": "zzzzqqqq"})
    run.send("/load", {"group_id": "mcp:weather", "tool_names": ["get_forecast", "no_such"]})
    run.call("weather__get_forecast", city="Oslo")
    run.call("weather__get_forecast", town="Oslo")
    run.call("weather__list_stations", country="Norway")
    run.call("nowhere__tool", a=1)
    Run(populated, run.key).send("/close", {})
    run.send("/fork", {})
    moved = populated.command("shell", "-c", MOVE_OPENING_BACK.format(run.id))
    assert moved.returncode == 0, moved.stderr
    yield run
    populated.api("DELETE", "/agents/walker")


@pytest.fixture
def pages(run):
    return [
        "/sessions",
        "/sessions?state=closed",
        "/sessions?agent=nobody",
        f"/sessions/{run.id}",
        "/sessions/ses_nowhere",
        "/tools/weather__get_forecast/try",
        "/tools/weather__report_weather/try",
        "/scripts/try",
    ]


def test_an_operator_finds_a_session_and_reads_its_timeline(run, open_page):
    page = open_page()
    page.goto("/sessions?agent=walker")
    expect(page.locator("tbody tr")).to_have_count(3)
    page.get_by_label("has errors").check()
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page).to_have_url(re.compile("errors="))
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")

    expect(page).to_have_url(re.compile(run.id))
    timeline = page.locator(".timeline")
    for sentence in (
        "opened in deferred mode",
        "searched “weather forecast”: 2 of",
        "searched “zzzzqqqq”: no results",
        "loaded weather__get_forecast (≈",
        "called weather__get_forecast ·",
        "call to weather__get_forecast rejected: ",
        "called weather__list_stations directly",
        "call to nowhere__tool rejected:",
        "forked to ses_",
    ):
        expect(timeline).to_contain_text(sentence)
    expect(timeline.locator(".gap")).to_contain_text("Idle for 2 h")


def test_steps_arguments_and_results_are_navigated_by_keyboard(run, open_page):
    page = open_page()
    page.goto(f"/sessions/{run.id}")
    step = page.locator("#step")
    expect(step).to_contain_text("call to weather__get_forecast rejected: ")
    expect(step).to_contain_text("Rejected by Toolcrib invalid_arguments")

    page.keyboard.press("k")
    expect(step).to_contain_text("called weather__get_forecast")
    expect(step).to_contain_text('"city": "Oslo"')
    expect(step.get_by_role("region", name="Server response").first).to_contain_text("sunny")
    expect(page).to_have_url(re.compile(r"step=5"))
    expect(page.locator(".timeline [aria-current]")).to_have_attribute("data-step", "5")
    page.keyboard.press("o")
    expect(step.get_by_role("region", name="Arguments of step 5")).to_be_focused()
    page.keyboard.press("o")
    expect(step.get_by_role("region", name="Server response").first).to_be_focused()

    page.keyboard.press("e")
    expect(step).to_contain_text("Rejected by Toolcrib invalid_arguments")
    page.keyboard.press("e")
    expect(step).to_contain_text("call to nowhere__tool rejected")
    page.reload()
    expect(step).to_contain_text("call to nowhere__tool rejected")

    with page.expect_download() as download:
        page.get_by_role("link", name="Export JSON").click()
    exported = json.loads(download.value.path().read_text())
    assert exported["id"] == run.id
    assert exported["metadata"] == {"task": "rain"}


def test_a_step_is_selected_without_javascript_and_forks_are_listed(run, open_page):
    page = open_page(java_script_enabled=False)
    page.goto(f"/sessions/{run.id}")
    page.locator(".timeline a", has_text="searched “weather forecast”").click()
    expect(page).to_have_url(re.compile(r"\?step=2#step"))
    expect(page.locator("#step .hits li")).to_have_count(2)
    forks = page.get_by_role("region", name="Forks")
    expect(forks).to_contain_text("this session")
    forks.get_by_role("link").click()
    expect(page.get_by_role("region", name="Forks").locator("li li")).to_contain_text(
        "this session"
    )


def test_previous_and_next_sessions_open_by_keyboard(run, open_page):
    page = open_page()
    page.goto(f"/sessions/{run.id}")
    page.keyboard.press("]")
    expect(page).not_to_have_url(re.compile(run.id))
    page.keyboard.press("[")
    expect(page).to_have_url(re.compile(run.id))


def test_new_sessions_are_offered_by_a_link_while_the_list_is_paused(run, open_page):
    page = open_page()
    page.goto("/sessions?agent=walker")
    page.get_by_role("button", name="Live").click()
    rows = page.locator("tbody tr")
    before = rows.count()
    position = rows.first.bounding_box()
    Run(run.toolcrib, run.key).send("/close", {})
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    link = page.get_by_role("link", name="1 new")
    expect(link).to_be_visible()
    expect(rows).to_have_count(before)
    assert rows.first.bounding_box() == position
    link.click()
    expect(rows).to_have_count(before + 1)


def test_a_tools_page_shows_its_usage_and_links_to_its_sessions(run, open_page):
    page = open_page()
    page.goto("/tools/weather__get_forecast")
    calls = page.get_by_role("region", name="Calls", exact=True)
    expect(calls).to_contain_text("2, 1 with errors")
    calls.get_by_role("link", name="View sessions that called this tool").click()
    expect(page.locator("tbody tr")).to_have_count(1)


def test_a_read_only_tool_is_called_without_confirmation(run, open_page):
    page = open_page()
    page.goto("/tools/weather__get_forecast")
    page.keyboard.press("t")
    expect(page.get_by_label("Arguments")).to_have_value('{\n  "city": ""\n}')
    page.get_by_label("Arguments").fill('{"city": "Bergen", "days": 2}')
    page.get_by_role("button", name="Call tool").click()

    result = page.get_by_role("region", name="Result", exact=False).first
    expect(result).to_contain_text("sunny")
    expect(result).to_contain_text("Bergen")
    expect(result.locator(".status")).to_have_text("ok")


def test_fields_and_json_stay_in_sync(run, open_page):
    page = open_page()
    page.goto("/tools/weather__report_weather/try")
    area = page.get_by_label("Arguments")
    page.get_by_label("city").fill("Oslo")
    assert json.loads(area.input_value()) == {"city": "Oslo", "text": ""}
    area.fill('{"city": "Bergen"}')
    expect(page.get_by_label("city")).to_have_value("Bergen")
    expect(page.get_by_label("text", exact=True)).to_have_value("")
    page.get_by_label("city").fill("")
    assert json.loads(area.input_value()) == {}
    area.fill("{")
    expect(page.get_by_label("city")).to_be_disabled()


def test_a_tool_that_may_change_data_asks_for_confirmation_without_javascript(run, open_page):
    page = open_page(java_script_enabled=False)
    page.goto("/tools/weather__report_weather/try")
    page.get_by_label("Arguments").fill('{"city": "Oslo", "text": "rain"}')
    page.get_by_role("button", name="Call tool").click()
    expect(page.get_by_text("The server does not report this tool as read-only.")).to_be_visible()
    page.get_by_role("button", name="Confirm call").click()
    expect(page.get_by_text("Noted for Oslo.").first).to_be_visible()


@pytest.mark.needs_npm
@pytest.mark.parametrize("theme", ["light"])  # test_every_page.py covers both
def test_axe_finds_nothing_on_any_page(theme, run, pages, open_page):
    page = open_page(color_scheme=theme, bypass_csp=True)
    violations = []
    for path in pages:
        page.goto(path)
        page.evaluate(OPEN_ALL)
        violations += driving.run_axe(page)
    page.goto("/tools/weather__report_weather/try")
    page.evaluate(OPEN_ALL)
    page.get_by_label("Arguments").fill('{"city": "Oslo", "text": "rain"}')
    page.get_by_role("button", name="Call tool").click()
    violations += driving.run_axe(page)
    page.get_by_role("button", name="Confirm call").click()
    expect(page.get_by_text("Noted for Oslo.").first).to_be_visible()
    violations += driving.run_axe(page)

    assert "\n".join(violations) == ""


def test_no_page_scrolls_sideways_at_320_pixels(run, pages, open_page):
    page = open_page(width=320, height=640)
    wide = []
    for path in pages:
        page.goto(path)
        page.evaluate(OPEN_ALL)
        if driving.scrolls_sideways(page):
            wide.append(path)

    assert wide == []
