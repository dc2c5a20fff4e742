"""Optimize: simulated preloads, net gains only, one action with one undo, groups from calls."""

import pytest

from catalog.groups import actions as group_actions
from catalog.models import Group, Membership
from sessions_app.models import AgentSession
from sessions_app.usage import optimize
from tests.support.factories import (
    make_agent,
    make_call,
    make_event,
    make_server,
    make_session,
    make_tool,
)
from toolcrib.lib import figures
from toolcrib.lib.roles import Actor

ACTOR = Actor.command("tests")
SAFE = {"readOnlyHint": True}
pytestmark = pytest.mark.django_db


@pytest.fixture
def scout():
    return make_agent("scout")


def forecast_of(**annotations):
    server = make_server(slug="weather")
    return make_tool(server, "get_forecast", description="Rain.", annotations=annotations)


def run_sessions(agent, tool, found=4, total=4, search=500):
    """Create sessions of which some search for the tool and load it."""
    for number in range(total):
        session = make_session(agent, tokens_catalog=50)
        make_event(session, "searched", tokens=search)
        if number < found:
            cost = tool.approved.tokens
            name = tool.public_name
            make_event(session, "loaded", group_id="mcp:weather", names=[name], tokens=cost)


def preload_of(tool):
    return Membership.objects.get(group__group_id="mcp:weather", tool=tool).preload


def test_a_tool_that_every_session_searches_for_is_worth_a_preload(scout):
    tool = forecast_of(**SAFE)
    run_sessions(scout, tool)
    [row] = optimize.simulate().rows
    assert (row.group_id, row.tool, row.preload) == ("mcp:weather", tool.public_name, True)
    assert (row.sessions, row.used) == (4, 4)
    assert (row.saved, row.round_trips) == (4 * 500, 8)  # searches; the definitions cancel out
    [group] = optimize.simulate().groups
    assert group.before - group.after == row.saved
    assert (group.trips_before, group.trips_after) == (8, 0)


def test_a_preload_that_costs_more_than_it_saves_is_not_recommended(scout):
    tool = forecast_of(**SAFE)
    run_sessions(scout, tool, found=3, total=60, search=tool.approved.tokens)
    assert optimize.simulate().rows == []


def test_tools_that_are_loaded_together_spare_the_round_trip_only_together(scout):
    tool = forecast_of(**SAFE)
    other = make_tool(tool.server, "get_alarms", description="Storms.", annotations=SAFE)
    both, cost = [tool.public_name, other.public_name], tool.approved.tokens + other.approved.tokens
    for _ in range(4):
        session = make_session(scout, tokens_load=cost)
        make_event(session, "searched", tokens=500)
        make_event(session, "loaded", group_id="mcp:weather", names=both, tokens=cost)
    # One alone spares its definition, which it costs, and no round trip.
    assert optimize.simulate().rows == []


@pytest.mark.parametrize("annotations", [{"destructiveHint": True}, {}])
def test_a_tool_that_may_be_destructive_is_never_preloaded(scout, annotations):
    run_sessions(scout, forecast_of(**annotations))
    simulation = optimize.simulate()
    assert (simulation.rows, simulation.destructive) == ([], 1)


def test_a_search_that_led_to_another_tool_is_not_spared(scout):
    tool = forecast_of(**SAFE)
    other = make_tool(tool.server, "sound_alarm")
    for _ in range(4):
        session = make_session(scout)
        make_event(session, "searched", tokens=500)
        make_event(session, "implicit_load", tool_name=tool.public_name)
        make_event(session, "implicit_load", tool_name=other.public_name)
    assert optimize.simulate().rows == []


def test_unused_preloads_become_on_demand_and_used_ones_stay(scout):
    tool = forecast_of()
    group = Group.objects.get(group_id="mcp:weather")
    group_actions.set_preload(group, [tool], True, actor=ACTOR)
    sessions = [make_session(scout) for _ in range(3)]
    [row] = optimize.simulate().rows
    assert (row.preload, row.saved) == (False, 3 * tool.approved.tokens)
    make_call(sessions[0], tool)
    assert optimize.simulate().rows == []


