"""Writes to groups: effects, validation, audit entries, undo, drift and lint warnings."""

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
from tests.support.factories import ingest_tools, make_server, make_tool, tool_object
from tests.support.waiting import scaled
from toolcrib.lib.errors import Conflict, Invalid, NotFound

pytestmark = pytest.mark.django_db


@pytest.fixture
def weather(db):
    server = make_server(slug="weather", name="Weather")
    ingest_tools(server, *[tool_object(name) for name in ("a", "b", "c")])
    return server


@pytest.fixture
def research(weather):
    return group_actions.create("research", "Research", "Find things out.", actor=SYSTEM).group


def tool(name):
    return Tool.objects.get(name=name)


def add(group, *names):
    return group_actions.assign(group, [tool(name) for name in names], actor=SYSTEM)


def member_names(group):
    """Return the names of the group's tools, in the order agents see them."""
    rows = Membership.objects.filter(group=group).order_by("position", "tool__public_name")
    return list(rows.values_list("tool__name", flat=True))


def full_state():
    """Return every group, membership and agent link."""
    return {
        "groups": list(Group.objects.values()),
        "members": sorted(
            Membership.objects.values_list(
                "group__group_id", "tool__public_name", "position", "preload"
            )
        ),
        "agents": sorted(Agent.groups.through.objects.values_list("agent", "group", "position")),
    }


# --- Writes -------------------------------------------------------------------------------------


def test_a_new_group_comes_last_and_is_empty(research, weather):
    assert [group.group_id for group in Group.objects.all()] == ["mcp:weather", "research"]
    assert member_names(research) == []
    assert sentence(AuditEntry.objects.first()) == "Toolcrib created group research"


def test_a_new_group_that_follows_a_server_has_its_present_tools(weather):
    weather.group.delete()
    ingest_tools(weather, tool_object("b"), tool_object("c"), tool_object("d"))  # a is gone

    group = group_actions.create("own", "Own", follows="weather", actor=SYSTEM).group

    assert member_names(group) == ["b", "c", "d"]


@pytest.mark.parametrize("name", ["a", "mcp:github", "0", "a.b_c-d:e", "a" * 80])
def test_a_valid_id_is_accepted(name):
    assert group_actions.create(name, "One", actor=SYSTEM).group.group_id == name


@pytest.mark.parametrize("name", ["", "A", ":a", "-a", "a b", "a/b", "a" * 81, "ä", "a\n", "a\0"])
def test_an_invalid_id_is_rejected_with_the_rule(name, research):
    for write in (
        lambda: group_actions.create(name, "One", actor=SYSTEM),
        lambda: group_actions.edit(research, group_id=name, actor=SYSTEM),
    ):
        with pytest.raises(Invalid, match="1 to 80 lower-case letters") as raised:
            write()
        assert "mcp:github" in raised.value.hint


def test_a_duplicate_id_is_rejected(research, weather):
    with pytest.raises(Conflict, match="mcp:weather already"):
        group_actions.create("mcp:weather", "Again", actor=SYSTEM)
    with pytest.raises(Conflict, match="mcp:weather already"):
        group_actions.edit(research, group_id="mcp:weather", actor=SYSTEM)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"display_name": " \n "}, "needs a display name"),
        ({"display_name": "x" * 121}, "at most 120"),
        ({"description": "x" * 501}, "at most 500"),
        ({"description": "a\0b"}, "NUL"),
        ({"display_name": "\ud800"}, "invalid Unicode"),
    ],
)
def test_an_invalid_text_is_rejected(fields, reason, research):
    with pytest.raises(Invalid, match=reason):
        group_actions.edit(research, actor=SYSTEM, **fields)


def test_texts_are_normalized_to_one_line(research):
    group_actions.edit(research, description="  Two\nlines\tand  space ", actor=SYSTEM)

    assert Group.objects.get(pk=research.pk).description == "Two lines and space"


def test_several_settings_are_one_write(research):
    before = AuditEntry.objects.count()

    write = group_actions.edit(
        research, actor=SYSTEM, display_name="Study", description="Read.", preload_default=True
    )

    assert AuditEntry.objects.count() == before + 1
    assert (write.entry.verb, write.entry.before) == (
        "group.settings",
        {"display_name": "Research", "description": "Find things out.", "preload_default": False},
    )


