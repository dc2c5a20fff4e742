"""Writes to agents: each one whole or not at all, audited, and refused in a sentence."""

import pytest
from django.db import transaction

from catalog.audit import SYSTEM, Actor, sentence
from catalog.models import AuditEntry, Group, Revision
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys
from sessions_app.models import Agent, ApiKey
from tests.support.factories import make_server
from toolcrib.lib.errors import Conflict, Invalid, NotFound

ADA = Actor("user", "ada@example.org", 1)


@pytest.fixture
def groups(db):
    """Three groups, in no order that a name would give."""
    for slug in ("weather", "files", "crm"):
        make_server(slug=slug)
    return ["mcp:weather", "mcp:files", "mcp:crm"]


@pytest.fixture
def scout(groups):
    return agent_actions.create("scout", groups=groups, actor=ADA)


def newest():
    return AuditEntry.objects.latest("id")


def said(error):
    """The sentence, which must be one."""
    assert error.value.message.endswith(".")
    return error.value.sentence


# --- Making -------------------------------------------------------------------------------------


def test_a_name_is_enough_and_gives_the_defaults_of_the_design(db):
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
    assert agent_actions.group_ids(agent) == []
    assert not agent.all_groups
    assert sentence(newest()) == "ada@example.org made agent scout"


def test_groups_keep_the_order_they_were_given_in(groups):
    wanted = ["mcp:files", "mcp:weather"]

    agent = agent_actions.create("scout", groups=[*wanted, "mcp:files"], actor=ADA)

    assert agent_actions.group_ids(agent) == wanted
    assert newest().after["groups"] == wanted


def test_an_agent_with_all_groups_has_no_list_of_them(groups):
    agent = agent_actions.create("scout", all_groups=True, actor=ADA)

    assert Agent.objects.get(pk=agent.pk).all_groups
    assert agent_actions.group_ids(agent) == []
    assert newest().after["groups"] == "all"


def test_settings_can_be_given_when_it_is_made(db):
    agent = agent_actions.create("scout", mode="full", budget=5_000, calls_per_minute=9, actor=ADA)

    agent.refresh_from_db()
    assert (agent.mode, agent.budget, agent.calls_per_minute) == ("full", 5_000, 9)
    assert newest().after == {"mode": "full", "budget": 5_000, "calls_per_minute": 9, "groups": []}


@pytest.mark.parametrize(
    "name", ["", "   ", "x" * 81, "a\nb", "a\0b", "a\u202eb", "\ud800", "a/b", ".", ".."]
)
def test_a_name_that_cannot_be_used_is_refused(name, db):
    with pytest.raises(Invalid) as error:
        agent_actions.create(name, actor=ADA)

    assert "name" in said(error)
    assert not Agent.objects.exists()


@pytest.mark.parametrize("name", ["x", "x" * 80, "Späher Nr. 1", "новый", "a&b?c=d#e%f", "new"])
def test_a_name_may_be_anything_printable(name, db):
    assert agent_actions.find_agent(agent_actions.create(f" {name} ", actor=ADA).name).name == name


def test_a_name_is_used_once(scout):
    with pytest.raises(Conflict) as error:
        agent_actions.create("scout", actor=ADA)

    assert "There is an agent called scout already." in said(error)
    assert Agent.objects.count() == 1


def test_unknown_groups_are_named_with_those_that_exist_and_nothing_is_made(groups):
    with pytest.raises(NotFound) as error:
        agent_actions.create("scout", groups=["mcp:weather", "mcp:nope", "a\0b"], actor=ADA)

    assert "mcp:nope" in error.value.message
    assert "mcp:weather" not in error.value.message
    for one in groups:
        assert one in error.value.hint
    assert not Agent.objects.exists()
    assert not AuditEntry.objects.exists()


def test_without_any_group_the_error_says_so(db):
    with pytest.raises(NotFound) as error:
        agent_actions.create("scout", groups=["mcp:nope"], actor=ADA)

    assert "There are no groups yet." in said(error)


def test_chosen_groups_and_all_of_them_exclude_each_other(groups):
    with pytest.raises(Invalid) as error:
        agent_actions.create("scout", groups=groups, all_groups=True, actor=ADA)

    assert "not both" in said(error)
    assert not Agent.objects.exists()


def test_the_agent_and_its_first_key_are_made_together_or_not_at_all(db):
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
    ("max_sessions", None),
    ("name", ""),
    ("enabled", False),
    ("pk", 7),
]


@pytest.mark.parametrize(("key", "value"), BAD_SETTINGS)
def test_a_setting_that_cannot_be_meant_is_refused_and_changes_nothing(key, value, scout):
    before, entries = Agent.objects.values().get(), AuditEntry.objects.count()

    with pytest.raises(Invalid) as error:
        agent_actions.change(scout, actor=ADA, **{"description": "Finds things.", key: value})

    assert said(error)
    assert Agent.objects.values().get() == before
    assert AuditEntry.objects.count() == entries


def test_a_change_is_audited_with_what_was_and_what_is(scout):
    agent_actions.change(scout, mode="full", budget=900, calls_in_flight=20, actor=ADA)

    entry = newest()
    assert sentence(entry) == "ada@example.org changed settings of agent scout"
    assert entry.before == {"mode": "auto", "budget": None}
    assert entry.after == {"mode": "full", "budget": 900}


