"""Writes to groups: what each does, what it refuses, and that each can be taken back."""

import threading

import pytest
from django.db import connection

from catalog import cache
from catalog.audit import SYSTEM, sentence
from catalog.groups import actions as group_actions
from catalog.groups import health as group_health
from catalog.groups import undo as group_undo
from catalog.groups.health import Drift
from catalog.models import AuditEntry, Group, Membership, Revision, Tool
from catalog.tools import actions as tool_actions
from sessions_app.models import Agent
from tests.support.factories import fold, make_server, make_tool, tool_object
from toolcrib.lib.errors import Conflict, Invalid, NotFound

pytestmark = pytest.mark.django_db


@pytest.fixture
def weather(db):
    server = make_server(slug="weather", name="Weather")
    fold(server, *[tool_object(name) for name in ("a", "b", "c")])
    return server


@pytest.fixture
def research(weather):
    return group_actions.create("research", "Research", "Find things out.", actor=SYSTEM).group


def tool(name):
    return Tool.objects.get(name=name)


def add(group, *names):
    return group_actions.assign(group, [tool(name) for name in names], actor=SYSTEM)


def held(group):
    """Names of the group's tools, in the order agents see them."""
    rows = Membership.objects.filter(group=group).order_by("position", "tool__public_name")
    return list(rows.values_list("tool__name", flat=True))


def standing():
    """Everything about groups that a person could tell."""
    return {
        "groups": list(Group.objects.values()),
        "members": sorted(
            Membership.objects.values_list(
                "group__group_id", "tool__public_name", "position", "preload"
            )
        ),
        "agents": sorted(Agent.groups.through.objects.values_list("agent", "group", "position")),
    }


# --- What each does -----------------------------------------------------------------------------


def test_a_new_group_comes_last_and_is_empty(research, weather):
    assert [group.group_id for group in Group.objects.all()] == ["mcp:weather", "research"]
    assert held(research) == []
    assert sentence(AuditEntry.objects.first()) == "Toolcrib made group research"


def test_a_new_group_that_follows_a_server_has_its_present_tools(weather):
    weather.group.delete()
    fold(weather, tool_object("b"), tool_object("c"), tool_object("d"))  # a is gone

    group = group_actions.create("own", "Own", follows=weather, actor=SYSTEM).group

    assert held(group) == ["b", "c", "d"]


@pytest.mark.parametrize("name", ["a", "mcp:github", "0", "a.b_c-d:e", "a" * 80])
def test_an_id_may_be_such(name):
    assert group_actions.create(name, "One", actor=SYSTEM).group.group_id == name


@pytest.mark.parametrize("name", ["", "A", ":a", "-a", "a b", "a/b", "a" * 81, "ä", "a\n", "a\0"])
def test_an_id_that_agents_could_not_use_is_refused_with_the_rule(name, research):
    for act in (
        lambda: group_actions.create(name, "One", actor=SYSTEM),
        lambda: group_actions.rename(research, group_id=name, actor=SYSTEM),
    ):
        with pytest.raises(Invalid, match="1 to 80 lower-case letters") as refused:
            act()
        assert "mcp:github" in refused.value.hint


def test_an_id_is_given_once(research, weather):
    with pytest.raises(Conflict, match="mcp:weather already"):
        group_actions.create("mcp:weather", "Again", actor=SYSTEM)
    with pytest.raises(Conflict, match="mcp:weather already"):
        group_actions.rename(research, group_id="mcp:weather", actor=SYSTEM)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"display_name": " \n "}, "needs a display name"),
        ({"display_name": "x" * 121}, "at most 120"),
        ({"description": "x" * 501}, "at most 500"),
        ({"description": "a\0b"}, "NUL"),
        ({"display_name": "\ud800"}, "broken Unicode"),
    ],
)
def test_a_text_that_cannot_be_kept_is_refused(fields, reason, research):
    with pytest.raises(Invalid, match=reason):
        group_actions.edit(research, actor=SYSTEM, **fields)


def test_texts_stay_on_one_line_as_in_the_catalog(research):
    group_actions.describe(research, "  Two\nlines\tand  space ", actor=SYSTEM)

    assert Group.objects.get(pk=research.pk).description == "Two lines and space"


def test_several_settings_are_one_act(research):
    before = AuditEntry.objects.count()

    done = group_actions.edit(
        research, actor=SYSTEM, display_name="Study", description="Read.", preload_default=True
    )

    assert AuditEntry.objects.count() == before + 1
    assert (done.entry.verb, done.entry.before) == (
        "group.settings",
        {"display_name": "Research", "description": "Find things out.", "preload_default": False},
    )