def test_a_group_mixes_servers_and_custom_tools(research):
    make_tool(make_server(slug="git"), "log")
    tool_actions.save_custom_tool(tool_object("open_ticket"), actor=SYSTEM)

    add(research, "b", "log", "open_ticket")

    assert member_names(research) == ["log", "open_ticket", "b"]  # by public name until ordered


def test_tools_are_added_once_at_a_position_or_last(research):
    add(research, "a", "b")
    assert add(research, "a", "b").entry is None

    group_actions.order_members(research, ["weather__b", "weather__a"], actor=SYSTEM)
    add(research, "c")
    assert member_names(research) == ["b", "a", "c"]

    make_tool(make_server(slug="git"), "log")
    group_actions.assign(research, [tool("log")], 1, actor=SYSTEM)
    assert member_names(research) == ["b", "log", "a", "c"]


def test_members_can_be_ordered(research):
    add(research, "a", "b", "c")

    group_actions.order_members(research, ["weather__c"], actor=SYSTEM)
    assert member_names(research) == ["c", "a", "b"]
    group_actions.shift_member(research, tool("b"), -1, actor=SYSTEM)
    assert member_names(research) == ["c", "b", "a"]
    group_actions.shift_member(research, tool("c"), 1, actor=SYSTEM)
    assert member_names(research) == ["b", "c", "a"]
    assert group_actions.shift_member(research, tool("b"), -1, actor=SYSTEM).entry is None


@pytest.mark.parametrize("names", [["weather__a", "weather__a"], ["weather__b"], ["nowhere"]])
def test_an_order_with_other_tools_is_rejected(names, research):
    add(research, "a")

    with pytest.raises(Invalid):
        group_actions.order_members(research, names, actor=SYSTEM)


def test_groups_can_be_ordered(research):
    group_actions.create("third", "Third", actor=SYSTEM)

    def names():
        return list(Group.objects.values_list("group_id", flat=True))

    group_actions.order(["third"], actor=SYSTEM)
    assert names() == ["third", "mcp:weather", "research"]
    group_actions.move(research, 0, actor=SYSTEM)
    assert names() == ["research", "third", "mcp:weather"]
    group_actions.move(research, 99, actor=SYSTEM)
    assert names() == ["third", "mcp:weather", "research"]
    group_actions.move(research, by=-1, actor=SYSTEM)
    assert names() == ["third", "research", "mcp:weather"]
    with pytest.raises(Invalid):
        group_actions.order(["nowhere"], actor=SYSTEM)
    with pytest.raises(Invalid):
        group_actions.move(research, -1, actor=SYSTEM)


def test_a_tool_of_the_followed_server_cannot_be_removed_before_unfollowing(weather):
    group = weather.group

    with pytest.raises(Conflict, match="mirrors weather") as raised:
        group_actions.remove(group, [tool("a")], actor=SYSTEM)
    assert raised.value.hint == "Stop mirroring weather, or hide the tool."

    group_actions.edit(group, follows=None, actor=SYSTEM)
    group_actions.remove(group, [tool("a")], actor=SYSTEM)
    assert member_names(group) == ["b", "c"]


def test_following_adds_tools_that_were_removed_before(weather):
    group = weather.group
    group_actions.edit(group, follows=None, actor=SYSTEM)
    group_actions.remove(group, [tool("a")], actor=SYSTEM)

    write = group_actions.edit(group, follows="weather", actor=SYSTEM)

    assert member_names(group) == ["a", "b", "c"]
    assert list(write.entry.after["members"]) == ["weather__a"]


def test_a_server_can_be_followed_by_one_group_only(research, weather):
    with pytest.raises(Conflict, match="mcp:weather already mirrors weather"):
        group_actions.edit(research, follows="weather", actor=SYSTEM)


def test_a_tool_outside_the_group_cannot_be_removed_or_preloaded(research):
    for write in (
        lambda: group_actions.remove(research, [tool("a")], actor=SYSTEM),
        lambda: group_actions.set_preload(research, [tool("a")], True, actor=SYSTEM),
        lambda: group_actions.shift_member(research, tool("a"), 1, actor=SYSTEM),
    ):
        with pytest.raises(Invalid, match="weather__a is not in research"):
            write()


