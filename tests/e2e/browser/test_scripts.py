"""Scripts on pages: an admin reads a run, edits its code and runs it again as the agent."""

import re

import pytest
from playwright.sync_api import expect

from tests.support.agents import make_agent

ASK = 'report = await weather.report_weather(city="Oslo", text="Rain")\nprint("asked")\n'
FAILING = ASK + 'raise ValueError("odd")'
CORRECTED = ASK + "len(str(report)) > 0"


@pytest.fixture
def session(populated):
    agent = make_agent(populated, "scripted", mode="deferred", code_mode=True)
    yield agent.open()
    populated.api("DELETE", "/agents/scripted")


def test_an_admin_edits_a_failed_script_and_runs_it_again(session, open_page):
    failed = session.post("/scripts", {"code": FAILING}).json
    assert failed["status"] == "failed", failed
    page = open_page()
    page.goto(f"/sessions/{session.id}/scripts/{failed['run_id']}")
    expect(page.locator("#error")).to_contain_text("ValueError")
    page.get_by_role("link", name="Edit and run again").click()

    code = page.get_by_label("Code")
    expect(code).to_have_value(FAILING)
    code.fill(CORRECTED)
    page.get_by_role("button", name="Run script").click()
    expect(page.locator(".notice.warn")).to_contain_text("weather__report_weather")
    page.get_by_role("button", name="Confirm run").click()

    expect(page).to_have_url(re.compile(r"/scripts/run_"))
    expect(page.get_by_role("heading", level=1)).to_contain_text("Completed", timeout=20_000)
    expect(page.get_by_role("region", name="Result")).to_contain_text("true")
    expect(page.get_by_role("region", name="Printed text")).to_contain_text("asked")
    expect(page.locator(".run-calls li")).to_have_count(1)
