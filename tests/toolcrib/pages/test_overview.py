"""The overview: what needs a person, the numbers of a day, and blocks that fail alone."""

import re
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from catalog.audit import SYSTEM, Actor
from catalog.groups import actions as group_actions
from catalog.models import Group, Tool
from servers.models import Server
from sessions_app.agents import api_keys
from sessions_app.models import ApiKey
from tests.support.factories import (
    fold,
    make_agent,
    make_call,
    make_server,
    make_session,
    make_tool,
    tool_object,
)
from toolcrib.pages import attention, overview


def text_of(response):
    """The page's words as a person reads them."""
    body = re.sub(r"<svg.*?</svg>", "", response.content.decode(), flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def sentences():
    return [item.sentence for item in attention.items()]


@pytest.fixture
def weather(db):
    server = make_server(slug="weather", state="connected", last_synced_at=timezone.now())
    fold(server, tool_object("get_forecast"), tool_object("get_temperature"))
    return server


# --- What needs a person ------------------------------------------------------------------------


def test_all_clear_says_when_a_server_last_answered(weather, page_of, admin):
    page = page_of(admin, "/")
    assert re.search(r"All clear\. Last sync (just now|\d+ s ago) \.", text_of(page))
    assert "<title>Overview" in page.content.decode()
    assert "Needs attention" not in text_of(page)


def test_the_title_counts_what_waits_and_each_line_has_one_button(weather, page_of, admin):
    make_server(slug="crm", state="failing", failures=3, state_reason="It answered HTML.")
    weather.removals_held = True
    weather.save()
    page = page_of(admin, "/")
    assert "<title>(2) Overview" in page.content.decode()
    words = text_of(page)
    assert "2 things need a person." in words
    assert "Crm is failing: It answered HTML. Look at server" in words
    assert "Weather no longer offers over half its tools" in words
    assert 'href="/servers/crm">Look at server' in page.content.decode()


def test_a_disabled_server_that_failed_waits_on_nobody(weather):
    make_server(slug="crm", state="failing", enabled=False)
    assert sentences() == []


def test_many_failing_servers_are_named_up_to_five_and_then_counted(db):
    for number in range(8):
        make_server(slug=f"s{number}", state="failing", state_reason="Refused.")
    found = attention.items()
    assert len(found) == 6
    assert found[-1].sentence == "3 more servers are failing."
    assert found[-1].url == "/servers?state=failing"


def test_a_changed_definition_waits_for_a_decision(weather):
    fold(
        weather,
        tool_object("get_forecast", description="Now something else."),
        tool_object("get_temperature"),
    )
    assert sentences() == ["1 definition waits for a decision."]
    assert attention.items()[0].url == "/approvals"


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (timedelta(minutes=30), "within the hour"),
        (timedelta(hours=5, minutes=1), "in 5 hours"),
        (timedelta(days=1, minutes=1), "in 1 day"),
        (timedelta(days=6, hours=23), "in 6 days"),
    ],
)
def test_a_key_that_ends_within_a_week_is_told(db, left, said):
    key, _ = api_keys.create_key(
        "laptop",
        "agent",
        agent=make_agent("scout"),
        actor=SYSTEM,
        expires_at=timezone.now() + left,
    )
    assert sentences() == [f"The key laptop ({key.prefix}…) of scout expires {said}."]
    assert attention.items()[0].url == "/agents/scout/keys"


def test_keys_that_last_or_are_gone_or_were_replaced_are_not_told(db):
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
    assert sentences() == []

    # Still used after its replacement was made: somebody forgot to change it.
    ApiKey.objects.filter(pk=rotated.pk).update(last_used_at=timezone.now())
    assert sentences() == [f"The key d ({rotated.prefix}…) of d expires in 23 hours."]


def test_a_chosen_group_that_lost_a_tool_and_could_gain_one_is_told(weather):
    group = group_actions.create("research", "Research", actor=SYSTEM).group
    group_actions.assign(group, list(Tool.objects.filter(server=weather)), actor=SYSTEM)
    assert sentences() == []
    fold(weather, tool_object("get_forecast"), tool_object("get_tides"))
    assert sentences() == [
        "Research has drifted: agents do not get 1 of its tools and 1 tool came to its servers."
    ]
    assert attention.items()[0].url == "/groups/research"


def test_a_group_that_preloads_over_the_budget_is_told(weather):
    group = group_actions.create("research", "Research", actor=SYSTEM).group
    long = "Return " + "rain and snow " * 1500
    group_actions.assign(group, [make_tool(weather, "long", description=long)], actor=SYSTEM)
    assert sentences() == []
    group_actions.set_default_preload(group, True, actor=SYSTEM)
    [said] = sentences()
    assert re.fullmatch(r"Research preloads ≈[\d,]+ tokens into each session, over 4,000\.", said)
    assert attention.items()[0].url == "/groups/research"


def test_an_agent_that_may_open_no_more_sessions_is_told(db):
    scout = make_agent("scout", max_sessions=2)
    make_session(scout)
    assert sentences() == []
    make_session(scout)
    make_session(scout, state="closed")
    assert sentences() == ["scout has 2 open sessions, as many as it may: new ones are refused."]


# --- Numbers ------------------------------------------------------------------------------------


def figures():
    return {one.label: one for one in overview.numbers()["figures"]}