def test_a_group_mixes_servers_and_custom_tools(research):
    make_tool(make_server(slug="git"), "log")
    tool_actions.save_custom_tool(tool_object("open_ticket"), actor=SYSTEM)

    add(research, "b", "log", "open_ticket")

    assert held(research) == ["log", "open_ticket", "b"]  # by public name until somebody orders


def test_tools_are_added_once_at_a_place_or_last(research):
    add(research, "a", "b")
    assert add(research, "a", "b").entry is None

    group_actions.order_members(research, ["weather__b", "weather__a"], actor=SYSTEM)
    add(research, "c")
    assert held(research) == ["b", "a", "c"]

    make_tool(make_server(slug="git"), "log")
    group_actions.assign(research, [tool("log")], 1, actor=SYSTEM)
    assert held(research) == ["b", "log", "a", "c"]


def test_members_are_ordered_by_hand(research):
    add(research, "a", "b", "c")

    group_actions.order_members(research, ["weather__c"], actor=SYSTEM)
    assert held(research) == ["c", "a", "b"]
    group_actions.shift_member(research, tool("b"), -1, actor=SYSTEM)
    assert held(research) == ["c", "b", "a"]
    group_actions.shift_member(research, tool("c"), 1, actor=SYSTEM)
    assert held(research) == ["b", "c", "a"]
    assert group_actions.shift_member(research, tool("b"), -1, actor=SYSTEM).entry is None


@pytest.mark.parametrize("names", [["weather__a", "weather__a"], ["weather__b"], ["nowhere"]])
def test_an_order_of_other_tools_is_refused(names, research):
    add(research, "a")

    with pytest.raises(Invalid):
        group_actions.order_members(research, names, actor=SYSTEM)


def test_groups_are_ordered_by_hand(research):
    group_actions.create("third", "Third", actor=SYSTEM)

    def names():
        return list(Group.objects.values_list("group_id", flat=True))

    group_actions.order(["third"], actor=SYSTEM)
    assert names() == ["third", "mcp:weather", "research"]
    group_actions.move(research, 0, actor=SYSTEM)
    assert names() == ["research", "third", "mcp:weather"]
    group_actions.move(research, 99, actor=SYSTEM)
    assert names() == ["third", "mcp:weather", "research"]
    group_actions.shift(research, -1, actor=SYSTEM)
    assert names() == ["third", "research", "mcp:weather"]
    with pytest.raises(Invalid):
        group_actions.order(["nowhere"], actor=SYSTEM)
    with pytest.raises(Invalid):
        group_actions.move(research, -1, actor=SYSTEM)


def test_a_tool_of_the_followed_server_stays_until_the_group_stops_following(weather):
    group = weather.group

    with pytest.raises(Conflict, match="follows weather") as refused:
        group_actions.remove(group, [tool("a")], actor=SYSTEM)
    assert refused.value.hint == "Let the group stop following weather, or hold the tool."

    group_actions.unfollow(group, actor=SYSTEM)
    group_actions.remove(group, [tool("a")], actor=SYSTEM)
    assert held(group) == ["b", "c"]


def test_following_brings_in_what_was_taken_out(weather):
    group = weather.group
    group_actions.unfollow(group, actor=SYSTEM)
    group_actions.remove(group, [tool("a")], actor=SYSTEM)

    done = group_actions.follow(group, weather, actor=SYSTEM)

    assert held(group) == ["a", "b", "c"]
    assert list(done.entry.after["members"]) == ["weather__a"]


def test_a_server_is_followed_by_one_group(research, weather):
    with pytest.raises(Conflict, match="mcp:weather follows weather already"):
        group_actions.follow(research, weather, actor=SYSTEM)


def test_a_tool_outside_the_group_is_neither_removed_nor_preloaded(research):
    for act in (
        lambda: group_actions.remove(research, [tool("a")], actor=SYSTEM),
        lambda: group_actions.set_preload(research, [tool("a")], True, actor=SYSTEM),
        lambda: group_actions.shift_member(research, tool("a"), 1, actor=SYSTEM),
    ):
        with pytest.raises(Invalid, match="weather__a is not in research"):
            act()