def test_a_write_to_a_deleted_group_is_not_found(research):
    group_actions.delete(Group.objects.get(pk=research.pk), actor=SYSTEM)

    for write in (
        lambda: group_actions.edit(research, description="x", actor=SYSTEM),
        lambda: group_actions.move(research, 0, actor=SYSTEM),
        lambda: group_actions.delete(research, actor=SYSTEM),
    ):
        with pytest.raises(NotFound, match="research was deleted in the meantime"):
            write()


# --- Audit, revision and undo of every verb -----------------------------------------------------

WRITES = {
    "group.rename": lambda group: group_actions.edit(
        group, display_name="Study", group_id="study", actor=SYSTEM
    ),
    "group.describe": lambda group: group_actions.edit(group, description="Else.", actor=SYSTEM),
    "group.preload_default": lambda group: group_actions.edit(
        group, preload_default=True, actor=SYSTEM
    ),
    "group.deferred": lambda group: group_actions.edit(group, deferred=False, actor=SYSTEM),
    "group.settings": lambda group: group_actions.edit(
        group, actor=SYSTEM, display_name="Study", deferred=False
    ),
    "group.follow": lambda group: group_actions.edit(
        group, follows=tool("log").server.slug, actor=SYSTEM
    ),
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
    "group.unfollow": lambda group: group_actions.edit(
        Group.objects.get(group_id="mcp:weather"), follows=None, actor=SYSTEM
    ),
}

NOT_REPEATABLE = {"group.add", "group.delete", "group.remove"}  # a second one is rejected


@pytest.fixture
def stocked(research):
    """A group of two agents, with ordered members and a preload setting."""
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


@pytest.mark.parametrize("verb", WRITES)
def test_each_write_is_audited_bumps_the_revision_and_can_be_undone(verb, stocked):
    before = full_state()
    counts = (Revision.current(), AuditEntry.objects.count())

    write = WRITES[verb](stocked)

    assert write.entry.verb == verb
    assert full_state() != before
    assert (Revision.current(), AuditEntry.objects.count()) == (counts[0] + 1, counts[1] + 1)

    undo_write = group_undo.undo(write.entry, actor=SYSTEM)

    for group in before["groups"]:
        group.pop("created_at")
    now = full_state()
    for group in now["groups"]:
        group.pop("created_at")
    assert now == before
    assert (Revision.current(), AuditEntry.objects.count()) == (counts[0] + 2, counts[1] + 2)
    assert undo_write.entry.verb == "group.undo"
    assert undo_write.entry.after["undoes"] == write.entry.pk


@pytest.mark.parametrize("verb", WRITES)
def test_a_second_undo_is_rejected_and_an_undo_can_be_undone(verb, stocked):
    write = WRITES[verb](stocked)
    after = full_state()["members"]
    undo_write = group_undo.undo(write.entry, actor=SYSTEM)

    with pytest.raises(Conflict, match="already undone"):
        group_undo.undo(write.entry, actor=SYSTEM)
    group_undo.undo(undo_write.entry, actor=SYSTEM)

    assert full_state()["members"] == after


@pytest.mark.parametrize("verb", [verb for verb in WRITES if verb not in NOT_REPEATABLE])
def test_a_write_without_changes_records_nothing(verb, stocked):
    WRITES[verb](stocked)
    before = (Revision.current(), AuditEntry.objects.count(), full_state())

    assert WRITES[verb](stocked).entry is None

    assert (Revision.current(), AuditEntry.objects.count(), full_state()) == before


LATER_WRITES = {
    "group.describe": lambda group: group_actions.edit(group, description="Third.", actor=SYSTEM),
    "group.rename": lambda group: group_actions.edit(group, display_name="Third", actor=SYSTEM),
    "group.preload": lambda group: group_actions.set_preload(
        group, [tool("a")], None, actor=SYSTEM
    ),
    "group.order_members": lambda group: group_actions.order_members(
        group, ["weather__a"], actor=SYSTEM
    ),
    "group.assign": lambda group: group_actions.remove(group, [tool("log")], actor=SYSTEM),
    "group.remove": lambda group: add(group, "a"),
    "group.move": lambda group: group_actions.move(group, 1, actor=SYSTEM),
    "group.follow": lambda group: group_actions.edit(group, follows=None, actor=SYSTEM),
}


