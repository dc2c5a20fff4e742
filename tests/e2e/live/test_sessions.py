"""Byte stability of a session's catalog, tools and loads under changes."""

import json

import pytest

from tests.support.agents import make_agent, sync_server, update_server
from tests.support.servers import call_upstream, register
from tests.support.upstreams.running import running_http
from tests.support.waiting import wait_for

LOADED = ["get_forecast", "get_temperature"]


@pytest.fixture(scope="module")
def agent(toolcrib):
    return make_agent(toolcrib, "reader", calls_per_minute=10_000, cost_per_minute=100_000)


class Weather:
    """A server that can be changed, its group, and an agent's session over it."""

    def __init__(self, toolcrib, agent, slug, url):
        self.toolcrib, self.agent, self.slug, self.url = toolcrib, agent, slug, url
        self.group = f"mcp:{slug}"

    def open(self, **options):
        session = self.agent.open(groups=[self.group], mode="deferred", **options)
        assert self.group in session.opened["catalog"]["text"]
        return session

    def change(self, tool, **arguments):
        """Change the upstream server."""
        call_upstream(self.url, tool, **arguments)

    def approve(self, tool):
        path = f"/tools/{self.slug}__{tool}/approve"
        assert self.toolcrib.api("POST", path)[0] == 200

    def admin(self, method, path="", body=None):
        status, response = self.toolcrib.api(method, f"/groups/{self.group}{path}", body)
        assert status == 200, response


@pytest.fixture
def weather(request, toolcrib, agent):
    slug = f"weather-{len(request.node.name)}"
    with running_http("healthy") as url:
        register(toolcrib, slug, url)
        yield Weather(toolcrib, agent, slug, url)
    toolcrib.api("DELETE", f"/servers/{slug}")


@pytest.mark.smoke
def test_searches_loads_and_calls_do_not_change_the_catalog(weather):
    session = weather.open(preload=["list_stations"])
    before = session.surface()
    first = session.load(weather.group, LOADED)

    session.search(query="forecast for a city", load=True)
    session.search(name="report_weather")
    session.load(weather.group)
    session.call("get_forecast", {"city": "Oslo"})
    session.call("get_forecast", {"town": "Oslo"})
    session.call("report_weather", {"city": "Oslo", "text": "rain"})
    session.call("no_such_tool")
    session.get("/tools/get_forecast")

    assert session.surface() == before
    repeated = json.loads(session.load(weather.group, LOADED))
    assert {**repeated, "remaining": None} == {**json.loads(first), "remaining": None}
    assert json.loads(first)["remaining"] > 0
    assert repeated["remaining"] == 0
    assert [tool["name"] for tool in json.loads(before["tools"][0])] == [
        "search_tools",
        "load_tools",
        "get_tool_details",
        "call_read_only_tool",
        "deferred_tool_call",
        f"{weather.slug}__list_stations",
    ]


def test_changed_added_and_removed_tools_of_a_server_change_no_byte_of_a_session(weather):
    session = weather.open(preload=["list_stations"])
    before, loaded = session.surface(), session.load(weather.group)
    named = session.load(weather.group, ["report_weather", "get_forecast"])
    details = session.get("/tools/get_forecast")
    assert "Return the weather" in details["description"]

    weather.change("rename_description", name="get_forecast", text="Tell what comes.")
    weather.change("rename_description", name="list_stations", text="List every station.")
    weather.change("add_tool", name="warn_sailors", description="Warn sailors of a storm.")
    weather.change("remove_tool", name="report_weather")
    run = sync_server(weather.toolcrib, weather.slug)
    assert (run["added"], run["changed"], run["removed"]) == (1, 2, 1)
    assert (session.surface(), session.load(weather.group)) == (before, loaded)

    weather.approve("get_forecast")
    weather.approve("list_stations")
    assert (session.surface(), session.load(weather.group)) == (before, loaded)
    assert session.get("/tools/get_forecast") == details

    # A new session gets the new text, so the old bytes were kept on purpose.
    fresh = weather.open(preload=["list_stations"])
    assert fresh.surface()["json"] != before["json"]
    assert b"Tell what comes." in fresh.load(weather.group)

    # Added tools are found and can be called; calls of removed tools are refused.
    added = f"{weather.slug}__warn_sailors"
    assert session.search_names(query="storm warning for sailors")[0] == added
    assert session.call(added, {"text": "storm"})["state"] == "succeeded"
    removed = session.call("report_weather", {"city": "Oslo", "text": "rain"})
    assert (removed["state"], removed["error"]["code"]) == ("refused", "missing")
    assert (session.surface(), session.load(weather.group)) == (before, loaded)
    assert session.load(weather.group, ["report_weather", "get_forecast"]) == named


