"""Tool queries: counts and filters read from the catalog cache."""

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
from tests.support.factories import ingest_tools, make_server, make_tool, tool_object

pytestmark = pytest.mark.django_db
BACKEND = "django.contrib.auth.backends.ModelBackend"


@pytest.fixture
def weather(db):
    return make_server(slug="weather")


def names(query):
    filters = ToolFilter.read(QueryDict(query))
    return [tool.name for tool in tool_queries.list_tools(filters, offset=0).rows]


def annotated(name, **hints):
    return tool_object(name, annotations=hints)


def test_badges_are_counted_and_filtered_by_the_annotations_of_the_tool_itself(weather):
    nested = {"annotations": {"type": "object", "readOnlyHint": True}}
    ingest_tools(
        weather,
        annotated("read", readOnlyHint=True),
        annotated("wipe", destructiveHint=True, readOnlyHint=False),
        annotated("both", destructiveHint=True, readOnlyHint=True),
        tool_object("silent", inputSchema={"type": "object", "properties": nested}),
    )
    assert tool_queries.count_tools().badges == {"read-only": 2, "destructive": 2, "open-world": 0}
    assert names("badge=read-only") == ["both", "read"]
    assert names("badge=read-only&badge=destructive") == ["both"]
    assert names("badge=open-world") == []


def test_badges_are_filtered_by_regex_beyond_the_parameter_limit(weather, monkeypatch):
    monkeypatch.setattr(tool_queries, "MAX_PARAMETERS", 0)
    ingest_tools(
        weather, annotated("read", readOnlyHint=True), annotated("other", readOnlyHint=False)
    )
    assert names("badge=read-only") == ["read"]


def test_missing_tools_are_not_counted(weather):
    ingest_tools(
        weather, annotated("read", readOnlyHint=True), annotated("stay", readOnlyHint=True)
    )
    ingest_tools(weather, annotated("stay", readOnlyHint=True))
    counts = tool_queries.count_tools()
    assert counts.badges["read-only"] == 1
    assert counts.groups == [("mcp:weather", 1)]
    assert counts.servers == [("weather", 1)]


def test_a_custom_tool_is_preloaded_by_default(weather):
    mine = tool_actions.save_custom_tool(tool_object("mine"), actor=SYSTEM)
    group = group_actions.create("own", "Own", actor=SYSTEM).group
    group_actions.assign(group, [mine, make_tool(weather, "a")], actor=SYSTEM)

    def preload_tokens():
        return next(
            cost.preload for one, cost in board.list_groups_with_costs() if one.pk == group.pk
        )

    assert preload_tokens() == mine.approved.tokens > 0
    group_actions.set_preload(group, [mine], False, actor=SYSTEM)
    assert preload_tokens() == 0


def test_memoized_values_are_recomputed_at_the_next_revision(weather):
    computed = []

    @cache.memoize_per_revision
    def size(group):
        computed.append(group.group_id)
        return len(group.members)

    def sizes():
        return [size(group) for group in cache.current().groups]

    make_tool(weather, "a")
    assert sizes() == sizes() == [1]
    make_tool(weather, "b")
    assert sizes() == [2]
    assert computed == ["mcp:weather"] * 2
    Group.objects.update(display_name="Other")
    Revision.bump()
    assert sizes() == [2]
    assert len(computed) == 3


def test_the_group_list_is_paginated_and_groups_move_across_pages(client, admin, monkeypatch):
    monkeypatch.setattr(group_views, "GROUPS_PER_PAGE", 2)
    for name in ("a", "b", "c"):
        group_actions.create(name, name.upper(), actor=SYSTEM)
    client.force_login(admin, backend=BACKEND)

    def read(url):
        page = client.get(url).content.decode()
        disabled = re.findall(r'name="(up|down)" value="(\w)"[^>]* disabled', page)
        return re.findall(r'aria-label="Compare (\w)"', page), disabled, page

    listed, disabled, page = read("/groups")
    assert (listed, disabled) == (["a", "b"], [("up", "a")])
    assert "1 to 2 of 3 groups" in page
    assert "3 groups. A group gives" in page
    listed, disabled, _ = read("/groups?after=2")
    assert (listed, disabled) == (["c"], [("down", "c")])
