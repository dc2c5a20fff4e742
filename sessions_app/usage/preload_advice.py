"""Preload advice: preloaded tools that are never called, and tools that sessions often load.

Reads only. What is preloaded comes from the catalog cache that agents are served from.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from django.db.models import QuerySet

from catalog import cache
from catalog.cache import CachedGroup
from catalog.models import Group, Tool
from sessions_app.ledger.event_details import read_names, read_object
from sessions_app.models import Agent, AgentGroup, Event, EventKind
from sessions_app.usage.filters import UsageFilter

PAGE = 25
LOADS = 2_000  # newest loads that are read
OFTEN = 3  # sessions


@dataclass(frozen=True)
class PreloadCandidate:
    """A tool in a group, with what its definition costs each session that is given it."""

    group: Group
    tool: Tool
    tokens: int
    sessions: int = 0  # that loaded it
    share: int = 0  # of all sessions, in percent

    @property
    def movable(self) -> bool:
        """Whether the member's own setting decides: a group given whole asks nobody."""
        return self.group.deferred


@dataclass(frozen=True)
class UnusedPreloads:
    places: list[PreloadCandidate]
    total: int
    tokens: int


Pair = tuple[CachedGroup, cache.CachedMember]


def _groups(wanted: UsageFilter) -> list[CachedGroup]:
    """List the groups that the filter asks for."""
    groups: Iterable[CachedGroup] = cache.current().groups
    if wanted.group:
        groups = [group for group in groups if group.group_id == wanted.group]
    if wanted.agent and not Agent.objects.filter(name=wanted.agent, all_groups=True).exists():
        links = AgentGroup.objects.filter(agent__name=wanted.agent)
        its = set(links.values_list("group_id", flat=True))
        groups = [group for group in groups if group.pk in its]
    return list(groups)


@cache.memoize_per_revision
def _preloads(group: CachedGroup) -> list[Pair]:
    return [(group, member) for member in group.offered if member.preload]


def _candidates(pairs: Sequence[Pair], most: int | None) -> list[PreloadCandidate]:
    """Fetch what a page shows of the first of these."""
    groups = {group.pk: group for group in Group.objects.all()}
    rows = Tool.objects.only("public_name", "created_at", "server_id")
    if most is not None:
        rows = rows.filter(pk__in=[member.tool.tool_id for _, member in pairs[:most]])
    tools = {tool.pk: tool for tool in rows}
    return [
        PreloadCandidate(groups[group.pk], tools[member.tool.tool_id], _tokens(member))
        for group, member in pairs[:most]
        if group.pk in groups and member.tool.tool_id in tools
    ]


def _tokens(member: cache.CachedMember) -> int:
    return member.tool.approved.tokens if member.tool.approved else 0


def unused_preloads(
    wanted: UsageFilter, called: Collection[str] | None = None, most: int | None = PAGE
) -> UnusedPreloads:
    """Return what is preloaded and was not called, the costliest first.

    `called` are the names that were, where they have been counted already.
    """
    if called is None:
        called = set(wanted.calls().values_list("tool_name", flat=True).distinct())
    pairs = [
        pair
        for group in _groups(wanted)
        for pair in _preloads(group)
        if pair[1].tool.name not in called
    ]
    pairs.sort(key=lambda pair: (-_tokens(pair[1]), pair[1].tool.name, pair[0].group_id))
    tokens = sum(_tokens(member) for _, member in pairs)
    return UnusedPreloads(_candidates(pairs, most), len(pairs), tokens)


def often_loaded(wanted: UsageFilter, most: int | None = PAGE) -> list[PreloadCandidate]:
    """Return what many sessions loaded and no setting preloads, the most often loaded first."""
    seen: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    rows = wanted.events(EventKind.LOADED).order_by("-at")
    for session, group, text in rows.values_list("session_id", "group_id", "details")[:LOADS]:
        for name in read_names(read_object(text), "names"):
            seen[group, name].add(session)
    often = {pair: len(found) for pair, found in seen.items() if len(found) >= OFTEN}
    named = {group for group, _ in often}
    pairs = [
        (group, member)
        for group in _groups(wanted)
        if group.group_id in named
        for member in group.offered
        if not member.preload and (group.group_id, member.tool.name) in often
    ]
    pairs.sort(key=lambda pair: (-often[_key(pair)], _key(pair)))
    all_sessions = max(_sessions_of(wanted, rows), 1)
    return [
        replace(place, sessions=times, share=min(round(100 * times / all_sessions), 100))
        for place in _candidates(pairs, most)
        for times in [often[place.group.group_id, place.tool.public_name]]
    ]


def _key(pair: Pair) -> tuple[str, str]:
    return pair[0].group_id, pair[1].tool.name


def _sessions_of(wanted: UsageFilter, loads: QuerySet[Event]) -> int:
    """Count the sessions of the time that the loads which were read come from."""
    oldest = loads.values_list("at", flat=True)[LOADS - 1 : LOADS].first()
    rows = wanted.sessions()
    return (rows.filter(created_at__gte=oldest) if oldest else rows).count()
