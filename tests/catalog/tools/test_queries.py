"""What lists of the catalog count and show, read from the shelf that agents are served from."""

import re

import pytest
from django.http import QueryDict

from catalog import cache
from catalog.audit import SYSTEM
from catalog.groups import actions as group_actions
from catalog.groups import board
from catalog.groups import views as group_views
from catalog.models import Group, Revision
from catalog.tools import actions as tool_actions
from catalog.tools import queries as tool_queries
from catalog.tools.queries import ToolFilter
from tests.support.factories import fold, make_server, make_tool, tool_object

pytestmark = pytest.mark.django_db
BACKEND = "django.contrib.auth.backends.ModelBackend"


@pytest.fixture
def weather(db):
    return make_server(slug="weather")


def names(address):
    wanted = ToolFilter.read(QueryDict(address))
    return [tool.name for tool in tool_queries.tools(wanted, offset=0).rows]


def annotated(name, **hints):
    return tool_object(name, annotations=hints)


def test_badges_are_counted_and_filtered_by_what_the_server_says_of_the_tool_itself(weather):
    nested = {"annotations": {"type": "object", "readOnlyHint": True}}
    fold(
        weather,
        annotated("read", readOnlyHint=True),
        annotated("wipe", destructiveHint=True, readOnlyHint=False),
        annotated("both", destructiveHint=True, readOnlyHint=True),
        tool_object("silent", inputSchema={"type": "object", "properties": nested}),
    )
    assert tool_queries.counts().badges == {"read-only": 2, "destructive": 2, "open-world": 0}
    assert names("badge=read-only") == ["both", "read"]
    assert names("badge=read-only&badge=destructive") == ["both"]
    assert names("badge=open-world") == []


def test_badges_are_filtered_by_the_text_where_a_statement_cannot_list_the_tools(
    weather, monkeypatch
):
    monkeypatch.setattr(tool_queries, "MAX_PARAMETERS", 0)
    fold(weather, annotated("read", readOnlyHint=True), annotated("other", readOnlyHint=False))
    assert names("badge=read-only") == ["read"]


def test_gone_tools_count_for_no_badge_and_no_group(weather):
    fold(weather, annotated("read", readOnlyHint=True), annotated("stay", readOnlyHint=True))
    fold(weather, annotated("stay", readOnlyHint=True))
    found = tool_queries.counts()
    assert found.badges["read-only"] == 1
    assert found.groups == [("mcp:weather", 1)]
    assert found.servers == [("weather", 1)]


def test_a_custom_tool_costs_a_session_from_the_start_unless_somebody_said_otherwise(weather):
    mine = tool_actions.save_custom_tool(tool_object("mine"), actor=SYSTEM)
    group = group_actions.create("own", "Own", actor=SYSTEM).group
    group_actions.assign(group, [mine, make_tool(weather, "a")], actor=SYSTEM)

    def preload_tokens():
        return next(
            one.preload_tokens for one in board.list_groups_with_costs() if one.pk == group.pk
        )

    assert preload_tokens() == mine.approved.tokens > 0
    group_actions.set_preload(group, [mine], False, actor=SYSTEM)
    assert preload_tokens() == 0


def test_what_was_worked_out_of_a_group_is_worked_out_anew_at_the_next_revision(weather):
    read = []

    @cache.memoize_per_revision
    def size(group):
        read.append(group.group_id)
        return len(group.members)

    def look():
        return [size(group) for group in cache.current().groups]

    make_tool(weather, "a")
    assert look() == look() == [1]
    make_tool(weather, "b")
    assert look() == [2]
    assert read == ["mcp:weather"] * 2
    Group.objects.update(display_name="Other")
    Revision.bump()
    assert look() == [2]
    assert len(read) == 3


def test_the_list_of_groups_has_pages_and_steps_lead_over_their_edges(client, admin, monkeypatch):
    monkeypatch.setattr(group_views, "SHOWN", 2)
    for name in ("a", "b", "c"):
        group_actions.create(name, name.upper(), actor=SYSTEM)
    client.force_login(admin, backend=BACKEND)

    def shown(address):
        page = client.get(address).content.decode()
        closed = re.findall(r'name="(up|down)" value="(\w)"[^>]* disabled', page)
        return re.findall(r'aria-label="Compare (\w)"', page), closed, page

    found, closed, page = shown("/groups")
    assert (found, closed) == (["a", "b"], [("up", "a")])
    assert "1 to 2 of 3 groups" in page
    assert "3 groups of tools" in page
    found, closed, _ = shown("/groups?after=2")
    assert (found, closed) == (["c"], [("down", "c")])
