"""Preferences: changed in the dashboard, read on each use, fixed by environment variables."""

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


def change(**values):
    return preferences.change(values, actor=ADA)


def test_the_default_comes_from_the_settings(settings):
    settings.KEEP_PAYLOADS_DAYS = 12

    assert preferences.value("keep_payloads_days") == 12
    assert preferences.values("retention")["keep_payloads_days"] == 12


def test_a_change_applies_at_once_and_is_audited():
    assert [spec.name for spec in change(keep_payloads_days=7, keep_sessions_days=365)] == [
        "keep_payloads_days"
    ]

    assert preferences.value("keep_payloads_days") == 7
    entry = AuditEntry.objects.get()
    assert (entry.verb, entry.target_label) == ("settings.change", "keep_payloads_days")
    assert (entry.before, entry.after) == ({"value": 30}, {"value": 7})


def test_setting_the_current_value_records_nothing():
    change(keep_payloads_days=7)

    assert change(keep_payloads_days=7) == []
    assert AuditEntry.objects.count() == 1


def test_an_environment_variable_takes_precedence_and_prevents_changes(settings):
    change(keep_payloads_days=7)
    settings.FROM_ENVIRONMENT = frozenset({"TOOLCRIB_KEEP_PAYLOADS_DAYS"})
    settings.KEEP_PAYLOADS_DAYS = 3

    assert preferences.value("keep_payloads_days") == 3
    assert preferences.values()["keep_payloads_days"] == 3
    with pytest.raises(Conflict, match="TOOLCRIB_KEEP_PAYLOADS_DAYS"):
        change(keep_payloads_days=9)


@pytest.mark.parametrize("bad", [0, -1, 36_501, 1.5, True, "7", None, float("nan")])
def test_an_invalid_value_is_rejected_and_nothing_is_stored(bad):
    with pytest.raises(Invalid, match="whole number"):
        change(keep_sessions_days=8, keep_payloads_days=bad)
    assert not Preference.objects.exists()


def test_an_unknown_name_is_rejected():
    with pytest.raises(Invalid, match="not a setting"):
        change(colour=3)


def test_a_stored_value_out_of_range_is_ignored():
    Preference.objects.create(name="keep_payloads_days", value="99999999")

    assert preferences.value("keep_payloads_days") == 30


def test_every_preference_accepts_its_own_default():
    for spec in preferences.PREFERENCES.values():
        assert spec.accepts(spec.default), spec.name


# --- Effects -------------------------------------------------------------------------------


def test_agent_defaults_match_the_model():
    assert preferences.agent_defaults() == {
        name: Agent._meta.get_field(name).default for name in preferences.agent_defaults()
    }


def test_a_new_agent_gets_the_defaults_for_unset_fields():
    change(agent_tool_threshold=40, agent_catalog_budget=500, agent_threshold_percent=2.5)

    agent = agent_actions.create("scout", actor=ADA, catalog_budget=700)

    agent.refresh_from_db()
    assert (agent.tool_threshold, agent.catalog_budget, agent.threshold_percent) == (40, 700, 2.5)


def test_existing_agents_are_unchanged():
    agent = agent_actions.create("scout", actor=ADA)

    change(agent_tool_threshold=40)

    agent.refresh_from_db()
    assert agent.tool_threshold == 15


def test_payloads_and_sessions_are_pruned_after_the_retention_period():
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


def test_a_session_expires_after_the_idle_timeout():
    session = make_session(make_agent(), started=timezone.now() - timedelta(minutes=10))
    assert loading.current_state(session) == "open"

    change(session_idle_seconds=300)

    assert loading.current_state(session) == "expired"
    assert expire_idle() == 1


def test_a_session_in_use_needs_no_query(django_assert_num_queries):
    session = make_session(make_agent(), started=timezone.now())

    with django_assert_num_queries(0):
        assert loading.current_state(session) == "open"


def test_a_new_server_gets_the_sync_interval():
    change(sync_poll_seconds=120)

    draft = ServerDraft("weather", "weather", "http", url="http://127.0.0.1:8999/mcp")
    server = server_actions.add_server(draft, actor=ADA)

    assert server.poll_seconds == 120
