"""Every place that shows a figure of a session shows the same number."""

import csv
import io
import re
from datetime import timedelta
from html import unescape

import pytest
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.groups import actions as group_actions
from catalog.groups import board
from catalog.groups.preview import cached_group
from catalog.models import Group
from catalog.tools import actions as tool_actions
from catalog.tools.actions import save_custom_tool
from sessions_app.models import AgentSession, UsageKind
from sessions_app.review import queries as review_queries
from sessions_app.review import session_detail
from sessions_app.usage import call_stats, rollups
from sessions_app.usage.filters import UsageFilter
from sessions_app.usage.series import read_series, read_totals
from tests.support.agent_client import make_agent_client, make_group
from tests.support.factories import (
    make_agent,
    make_call,
    make_run,
    make_server,
    make_session,
    make_tool,
    tool_object,
)
from toolcrib.lib import figures
from toolcrib.lib.figures import signed

pytestmark = pytest.mark.django_db
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture
def signed_in(client, admin):
    client.force_login(admin)
    return client


@pytest.fixture
def session(db):
    """A real session: opened, searched, loaded, two calls, one rejected with the schema."""
    make_server(slug="weather")  # the overview needs one
    names = ("count", "measure", "weigh")
    tools = [save_custom_tool(tool_object(n, inputSchema=NUMBER), actor=SYSTEM) for n in names]
    make_group("own", *tools)
    opened = make_agent_client("scout", mode="deferred").open(model="large-1")
    opened.post("/search", {"query": "measure a length"})
    opened.post("/load", {"names": ["measure"]})
    opened.call("count", {"n": 5})
    opened.call("count", {"n": "five"})
    opened.call("measure", {"n": 6})
    return opened


def text_of(response):
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", response.content.decode())).split())


def test_every_place_shows_the_same_figures_of_a_session(session, signed_in):
    row = AgentSession.objects.get()
    tokens = row.token_figures
    assert min(tokens.catalog, tokens.searches, tokens.definitions, tokens.results) > 0

    # API: state and stats of the session, export
    ledger = session.get("/stats")["tokens"]
    assert ledger == review_queries.export_session(row)["tokens"]
    assert (ledger["all_schemas"], ledger["given"]) == (tokens.baseline, tokens.given)
    assert (ledger["saved"], ledger["saved_percent"]) == (tokens.saved, tokens.saved_percent)
    assert ledger["delivered"] == tokens.given + tokens.results

    # timeline and context chart
    _, steps = review_queries.session_timeline(row)
    assert steps[-1].step.context == tokens.sent
    meter = session_detail.context_meter(row)
    parts = {kind: total for kind, _, total in meter.parts}
    assert parts == {
        name: getattr(tokens, name) for name in ("catalog", "searches", "definitions", "results")
    }

    # charts by agent, model and over all
    of_agent = read_series("24h", UsageKind.AGENT, str(row.agent_id)).total
    of_model = read_totals("24h", UsageKind.MODEL)["large-1"]
    for total in (read_series("24h").total, of_agent, of_model):
        assert total.token_figures == tokens
        assert (total.calls, total.errors, total.sessions) == (row.calls, row.errors, 1)

    # pages
    page = text_of(signed_in.get(f"/sessions/{row.session_id}"))
    assert page.count(f"Given for tools ≈{tokens.given:,}") == 2
    assert f"Baseline (all schemas) ≈{tokens.baseline:,}" in page
    assert f"≈{tokens.sent:,} tokens in context at the end" in page
    listed = f"≈{tokens.given:,} of {tokens.baseline:,}"
    for address in ("/sessions", "/", "/agents/scout/activity"):
        assert listed in text_of(signed_in.get(address)), address
    saved = f"≈{tokens.given:,} given for tools, {signed(tokens.saved)} saved."
    for address in ("/", "/agents/scout/activity"):
        assert saved in text_of(signed_in.get(address)), address

    # CSV
    body = signed_in.get("/usage/tools.csv").content.decode()
    rows = {line["tool"]: line for line in csv.DictReader(io.StringIO(body))}
    assert sum(int(line["calls"]) for line in rows.values()) == row.calls
    assert sum(int(line["errors"]) for line in rows.values()) == row.errors


def test_a_fork_starts_with_what_its_parent_had_in_context(session, signed_in):
    before = AgentSession.objects.get().token_figures
    fork_id = session.post("/fork").json["id"]
    fork = AgentSession.objects.get(session_id=fork_id)
    assert fork.token_figures == before

    _, steps = review_queries.session_timeline(fork)
    assert steps[0].step.context == before.sent
    parts = {kind: total for kind, _, total in session_detail.context_meter(fork).parts}
    assert parts == {
        name: getattr(before, name) for name in ("catalog", "searches", "definitions", "results")
    }
    page = text_of(signed_in.get(f"/sessions/{fork_id}"))
    assert f"≈{before.sent:,} tokens in context at the end; ≈{before.sent:,} from the" in page
    assert f"No tokens added, ≈{before.sent:,} tokens in context." in page