def test_all_changes_are_applied_at_once_and_undone_at_once(scout, client, admin):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    tool = forecast_of(**SAFE)
    run_sessions(scout, tool)
    desk = make_tool(make_server(slug="desk"), "open_ticket")
    group = Group.objects.get(group_id="mcp:desk")
    group_actions.set_preload(group, [desk], True, actor=ACTOR)
    keys = [row.key for row in optimize.simulate().rows]
    assert len(keys) == 2
    forged = "mcp:desk|desk__open_ticket|1"
    page = client.post("/usage/optimize/apply", {"row": [*keys, forged]}, follow=True)
    assert "2 changes applied to new sessions." in page.content.decode()
    assert preload_of(tool) is True
    assert Membership.objects.get(tool=desk).preload is False
    offer = page.context["offer"]
    data = {"also": offer["also"], "next": "/usage/optimize"}
    back = client.post(f"/groups/undo/{offer['entry']}", data)
    assert back.url == "/usage/optimize"
    assert preload_of(tool) is None
    assert Membership.objects.get(tool=desk).preload is True


def test_nothing_chosen_changes_nothing_and_operators_cannot_apply(scout, client, operator, admin):
    backend = "django.contrib.auth.backends.ModelBackend"
    client.force_login(operator, backend=backend)
    run_sessions(scout, forecast_of(**SAFE))
    page = client.get("/usage/optimize").content.decode()
    assert "Preload" in page
    assert "Apply selected" not in page
    assert "Build group" not in page
    assert client.post("/usage/optimize/apply").status_code == 403
    client.force_login(admin, backend=backend)
    page = client.post("/usage/optimize/apply", follow=True)
    assert "Nothing to apply." in page.content.decode()


def test_a_group_is_built_from_the_calls_of_an_agent(scout, client, admin):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    tool = forecast_of()
    failed = make_tool(tool.server, "sound_alarm")
    session = make_session(scout)
    make_call(session, tool)
    make_call(session, failed, state="failed", is_error=True)
    data = {"agent": "scout", "group_id": "scout:real", "display_name": "Real"}
    response = client.post("/usage/optimize/group", data)
    assert response.url == "/groups/scout:real"
    members = Membership.objects.filter(group__group_id="scout:real")
    assert [member.tool.public_name for member in members] == ["weather__get_forecast"]
    again = client.post("/usage/optimize/group", data, follow=True)
    assert "Group scout:real already exists." in again.content.decode()


def test_money_before_and_after_is_of_sessions_whose_model_has_a_price(scout, client, admin):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    tool = forecast_of(**SAFE)
    run_sessions(scout, tool)
    assert optimize.simulate().money is None
    assert "Money saved" not in client.get("/usage/optimize").content.decode()
    AgentSession.objects.filter(pk=AgentSession.objects.first().pk).update(model="large-1")
    client.post("/settings/prices", {"currency": "EUR", "prices": "large-* 2500"})
    [group] = optimize.simulate().groups
    [row] = group.rows
    spent = group.before // 4  # the sessions are alike
    assert group.money == figures.Money("EUR", spent * 0.0025, 500 * 0.0025)
    assert row.money.saving == group.money.saving
    page = " ".join(client.get("/usage/optimize").content.decode().split())
    assert f"≈{group.money.cost_text} → ≈{group.cost_after}" in page
    assert f"(≈{group.money.saving_text}) in the last 30 days" in page


def test_all_sessions_of_the_time_are_simulated_and_a_sample_says_so(scout, client, admin):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    run_sessions(scout, forecast_of(**SAFE), total=6, found=6)
    page = " ".join(client.get("/usage/optimize").content.decode().split())
    assert "Simulated on all 6 deferred sessions" in page
    assert "Select all changes" in page
    assert not optimize.simulate().is_sample
    sample = optimize.simulate(4)
    assert (sample.sessions, sample.recorded, sample.is_sample) == (4, 6, True)


def test_the_page_is_linked_from_the_sidebar_and_from_the_usage_page(scout, client, operator):
    client.force_login(operator, backend="django.contrib.auth.backends.ModelBackend")
    make_session(scout)
    for address, links in (("/", 2), ("/usage", 3)):  # sidebar, menu of narrow screens, header
        page = client.get(address).content.decode()
        assert page.count('href="/usage/optimize"') == links, address
