"""Agent writes: atomic, audited, and rejected with a readable error."""

import json

import pytest
from django.db import transaction
from django.utils import timezone

from catalog.audit import SYSTEM, Actor, sentence
from catalog.models import AuditEntry, Group, Revision
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys
from sessions_app.agents.queries import find_agent
from sessions_app.ledger import calls as call_ledger
from sessions_app.models import Agent, AgentSession, ApiKey, Call, CallAnswer, Event
from tests.support.factories import make_call, make_event, make_server, make_session
from toolcrib.lib.errors import Conflict, Invalid, NotFound

ADA = Actor("user", "ada@example.org", 1)


@pytest.fixture
def groups(db):
    """Three groups whose order is not alphabetical."""
    for slug in ("weather", "files", "crm"):
        make_server(slug=slug)
    return ["mcp:weather", "mcp:files", "mcp:crm"]


@pytest.fixture
def scout(groups):
    return agent_actions.create("scout", groups=groups, actor=ADA)


def newest_entry():
    return AuditEntry.objects.latest("id")


def sentence_of(error):
    """Return the message and hint; the message must be a sentence."""
    assert error.value.message.endswith(".")
    return error.value.sentence


# --- Create -------------------------------------------------------------------------------------


def test_only_the_name_is_required_and_settings_have_defaults(db):
    agent = agent_actions.create("scout", actor=ADA)

    agent.refresh_from_db()
    assert (agent.strategy, agent.mode, agent.enabled) == ("dispatch", "auto", True)
    assert (agent.tool_threshold, agent.threshold_tokens, agent.threshold_percent) == (
        15,
        10_000,
        5.0,
    )
    assert (agent.catalog_budget, agent.budget) == (2_000, None)
    assert (agent.calls_in_flight, agent.calls_per_minute) == (20, 600)
    assert (agent.searches_per_minute, agent.max_sessions) == (120, 100)
    assert agent.cost_per_minute == 3_000
    assert agent_actions.group_ids(agent) == []
    assert not agent.all_groups
    assert sentence(newest_entry()) == "ada@example.org created agent scout"


def test_groups_keep_their_order_without_duplicates(groups):
    expected = ["mcp:files", "mcp:weather"]

    agent = agent_actions.create("scout", groups=[*expected, "mcp:files"], actor=ADA)

    assert agent_actions.group_ids(agent) == expected
    assert newest_entry().after["groups"] == expected


def test_an_agent_with_all_groups_has_no_group_list(groups):
    agent = agent_actions.create("scout", all_groups=True, actor=ADA)

    assert Agent.objects.get(pk=agent.pk).all_groups
    assert agent_actions.group_ids(agent) == []
    assert newest_entry().after["groups"] == "all"


def test_an_agent_can_be_created_with_settings(db):
    agent = agent_actions.create("scout", mode="full", budget=5_000, calls_per_minute=9, actor=ADA)

    agent.refresh_from_db()
    assert (agent.mode, agent.budget, agent.calls_per_minute) == ("full", 5_000, 9)
    assert newest_entry().after == {
        "mode": "full",
        "budget": 5_000,
        "calls_per_minute": 9,
        "groups": [],
    }


@pytest.mark.parametrize(
    "name", ["", "   ", "x" * 81, "a\nb", "a\0b", "a\u202eb", "\ud800", "a/b", ".", ".."]
)
def test_an_invalid_name_is_rejected(name, db):
    with pytest.raises(Invalid) as error:
        agent_actions.create(name, actor=ADA)

    assert "name" in sentence_of(error)
    assert not Agent.objects.exists()


@pytest.mark.parametrize("name", ["x", "x" * 80, "Späher Nr. 1", "новый", "a&b?c=d#e%f", "new"])
def test_a_name_may_contain_any_printable_characters(name, db):
    assert find_agent(agent_actions.create(f" {name} ", actor=ADA).name).name == name


