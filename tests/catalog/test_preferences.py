"""Preferences: chosen in the dashboard, read at each use, fixed by the environment."""

from datetime import timedelta

import pytest
from django.utils import timezone

from catalog import preferences
from catalog.audit import Actor
from catalog.models import AuditEntry, Preference
from servers.registration import actions as server_actions
from servers.registration.drafts import ServerDraft
from sessions_app.agents import actions as agent_actions
from sessions_app.ledger import calls as call_ledger
from sessions_app.models import Agent, AgentSession
from sessions_app.sessions import loading
from sessions_app.sessions.lifecycle import expire_idle
from tests.support.factories import make_agent, make_call, make_session
from toolcrib.lib.errors import Conflict, Invalid

pytestmark = pytest.mark.django_db
ADA = Actor("user", "ada@example.org")


def change(**wanted):
    return preferences.change(wanted, actor=ADA)


def test_until_somebody_chooses_the_settings_hold(settings):
    settings.KEEP_PAYLOADS_DAYS = 12

    assert preferences.value("keep_payloads_days") == 12
    assert preferences.values("retention")["keep_payloads_days"] == 12


def test_a_choice_holds_at_the_next_use_and_is_written_down():
    assert [one.name for one in change(keep_payloads_days=7, keep_sessions_days=365)] == [
        "keep_payloads_days"
    ]

    assert preferences.value("keep_payloads_days") == 7
    entry = AuditEntry.objects.get()
    assert (entry.verb, entry.target_label) == ("settings.change", "keep_payloads_days")
    assert (entry.before, entry.after) == ({"value": 30}, {"value": 7})


def test_choosing_what_holds_already_writes_nothing():
    change(keep_payloads_days=7)

    assert change(keep_payloads_days=7) == []
    assert AuditEntry.objects.count() == 1


def test_the_environment_wins_over_a_choice_made_before_and_refuses_the_next(settings):
    change(keep_payloads_days=7)
    settings.FROM_ENVIRONMENT = frozenset({"TOOLCRIB_KEEP_PAYLOADS_DAYS"})
    settings.KEEP_PAYLOADS_DAYS = 3

    assert preferences.value("keep_payloads_days") == 3
    assert preferences.values()["keep_payloads_days"] == 3
    with pytest.raises(Conflict, match="TOOLCRIB_KEEP_PAYLOADS_DAYS"):
        change(keep_payloads_days=9)


@pytest.mark.parametrize("bad", [0, -1, 36_501, 1.5, True, "7", None, float("nan")])
def test_what_is_no_such_number_is_refused_and_nothing_of_it_kept(bad):
    with pytest.raises(Invalid, match="whole number"):
        change(keep_sessions_days=8, keep_payloads_days=bad)
    assert not Preference.objects.exists()


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(Invalid, match="not a setting"):
        change(colour=3)


def test_a_kept_value_that_is_out_of_range_by_now_counts_as_none():
    Preference.objects.create(name="keep_payloads_days", value="99999999")

    assert preferences.value("keep_payloads_days") == 30


def test_every_preference_accepts_its_own_default():
    for known in preferences.PREFERENCES.values():
        assert known.accepts(known.default), known.name


# --- What they do -------------------------------------------------------------------------------


def test_defaults_of_agents_are_those_of_the_model():
    assert preferences.agent_defaults() == {
        name: Agent._meta.get_field(name).default for name in preferences.AGENT
    }


def test_a_new_agent_gets_the_chosen_defaults_where_its_maker_says_nothing():
    change(agent_tool_threshold=40, agent_catalog_budget=500, agent_threshold_percent=2.5)

    agent = agent_actions.create("scout", actor=ADA, catalog_budget=700)

    agent.refresh_from_db()
    assert (agent.tool_threshold, agent.catalog_budget, agent.threshold_percent) == (40, 700, 2.5)


def test_agents_made_before_keep_what_they_have():
    agent = agent_actions.create("scout", actor=ADA)

    change(agent_tool_threshold=40)

    agent.refresh_from_db()
    assert agent.tool_threshold == 15


def test_payloads_and_sessions_are_forgotten_after_the_chosen_days():
    now = timezone.now()
    old = make_session(ended_at=now - timedelta(days=9), state="closed")
    call = make_call(make_session(), at=now - timedelta(days=4), arguments={"a": 1})
    call_ledger.prune()
    call.refresh_from_db()
    assert call.arguments
    assert AgentSession.objects.filter(pk=old.pk).exists()

    change(keep_payloads_days=3, keep_sessions_days=8)
    call_ledger.prune()

    call.refresh_from_db()
    assert not call.arguments
    assert not AgentSession.objects.filter(pk=old.pk).exists()


def test_a_session_expires_after_the_chosen_time():
    session = make_session(make_agent(), started=timezone.now() - timedelta(minutes=10))
    assert loading.current_state(session) == "open"

    change(session_idle_seconds=300)

    assert loading.current_state(session) == "expired"
    assert expire_idle() == 1


def test_a_session_in_use_asks_the_database_nothing(django_assert_num_queries):
    session = make_session(make_agent(), started=timezone.now())

    with django_assert_num_queries(0):
        assert loading.current_state(session) == "open"


def test_a_new_server_is_polled_as_often_as_was_chosen():
    change(sync_poll_seconds=120)

    draft = ServerDraft("weather", "weather", "http", url="http://127.0.0.1:8999/mcp")
    server = server_actions.add_server(draft, actor=ADA)

    assert server.poll_seconds == 120