def test_every_place_shows_the_same_latency(signed_in, admin_token):
    """p50 and p95 of a server and of a tool: lists, pages, charts, usage, API and CSV."""
    server = make_server(slug="weather", state="connected")
    tool, session = make_tool(server, "now"), make_session(make_agent("scout"))
    for ms in (3, 11, 23, 170, 612):
        make_call(session, tool, ms=ms)
    of_server = read_series("24h", UsageKind.SERVER, "weather").total
    of_tool = read_series("30d", UsageKind.TOOL, tool.public_name).total
    p50, p95 = of_server.p50, of_server.p95
    assert (of_tool.p50, of_tool.p95) == (p50, p95)

    for address in ("/servers/weather", f"/tools/{tool.public_name}", "/agents/scout/activity"):
        page = text_of(signed_in.get(address))
        assert f"p50 {p50} ms, p95 {p95} ms." in page, address
        assert f"p95 latency {p95} ms" in page, address
    assert f"p95 latency {p95} ms" in text_of(signed_in.get("/"))
    assert f" {p95} ms " in text_of(signed_in.get("/servers"))
    used = text_of(signed_in.get(f"/tools/{tool.public_name}/use"))
    assert f"Duration p50 {p50} ms, p95 {p95} ms" in used
    usage = text_of(signed_in.get("/usage?by=tool"))
    assert usage.count(f" {p50} ms {p95} ms ") == 3  # table of the chart, breakdown, tools
    assert f"p95 latency {p95} ms" in usage
    (line,) = csv.DictReader(io.StringIO(signed_in.get("/usage/tools.csv").content.decode()))
    assert (line["p50_ms"], line["p95_ms"]) == (str(p50), str(p95))
    headers = {"Authorization": f"Bearer {admin_token}"}
    (item,) = signed_in.get("/api/v1/usage/tools", headers=headers).json()["items"]
    assert (item["p50_ms"], item["p95_ms"]) == (p50, p95)


def test_every_place_shows_the_same_money_of_a_session(session, signed_in, admin_token):
    headers = {"Authorization": f"Bearer {admin_token}"}
    row = AgentSession.objects.get()
    address = f"/sessions/{row.session_id}"
    assert "Money saved" not in text_of(signed_in.get(address))
    saved = signed_in.post("/settings/prices", {"currency": "EUR", "prices": "large-* 2500"})
    assert saved.status_code == 302
    tokens = row.token_figures
    money = figures.money_of(tokens, figures.Price("EUR", 2500))
    assert (money.cost, money.saving) == pytest.approx(
        (tokens.given * 0.0025, tokens.saved * 0.0025)
    )

    page = text_of(signed_in.get(address))
    assert f"Cost ≈{money.cost_text} Money saved ≈{money.saving_text}" in page
    assert review_queries.export_session(row)["money"]["cost"] == money.cost
    usage = text_of(signed_in.get("/usage"))
    assert f"{money.cost_text} {money.saving_text}" in usage
    assert f"≈{money.saving_text}" in text_of(signed_in.get("/"))
    body = signed_in.get("/usage/models.csv").content.decode()
    (line,) = csv.DictReader(io.StringIO(body))
    assert (line["currency"], line["given"]) == ("EUR", str(tokens.given))
    assert float(line["cost"]) == pytest.approx(money.cost, abs=0.01)
    (item,) = signed_in.get("/api/v1/usage/models", headers=headers).json()["items"]
    assert (item["given"], item["cost"], item["saving"]) == (
        *(tokens.given, money.cost, money.saving),
    )
    prices = signed_in.get("/api/v1/settings/prices", headers=headers).json()
    assert prices == {"currency": "EUR", "prices": [{"model": "large-*", "per_million": 2500}]}
    for wrong in ("large-1", "large-1 -2", "large-1 nan", "a 1\na 2"):
        values = {"currency": "EUR", "prices": wrong}
        assert signed_in.post("/settings/prices", values).status_code == 422, wrong