def test_a_name_is_unique(scout):
    with pytest.raises(Conflict) as error:
        agent_actions.create("scout", actor=ADA)

    assert "An agent named scout already exists." in sentence_of(error)
    assert Agent.objects.count() == 1


def test_an_error_lists_unknown_and_existing_groups_and_creates_nothing(groups):
    with pytest.raises(Invalid) as error:
        agent_actions.create("scout", groups=["mcp:weather", "mcp:nope", "a\0b"], actor=ADA)

    assert "mcp:nope" in error.value.message
    assert "mcp:weather" not in error.value.message
    for group_id in groups:
        assert group_id in error.value.hint
    assert not Agent.objects.exists()
    assert not AuditEntry.objects.exists()


def test_the_error_says_that_no_groups_exist(db):
    with pytest.raises(Invalid) as error:
        agent_actions.create("scout", groups=["mcp:nope"], actor=ADA)

    assert "No groups exist yet." in sentence_of(error)


def test_selected_groups_and_all_groups_are_mutually_exclusive(groups):
    with pytest.raises(Invalid) as error:
        agent_actions.create("scout", groups=groups, all_groups=True, actor=ADA)

    assert "not both" in sentence_of(error)
    assert not Agent.objects.exists()


def test_an_agent_and_its_first_key_are_created_atomically(db):
    agent, text = agent_actions.create_with_key("scout", actor=ADA)
    assert api_keys.find_key(text).agent == agent

    with pytest.raises(Conflict):
        agent_actions.create_with_key("scout", actor=ADA)
    assert ApiKey.objects.count() == 1


# --- Settings -----------------------------------------------------------------------------------

BAD_SETTINGS = [
    ("strategy", "magic"),
    ("mode", ""),
    ("mode", None),
    ("tool_threshold", 0),
    ("tool_threshold", True),
    ("threshold_tokens", -1),
    ("threshold_tokens", 1.5),
    ("threshold_percent", 0),
    ("threshold_percent", 100.1),
    ("threshold_percent", float("nan")),
    ("threshold_percent", float("inf")),
    ("threshold_percent", "5"),
    ("catalog_budget", 0),
    ("catalog_budget", 10**12),
    ("catalog_header", "x" * 4_001),
    ("catalog_header", "a\0b"),
    ("description", 5),
    ("description", "\ud800"),
    ("budget", 0),
    ("calls_in_flight", 0),
    ("calls_per_minute", "many"),
    ("searches_per_minute", 0),
    ("cost_per_minute", 0),
    ("cost_per_minute", 0.5),
    ("max_sessions", None),
    ("name", ""),
    ("enabled", False),
    ("pk", 7),
]


@pytest.mark.parametrize(("key", "value"), BAD_SETTINGS)
def test_an_invalid_setting_is_rejected_and_changes_nothing(key, value, scout):
    before, entries = Agent.objects.values().get(), AuditEntry.objects.count()

    with pytest.raises(Invalid) as error:
        agent_actions.change(scout, actor=ADA, **{"description": "Finds things.", key: value})

    assert sentence_of(error)
    assert Agent.objects.values().get() == before
    assert AuditEntry.objects.count() == entries


def test_a_change_is_audited_with_old_and_new_values(scout):
    agent_actions.change(scout, mode="full", budget=900, calls_in_flight=20, actor=ADA)

    entry = newest_entry()
    assert sentence(entry) == "ada@example.org changed settings of agent scout"
    assert entry.before == {"mode": "auto", "budget": None}
    assert entry.after == {"mode": "full", "budget": 900}


def test_writing_unchanged_values_records_nothing(scout):
    before, revision = AuditEntry.objects.count(), Revision.current()

    agent_actions.change(scout, mode="auto", actor=ADA)
    agent_actions.set_groups(scout, agent_actions.group_ids(scout), actor=ADA)
    agent_actions.set_enabled(scout, True, actor=ADA)

    assert AuditEntry.objects.count() == before
    assert Revision.current() == revision