@pytest.mark.parametrize("verb", LATER_WRITES)
def test_undo_is_rejected_after_a_later_change_of_the_same_part(verb, stocked):
    write = WRITES[verb](stocked)
    LATER_WRITES[verb](stocked)
    before = full_state()

    with pytest.raises(Conflict, match="has changed since then") as raised:
        group_undo.undo(write.entry, actor=SYSTEM)

    assert raised.value.hint
    assert full_state() == before


def test_undo_works_after_a_later_change_of_another_part(stocked):
    write = group_actions.edit(stocked, description="Else.", actor=SYSTEM)
    group_actions.set_preload(stocked, [tool("a")], True, actor=SYSTEM)

    group_undo.undo(write.entry, actor=SYSTEM)

    assert Group.objects.get(pk=stocked.pk).description == "Find things out."


def test_creation_cannot_be_undone_after_tools_were_added(research):
    entry = AuditEntry.objects.get(verb="group.add", target_label="research")
    add(research, "a")

    with pytest.raises(Conflict, match="has changed since then"):
        group_undo.undo(entry, actor=SYSTEM)


def test_a_restored_group_omits_deleted_tools_and_agents(stocked, weather):
    write = group_actions.delete(stocked, actor=SYSTEM)
    Agent.objects.get(name="drifter").delete()
    weather.delete()

    group = group_undo.undo(write.entry, actor=SYSTEM).group

    assert member_names(group) == []
    assert [link.agent.name for link in group.agent_links.all()] == ["scout"]


def test_a_restored_group_that_follows_a_server_has_its_new_tools(weather):
    write = group_actions.delete(weather.group, actor=SYSTEM)
    ingest_tools(weather, *[tool_object(name) for name in ("a", "b", "c", "d")])

    group = group_undo.undo(write.entry, actor=SYSTEM).group

    assert group.follows == weather
    assert member_names(group) == ["a", "b", "c", "d"]


def test_a_group_cannot_be_restored_while_another_has_its_id_or_server(stocked, weather):
    write = group_actions.delete(stocked, actor=SYSTEM)
    group_actions.create("research", "Other", actor=SYSTEM)
    with pytest.raises(Conflict, match="Another group is now called research"):
        group_undo.undo(write.entry, actor=SYSTEM)

    write = group_actions.delete(weather.group, actor=SYSTEM)
    group_actions.create("other", "Other", follows="weather", actor=SYSTEM)
    with pytest.raises(Conflict, match="other already mirrors weather"):
        group_undo.undo(write.entry, actor=SYSTEM)


def test_undoing_an_unfollow_adds_new_tools_of_the_server(weather):
    group = weather.group
    write = group_actions.edit(group, follows=None, actor=SYSTEM)
    ingest_tools(weather, *[tool_object(name) for name in ("a", "b", "c", "d")])
    assert member_names(group) == ["a", "b", "c"]

    group_undo.undo(write.entry, actor=SYSTEM)

    assert member_names(group) == ["a", "b", "c", "d"]


def test_an_assign_cannot_be_undone_after_the_server_was_followed(research, weather):
    write = add(research, "a")
    weather.group.delete()
    group_actions.edit(research, follows="weather", actor=SYSTEM)

    with pytest.raises(Conflict, match="mirrors weather"):
        group_undo.undo(write.entry, actor=SYSTEM)
    assert member_names(research) == ["a", "b", "c"]


def test_a_write_to_a_deleted_group_can_be_undone_after_its_deletion_is(stocked):
    described = group_actions.edit(stocked, description="Else.", actor=SYSTEM)
    deleted = group_actions.delete(Group.objects.get(pk=stocked.pk), actor=SYSTEM)

    with pytest.raises(Conflict, match="research was deleted in the meantime"):
        group_undo.undo(described.entry, actor=SYSTEM)
    group_undo.undo(deleted.entry, actor=SYSTEM)
    group_undo.undo(described.entry, actor=SYSTEM)

    assert Group.objects.get(group_id="research").description == "Find things out."


