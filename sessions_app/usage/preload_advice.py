"""Preload advice: preloaded tools that are never called. `optimize` recommends preloads.

Reads only. Preloads come from the catalog cache that also serves agents.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from catalog import cache
from catalog.cache import CachedGroup
from catalog.models import Group, Tool
from sessions_app.models import Agent, AgentGroup
from sessions_app.usage.filters import UsageFilter

PAGE = 25


@dataclass(frozen=True)
class PreloadCandidate:
    """A tool in a group, with the cost of its definition per session."""

    group: Group
    tool: Tool
    tokens: int


@dataclass(frozen=True)
class UnusedPreloads:
    candidates: list[PreloadCandidate]
    total: int
    tokens: int


Pair = tuple[CachedGroup, cache.CachedMember]


def _groups(filters: UsageFilter) -> list[CachedGroup]:
    """Return the groups that match the filters."""
    groups: Iterable[CachedGroup] = cache.current().groups
    if filters.group:
        groups = [group for group in groups if group.group_id == filters.group]
    if filters.agent and not Agent.objects.filter(name=filters.agent, all_groups=True).exists():
        links = AgentGroup.objects.filter(agent__name=filters.agent)
        pks = set(links.values_list("group_id", flat=True))
        groups = [group for group in groups if group.pk in pks]
    return list(groups)


@cache.memoize_per_revision
def _preloads(group: CachedGroup) -> list[Pair]:
    return [(group, member) for member in group.offered if member.preload]


def _candidates(pairs: Sequence[Pair], limit: int | None) -> list[PreloadCandidate]:
    """Fetch the groups and tools of the first `limit` pairs."""
    groups = Group.objects.in_bulk()
    tools = Tool.objects.only("public_name", "created_at", "server_id").in_bulk(
        [member.tool.tool_id for _, member in pairs[:limit]]
    )
    return [
        PreloadCandidate(groups[group.pk], tools[member.tool.tool_id], _tokens(member))
        for group, member in pairs[:limit]
        if group.pk in groups and member.tool.tool_id in tools
    ]


def _tokens(member: cache.CachedMember) -> int:
    return member.tool.approved.tokens if member.tool.approved else 0


def unused_preloads(
    filters: UsageFilter, called: Collection[str] | None = None, limit: int | None = PAGE
) -> UnusedPreloads:
    """Return preloaded tools that were not called, most expensive first.

    Pass `called`, the names of called tools, if they are already known.
    """
    if called is None:
        called = set(filters.calls().values_list("tool_name", flat=True).distinct())
    pairs = [
        pair
        for group in _groups(filters)
        for pair in _preloads(group)
        if pair[1].tool.name not in called
    ]
    pairs.sort(key=lambda pair: (-_tokens(pair[1]), pair[1].tool.name, pair[0].group_id))
    tokens = sum(_tokens(member) for _, member in pairs)
    return UnusedPreloads(_candidates(pairs, limit), len(pairs), tokens)
