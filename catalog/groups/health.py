"""Read what people should know about groups: what drifted after a sync, what could be better.

Reads only, each in a fixed number of queries however many groups and tools there are. What
groups hold comes from the shelf that agents are served from, and is worked out once a revision.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db.models import Count, Max, Q
from django.utils import timezone

from catalog import cache
from catalog.cache import CachedGroup
from catalog.groups import lints
from catalog.groups.lints import GroupFacts, Lint
from catalog.models import AuditEntry, Group, Membership, Tool

# The acts by which somebody chose what a group holds.
CHOOSING = (
    "group.add",
    "group.assign",
    "group.remove",
    "group.follow",
    "group.unfollow",
    "group.undo",
)
READ_FOR_LINTS = 1_000  # members whose descriptions are read; of the others nothing is said


@dataclass(frozen=True)
class Drift:
    """How a group stands against what its servers offer now, in public names."""

    missing: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.new)


def drift(group: Group) -> Drift:
    """Say what drifted since somebody chose this group's members.

    Missing are members that agents do not get: gone, held, rejected, not approved, or of a disabled
    server. New are tools that came to a server the group takes tools from, without following it,
    after its members were last chosen: added, removed, followed, or an act undone.
    """
    return drifts([group])[group.pk]


def drifts(groups: Sequence[Group]) -> dict[int, Drift]:
    """Say for each group what drifted, by primary key. See `drift`."""
    found = {group.pk: Drift() for group in groups}
    standing = cache.current().by_pk
    here = {pk: standing[pk] for pk in found if pk in standing}
    for pk, group in here.items():
        found[pk].missing.extend(_not_given(group))
    # The shelf has no tool that never had a definition.
    rows = Membership.objects.filter(group__in=found, tool__latest=None).order_by()
    for pk, name in rows.values_list("group_id", "tool__public_name"):
        found[pk].missing.append(name)
    for drifted in found.values():
        drifted.missing.sort()
    _add_new(groups, here, found)
    return found


@cache.memoize_per_revision
def _not_given(group: CachedGroup) -> list[str]:
    return [member.tool.name for member in group.members if not member.tool.offered]


@cache.memoize_per_revision
def _servers(group: CachedGroup) -> set[int]:
    return {member.tool.server_id for member in group.members if member.tool.server_id}


@cache.memoize_per_revision
def _tools(group: CachedGroup) -> set[int]:
    return {member.tool.tool_id for member in group.members}


def _add_new(
    groups: Sequence[Group], here: Mapping[int, CachedGroup], found: dict[int, Drift]
) -> None:
    takers = defaultdict(set)  # of each server
    for group in groups:
        for server in _servers(here[group.pk]) if group.pk in here else ():
            if server != group.follows_id:
                takers[server].add(group.pk)
    if not takers:
        return
    chosen = _last_chosen(groups)
    since = min(chosen[pk] for pks in takers.values() for pk in pks)
    came = Tool.objects.current().filter(server__in=takers, created_at__gt=since)
    rows = came.order_by("public_name").values_list("pk", "public_name", "server_id", "created_at")
    for tool, name, server, at in rows:
        for pk in takers[server or 0]:
            if at > chosen[pk] and tool not in _tools(here[pk]):
                found[pk].new.append(name)


def _last_chosen(groups: Sequence[Group]) -> dict[int, datetime]:
    """When the members of each group were last chosen; at first, when it was made."""
    chosen = {group.pk: group.created_at for group in groups}
    acts = AuditEntry.objects.filter(
        target_kind="group", target_id__in=chosen, verb__in=CHOOSING
    ).order_by()
    for pk, at in acts.values_list("target_id").annotate(Max("at")):
        chosen[pk] = max(chosen[pk], at)
    return chosen


# --- Lints --------------------------------------------------------------------------------------


def group_lints(groups: Sequence[Group]) -> dict[int, list[Lint]]:
    """Advise on each group as a whole, by primary key; its tools' texts are not read."""
    here = cache.current().by_pk
    return {group.pk: _advice(here[group.pk]) if group.pk in here else [] for group in groups}


@cache.memoize_per_revision
def _advice(group: CachedGroup) -> list[Lint]:
    preloads: dict[str, int] = defaultdict(int)
    names: dict[str, list[str]] = defaultdict(list)
    for member in group.offered:
        preloads[member.tool.server] += member.preload
        names[member.tool.server].append(member.tool.original_name)
    return lints.of_group(
        GroupFacts(group.group_id, group.description, len(group.offered), preloads, names)
    )


def tool_lints(group: Group) -> list[Lint]:
    """Advise on the tools of a group that agents get."""
    here = cache.current().by_pk.get(group.pk)
    return _advice_on_tools(here) if here else []


@cache.memoize_per_revision
def _advice_on_tools(group: CachedGroup) -> list[Lint]:
    return [
        lint
        for member in group.offered[:READ_FOR_LINTS]
        for lint in lints.of_tool(
            member.tool.name, member.tool.original_name, member.tool.description
        )
    ]


# --- Use ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupUsers:
    agents: int
    sessions: int  # of those agents, opened today


def group_users(groups: Sequence[Group]) -> dict[int, GroupUsers]:
    """Count who has each group, and how often they came today, by primary key.

    Agents are of another app and known by their relation to groups only; those that have all
    groups count for each.
    """
    agents: Any = Group._meta.get_field("agents").related_model
    today = timezone.localtime().replace(hour=0, minute=0, second=0, microsecond=0)
    opened = Count("sessions", filter=Q(sessions__created_at__gte=today))
    came = dict(agents.objects.order_by().annotate(opened=opened).values_list("pk", "opened"))
    having = list(agents.objects.filter(all_groups=True).values_list("pk", flat=True))
    found = {group.pk: set(having) for group in groups}
    for pk, agent in Group.objects.exclude(agents=None).order_by().values_list("pk", "agents"):
        if pk in found:
            found[pk].add(agent)
    return {
        pk: GroupUsers(len(its), sum(came.get(agent, 0) for agent in its))
        for pk, its in found.items()
    }
