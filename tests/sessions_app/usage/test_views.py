"""The page of use: what it counts, what it advises, who may act on it, what it costs."""

import csv
import io
import json
import re
from datetime import timedelta

import pytest
from django.http import QueryDict
from django.urls import reverse
from django.utils import timezone

from catalog.audit import Actor
from catalog.groups import actions as group_actions
from catalog.models import AuditEntry, Group, Membership
from catalog.tools import actions as tool_actions
from sessions_app.models import AgentSession, Expansion
from sessions_app.usage import funnels, preload_advice, searches, tool_usage
from sessions_app.usage import views as usage_views
from sessions_app.usage.filters import UsageFilter
from sessions_app.usage.tool_usage import Bucket
from tests.support.factories import (
    fold,
    make_agent,
    make_call,
    make_event,
    make_server,
    make_session,
    make_tool,
    tool_object,
)

BACKEND = "django.contrib.auth.backends.ModelBackend"
ACTOR = Actor.command("tests")
pytestmark = pytest.mark.django_db


@pytest.fixture
def weather(db):
    return make_server(slug="weather")


@pytest.fixture
def forecast(weather):
    return make_tool(weather, "get_forecast", description="Say the weather.")


@pytest.fixture
def alarm(weather, forecast):
    return make_tool(weather, "sound_alarm", description="Warn of a storm.")


@pytest.fixture
def scout(db):
    return make_agent("scout")


@pytest.fixture
def as_admin(client, admin):
    client.force_login(admin, backend=BACKEND)
    return client


@pytest.fixture
def as_operator(client, operator):
    client.force_login(operator, backend=BACKEND)
    return client


def wanted(address=""):
    return UsageFilter.read(QueryDict(address))


def text_of(response):
    return " ".join(re.sub(r"<[^>]+>", " ", response.content.decode()).split())


def preload(group_id, *tools, on=True):
    group_actions.set_preload(Group.objects.get(group_id=group_id), tools, on, actor=ACTOR)


# --- Counting -----------------------------------------------------------------------------------


def test_calls_errors_and_tokens_are_counted_by_day_and_by_tool(scout, forecast, alarm):
    session = make_session(scout)
    yesterday = timezone.now() - timedelta(days=1)
    for ms in (100, 200, 300):
        make_call(session, forecast, tokens=20, ms=ms)
    make_call(session, forecast, at=yesterday, state="timed_out", ms=900)
    make_call(session, alarm, is_error=True)
    make_call(session, tool_name="made_up", state="refused", sent_at=None)
    make_call(None, forecast, path="try")
    make_call(session, forecast, at=timezone.now() - timedelta(days=31))

    used = tool_usage.usage_report(wanted())

    assert (used.calls, used.errors, used.unknown_tools) == (6, 3, 1)
    assert [(one.calls, one.errors) for one in used.buckets[-2:]] == [(1, 1), (5, 2)]
    first = used.tools[0]
    assert (first.tool_name, first.calls, first.errors, first.tokens) == (
        "weather__get_forecast", 4, 1, 60
    )  # fmt: skip
    assert (first.error_rate, first.tokens_per_call, first.p50_ms, first.p95_ms) == (
        25.0,
        15,
        200,
        900,
    )
    tool_usage.add_trends(wanted(), used.tools)
    assert first.trend[-3:] == [0, 1, 3]
    assert [one.tool_name for one in used.tools] == [
        "weather__get_forecast",
        "weather__sound_alarm",
    ]


def test_time_before_anything_was_recorded_is_a_gap_and_not_zero(scout, forecast):
    make_call(make_session(scout), forecast, at=timezone.now() - timedelta(days=2))

    days = tool_usage.usage_report(wanted("range=7d")).buckets

    assert [day.calls for day in days] == [None, None, None, None, 1, 0, 0]


def test_the_range_the_agent_and_the_group_narrow_what_is_counted(scout, forecast):
    ticket = make_tool(make_server(slug="desk"), "open_ticket")
    make_call(make_session(scout), forecast)
    make_call(make_session(make_agent("drifter")), ticket)
    make_call(make_session(scout), forecast, at=timezone.now() - timedelta(days=5))

    def names(address):
        return [
            (one.tool_name, one.calls) for one in tool_usage.usage_report(wanted(address)).tools
        ]

    both = [("desk__open_ticket", 1), ("weather__get_forecast", 2)]
    assert sorted(names("")) == both
    assert names("agent=scout&range=24h") == [("weather__get_forecast", 1)]
    assert names("group=mcp:desk") == [("desk__open_ticket", 1)]
    assert names("group=nowhere") == names("agent=nobody") == []
    assert names("range=nonsense&sort=name") == both
    assert len(tool_usage.usage_report(wanted("range=24h")).buckets) == 24