def test_only_writes_to_groups_can_be_undone(weather):
    tool_actions.hold(tool("a"), "", actor=SYSTEM)

    with pytest.raises(Conflict, match="Only changes to groups"):
        group_undo.undo(AuditEntry.objects.first(), actor=SYSTEM)


@pytest.mark.django_db(transaction=True)
def test_concurrent_undos_of_one_entry_succeed_once():
    entry = group_actions.create("research", "Research", actor=SYSTEM)
    entry = group_actions.edit(entry.group, description="Else.", actor=SYSTEM).entry
    start, outcomes = threading.Barrier(4), []

    def undo_once():
        start.wait(scaled(10))
        try:
            group_undo.undo(entry, actor=SYSTEM)
            outcomes.append("done")
        except Conflict as error:
            outcomes.append(error.message)
        finally:
            connection.close()

    threads = [threading.Thread(target=undo_once) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(30))

    assert sorted(outcomes) == ["This was already undone."] * 3 + ["done"]
    assert AuditEntry.objects.filter(verb="group.undo").count() == 1


# --- Drift --------------------------------------------------------------------------------------


def test_unavailable_members_are_missing(research, weather):
    add(research, "a", "b", "c")
    tool_actions.hold(tool("b"), "Odd.", actor=SYSTEM)
    ingest_tools(weather, tool_object("b"), tool_object("c"))

    assert group_health.drift(research) == Drift(missing=["weather__a", "weather__b"], new=[])
    weather.enabled = False
    weather.save()
    Revision.bump()
    assert group_health.drift(research).missing == ["weather__a", "weather__b", "weather__c"]


def test_tools_added_after_the_last_membership_edit_are_new(research, weather):
    add(research, "a")
    assert not group_health.drift(research)
    make_tool(make_server(slug="git"), "log")  # on a server without members in the group

    make_tool(weather, "d")
    assert group_health.drift(research).new == ["weather__d"]
    assert not group_health.drift(weather.group)  # it follows the server

    group_actions.edit(research, description="Else.", actor=SYSTEM)
    assert group_health.drift(research).new == ["weather__d"]
    add(research, "d")
    assert not group_health.drift(research)


def test_a_membership_edit_clears_the_new_tools_of_that_group_only(research, weather):
    other = group_actions.create("other", "Other", actor=SYSTEM).group
    add(research, "a")
    add(other, "a")
    make_tool(weather, "d")

    add(research, "b")

    assert group_health.drifts([research, other]) == {
        research.pk: Drift(),
        other.pk: Drift(new=["weather__d"]),
    }


def test_group_lints_check_available_tools_only(research, weather):
    ingest_tools(weather, *[tool_object(f"find_{at}") for at in range(12)], allow_removals=True)
    group_actions.edit(research, description="", actor=SYSTEM)
    add(research, *[f"find_{at}" for at in range(12)])
    group_actions.edit(research, preload_default=True, actor=SYSTEM)

    def codes():
        return {lint.code for lint in group_health.group_lints([research])[research.pk]}

    research.refresh_from_db()
    assert codes() == {"group_description", "group_size", "preloads"}
    group_actions.set_preload(research, list(research.tools.all()), False, actor=SYSTEM)
    assert codes() == {"group_description", "group_size"}
    group_actions.edit(research, deferred=False, actor=SYSTEM)
    research.refresh_from_db()
    assert "preloads" in codes()
    for extra in research.tools.all()[:2]:
        tool_actions.hold(extra, "", actor=SYSTEM)
    assert "group_size" not in codes()


def test_drift_and_lints_take_a_fixed_number_of_queries(weather, django_assert_max_num_queries):
    def cost(number):
        for at in range(Group.objects.count(), number):
            add(group_actions.create(f"g{at}", "One", actor=SYSTEM).group, "a", "b")
        make_tool(weather, f"new{number}")
        every = list(Group.objects.all())
        cache.current()  # loaded once per revision
        with django_assert_max_num_queries(6) as captured:
            drifts = group_health.drifts(every)
            group_health.group_lints(every)
        assert all(drift.new for drift in drifts.values()) is False
        assert f"weather__new{number}" in drifts[every[-1].pk].new
        return len(captured)

    assert cost(3) == cost(30)