def test_writing_what_already_stands_records_nothing(scout):
    before, revision = AuditEntry.objects.count(), Revision.current()

    agent_actions.change(scout, mode="auto", actor=ADA)
    agent_actions.set_groups(scout, agent_actions.group_ids(scout), actor=ADA)
    agent_actions.enable(scout, actor=ADA)

    assert AuditEntry.objects.count() == before
    assert Revision.current() == revision


def test_a_budget_can_be_taken_away_again(scout):
    agent_actions.change(scout, budget=900, actor=ADA)

    assert agent_actions.change(scout, budget=None, actor=ADA).budget is None


def test_renaming_to_a_name_in_use_is_refused_and_keeps_the_old_one(scout):
    agent_actions.create("drifter", actor=ADA)

    with pytest.raises(Conflict), transaction.atomic():
        agent_actions.change(scout, name="drifter", actor=ADA)

    assert agent_actions.find_agent("scout").pk == scout.pk


@pytest.mark.parametrize(
    ("change", "seen"), [({"mode": "full"}, True), ({"description": "x"}, False)]
)
def test_the_revision_rises_when_what_the_agent_is_given_changes(change, seen, scout):
    before = Revision.current()

    agent_actions.change(scout, **change, actor=ADA)

    assert (Revision.current() > before) == seen


# --- Groups -------------------------------------------------------------------------------------


def test_the_groups_are_replaced_as_a_whole_and_audited(scout, groups):
    before = Revision.current()

    agent_actions.set_groups(scout, ["mcp:crm", "mcp:weather"], actor=ADA)

    assert agent_actions.group_ids(scout) == ["mcp:crm", "mcp:weather"]
    assert newest().before == {"groups": groups}
    assert newest().after == {"groups": ["mcp:crm", "mcp:weather"]}
    assert Revision.current() > before


def test_all_groups_takes_the_place_of_the_list_and_back(scout):
    assert agent_actions.set_groups(scout, all_groups=True, actor=ADA).all_groups
    assert agent_actions.group_ids(scout) == []

    agent = agent_actions.set_groups(scout, ["mcp:crm"], actor=ADA)
    assert not agent.all_groups
    assert agent_actions.group_ids(agent) == ["mcp:crm"]


def test_an_unknown_group_leaves_the_list_as_it_was(scout, groups):
    with pytest.raises(NotFound):
        agent_actions.set_groups(scout, ["mcp:crm", "mcp:nope"], actor=ADA)

    assert agent_actions.group_ids(scout) == groups


@pytest.mark.parametrize(
    ("act", "group", "left"),
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
def test_one_group_is_moved_added_or_removed(act, group, left, scout):
    Group.objects.create(group_id="mcp:late", display_name="Late")

    agent_actions.reorder_groups(scout, act, group, actor=ADA)

    assert agent_actions.group_ids(scout) == left


@pytest.mark.parametrize(
    ("act", "group", "error"),
    [
        ("up", "mcp:nope", NotFound),
        ("add", "mcp:nope", NotFound),
        ("remove", "", NotFound),
        ("turn", "mcp:files", Invalid),
    ],
)
def test_an_act_that_cannot_be_done_is_refused(act, group, error, scout, groups):
    with pytest.raises(error) as refused:
        agent_actions.reorder_groups(scout, act, group, actor=ADA)

    assert said(refused)
    assert agent_actions.group_ids(scout) == groups


def test_an_agent_with_all_groups_has_none_to_move(scout):
    agent_actions.set_groups(scout, all_groups=True, actor=ADA)

    with pytest.raises(Conflict) as error:
        agent_actions.reorder_groups(scout, "add", "mcp:files", actor=ADA)

    assert "has all groups" in said(error)


def test_a_deleted_group_leaves_the_agent_with_the_others(scout):
    Group.objects.get(group_id="mcp:files").delete()

    assert agent_actions.group_ids(scout) == ["mcp:weather", "mcp:crm"]


# --- The end ------------------------------------------------------------------------------------


def test_disabling_and_enabling_is_recorded_once_each(scout):
    assert not agent_actions.disable(scout, actor=ADA).enabled
    agent_actions.disable(scout, actor=ADA)
    assert agent_actions.enable(scout, actor=ADA).enabled

    verbs = AuditEntry.objects.order_by("id").values_list("verb", flat=True)
    assert list(verbs)[-2:] == ["agent.disable", "agent.enable"]


def test_a_deleted_agent_takes_its_keys_along_and_stays_in_the_log(scout):
    _, text = api_keys.create_key("laptop", "agent", agent=scout, actor=SYSTEM)

    agent_actions.delete(scout, actor=ADA)

    assert not Agent.objects.exists()
    assert api_keys.find_key(text) is None
    assert sentence(newest()) == "ada@example.org deleted agent scout"
    assert newest().before["keys"] == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda agent: agent_actions.change(agent, mode="full", actor=ADA),
        lambda agent: agent_actions.set_groups(agent, all_groups=True, actor=ADA),
        lambda agent: agent_actions.disable(agent, actor=ADA),
        lambda agent: agent_actions.delete(agent, actor=ADA),
    ],
)
def test_whoever_comes_after_a_deletion_is_told(write, scout):
    Agent.objects.get().delete()

    with pytest.raises(NotFound) as error:
        write(scout)

    assert "scout is gone." in said(error)
