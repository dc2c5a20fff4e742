"""Overview: items that need attention, metrics, and blocks that fail independently."""

import re
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from catalog.audit import SYSTEM, Actor
from catalog.groups import actions as group_actions
from catalog.models import Group, Tool
from servers.errors import SEE_STDERR
from servers.models import Server
from sessions_app.agents import api_keys
from sessions_app.models import ApiKey
from sessions_app.usage import rollups
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
from toolcrib.pages import attention, overview


def text_of(response):
    """Return the visible text of a page."""
    body = re.sub(r"<svg.*?</svg>", "", response.content.decode(), flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def messages():
    return [item.message for item in attention.items()]


@pytest.fixture
def weather(db):
    server = make_server(slug="weather", state="connected", last_synced_at=timezone.now())
    ingest_tools(server, tool_object("get_forecast"), tool_object("get_temperature"))
    return server


# --- Items that need attention ------------------------------------------------------------------


def test_without_items_the_last_sync_is_shown(weather, page_of, admin):
    page = page_of(admin, "/")
    assert re.search(r"No items need attention\. Last sync (just now|\d+ s ago) \.", text_of(page))
    assert "<title>Overview" in page.content.decode()
    assert "Needs attention" not in text_of(page)


def test_the_title_counts_the_items_and_each_has_one_action(weather, page_of, admin):
    make_server(slug="crm", state="failing", failures=3, state_reason="It answered HTML.")
    Server.objects.update(state_since=timezone.now() - timedelta(minutes=35, seconds=5))
    weather.removals_held = True
    weather.save(update_fields=["removals_held"])
    page = page_of(admin, "/")
    assert "<title>(2) Overview" in page.content.decode()
    text = text_of(page)
    assert "2 items need attention." in text
    assert "Crm: failing for 35 min, 3 retries. It answered HTML. View server Reconnect" in text
    assert "Weather no longer lists over half of its tools." in text
    assert 'action="/servers/crm/sync?next=/"' in page.content.decode()


def test_a_disabled_failing_server_needs_no_attention(weather):
    make_server(slug="crm", state="failing", enabled=False)
    assert messages() == []


def test_five_failing_servers_are_listed_and_the_rest_counted(db):
    for number in range(8):
        make_server(slug=f"s{number}", state="failing", state_reason="Refused.")
    items = attention.items()
    assert len(items) == 6
    assert items[-1].message == "3 more servers are failing."
    assert items[-1].url == "/servers?state=failing"


def test_a_changed_definition_is_pending_review(weather):
    ingest_tools(
        weather,
        tool_object("get_forecast", description="Now something else."),
        tool_object("get_temperature"),
    )
    assert messages() == ["1 definition is pending review."]
    assert attention.items()[0].url == "/approvals"


@pytest.mark.parametrize(
    ("remaining", "text"),
    [
        (timedelta(minutes=30), "within an hour"),
        (timedelta(hours=5, minutes=1), "in 5 hours"),
        (timedelta(days=1, minutes=1), "in 1 day"),
        (timedelta(days=6, hours=23), "in 6 days"),
    ],
)
def test_a_key_that_expires_within_a_week_is_listed(db, remaining, text):
    key, _ = api_keys.create_key(
        "laptop",
        "agent",
        agent=make_agent("scout"),
        actor=SYSTEM,
        expires_at=timezone.now() + remaining,
    )
    assert messages() == [f"Key laptop ({key.prefix}…) of scout expires {text}."]
    assert attention.items()[0].url == "/agents/scout/keys"


def test_valid_revoked_and_replaced_keys_are_not_listed(db):
    soon = timezone.now() + timedelta(days=2)
    later = timezone.now() + timedelta(days=8)
    api_keys.create_key("long", "agent", agent=make_agent("a"), actor=SYSTEM, expires_at=later)
    revoked, _ = api_keys.create_key(
        "r", "agent", agent=make_agent("b"), actor=SYSTEM, expires_at=soon
    )
    api_keys.revoke(revoked, actor=SYSTEM)
    off = make_agent("c", enabled=False)
    api_keys.create_key("off", "agent", agent=off, actor=SYSTEM, expires_at=soon)
    rotated, _ = api_keys.create_key("d", "agent", agent=make_agent("d"), actor=SYSTEM)
    api_keys.rotate(rotated, actor=SYSTEM)
    assert messages() == []

    # Still used after it was replaced.
    ApiKey.objects.filter(pk=rotated.pk).update(last_used_at=timezone.now())
    assert messages() == [f"Key d ({rotated.prefix}…) of d expires in 23 hours."]


def test_a_group_with_an_unavailable_and_a_new_tool_is_listed(weather):
    group = group_actions.create("research", "Research", actor=SYSTEM).group
    group_actions.assign(group, list(Tool.objects.filter(server=weather)), actor=SYSTEM)
    assert messages() == []
    ingest_tools(weather, tool_object("get_forecast"), tool_object("get_tides"))
    assert messages() == ["1 tool in “Research” is unavailable; 1 new tool on its servers."]
    assert attention.items()[0].url == "/groups/research"


def test_a_group_with_preloads_over_budget_is_listed(weather):
    group = group_actions.create("research", "Research", actor=SYSTEM).group
    long = "Return " + "rain and snow " * 1500
    group_actions.assign(group, [make_tool(weather, "long", description=long)], actor=SYSTEM)
    assert messages() == []
    group_actions.edit(group, preload_default=True, actor=SYSTEM)
    [message] = messages()
    assert re.fullmatch(
        r"Research costs ≈[\d,]+ tokens in each session, above the budget of 4,000\.", message
    )
    assert attention.items()[0].url == "/groups/research"


def test_an_agent_at_its_session_limit_is_listed(db):
    scout = make_agent("scout", max_sessions=2)
    make_session(scout)
    assert messages() == []
    make_session(scout)
    make_session(scout, state="closed")
    assert messages() == ["scout is at its limit of 2 open sessions: new sessions may be rejected."]


# --- Metrics ------------------------------------------------------------------------------------


def metrics():
    return {metric.label: metric for metric in overview.numbers()["figures"]}


def test_metrics_cover_the_last_24_hours_and_the_change_from_the_day_before(weather):
    tool = Tool.objects.first()
    now = timezone.now()
    session = make_session(tokens_all=1000)
    for kind, tokens in (("opened", 100), ("searched", 20), ("loaded", 30), ("called", 500)):
        make_event(session, kind, tokens=tokens)
    make_session(tokens_all=5000, started=now - timedelta(hours=25))
    for hours, ms, state in ((0, 100, "succeeded"), (2, 200, "failed"), (2, 300, "succeeded")):
        make_call(session, tool, at=now - timedelta(hours=hours), ms=ms, state=state)
    make_call(session, tool, at=now - timedelta(hours=25))
    make_call(None, tool, path="try")

    by_label = metrics()
    assert (by_label["Calls"].value, by_label["Calls"].change) == ("3", 200)
    assert (by_label["Error rate"].value, round(by_label["Error rate"].change)) == ("33.3", 33)
    value, unit = by_label["p95 latency"].value, by_label["p95 latency"].unit
    assert (300 / 2**0.5 <= int(value) <= 300 * 2**0.5, unit) == (True, "ms")
    assert by_label["Tokens saved"].value == "≈850"


def test_the_range_in_the_url_applies_to_metrics_and_charts(weather, page_of, operator):
    tool, at = Tool.objects.first(), timezone.now() - timedelta(days=3)
    make_call(make_session(started=at), tool, at=at)
    rollups.count_ended_hours()
    assert "No calls in the last 24 hours." in text_of(page_of(operator, "/"))
    page = page_of(operator, "/?range=7d")
    assert "Last 7 days" in text_of(page)
    assert "1 call, 0 errors." in text_of(page)
    assert page.content.decode().count("data-column=") == 7 * 2  # calls and latency


def test_without_calls_there_is_no_error_rate(weather, page_of, operator):
    by_label = metrics()
    assert (by_label["Error rate"].value, by_label["p95 latency"].value) == ("–", "–")
    assert "No calls in the last 24 hours." in text_of(page_of(operator, "/"))


def test_sessions_above_the_baseline_reduce_the_tokens_saved(db):
    make_event(make_session(tokens_all=100), "opened", tokens=350)
    assert metrics()["Tokens saved"].value == "−≈250"


# --- Servers, sessions, blocks that fail --------------------------------------------------------


def test_servers_are_sorted_worst_first(db):
    for slug, state in (
        ("a", "disabled"),
        ("b", "connected"),
        ("c", "failing"),
        ("d", "connecting"),
        ("e", "new"),
    ):
        make_server(slug=slug, state=state)
    block = overview.servers()
    assert [server.slug for server in block["listed"]] == ["c", "d", "e", "b", "a"]
    assert (block["connected"], block["total"], block["more"]) == (1, 5, 0)


def test_five_sessions_are_shown_newest_first(weather, page_of, admin):
    sessions = [make_session(make_agent(f"agent-{number}")) for number in range(6)]
    page = page_of(admin, "/").content.decode()
    listed = re.findall(r'href="/sessions/(ses_\w+)"', page)
    assert listed == [session.session_id for session in sessions[:0:-1]]


@pytest.mark.parametrize(
    ("table", "failed", "available"),
    [
        (
            "sessions_app_usagehour",
            "Metrics",
            ["No items need attention.", "Recent sessions All sessions"],
        ),
        ("sessions_app_expansion", "Recent sessions", ["No items need attention.", "Calls 0"]),
        ("sessions_app_apikey", "Items that need attention", ["Calls 0", "1 of 1 connected"]),
    ],
)
@pytest.mark.skipif(connection.vendor != "sqlite", reason="an error would end the transaction")
def test_a_block_that_fails_does_not_affect_the_others(
    weather, page_of, admin, table, failed, available
):
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA legacy_alter_table = ON")
    make_session()
    page_of(admin, "/")
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO put_away")
    try:
        page = page_of(admin, "/")
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE put_away RENAME TO {table}")
            cursor.execute("PRAGMA legacy_alter_table = OFF")
    assert page.status_code == 200
    text = text_of(page)
    assert f"{failed} could not be read from the database." in text
    assert text.count("could not be read from the database") == 1
    for part in available:
        assert part in text


def test_the_number_of_queries_does_not_grow_with_rows(
    weather, client, admin, django_assert_max_num_queries
):
    tool = Tool.objects.first()
    for number in range(30):
        server = make_server(slug=f"s{number}", state="failing")
        make_tool(server)
        agent = make_agent(f"agent-{number}", max_sessions=1)
        api_keys.create_key(
            "k", "agent", agent=agent, actor=SYSTEM, expires_at=timezone.now() + timedelta(days=1)
        )
        session = make_session(agent)
        make_call(session, tool)
        group = group_actions.create(f"g{number}", f"G{number}", actor=SYSTEM).group
        group_actions.assign(group, [tool], actor=SYSTEM)
    ingest_tools(weather, tool_object("get_tides"))
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    client.get("/")
    with django_assert_max_num_queries(45):
        page = client.get("/")
    assert "25 more servers are failing." in text_of(page)
    assert "25 more groups are affected by changed tools." in text_of(page)


# --- First run and first steps ------------------------------------------------------------------


def test_before_the_first_server_only_the_setup_card_is_shown(page_of, admin):
    text = text_of(page_of(admin, "/"))
    assert "No servers connected yet." in text
    assert "Connect your first server" in text
    assert "-m servers.demo" in text
    assert "Recent sessions" not in text
    assert "First steps" not in text


def test_an_operator_sees_that_an_admin_must_connect_the_first_server(page_of, operator):
    page = page_of(operator, "/")
    assert "This requires the role admin." in text_of(page)
    assert 'name="confirm"' not in page.content.decode()


def test_the_demo_is_saved_only_with_the_command_that_was_shown(client, admin):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    page = client.get("/").content.decode()
    body = dict(re.findall(r'name="(source|pick|confirm)" value="([^"]+)"', page))
    assert body["source"] == "demo"

    other = client.post("/servers/add/check", {**body, "confirm": "0" * 64}, follow=True)
    assert "select Allow this command" in text_of(other)
    assert Server.objects.count() == 0

    done = client.post("/servers/add/check", body)
    assert done.headers["Location"] == "/servers/add/progress"
    assert Server.objects.get().slug == "demo"


def test_first_steps_show_their_completion_and_can_be_dismissed(weather, client, admin, operator):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    assert "First steps 2 of 5 done" in text_of(client.get("/"))  # a server, a second person
    assert client.get("/welcome/group").headers["Location"] == "/groups/mcp:weather"
    make_session(make_agent("scout"))
    assert "First steps" not in text_of(client.get("/"))  # all five

    operator.delete()
    assert "First steps 4 of 5 done" in text_of(client.get("/"))
    client.post("/welcome/dismiss")
    assert "First steps" not in text_of(client.get("/"))


def test_a_change_of_a_group_completes_its_step(weather, client, admin):
    group_actions.edit(Group.objects.get(), display_name="Sky", actor=Actor.user(admin))
    assert overview.first_steps(group_viewed=False)[1].done


def test_operators_see_no_first_steps_and_outsiders_no_overview(
    weather, page_of, operator, outsider
):
    assert "First steps" not in text_of(page_of(operator, "/"))
    assert page_of(outsider, "/").status_code == 403


def test_a_failing_program_is_quoted_where_it_appears(page_of, admin, db):
    make_server(
        slug="crm",
        name="CRM",
        transport="stdio",
        command="/bin/crm",
        state="failing",
        state_reason=f"The program exited with code 1 during the handshake. {SEE_STDERR}",
        state_detail="starting\nCRM_TOKEN is not set <b>\n",
    )
    [message] = messages()
    assert message.endswith("It said: “CRM_TOKEN is not set <b>”")
    for path in ("/", "/servers", "/servers/crm"):
        page = page_of(admin, path).content.decode()
        assert "It said: “CRM_TOKEN is not set &lt;b&gt;”" in page, path