@pytest.mark.parametrize(
    ("sort", "first"),
    [
        ("-calls", "b"),
        ("calls", "a"),
        ("-errors", "a"),
        ("-p95", "a"),
        ("-each", "a"),
        ("-name", "b"),
    ],
)
def test_the_tools_are_sorted_by_any_column(sort, first, scout, weather):
    make_tool(weather, "a"), make_tool(weather, "b")
    session = make_session(scout)
    tools = {tool.name: tool for tool in weather.tools.select_related("server", "approved")}
    make_call(session, tools["a"], ms=900, tokens=90, is_error=True)
    for _ in range(2):
        make_call(session, tools["b"], ms=10, tokens=1)

    assert tool_usage.usage_report(wanted(f"sort={sort}")).tools[0].tool_name == f"weather__{first}"


def test_the_caption_says_when_most_happened_and_when_most_went_wrong():
    start = timezone.now().replace(year=2026, month=11, day=2, hour=0)

    def said(*counts):
        days = [Bucket(start + timedelta(days=at), *one) for at, one in enumerate(counts)]
        return usage_views.finding(days, "day")

    assert said((0, 0), (None, 0)) == "No agent called a tool in this time."
    assert said((5, 0), (0, 0)) == "5 calls, all of them on Monday 2 November; none went wrong."
    assert said((9, 1), (1, 0)).endswith("on Monday 2 November; 1 went wrong (10 %).")
    assert said((90, 1), (10, 4)) == (
        "100 calls, most of them on Monday 2 November; 5 went wrong (5.0 %), "
        "most of these on Tuesday 3 November (4 of 10)."
    )


# --- Places -------------------------------------------------------------------------------------


def test_what_is_preloaded_and_never_called_is_listed_with_its_cost(scout, forecast, alarm):
    preload("mcp:weather", forecast, alarm)
    make_call(make_session(scout), forecast)
    make_call(None, alarm, path="try")

    found = preload_advice.unused_preloads(wanted())

    assert [one.tool for one in found.places] == [alarm]
    assert (found.total, found.tokens) == (1, alarm.approved.tokens)
    assert preload_advice.unused_preloads(wanted("group=elsewhere")).places == []
    assert len(preload_advice.unused_preloads(wanted("agent=nobody")).places) == 0
    make_call(make_session(make_agent("drifter")), alarm)
    assert preload_advice.unused_preloads(wanted()).total == 0
    assert [one.tool for one in preload_advice.unused_preloads(wanted("agent=scout")).places] == [
        alarm
    ]


def test_what_many_sessions_load_is_a_candidate_until_it_is_preloaded(scout, forecast, alarm):
    for at in range(4):
        names = [forecast.public_name, *([alarm.public_name] * (at < 2))]
        make_event(make_session(scout), "loaded", group_id="mcp:weather", names=names)

    [place] = preload_advice.often_loaded(wanted())

    assert (place.tool, place.sessions, place.share) == (forecast, 4, 100)
    preload("mcp:weather", forecast)
    assert preload_advice.often_loaded(wanted()) == []


def test_a_custom_tool_is_preloaded_where_nobody_said_otherwise(scout, forecast):
    mine = tool_actions.save_custom_tool(tool_object("mine"), actor=ACTOR)
    group = Group.objects.get(group_id="mcp:weather")
    group_actions.assign(group, [mine], actor=ACTOR)
    for _ in range(3):
        make_event(make_session(scout), "loaded", group_id="mcp:weather", names=["mine"])

    assert [one.tool for one in preload_advice.unused_preloads(wanted()).places] == [mine]
    assert preload_advice.often_loaded(wanted()) == []
    preload("mcp:weather", mine, on=False)
    assert preload_advice.unused_preloads(wanted()).places == []
    assert [one.tool for one in preload_advice.often_loaded(wanted())] == [mine]