def test_the_numbers_are_of_the_last_24_hours_by_the_hour(weather):
    tool = Tool.objects.first()
    now = timezone.now()
    session = make_session(
        tokens_all=1000, tokens_catalog=100, tokens_search=20, tokens_load=30, tokens_call=500
    )
    make_session(tokens_all=5000, started=now - timedelta(hours=25))
    for hours, ms, state in ((0, 100, "succeeded"), (2, 200, "failed"), (2, 300, "succeeded")):
        at = now - timedelta(hours=hours, minutes=5)
        make_call(session, tool, at=at, ms=ms, state=state)
    make_call(session, tool, at=now - timedelta(hours=25))
    make_call(None, tool, path="try")

    found = figures()
    assert found["Calls"].value == "3"
    assert found["Calls"].spark == [0] * 21 + [2, 0, 1]
    assert found["Error rate"].value == "33.3"
    assert found["Error rate"].spark == [None] * 21 + [50, None, 0]
    assert (found["p95 latency"].value, found["p95 latency"].unit) == ("300", "ms")
    assert found["p95 latency"].spark == [None] * 21 + [300, None, 100]
    assert found["Tokens saved"].value == "≈850"
    assert found["Tokens saved"].spark == [0] * 23 + [850]


def test_without_a_call_there_is_no_rate_rather_than_none(weather, page_of, operator):
    found = figures()
    assert (found["Error rate"].value, found["p95 latency"].value) == ("–", "–")
    assert "No agent made a call since yesterday" in text_of(page_of(operator, "/"))


def test_sessions_that_paid_more_than_all_schemas_count_against_what_was_saved(db):
    make_session(tokens_all=100, tokens_catalog=350)
    assert figures()["Tokens saved"].value == "-≈250"


# --- Servers, sessions, blocks that fail --------------------------------------------------------


def test_servers_stand_worst_first(db):
    for slug, state in (
        ("a", "disabled"),
        ("b", "connected"),
        ("c", "failing"),
        ("d", "connecting"),
        ("e", "new"),
    ):
        make_server(slug=slug, state=state)
    found = overview.servers()
    assert [one.slug for one in found["shown"]] == ["c", "d", "e", "b", "a"]
    assert (found["connected"], found["total"], found["more"]) == (1, 5, 0)


def test_five_sessions_are_shown_newest_first(weather, page_of, admin):
    made = [make_session(make_agent(f"agent-{number}")) for number in range(6)]
    page = page_of(admin, "/").content.decode()
    shown = re.findall(r'href="/sessions/(ses_\w+)"', page)
    assert shown == [session.session_id for session in made[:0:-1]]


@pytest.mark.parametrize(
    ("table", "told", "stands"),
    [
        ("sessions_app_call", "The numbers", ["All clear.", "Recent sessions All sessions"]),
        ("sessions_app_expansion", "The sessions", ["All clear.", "Calls 0"]),
        ("sessions_app_apikey", "What needs attention", ["Calls 0", "1 of 1 connected."]),
    ],
)
@pytest.mark.skipif(connection.vendor != "sqlite", reason="an error would end the transaction")
def test_a_block_that_cannot_be_read_says_so_and_the_others_stay(
    weather, page_of, admin, table, told, stands
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
    words = text_of(page)
    assert f"{told} could not be read from the database." in words
    assert words.count("could not be read from the database") == 1
    for one in stands:
        assert one in words


def test_the_page_asks_no_more_queries_for_many_rows(
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
    fold(weather, tool_object("get_tides"))
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    client.get("/")
    with django_assert_max_num_queries(45):
        page = client.get("/")
    assert "25 more servers are failing." in text_of(page)
    assert "25 more groups drifted." in text_of(page)


# --- First run and first steps ------------------------------------------------------------------


def test_before_the_first_server_there_is_the_setup_card_alone(page_of, admin):
    words = text_of(page_of(admin, "/"))
    assert "Nothing is connected yet." in words
    assert "Connect your first server" in words
    assert "-m servers.demo" in words
    assert "Recent sessions" not in words
    assert "First steps" not in words


def test_an_operator_reads_who_may_connect_the_first_server(page_of, operator):
    page = page_of(operator, "/")
    assert "This needs the role admin." in text_of(page)
    assert 'name="confirm"' not in page.content.decode()


def test_the_demo_is_saved_by_one_press_only_with_the_program_that_was_shown(client, admin):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    page = client.get("/").content.decode()
    body = dict(re.findall(r'name="(source|pick|confirm)" value="([^"]+)"', page))
    assert body["source"] == "demo"

    other = client.post("/servers/add/check", {**body, "confirm": "0" * 64}, follow=True)
    assert "tick Run exactly this program" in text_of(other)
    assert Server.objects.count() == 0

    done = client.post("/servers/add/check", body)
    assert done.headers["Location"] == "/servers/add/progress"
    assert Server.objects.get().slug == "demo"


def test_first_steps_are_ticked_as_they_are_done_and_can_be_dismissed(
    weather, client, admin, operator
):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    assert "First steps 2 of 5 done" in text_of(client.get("/"))  # a server, a second person
    assert client.get("/welcome/group").headers["Location"] == "/groups/mcp:weather"
    make_session(make_agent("scout"))
    assert "First steps" not in text_of(client.get("/"))  # all five

    operator.delete()
    assert "First steps 4 of 5 done" in text_of(client.get("/"))
    client.post("/welcome/dismiss")
    assert "First steps" not in text_of(client.get("/"))


def test_a_group_that_a_person_changed_was_looked_at(weather, client, admin):
    group_actions.edit(Group.objects.get(), display_name="Sky", actor=Actor.user(admin))
    assert overview.first_steps(looked=False)[1].done


def test_an_operator_has_no_first_steps_and_an_outsider_no_overview(
    weather, page_of, operator, outsider
):
    assert "First steps" not in text_of(page_of(operator, "/"))
    assert page_of(outsider, "/").status_code == 403
