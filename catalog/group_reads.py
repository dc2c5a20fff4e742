"""Read what people should know about groups: what drifted after a sync, what could be better.

Reads only, each in a fixed number of queries however many groups and tools there are.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db.models import Count, Max, Q
from django.utils import timezone

from catalog import lints
from catalog.lints import GroupFacts, Lint
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
    missing = dict(Tool.objects.unservable().values_list("pk", "public_name"))
    if missing:
        held = Membership.objects.filter(group__in=found).order_by()
        for pk, tool in held.values_list("group_id", "tool_id"):
            if tool in missing:
                found[pk].missing.append(missing[tool])
        for drifted in found.values():
            drifted.missing.sort()
    _add_new(groups, found)
    return found


def _add_new(groups: Sequence[Group], found: dict[int, Drift]) -> None:
    follows = {group.pk: group.follows_id for group in groups}
    takers = defaultdict(set)  # of each server
    pairs = Membership.objects.filter(group__in=found).exclude(tool__server=None).order_by()
    for pk, server in pairs.values_list("group_id", "tool__server_id").distinct():
        if server and server != follows[pk]:
            takers[server].add(pk)
    if not takers:
        return
    chosen = _last_chosen(groups)
    since = min(chosen[pk] for pks in takers.values() for pk in pks)
    came = Tool.objects.current().filter(server__in=takers, created_at__gt=since)
    within = set(
        Membership.objects.filter(group__in=found, tool__in=came).values_list("group_id", "tool_id")
    )
    rows = came.order_by("public_name").values_list("pk", "public_name", "server_id", "created_at")
    for tool, name, server, at in rows:
        for pk in takers[server or 0]:
            if at > chosen[pk] and (pk, tool) not in within:
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
    by_pk = {group.pk: group for group in groups}
    tools: dict[int, int] = defaultdict(int)
    preloads: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    names: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    rows = Membership.objects.filter(group__in=by_pk, tool__in=Tool.objects.servable()).order_by(
        "tool__public_name"
    )
    for pk, server, name, preload in rows.values_list(
        "group_id", "tool__server__slug", "tool__name", "preload"
    ):
        tools[pk] += 1
        names[pk][server or ""].append(name)
        preloads[pk][server or ""] += is_preloaded(by_pk[pk], preload)
    return {
        pk: lints.of_group(
            GroupFacts(group.group_id, group.description, tools[pk], preloads[pk], names[pk])
        )
        for pk, group in by_pk.items()
    }


def tool_lints(group: Group) -> list[Lint]:
    """Advise on the tools of a group that agents get."""
    rows = (
        Tool.objects.servable()
        .filter(memberships__group=group)
        .select_related("approved", "latest")
        .order_by("memberships__position", "public_name")
    )
    return [
        lint
        for tool in rows[:READ_FOR_LINTS]
        for lint in lints.of_tool(tool.public_name, tool.name, tool.description)
    ]


def is_preloaded(group: Group, preload: bool | None) -> bool:
    """Whether a member with this setting is preloaded: all are where the group is not deferred."""
    return not group.deferred or (group.preload_default if preload is None else preload)


# --- Use ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    agents: int
    sessions: int  # of those agents, opened today


def users(groups: Sequence[Group]) -> dict[int, Use]:
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
        pk: Use(len(its), sum(came.get(agent, 0) for agent in its)) for pk, its in found.items()
    }