def test_group_edits_by_an_admin_change_no_byte_of_a_session(weather):
    session = weather.open()
    before, loaded = session.surface(), session.load(weather.group)
    name = f"{weather.slug}__get_forecast"

    weather.admin("PATCH", body={"display_name": "Sky", "description": "Ask the sky."})
    weather.admin("PATCH", "/members", {"tools": [name], "preload": True})
    weather.admin("PUT", "/members", {"tools": [f"{weather.slug}__report_weather"]})
    weather.admin("PATCH", body={"follows": None})
    weather.admin("DELETE", f"/members?tool={weather.slug}__get_temperature")
    weather.toolcrib.api("PATCH", f"/tools/{name}", {"description_override": "Ours to say."})
    assert (session.surface(), session.load(weather.group)) == (before, loaded)
    assert b"Ours to say." in weather.open().surface()["json"][0]

    # After a rename the session still knows the group by its old id.
    renamed = f"{weather.group}-sky"
    weather.admin("PATCH", body={"group_id": renamed})
    assert (session.surface(), session.load(weather.group)) == (before, loaded)
    refused = session.call("get_temperature", {"city": "Oslo"})
    assert refused["state"] == "refused", "taken out of the group, it is out of scope"
    weather.toolcrib.api("DELETE", f"/groups/{renamed}")
    assert session.surface() == before


@pytest.mark.timeout(180)
def test_a_restart_and_a_kill_9_change_no_byte_and_no_state(toolcrib, weather):
    session, injecting = weather.open(), weather.open(strategy="inject")
    for opened in (session, injecting):
        opened.load(weather.group, LOADED)
    before = {
        opened.id: (opened.surface(), opened.get("/state"), opened.get("/stats"))
        for opened in (session, injecting)
    }
    loaded = session.load(weather.group, LOADED)
    public_names = [f"{weather.slug}__{name}" for name in LOADED]
    assert session.get("/state") == {
        "strategy": "dispatch",
        "expanded_groups": {weather.group: public_names},
        "load_order": public_names,
    }
    delivered = session.get("/stats")["tokens"]["delivered"]

    for end in (toolcrib.stop, toolcrib.kill):
        end()
        toolcrib.start()
        for opened in (session, injecting):
            surface, state, stats = before[opened.id]
            assert opened.surface() == surface
            assert opened.get("/state") == state
            assert opened.get("/stats")["tool_names"] == stats["tool_names"]
        assert session.get("/stats")["tokens"]["delivered"] == delivered
        assert session.load(weather.group, LOADED) == loaded
        delivered = session.get("/stats")["tokens"]["delivered"]
        called = session.call("get_forecast", {"city": "Oslo"})
        assert (called["state"], called["implicit_load"]) == ("succeeded", False)
        delivered = session.get("/stats")["tokens"]["delivered"]
        check_descendants(weather, session, loaded)


def check_descendants(weather, session, loaded):
    """Fork and resume the session: both continue from its state, and neither changes it."""
    state = session.get("/state")
    child = session.fork()
    assert child.surface() == session.surface()
    assert child.get("/state") == state
    assert child.get()["parent"] == session.id
    assert child.load(weather.group, LOADED) == loaded
    heir = weather.open(resume=state)
    assert heir.opened["unknown"] == []
    assert heir.get("/state") == state
    assert heir.load(weather.group, LOADED) == loaded
    child.load(weather.group)
    heir.load(weather.group)
    assert child.get("/state")["expanded_groups"] == {weather.group: None}
    assert session.get("/state") == state


def test_disabling_a_server_changes_no_byte_of_a_session_and_calls_are_refused(toolcrib, weather):
    session = weather.open()
    before, loaded = session.surface(), session.load(weather.group, LOADED)
    assert session.call("get_forecast", {"city": "Oslo"})["state"] == "succeeded"

    update_server(toolcrib, weather.slug, enabled=False)
    refused = session.call("get_forecast", {"city": "Oslo"})
    assert (refused["is_error"], refused["error"]["code"]) == (True, "server_disabled")
    assert "disabled" in refused["content"][0]["text"]
    assert (session.surface(), session.load(weather.group, LOADED)) == (before, loaded)
    assert session.search_names(query="forecast") == []
    assert len(session.get("/state")["expanded_groups"][weather.group]) == 2

    update_server(toolcrib, weather.slug, enabled=True)
    wait_for(
        lambda: session.call("get_forecast", {"city": "Oslo"})["state"] == "succeeded", 30,
        every=0.2,
    )  # fmt: skip
    assert session.surface() == before