def test_every_place_shows_the_same_figures_of_scripts(session, signed_in, admin_token):
    row = AgentSession.objects.get()
    runs = [
        make_run(row, tokens_given=40, tokens_spared=1_000),
        make_run(row, state="failed", tokens_given=10, tokens_spared=500),
        make_run(row, state="held", finished_at=None, tokens_given=0, tokens_spared=70),
        make_run(row, at=timezone.now() - timedelta(days=31), tokens_spared=9_999),
    ]
    row.call_rows.update(run=runs[0], path="script")
    calls = row.call_rows.count()
    expected = figures.ScriptFigures(3, 1, 1, calls, 50, 1_570)

    (usage,) = call_stats.scripts_by_agent(UsageFilter())
    assert (usage.agent, usage.figures) == ("scout", expected)
    assert call_stats.total_scripts([usage, usage]).spared == 2 * 1_570
    assert call_stats.scripts_by_agent(UsageFilter(agent="nobody")) == []

    page = text_of(signed_in.get("/usage"))
    assert f"scout 3 1 1 {calls} ≈50 ≈1,570" in page
    assert "Here they are 31.4 times the tokens given." in page
    body = signed_in.get("/usage/scripts.csv").content.decode()
    assert list(csv.DictReader(io.StringIO(body))) == [
        {
            "agent": "scout",
            "runs": "3",
            "failed": "1",
            "held": "1",
            "calls": str(calls),
            "tokens_given": "50",
            "tokens_spared": "1570",
        }
    ]
    headers = {"Authorization": f"Bearer {admin_token}"}
    answer = signed_in.get("/api/v1/usage/scripts", headers=headers).json()
    assert answer["items"] == [
        {
            "agent": "scout",
            "runs": 3,
            "failed": 1,
            "held": 1,
            "calls": calls,
            "tokens_given": 50,
            "tokens_spared": 1_570,
        }
    ]


def test_an_error_that_contains_a_schema_is_given_for_tools(session):
    row = AgentSession.objects.get()
    rejected = row.events.get(kind="refused")
    loads = row.events.filter(kind="loaded").values_list("tokens", flat=True)
    assert row.tokens_load == sum(loads) + rejected.tokens
    assert rejected.tokens > 0


def test_stored_hours_agree_with_the_session(session):
    row = AgentSession.objects.get()
    tokens, start = row.token_figures, rollups.hour_of(row.created_at)
    hours = rollups.count_hours(start, start + 2 * rollups.HOUR)
    of_all = [hour for hour in hours if hour.kind == UsageKind.ALL]
    assert sum(hour.tokens_load for hour in of_all) == tokens.definitions
    assert sum(hour.tokens_call for hour in of_all) == tokens.results


def test_a_session_that_saved_nothing_says_why(session, signed_in):
    row = AgentSession.objects.get()
    AgentSession.objects.update(tokens_all=10)
    row.refresh_from_db()
    assert row.token_figures.saved < 0
    assert row.token_figures.explanation in text_of(signed_in.get(f"/sessions/{row.session_id}"))


def test_a_tool_that_is_unavailable_counts_nowhere(signed_in):
    server = make_server(slug="weather")
    hidden, *_ = [make_tool(server, name) for name in ("now", "later", "never")]
    group = Group.objects.get(group_id="mcp:weather")
    group_actions.set_preload(group, list(group.tools.all()), True, actor=SYSTEM)
    tool_actions.hold(hidden, "Odd.", actor=SYSTEM)
    cost = board.group_cost(cached_group(group))
    assert (cost.tools, cost.preloaded) == (2, 2)

    assert "2 2 preloaded" in text_of(signed_in.get("/groups"))
    shown = text_of(signed_in.get("/groups/mcp:weather"))
    assert f"Preloaded 2 tools, ≈{cost.preload} tokens, 1 unavailable" in shown


def test_every_place_shows_the_same_cost_of_a_group(signed_in, admin_token):
    server = make_server(slug="weather")
    tools = [make_tool(server, name, description="Rain. " * 2_500) for name in ("now", "later")]
    group = Group.objects.get(group_id="mcp:weather")
    group_actions.set_preload(group, tools[:1], True, actor=SYSTEM)
    make_agent("scout", all_groups=True)
    cost = board.group_cost(cached_group(group))
    assert min(cost.preload, cost.stub, cost.rest) > 0
    assert cost.preload < cost.at_start == cost.preload + cost.stub

    headers = {"Authorization": f"Bearer {admin_token}"}
    listed = signed_in.get("/api/v1/groups", headers=headers).json()["items"][0]
    detail = signed_in.get("/api/v1/groups/mcp:weather", headers=headers).json()
    for item in (listed, detail):
        assert (item["preload_tokens"], item["catalog_tokens"]) == (cost.preload, cost.stub)
        assert (item["start_tokens"], item["tokens"]) == (cost.at_start, cost.definitions)
        assert item["over_budget"] == cost.at_start - figures.GROUP_BUDGET > 0

    shown = f"≈{cost.at_start:,}"
    for address in ("/groups", "/groups/mcp:weather", "/agents/scout", "/"):
        assert shown in text_of(signed_in.get(address)), address
    over = f"≈{cost.over_budget:,} over {figures.GROUP_BUDGET:,}"
    for address in ("/groups", "/groups/mcp:weather"):
        assert over in text_of(signed_in.get(address)), address
    assert cost.with_all_preloaded == cost.at_start + cost.rest
    of_all = f"≈{cost.at_start:,} tokens of ≈{cost.with_all_preloaded:,} with all tools preloaded"
    assert of_all in text_of(signed_in.get("/groups"))
    attention = text_of(signed_in.get("/"))
    assert f"costs {shown} tokens in each session, above the budget of" in attention
    assert f"session start: {shown} tokens" in text_of(signed_in.get("/agents/scout"))