def test_a_group_deleted_meanwhile_is_said_to_be_gone(research):
    group_actions.delete(Group.objects.get(pk=research.pk), actor=SYSTEM)

    for act in (
        lambda: group_actions.describe(research, "x", actor=SYSTEM),
        lambda: group_actions.move(research, 0, actor=SYSTEM),
        lambda: group_actions.delete(research, actor=SYSTEM),
    ):
        with pytest.raises(NotFound, match="research was deleted meanwhile"):
            act()


# --- Audit, revision and undo of every verb -----------------------------------------------------

ACTS = {
    "group.rename": lambda group: group_actions.rename(group, "Study", "study", actor=SYSTEM),
    "group.describe": lambda group: group_actions.describe(group, "Else.", actor=SYSTEM),
    "group.preload_default": lambda group: group_actions.set_default_preload(
        group, True, actor=SYSTEM
    ),
    "group.deferred": lambda group: group_actions.set_deferred(group, False, actor=SYSTEM),
    "group.settings": lambda group: group_actions.edit(
        group, actor=SYSTEM, display_name="Study", deferred=False
    ),
    "group.follow": lambda group: group_actions.follow(group, tool("log").server, actor=SYSTEM),
    "group.move": lambda group: group_actions.move(group, 0, actor=SYSTEM),
    "group.order": lambda group: group_actions.order(["research"], actor=SYSTEM),
    "group.assign": lambda group: group_actions.assign(group, [tool("log")], 0, actor=SYSTEM),
    "group.remove": lambda group: group_actions.remove(group, [tool("a"), tool("c")], actor=SYSTEM),
    "group.order_members": lambda group: group_actions.order_members(
        group, ["weather__c"], actor=SYSTEM
    ),
    "group.preload": lambda group: group_actions.set_preload(
        group, [tool("a"), tool("b")], True, actor=SYSTEM
    ),
    "group.delete": lambda group: group_actions.delete(group, actor=SYSTEM),
    "group.add": lambda group: group_actions.create("fourth", "Fourth", actor=SYSTEM),
    "group.unfollow": lambda group: group_actions.unfollow(
        Group.objects.get(group_id="mcp:weather"), actor=SYSTEM
    ),
}

ONCE = {"group.add", "group.delete", "group.remove"}  # a second one is refused


@pytest.fixture
def stocked(research):
    """A group with ordered members of its own settings, which two agents have."""
    git = make_server(slug="git")
    git.group.delete()
    make_tool(git, "log")
    add(research, "a", "b", "c")
    group_actions.order_members(research, ["weather__b", "weather__c"], actor=SYSTEM)
    group_actions.set_preload(research, [tool("c")], False, actor=SYSTEM)
    for at, name in enumerate(("scout", "drifter")):
        agent = Agent.objects.create(name=name)
        agent.group_links.create(group=research, position=at + 3)
    return Group.objects.get(pk=research.pk)


@pytest.mark.parametrize("verb", ACTS)
def test_each_act_is_audited_raises_the_revision_and_is_undone_whole(verb, stocked):
    before = standing()
    counts = (Revision.current(), AuditEntry.objects.count())

    done = ACTS[verb](stocked)

    assert done.entry.verb == verb
    assert standing() != before
    assert (Revision.current(), AuditEntry.objects.count()) == (counts[0] + 1, counts[1] + 1)

    undone = group_undo.undo(done.entry, actor=SYSTEM)

    for group in before["groups"]:
        group.pop("created_at")
    now = standing()
    for group in now["groups"]:
        group.pop("created_at")
    assert now == before
    assert (Revision.current(), AuditEntry.objects.count()) == (counts[0] + 2, counts[1] + 2)
    assert undone.entry.verb == "group.undo"
    assert undone.entry.after["undoes"] == done.entry.pk


@pytest.mark.parametrize("verb", ACTS)
def test_a_second_undo_is_refused_and_an_undo_can_be_undone(verb, stocked):
    done = ACTS[verb](stocked)
    after = standing()["members"]
    undone = group_undo.undo(done.entry, actor=SYSTEM)

    with pytest.raises(Conflict, match="undone already"):
        group_undo.undo(done.entry, actor=SYSTEM)
    group_undo.undo(undone.entry, actor=SYSTEM)

    assert standing()["members"] == after


@pytest.mark.parametrize("verb", [verb for verb in ACTS if verb not in ONCE])
def test_doing_what_already_stands_records_nothing(verb, stocked):
    ACTS[verb](stocked)
    before = (Revision.current(), AuditEntry.objects.count(), standing())

    assert ACTS[verb](stocked).entry is None

    assert (Revision.current(), AuditEntry.objects.count(), standing()) == before