def test_a_budget_can_be_removed(scout):
    agent_actions.change(scout, budget=900, actor=ADA)

    assert agent_actions.change(scout, budget=None, actor=ADA).budget is None


def test_renaming_to_an_existing_name_is_rejected_and_keeps_the_old_name(scout):
    agent_actions.create("drifter", actor=ADA)

    with pytest.raises(Conflict), transaction.atomic():
        agent_actions.change(scout, name="drifter", actor=ADA)

    assert find_agent("scout").pk == scout.pk


@pytest.mark.parametrize(
    ("change", "bumps"), [({"mode": "full"}, True), ({"description": "x"}, False)]
)
def test_a_change_to_the_catalog_settings_bumps_the_revision(change, bumps, scout):
    before = Revision.current()

    agent_actions.change(scout, **change, actor=ADA)

    assert (Revision.current() > before) == bumps


# --- Groups -------------------------------------------------------------------------------------


def test_setting_groups_replaces_the_list_and_is_audited(scout, groups):
    before = Revision.current()

    agent_actions.set_groups(scout, ["mcp:crm", "mcp:weather"], actor=ADA)

    assert agent_actions.group_ids(scout) == ["mcp:crm", "mcp:weather"]
    assert newest_entry().before == {"groups": groups}
    assert newest_entry().after == {"groups": ["mcp:crm", "mcp:weather"]}
    assert Revision.current() > before


def test_all_groups_replaces_the_list_and_a_list_replaces_all_groups(scout):
    assert agent_actions.set_groups(scout, all_groups=True, actor=ADA).all_groups
    assert agent_actions.group_ids(scout) == []

    agent = agent_actions.set_groups(scout, ["mcp:crm"], actor=ADA)
    assert not agent.all_groups
    assert agent_actions.group_ids(agent) == ["mcp:crm"]


def test_an_unknown_group_leaves_the_list_unchanged(scout, groups):
    with pytest.raises(Invalid):
        agent_actions.set_groups(scout, ["mcp:crm", "mcp:nope"], actor=ADA)

    assert agent_actions.group_ids(scout) == groups


@pytest.mark.parametrize(
    ("action", "group", "expected"),
    [
        ("up", "mcp:files", ["mcp:files", "mcp:weather", "mcp:crm"]),
        ("up", "mcp:weather", ["mcp:weather", "mcp:files", "mcp:crm"]),
        ("down", "mcp:weather", ["mcp:files", "mcp:weather", "mcp:crm"]),
        ("down", "mcp:crm", ["mcp:weather", "mcp:files", "mcp:crm"]),
        ("remove", "mcp:files", ["mcp:weather", "mcp:crm"]),
        ("add", "mcp:late", ["mcp:weather", "mcp:files", "mcp:crm", "mcp:late"]),
        ("add", "mcp:files", ["mcp:weather", "mcp:files", "mcp:crm"]),
    ],
)
def test_one_group_is_moved_added_or_removed(action, group, expected, scout):
    Group.objects.create(group_id="mcp:late", display_name="Late")

    agent_actions.apply_group_action(scout, action, group, actor=ADA)

    assert agent_actions.group_ids(scout) == expected


@pytest.mark.parametrize(
    ("action", "group", "error"),
    [
        ("up", "mcp:nope", NotFound),
        ("add", "mcp:nope", Invalid),
        ("remove", "", NotFound),
        ("turn", "mcp:files", Invalid),
    ],
)
def test_an_invalid_group_action_is_rejected(action, group, error, scout, groups):
    with pytest.raises(error) as raised:
        agent_actions.apply_group_action(scout, action, group, actor=ADA)

    assert sentence_of(raised)
    assert agent_actions.group_ids(scout) == groups


def test_group_actions_are_rejected_for_an_agent_with_all_groups(scout):
    agent_actions.set_groups(scout, all_groups=True, actor=ADA)

    with pytest.raises(Conflict) as error:
        agent_actions.apply_group_action(scout, "add", "mcp:files", actor=ADA)

    assert "has all groups" in sentence_of(error)