def test_where_only_the_newest_loads_are_read_shares_are_of_sessions_since_then(
    scout, forecast, monkeypatch
):
    monkeypatch.setattr(preload_advice, "LOADS", 3)
    for days in (9, 8, 2, 1, 0):
        at = timezone.now() - timedelta(days=days)
        session = make_session(scout)
        AgentSession.objects.filter(pk=session.pk).update(created_at=at)
        make_event(session, "loaded", at=at, group_id="mcp:weather", names=[forecast.public_name])

    [place] = preload_advice.often_loaded(wanted())

    assert (place.sessions, place.share) == (3, 100)


def test_what_a_group_does_not_narrow_says_so(as_operator, scout, forecast):
    make_session(scout)
    narrowed = text_of(as_operator.get("/usage?group=mcp:weather"))
    assert "Searches are shown of every group" in narrowed
    assert "came, whatever groups they have." in narrowed
    assert "of every group" not in text_of(as_operator.get("/usage"))


def test_one_click_makes_a_tool_on_demand_and_undo_takes_it_back(as_admin, scout, alarm):
    preload("mcp:weather", alarm)
    make_session(scout)
    query = "range=7d&agent=scout"
    assert "Make on demand" in text_of(as_admin.get(f"/usage?{query}"))

    form = {"group": "mcp:weather", "tool": alarm.public_name, "on": "0", "address": query}
    answer = as_admin.post("/usage/preload", form)

    assert answer["Location"] == f"/usage?{query}#unused"
    member = Membership.objects.get(tool=alarm)
    assert member.preload is False
    entry = AuditEntry.objects.latest("pk")
    assert (entry.verb, entry.actor_kind) == ("group.preload", "user")
    page = as_admin.get(f"/usage?{query}")
    assert "weather__sound_alarm in mcp:weather is given on demand in new sessions." in text_of(
        page
    )
    undo = re.search(r'action="(/usage/undo/\d+)"', page.content.decode())[1]

    assert as_admin.post(undo, {"address": query})["Location"] == f"/usage?{query}#unused"
    member.refresh_from_db()
    assert member.preload is True


def test_operators_read_everything_and_change_nothing(as_operator, scout, alarm):
    preload("mcp:weather", alarm)
    make_session(scout)

    page = as_operator.get("/usage")
    form = {"group": "mcp:weather", "tool": alarm.public_name, "on": "0"}

    assert page.status_code == 200
    assert "An admin can make it on demand." in text_of(page)
    assert '<button class="button small">Make on demand' not in page.content.decode()
    assert as_operator.post("/usage/preload", form).status_code == 403
    assert as_operator.post("/usage/undo/1").status_code == 403
    assert Membership.objects.get(tool=alarm).preload is True


@pytest.mark.parametrize(
    "form", [{}, {"group": "no\0", "tool": "x"}, {"group": "mcp:weather", "tool": "no"}]
)
def test_an_act_on_what_is_not_there_says_so_and_leads_back(form, as_admin, scout, alarm):
    make_session(scout)

    answer = as_admin.post("/usage/preload", form | {"address": "range=7d"}, follow=True)

    assert answer.redirect_chain == [("/usage?range=7d#unused", 302)]
    assert re.search("There is no (group|tool)", text_of(answer))


# --- Searches, sessions -------------------------------------------------------------------------


def test_searches_are_told_apart_by_what_came_of_them(scout, forecast):
    session = make_session(scout)
    name = forecast.public_name
    make_event(session, "searched", query="send fax", strategy="bm25", total=0, hits=[])
    make_event(session, "searched", query="storm", strategy="bm25", total=1, hits=[name])
    make_event(session, "searched", query="rain", strategy="bm25", total=1, hits=[name])
    make_event(session, "loaded", names=[name])
    make_event(session, "searched", query="both", total=1, hits=[name], newly_loaded=1)
    make_event(session, "searched", query="fog", strategy="bm25", total=1, hits=[name])
    make_event(make_session(scout), "called", call=make_call(session, forecast))

    found = searches.failed_searches(wanted())

    assert [one.asked for one in found.without_results] == ["“send fax”"]
    # The open session may still use what it found for "fog".
    assert [one.asked for one in found.abandoned] == ["“storm”"]
    assert found.read == 5
    AgentSession.objects.update(state="closed")
    found = searches.failed_searches(wanted())
    assert [one.asked for one in found.abandoned] == ["“fog”", "“storm”"]