MEANWHILE = {
    "group.describe": lambda group: group_actions.describe(group, "Third.", actor=SYSTEM),
    "group.rename": lambda group: group_actions.rename(group, "Third", actor=SYSTEM),
    "group.preload": lambda group: group_actions.set_preload(
        group, [tool("a")], None, actor=SYSTEM
    ),
    "group.order_members": lambda group: group_actions.order_members(
        group, ["weather__a"], actor=SYSTEM
    ),
    "group.assign": lambda group: group_actions.remove(group, [tool("log")], actor=SYSTEM),
    "group.remove": lambda group: add(group, "a"),
    "group.move": lambda group: group_actions.move(group, 1, actor=SYSTEM),
    "group.follow": lambda group: group_actions.unfollow(group, actor=SYSTEM),
}


@pytest.mark.parametrize("verb", MEANWHILE)
def test_an_act_is_not_undone_over_a_later_one(verb, stocked):
    done = ACTS[verb](stocked)
    MEANWHILE[verb](stocked)
    before = standing()

    with pytest.raises(Conflict, match="has changed since then") as refused:
        group_undo.undo(done.entry, actor=SYSTEM)

    assert refused.value.hint
    assert standing() == before


def test_a_later_act_on_something_else_is_no_hindrance(stocked):
    done = group_actions.describe(stocked, "Else.", actor=SYSTEM)
    group_actions.set_preload(stocked, [tool("a")], True, actor=SYSTEM)

    group_undo.undo(done.entry, actor=SYSTEM)

    assert Group.objects.get(pk=stocked.pk).description == "Find things out."


def test_a_new_group_that_got_tools_is_not_undone(research):
    entry = AuditEntry.objects.get(verb="group.add", target_label="research")
    add(research, "a")

    with pytest.raises(Conflict, match="has changed since then"):
        group_undo.undo(entry, actor=SYSTEM)


def test_a_deleted_group_comes_back_without_what_is_gone_for_good(stocked, weather):
    done = group_actions.delete(stocked, actor=SYSTEM)
    Agent.objects.get(name="drifter").delete()
    weather.delete()

    group = group_undo.undo(done.entry, actor=SYSTEM).group

    assert held(group) == []
    assert [link.agent.name for link in group.agent_links.all()] == ["scout"]


def test_a_deleted_group_that_followed_comes_back_with_the_tools_that_came_meanwhile(weather):
    done = group_actions.delete(weather.group, actor=SYSTEM)
    fold(weather, *[tool_object(name) for name in ("a", "b", "c", "d")])

    group = group_undo.undo(done.entry, actor=SYSTEM).group

    assert group.follows == weather
    assert held(group) == ["a", "b", "c", "d"]


def test_a_deleted_group_does_not_push_out_its_successor(stocked, weather):
    done = group_actions.delete(stocked, actor=SYSTEM)
    group_actions.create("research", "Other", actor=SYSTEM)
    with pytest.raises(Conflict, match="There is a group called research again"):
        group_undo.undo(done.entry, actor=SYSTEM)

    done = group_actions.delete(weather.group, actor=SYSTEM)
    group_actions.create("other", "Other", follows=weather, actor=SYSTEM)
    with pytest.raises(Conflict, match="other follows weather already"):
        group_undo.undo(done.entry, actor=SYSTEM)


def test_undoing_an_unfollow_brings_in_what_came_meanwhile(weather):
    group = weather.group
    done = group_actions.unfollow(group, actor=SYSTEM)
    fold(weather, *[tool_object(name) for name in ("a", "b", "c", "d")])
    assert held(group) == ["a", "b", "c"]

    group_undo.undo(done.entry, actor=SYSTEM)

    assert held(group) == ["a", "b", "c", "d"]


def test_undoing_an_assign_leaves_the_tools_of_a_server_followed_meanwhile(research, weather):
    done = add(research, "a")
    weather.group.delete()
    group_actions.follow(research, weather, actor=SYSTEM)

    with pytest.raises(Conflict, match="follows weather"):
        group_undo.undo(done.entry, actor=SYSTEM)
    assert held(research) == ["a", "b", "c"]


def test_an_act_on_a_deleted_group_is_undone_after_the_deletion_is(stocked):
    described = group_actions.describe(stocked, "Else.", actor=SYSTEM)
    deleted = group_actions.delete(Group.objects.get(pk=stocked.pk), actor=SYSTEM)

    with pytest.raises(Conflict, match="research was deleted meanwhile"):
        group_undo.undo(described.entry, actor=SYSTEM)
    group_undo.undo(deleted.entry, actor=SYSTEM)
    group_undo.undo(described.entry, actor=SYSTEM)

    assert Group.objects.get(group_id="research").description == "Find things out."