def test_deleting_a_group_removes_it_from_the_agent(scout):
    Group.objects.get(group_id="mcp:files").delete()

    assert agent_actions.group_ids(scout) == ["mcp:weather", "mcp:crm"]


# --- Disable and delete -------------------------------------------------------------------------


def test_disabling_and_enabling_is_recorded_once_each(scout):
    assert not agent_actions.set_enabled(scout, False, actor=ADA).enabled
    agent_actions.set_enabled(scout, False, actor=ADA)
    assert agent_actions.set_enabled(scout, True, actor=ADA).enabled

    verbs = AuditEntry.objects.order_by("id").values_list("verb", flat=True)
    assert list(verbs)[-2:] == ["agent.disable", "agent.enable"]


def test_deleting_an_agent_revokes_its_keys_and_keeps_a_record_of_it(scout):
    _, text = api_keys.create_key("laptop", "agent", agent=scout, actor=SYSTEM)

    agent_actions.delete(scout, actor=ADA)

    assert not Agent.objects.exists()
    assert api_keys.find_key(text) is None
    kept = Agent.with_deleted.get()
    assert (kept.name, kept.enabled, kept.group_links.count()) == ("scout", False, 0)
    assert kept.created_at < kept.deleted_at
    assert kept.keys.get().revoked_at is not None
    assert sentence(newest_entry()) == "ada@example.org deleted agent scout"
    assert newest_entry().before["keys"] == 1
    assert agent_actions.create("scout", actor=ADA).pk != kept.pk


def test_deleting_an_agent_erases_content_and_keeps_evidence_of_its_calls(scout):
    session = make_session(scout, metadata='{"secret": "m"}')
    fields = {"arguments": {"a": "secret"}, "result_copy": {"b": "secret"}}
    call = make_call(session, **fields, error_message="secret", result_sha256="d" * 64)
    CallAnswer.objects.create(call=call, body="secret")
    make_event(session, "searched", query="secret words", total=3, hits=["x"])

    agent_actions.delete(scout, actor=ADA)

    for model in (AgentSession, Call, CallAnswer, Event):
        assert "secret" not in str(list(model.objects.values()))
    call.refresh_from_db()
    session.refresh_from_db()
    assert (call.state, call.result_sha256, call.agent.name) == ("succeeded", "d" * 64, "scout")
    assert call.duration_ms == 420
    assert session.state == "closed"
    assert json.loads(Event.objects.get(kind="searched").details)["total"] == 3
    assert newest_entry().before["calls"] == 1


def test_what_a_call_brings_after_its_agent_was_deleted_is_erased_by_the_next_tidying(scout):
    session = make_session(scout)
    agent_actions.delete(scout, actor=ADA)
    call = make_call(session, at=timezone.now(), arguments={"a": "secret"})

    call_ledger.prune()

    call.refresh_from_db()
    assert (call.arguments, call.state) == ("", "succeeded")


def test_a_deleted_agent_counts_nowhere(scout, page_of, admin):
    agent_actions.delete(scout, actor=ADA)

    assert Group.objects.filter(agents__name="scout").count() == 0
    page = page_of(admin, "/agents").content.decode()
    assert "Deleted agents (1)" in page
    assert page_of(admin, "/agents/scout").status_code == 404


@pytest.mark.parametrize(
    "write",
    [
        lambda agent: agent_actions.change(agent, mode="full", actor=ADA),
        lambda agent: agent_actions.set_groups(agent, all_groups=True, actor=ADA),
        lambda agent: agent_actions.set_enabled(agent, False, actor=ADA),
        lambda agent: agent_actions.delete(agent, actor=ADA),
    ],
)
def test_writes_to_a_deleted_agent_raise_not_found(write, scout):
    agent_actions.delete(Agent.objects.get(), actor=ADA)

    with pytest.raises(NotFound) as error:
        write(scout)

    assert "scout no longer exists." in sentence_of(error)
