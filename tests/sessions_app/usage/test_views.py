"""Usage page: counts, preload advice, permissions, CSV files, query counts."""

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
from sessions_app.usage import (
    funnels,
    optimize,
    panels,
    preload_advice,
    rollups,
    searches,
    tool_usage,
)
from sessions_app.usage import views as usage_views
from sessions_app.usage.filters import UsageFilter
from tests.support.factories import (
    ingest_tools,
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


def filters(address=""):
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

    rollups.count_ended_hours()
    report = tool_usage.usage_report(filters(), percentiles=True)

    assert (report.calls, report.errors, report.unknown_tools) == (6, 3, 1)
    buckets = tool_usage.calls_by_bucket(filters())
    assert [(bucket.calls, bucket.errors) for bucket in buckets[-2:]] == [(1, 1), (5, 2)]
    first = report.tools[0]
    assert (first.tool_name, first.calls, first.errors, first.tokens) == (
        "weather__get_forecast", 4, 1, 60
    )  # fmt: skip
    assert (first.error_rate, first.tokens_per_call) == (25.0, 15)
    assert (first.p50_ms, first.p95_ms) == pytest.approx((200, 900), rel=0.2)
    tool_usage.add_details(filters(), report.tools)
    assert first.trend[-3:] == [0, 1, 3]
    assert [tool.tool_name for tool in report.tools] == [
        "weather__get_forecast",
        "weather__sound_alarm",
    ]


@pytest.mark.parametrize("ms", [90, 900, 4_000, 90_000])
def test_the_axis_of_latencies_has_one_unit(ms, scout, forecast):
    make_call(make_session(scout), forecast, ms=ms)
    _, charts = panels.read_panels("24h")
    axis = next(panel for panel in charts if panel.slug == "latency").axis
    assert re.fullmatch(r"[\d.]+ (m?s)", axis[0])
    assert "k" not in "".join(axis)


def test_buckets_before_the_first_recorded_call_have_no_count(scout, forecast):
    make_call(make_session(scout), forecast, at=timezone.now() - timedelta(days=2))

    rollups.count_ended_hours()
    buckets = tool_usage.calls_by_bucket(filters("range=7d"))

    assert [bucket.calls for bucket in buckets] == [None, None, None, None, 1, 0, 0]


def test_the_report_is_filtered_by_range_agent_and_group(scout, forecast):
    ticket = make_tool(make_server(slug="desk"), "open_ticket")
    make_call(make_session(scout), forecast)
    make_call(make_session(make_agent("drifter")), ticket)
    make_call(make_session(scout), forecast, at=timezone.now() - timedelta(days=5))

    rollups.count_ended_hours()

    def names(address):
        report = tool_usage.usage_report(filters(address))
        return [(tool.tool_name, tool.calls) for tool in report.tools]

    both = [("desk__open_ticket", 1), ("weather__get_forecast", 2)]
    assert sorted(names("")) == both
    assert names("agent=scout&range=24h") == [("weather__get_forecast", 1)]
    assert names("group=mcp:desk") == [("desk__open_ticket", 1)]
    assert names("group=nowhere") == names("agent=nobody") == []
    assert names("range=nonsense&sort=name") == both
    assert len(tool_usage.calls_by_bucket(filters("range=24h"))) == 24


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

    assert (
        tool_usage.usage_report(filters(f"sort={sort}")).tools[0].tool_name == f"weather__{first}"
    )


# --- Preload advice -----------------------------------------------------------------------------


def test_unused_preloads_are_listed_with_their_cost(scout, forecast, alarm):
    preload("mcp:weather", forecast, alarm)
    make_call(make_session(scout), forecast)
    make_call(None, alarm, path="try")

    unused = preload_advice.unused_preloads(filters())

    assert [row.tool for row in unused.candidates] == [alarm]
    assert (unused.total, unused.tokens) == (1, alarm.approved.tokens)
    assert preload_advice.unused_preloads(filters("group=elsewhere")).candidates == []
    assert len(preload_advice.unused_preloads(filters("agent=nobody")).candidates) == 0
    make_call(make_session(make_agent("drifter")), alarm)
    assert preload_advice.unused_preloads(filters()).total == 0
    assert [
        row.tool for row in preload_advice.unused_preloads(filters("agent=scout")).candidates
    ] == [alarm]


def test_frequently_loaded_tools_are_the_preloads_that_optimize_recommends(
    as_operator, scout, weather
):
    safe = make_tool(weather, "get_forecast", annotations={"readOnlyHint": True})
    risky = make_tool(weather, "delete_city", annotations={"destructiveHint": True})
    rare = make_tool(weather, "get_radar", annotations={"readOnlyHint": True})
    for at in range(12):
        session = make_session(scout)
        for tool in (safe, risky, *([rare] * (at < 3))):
            cost = tool.approved.tokens
            make_event(session, "searched", tokens=400 if tool != rare else 1)
            names = [tool.public_name]
            make_event(session, "loaded", group_id="mcp:weather", names=names, tokens=cost)
    response = as_operator.get("/usage")
    [row] = response.context["frequent"]
    assert row == optimize.simulate().preloads()[0]
    assert (row.tool, row.used, row.saved) == (safe.public_name, 12, 12 * 400)
    body = as_operator.get("/usage/often.csv").content.decode()
    [line] = csv.DictReader(io.StringIO(body))
    assert (line["tool"], line["tokens_saved"]) == (safe.public_name, str(12 * 400))
    assert as_operator.get("/usage?group=mcp:other").context["frequent"] == []
    preload("mcp:weather", safe)
    assert as_operator.get("/usage").context["frequent"] == []


def test_a_custom_tool_is_preloaded_by_default(scout, forecast):
    custom = tool_actions.save_custom_tool(tool_object("mine"), actor=ACTOR)
    group = Group.objects.get(group_id="mcp:weather")
    group_actions.assign(group, [custom], actor=ACTOR)
    assert [row.tool for row in preload_advice.unused_preloads(filters()).candidates] == [custom]
    preload("mcp:weather", custom, on=False)
    assert preload_advice.unused_preloads(filters()).candidates == []


def test_the_page_says_what_the_group_filter_does_not_apply_to(as_operator, scout, forecast):
    make_session(scout)
    page = text_of(as_operator.get("/usage?group=mcp:weather"))
    assert "The group filter does not apply to searches." in page
    assert "Sessions per agent, in all groups." in page
    assert "does not apply" not in text_of(as_operator.get("/usage"))


def test_a_tool_is_made_on_demand_and_undo_and_redo_reverse_it(as_admin, scout, alarm):
    preload("mcp:weather", alarm)
    make_session(scout)
    query = "range=7d&agent=scout"
    assert "Make on demand" in text_of(as_admin.get(f"/usage?{query}"))

    form = {"group": "mcp:weather", "tool": alarm.public_name, "on": "0", "address": query}
    response = as_admin.post("/usage/preload", form)

    assert response["Location"] == f"/usage?{query}#unused"
    member = Membership.objects.get(tool=alarm)
    assert member.preload is False
    entry = AuditEntry.objects.latest("pk")
    assert (entry.verb, entry.actor_kind) == ("group.preload", "user")
    page = as_admin.get(f"/usage?{query}")
    assert "weather__sound_alarm in mcp:weather is on demand in new sessions." in text_of(page)
    undo = re.search(r'action="(/usage/undo/\d+)"', page.content.decode())[1]

    assert as_admin.post(undo, {"address": query})["Location"] == f"/usage?{query}#unused"
    member.refresh_from_db()
    assert member.preload is True
    page = as_admin.get(f"/usage?{query}")
    assert "Undone. Redo" in text_of(page)
    redo = re.search(r'action="(/usage/undo/\d+)"', page.content.decode())[1]

    as_admin.post(redo, {"address": query, "redo": "1"})
    member.refresh_from_db()
    assert member.preload is False
    assert "Redone. Undo" in text_of(as_admin.get(f"/usage?{query}"))


def test_operators_read_the_page_but_cannot_change_preloads(as_operator, scout, alarm):
    preload("mcp:weather", alarm)
    make_session(scout)

    page = as_operator.get("/usage")
    form = {"group": "mcp:weather", "tool": alarm.public_name, "on": "0"}

    assert page.status_code == 200
    assert "Requires an admin." in text_of(page)
    assert '<button class="button small">Make on demand' not in page.content.decode()
    assert as_operator.post("/usage/preload", form).status_code == 403
    assert as_operator.post("/usage/undo/1").status_code == 403
    assert Membership.objects.get(tool=alarm).preload is True


@pytest.mark.parametrize(
    "form", [{}, {"group": "no\0", "tool": "x"}, {"group": "mcp:weather", "tool": "no"}]
)
def test_a_change_of_an_unknown_group_or_tool_shows_an_error(form, as_admin, scout, alarm):
    make_session(scout)

    response = as_admin.post("/usage/preload", form | {"address": "range=7d"}, follow=True)

    assert response.redirect_chain == [("/usage?range=7d#unused", 302)]
    assert re.search("(Group|Tool)s? not found", text_of(response))


# --- Searches, sessions -------------------------------------------------------------------------


def test_searches_are_classified_by_what_followed(scout, forecast):
    session = make_session(scout)
    name = forecast.public_name
    make_event(session, "searched", query="send fax", strategy="bm25", total=0, hits=[])
    make_event(session, "searched", query="storm", strategy="bm25", total=1, hits=[name])
    make_event(session, "searched", query="rain", strategy="bm25", total=1, hits=[name])
    make_event(session, "loaded", names=[name])
    make_event(session, "searched", query="both", total=1, hits=[name], newly_loaded=1)
    make_event(session, "searched", query="fog", strategy="bm25", total=1, hits=[name])
    make_event(make_session(scout), "called", call=make_call(session, forecast))

    failed = searches.failed_searches(filters())

    assert [row.asked for row in failed.without_results] == ["“send fax”"]
    # The open session may still use what it found for "fog".
    assert [row.asked for row in failed.abandoned] == ["“storm”"]
    assert failed.read == 5
    AgentSession.objects.update(state="closed")
    failed = searches.failed_searches(filters())
    assert [row.asked for row in failed.abandoned] == ["“fog”", "“storm”"]


def test_the_funnel_counts_sessions_that_searched_loaded_and_called(scout):
    make_session(scout, tokens_search=9)
    make_session(scout, tokens_search=9, tokens_load=9)
    make_session(scout, tokens_search=9, tokens_load=9, calls=1)
    make_session(scout, calls=4)
    make_session(make_agent("drifter"))

    [first, second] = funnels.funnels(filters())

    assert first == funnels.Funnel("scout", 4, 3, 2, 1, 1)
    assert (second.agent, second.sessions, second.searched) == ("drifter", 1, 0)


def test_open_sessions_on_outdated_definitions_are_listed(scout, weather, forecast):
    def open_with_definition(**fields):
        session = make_session(scout, **fields)
        pins = json.dumps({forecast.public_name: {"definition": forecast.approved_id}})
        Expansion.objects.create(session=session, group_id="mcp:weather", pins=pins, sequence=1)
        return session

    session = open_with_definition()
    open_with_definition(state="closed")
    assert funnels.outdated_sessions(filters()) == []

    ingest_tools(weather, tool_object("get_forecast", description="Say tomorrow's weather."))
    forecast.refresh_from_db()
    if forecast.latest_id != forecast.approved_id:
        forecast.approved = forecast.latest
        forecast.save()

    assert funnels.outdated_sessions(filters()) == [(session, ["weather__get_forecast"])]
    assert funnels.outdated_sessions(filters("agent=nobody")) == []


# --- The page and its tables --------------------------------------------------------------------


def test_before_the_first_session_the_page_explains_how_to_start(as_operator):
    page = text_of(as_operator.get("/usage"))

    assert "No sessions yet" in page
    assert "days after they end" in page


def test_the_charts_compare_with_the_period_before_and_link_to_sessions(
    as_operator, scout, forecast
):
    make_call(make_session(scout), forecast)
    make_call(make_session(scout), forecast, is_error=True)
    for _ in range(4):
        make_call(make_session(scout), forecast, at=timezone.now() - timedelta(days=8))
    rollups.count_ended_hours()
    response = as_operator.get("/usage?range=7d")
    page = text_of(response)
    assert "Calls 2 −50% vs before" in page
    assert "Error rate 50.0 % +50.0 points vs before" in page
    titles = [panel.title for panel in response.context["panels"]]
    assert titles == ["Calls and errors", "Latency", "Tokens for tools"]
    today = response.context["panels"][0].rows[-1]
    assert today.values == ("2", "1")
    listed = as_operator.get(today.url)
    assert text_of(listed).count("scout") >= 2
    of_group = as_operator.get("/usage?range=7d&group=mcp:weather").context
    assert of_group["series"].total.calls == 2
    assert as_operator.get("/usage?range=7d&group=none").context["series"].total.calls == 0
    of_agent = as_operator.get("/usage?range=7d&agent=scout").context
    assert (of_agent["series"].total.calls, "agent=scout" in of_agent["figures"][0].url) == (
        2,
        True,
    )


@pytest.mark.parametrize("by", ["agent", "server", "tool", "model"])
def test_calls_are_broken_down_with_links_to_their_sessions(by, as_operator, scout, forecast):
    session = make_session(scout, model="large-1")
    other = make_session(make_agent("other"), model="small-1")
    alert = make_tool(make_server(slug="alerts"), "sound")
    for _ in range(3):
        make_call(session, forecast)
    make_call(other, alert, is_error=True)
    response = as_operator.get(f"/usage?by={by}")
    breakdown = response.context["breakdown"]
    first, second = breakdown.rows
    names = {
        "agent": ("scout", "other"),
        "server": ("weather", "alerts"),
        "tool": ("weather__get_forecast", "alerts__sound"),
        "model": ("large-1", "small-1"),
    }[by]
    assert (first.name, first.figures.calls) == (names[0], 3)
    assert (second.name, second.figures.calls, second.figures.errors) == (names[1], 1, 1)
    assert breakdown.panel.rows[-1].values == ("3", "1", "0")
    for row, owner in ((first, session), (second, other)):
        found = as_operator.get(row.sessions_url).content.decode()
        ids = [run.session_id for run in (session, other) if f"/sessions/{run.session_id}" in found]
        assert ids == [owner.session_id]
        assert not row.url or as_operator.get(row.url).status_code == 200


def test_an_empty_range_offers_to_clear_the_filters(as_operator, scout):
    make_session(scout)
    page = text_of(as_operator.get("/usage?range=24h&agent=<i>x"))

    assert "No calls match these filters. Clear filters" in page
    assert "Last 24 hours By hour (UTC), against the period before." in page
    assert "&lt;i&gt;x" in page


@pytest.mark.parametrize("table", usage_views.TABLES)
def test_every_table_has_a_csv_file(table, as_operator, scout, forecast):
    preload("mcp:weather", forecast)
    session = make_session(scout)
    make_event(session, "searched", query="fax", total=0)

    response = as_operator.get(reverse("usage-csv", args=[table]) + "?range=7d")

    assert response["Content-Disposition"] == f'attachment; filename="toolcrib-{table}-7d.csv"'
    rows = list(csv.reader(io.StringIO(response.content.decode())))
    assert len(set(map(len, rows))) == 1
    assert len(rows) >= (
        1 if table in ("tools", "often", "astray", "old", "models", "scripts") else 2
    )


def test_an_unknown_table_is_not_found(as_operator):
    assert as_operator.get("/usage/passwords.csv").status_code == 404


def test_csv_cells_are_never_formulas(as_operator, scout):
    session = make_session(make_agent("=HYPERLINK(1)"))
    make_event(session, "searched", query="x", total=0)

    assert b"'=HYPERLINK(1),1" in as_operator.get("/usage/funnel.csv").content
    cells = ["=1", "+1", "-1", "@x", "\t=1", "\r=1", "fine", -1, None]
    assert [usage_views.format_cell(cell) for cell in cells] == [
        "'=1", "'+1", "'-1", "'@x", "'\t=1", "'\r=1", "fine", -1, ""
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["/usage", "/usage/tools.csv"])
def test_the_page_requires_a_role(path, client, outsider):
    assert client.get(path)["Location"].startswith("/sign-in")
    client.force_login(outsider, backend=BACKEND)
    assert client.get(path).status_code == 403


def test_the_page_takes_a_fixed_number_of_queries(
    as_admin, weather, scout, django_assert_max_num_queries
):
    def cost(number):
        ingest_tools(weather, *(tool_object(f"tool_{at}") for at in range(number)))
        tools = list(weather.tools.select_related("server", "approved"))
        preload("mcp:weather", *tools[::2])
        for tool in tools:
            session = make_session(scout, calls=1, tokens_search=1)
            make_call(session, tool)
            make_event(session, "searched", query=tool.name, total=1, hits=[tool.public_name])
            make_event(session, "loaded", group_id="mcp:weather", names=[tool.public_name])
        as_admin.get("/usage")
        with django_assert_max_num_queries(56) as captured:
            as_admin.get("/usage")
        return len(captured)

    assert cost(3) == cost(40)