def test_the_funnel_counts_how_far_sessions_came(scout):
    make_session(scout, tokens_search=9)
    make_session(scout, tokens_search=9, tokens_load=9)
    make_session(scout, tokens_search=9, tokens_load=9, calls=1)
    make_session(scout, calls=4)
    make_session(make_agent("drifter"))

    [first, second] = funnels.funnels(wanted())

    assert first == funnels.Funnel("scout", 4, 3, 2, 1, 1)
    assert (second.agent, second.sessions, second.searched) == ("drifter", 1, 0)


def test_open_sessions_that_hold_an_old_definition_are_named(scout, weather, forecast):
    def holding(**fields):
        session = make_session(scout, **fields)
        pins = json.dumps({forecast.public_name: {"definition": forecast.approved_id}})
        Expansion.objects.create(session=session, group_id="mcp:weather", pins=pins, sequence=1)
        return session

    live = holding()
    holding(state="closed")
    assert funnels.outdated_sessions(wanted()) == []

    fold(weather, tool_object("get_forecast", description="Say tomorrow's weather."))
    forecast.refresh_from_db()
    if forecast.latest_id != forecast.approved_id:
        forecast.approved = forecast.latest
        forecast.save()

    [found] = funnels.outdated_sessions(wanted())
    assert (found.session, found.names) == (live, ["weather__get_forecast"])
    assert funnels.outdated_sessions(wanted("agent=nobody")) == []


# --- The page and its tables --------------------------------------------------------------------


def test_before_the_first_session_the_page_says_what_it_will_say(as_operator):
    page = text_of(as_operator.get("/usage"))

    assert "No agent has worked here yet" in page
    assert "days after a session ends" in page


def test_an_empty_range_is_said_to_be_empty(as_operator, scout):
    make_session(scout)
    page = text_of(as_operator.get("/usage?range=24h&agent=<i>x"))

    assert "No agent called a tool in this time with these filters. Clear filters" in page
    assert "in steps of one hour (UTC)" in page
    assert "&lt;i&gt;x" in page


@pytest.mark.parametrize("table", usage_views.TABLES)
def test_every_table_is_a_file_too(table, as_operator, scout, forecast):
    preload("mcp:weather", forecast)
    session = make_session(scout)
    make_event(session, "searched", query="fax", total=0)

    answer = as_operator.get(reverse("usage-csv", args=[table]) + "?range=7d")

    assert answer["Content-Disposition"] == f'attachment; filename="toolcrib-{table}-7d.csv"'
    rows = list(csv.reader(io.StringIO(answer.content.decode())))
    assert len(set(map(len, rows))) == 1
    assert len(rows) >= (1 if table in ("tools", "often", "astray", "old") else 2)


def test_there_is_no_other_table(as_operator):
    assert as_operator.get("/usage/passwords.csv").status_code == 404


def test_no_cell_of_a_file_is_a_formula(as_operator, scout):
    session = make_session(make_agent("=HYPERLINK(1)"))
    make_event(session, "searched", query="x", total=0)

    assert b"'=HYPERLINK(1),1" in as_operator.get("/usage/funnel.csv").content
    cells = ["=1", "+1", "-1", "@x", "\t=1", "\r=1", "fine", -1, None]
    assert [usage_views.harmless(cell) for cell in cells] == [
        "'=1", "'+1", "'-1", "'@x", "'\t=1", "'\r=1", "fine", -1, ""
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["/usage", "/usage/tools.csv"])
def test_only_people_with_a_role_get_in(path, client, outsider):
    assert client.get(path)["Location"].startswith("/sign-in")
    client.force_login(outsider, backend=BACKEND)
    assert client.get(path).status_code == 403


def test_the_page_costs_the_same_for_little_use_and_for_much(
    as_admin, weather, scout, django_assert_max_num_queries
):
    def cost(number):
        fold(weather, *(tool_object(f"tool_{at}") for at in range(number)))
        tools = list(weather.tools.select_related("server", "approved"))
        preload("mcp:weather", *tools[::2])
        for tool in tools:
            session = make_session(scout, calls=1, tokens_search=1)
            make_call(session, tool)
            make_event(session, "searched", query=tool.name, total=1, hits=[tool.public_name])
            make_event(session, "loaded", group_id="mcp:weather", names=[tool.public_name])
        as_admin.get("/usage")
        with django_assert_max_num_queries(45) as captured:
            as_admin.get("/usage")
        return len(captured)

    assert cost(3) == cost(40)