def test_only_acts_on_groups_are_undone(weather):
    tool_actions.hold(tool("a"), "", actor=SYSTEM)

    with pytest.raises(Conflict, match="Only an act on a group"):
        group_undo.undo(AuditEntry.objects.first(), actor=SYSTEM)


@pytest.mark.django_db(transaction=True)
def test_of_two_undos_at_the_same_moment_one_is_done():
    entry = group_actions.create("research", "Research", actor=SYSTEM)
    entry = group_actions.describe(entry.group, "Else.", actor=SYSTEM).entry
    start, outcomes = threading.Barrier(4), []

    def take_back():
        start.wait(10)
        try:
            group_undo.undo(entry, actor=SYSTEM)
            outcomes.append("done")
        except Conflict as error:
            outcomes.append(error.message)
        finally:
            connection.close()

    threads = [threading.Thread(target=take_back) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert sorted(outcomes) == ["This was undone already."] * 3 + ["done"]
    assert AuditEntry.objects.filter(verb="group.undo").count() == 1


# --- Drift --------------------------------------------------------------------------------------


def test_tools_that_agents_do_not_get_are_missing(research, weather):
    add(research, "a", "b", "c")
    tool_actions.hold(tool("b"), "Odd.", actor=SYSTEM)
    fold(weather, tool_object("b"), tool_object("c"))

    assert group_health.drift(research) == Drift(missing=["weather__a", "weather__b"], new=[])
    weather.enabled = False
    weather.save()
    Revision.bump()
    assert group_health.drift(research).missing == ["weather__a", "weather__b", "weather__c"]


def test_tools_that_came_after_the_members_were_chosen_are_new(research, weather):
    add(research, "a")
    assert not group_health.drift(research)
    make_tool(make_server(slug="git"), "log")  # of a server the group takes nothing from

    make_tool(weather, "d")
    assert group_health.drift(research).new == ["weather__d"]
    assert not group_health.drift(weather.group)  # follows, so it has it

    group_actions.describe(research, "Else.", actor=SYSTEM)
    assert group_health.drift(research).new == ["weather__d"]
    add(research, "d")
    assert not group_health.drift(research)


def test_choosing_anew_settles_what_was_not_taken_for_that_group_alone(research, weather):
    other = group_actions.create("other", "Other", actor=SYSTEM).group
    add(research, "a")
    add(other, "a")
    make_tool(weather, "d")

    add(research, "b")

    assert group_health.drifts([research, other]) == {
        research.pk: Drift(),
        other.pk: Drift(new=["weather__d"]),
    }


def test_advice_on_a_group_looks_at_what_agents_get(research, weather):
    fold(weather, *[tool_object(f"find_{at}") for at in range(12)], allow_removals=True)
    group_actions.describe(research, "", actor=SYSTEM)
    add(research, *[f"find_{at}" for at in range(12)])
    group_actions.set_default_preload(research, True, actor=SYSTEM)

    def codes():
        return {lint.code for lint in group_health.group_lints([research])[research.pk]}

    research.refresh_from_db()
    assert codes() == {"group_description", "group_size", "preloads"}
    group_actions.set_preload(research, list(research.tools.all()), False, actor=SYSTEM)
    assert codes() == {"group_description", "group_size"}
    group_actions.set_deferred(research, False, actor=SYSTEM)
    research.refresh_from_db()
    assert "preloads" in codes()
    for one in research.tools.all()[:2]:
        tool_actions.hold(one, "", actor=SYSTEM)
    assert "group_size" not in codes()


def test_reading_drift_and_advice_costs_the_same_for_many_groups(
    weather, django_assert_max_num_queries
):
    def cost(number):
        for at in range(Group.objects.count(), number):
            add(group_actions.create(f"g{at}", "One", actor=SYSTEM).group, "a", "b")
        make_tool(weather, f"new{number}")
        every = list(Group.objects.all())
        cache.current()  # read once for each revision, whoever asks first
        with django_assert_max_num_queries(6) as captured:
            drifts = group_health.drifts(every)
            group_health.group_lints(every)
        assert all(drift.new for drift in drifts.values()) is False
        assert f"weather__new{number}" in drifts[every[-1].pk].new
        return len(captured)

    assert cost(3) == cost(30)
