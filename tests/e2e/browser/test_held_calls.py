"""Held calls in a browser: the list refreshes itself, and what a person decides is done."""

import json
import os
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.support import browser as driving
from tests.support.agents import make_agent
from tests.support.installation import Installation
from tests.support.servers import register
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.needs_chromium, pytest.mark.timeout(240)]
RULE = {
    "name": "Ask before forecasts",
    "effect": "hold",
    "reason": "Forecasts cost money.",
    "match": {"tools": ["*__get_forecast"]},
}


def take_picture(page, name):
    """Keep a picture where SCREENSHOTS names a folder."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def test_the_story_of_a_call_from_the_rule_to_the_verified_audit_log(
    browser, weather_url, tmp_path
):
    with Installation(tmp_path / "data") as toolcrib:
        cookies = driving.set_up_and_sign_in(browser, toolcrib)
        register(toolcrib, "weather", weather_url)
        agent = make_agent(toolcrib, "scout")
        session = agent.open(mode="deferred")
        assert session.call("get_forecast", {"city": "Oslo"})["state"] == "succeeded"
        context = browser.new_context(base_url=toolcrib.url, storage_state=cookies)
        errors = driving.collect_console_errors(context)
        page = context.new_page()

        # An operator makes a rule from the call on the timeline.
        page.goto(f"/sessions/{session.id}")
        page.locator("#timeline").get_by_text("weather__get_forecast").last.click()
        page.get_by_role("link", name="Make a rule from this call").click()
        page.get_by_label("Effect").select_option("hold")
        page.get_by_label("Reason").fill("Forecasts for Oslo cost money.")
        page.get_by_role("button", name="Test against the last 7 days").click()
        expect(page.get_by_role("status").first).to_contain_text("held")
        take_pictures(page, "story-1-rule")
        page.get_by_role("button", name="Save rule").click()
        expect(page.get_by_role("heading", name="Rules")).to_be_visible()
        take_pictures(page, "story-2-rules")

        # The same call is held; another one is not.
        held = session.call("get_forecast", {"city": "Oslo"})
        assert held["state"] == "held"
        assert session.call("get_forecast", {"city": "Rome"})["state"] == "succeeded"
        page.get_by_role("link", name="Approvals").first.click()
        page.get_by_role("link", name="Calls 1").click()
        item = page.locator(f"#{held['call_id']}")
        expect(item).to_contain_text("Forecasts for Oslo cost money.")
        take_pictures(page, "story-3-held")
        item.get_by_role("button", name="Allow once").click()
        expect(page.get_by_text("Allowed weather__get_forecast.")).to_be_visible()
        result = wait_for(lambda: _result(agent, held["call_id"]), 60, what="the result is there")
        assert result["structured_content"]["city"] == "Oslo"
        page.goto(f"/sessions/{session.id}")
        expect(page.locator("#timeline")).to_contain_text("allowed")
        take_pictures(page, "story-4-session")

        # The audit log tells each step and verifies.
        chained = {"holds": True, "pending": 0, "problem": ""}
        wait_for(lambda: chained.items() <= _audit_chain(toolcrib).items(), 30)
        page.goto("/audit")
        steps = ("created the rule", "held the call", "allowed the call", "fetched the result")
        for words in steps:
            expect(page.locator("#entries")).to_contain_text(words)
        expect(page.get_by_text("chained entries verified")).to_be_visible()
        take_pictures(page, "story-5-audit")
        assert driving.run_axe(page) == []
        assert errors == []


def _audit_chain(toolcrib):
    return json.loads(toolcrib.command("verify_audit", "--json").stdout)


def take_pictures(page, name):
    for theme in driving.THEMES:
        page.emulate_media(color_scheme=theme)
        take_picture(page, f"{name}-{theme}")
    page.emulate_media(color_scheme="light")


def test_a_person_decides_about_calls_and_the_agent_gets_the_results(
    browser, weather_url, tmp_path
):
    with Installation(tmp_path / "data") as toolcrib:
        cookies = driving.set_up_and_sign_in(browser, toolcrib)
        register(toolcrib, "weather", weather_url)
        assert toolcrib.api("POST", "/rules", RULE)[0] == 201
        agent = make_agent(toolcrib, "scout")
        session = agent.open(mode="deferred")
        context = browser.new_context(base_url=toolcrib.url, storage_state=cookies)
        errors = driving.collect_console_errors(context)
        page = context.new_page()
        page.goto("/approvals/calls")
        expect(page.get_by_role("heading", name="No held calls")).to_be_visible()

        # A call that is held while the page is open appears by itself.
        assert session.call("list_stations", {"country": "NO"})["state"] == "succeeded"
        first = session.call("get_forecast", {"city": "Oslo"})
        assert first["state"] == "held"
        item = page.locator(f"#{first['call_id']}")
        expect(item).to_contain_text("Forecasts cost money.")
        expect(item).to_contain_text("Oslo")
        expect(item).to_contain_text("weather__list_stations")
        expect(page.locator("[data-nav-count=approvals]").first).to_contain_text("1")
        expect(page.get_by_role("link", name="Calls 1")).to_be_visible()
        expect(item).to_contain_text("It has read from: weather")
        take_picture(page, "held-light")
        page.emulate_media(color_scheme="dark")
        take_picture(page, "held-dark")
        page.emulate_media(color_scheme="light")
        assert driving.run_axe(page) == []
        page.set_viewport_size({"width": 390, "height": 844})
        assert not driving.scrolls_sideways(page)
        take_picture(page, "held-narrow")
        page.set_viewport_size({"width": 1280, "height": 800})

        # Words that are being typed survive the refresh of the list.
        item.get_by_label("Your words to the agent").fill("Only today.")
        item.get_by_label("Your words to the agent").blur()  # no refresh while somebody types
        second = session.call("get_forecast", {"city": "Rome" + "x" * 9_000 + " and Paris"})
        expect(page.locator(f"#{second['call_id']}")).to_be_visible()
        expect(item.get_by_label("Your words to the agent")).to_have_value("Only today.")
        item.get_by_role("button", name="Allow once").click()
        expect(page.get_by_text("Allowed weather__get_forecast.")).to_be_visible()
        result = wait_for(lambda: _result(agent, first["call_id"]), 60, what="the result is there")
        assert result["structured_content"]["city"] == "Oslo"

        other = page.locator(f"#{second['call_id']}")
        arguments = other.locator(".code pre")
        size = (
            "each => [each.scrollWidth - each.clientWidth, each.scrollHeight - each.clientHeight]"
        )
        assert arguments.evaluate(size) == [0, 0]  # nothing of it is out of sight
        other.get_by_label("Your words to the agent").fill("Rome is <b>closed</b>.")
        other.get_by_role("button", name="Deny").click()
        expect(page.get_by_text("Denied weather__get_forecast.")).to_be_visible()
        denied = _result(agent, second["call_id"])
        assert denied["state"] == "denied"
        assert "Rome is <b>closed</b>." in denied["content"][0]["text"]
        take_picture(page, "decided")

        page.goto("/audit?target=call")
        expect(page.locator("#entries")).to_contain_text("allowed the call")
        expect(page.locator("#entries")).to_contain_text("denied the call")
        page.goto("/tools/weather__get_forecast")
        page.get_by_label("Visible but blocked").check()
        page.get_by_role("button", name="Save access").click()
        expect(page.get_by_text("is visible but blocked").first).to_be_visible()
        take_picture(page, "access")
        assert driving.run_axe(page) == []
        assert errors == []


def _result(agent, call_id):
    response = agent.send("GET", f"/calls/{call_id}?wait=20")
    assert response.status == 200, response.body
    waits = response.json["state"] in ("held", "approved", "accepted", "sent")
    return None if waits else response.json
