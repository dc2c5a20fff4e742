"""Health of groups: unavailable and new tools (drift), and lint warnings.

Members come from the cache that serves agents, in a fixed number of queries.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from django.db.models import Max

from catalog import cache
from catalog.cache import CachedGroup
from catalog.groups import lints
from catalog.groups.lints import Lint
from catalog.models import AuditEntry, Group, Membership, Tool

# Audit verbs of writes that choose the members of a group.
MEMBERSHIP_VERBS = [
    f"group.{verb}" for verb in ("add", "assign", "remove", "follow", "unfollow", "undo")
]
MAX_LINTED_TOOLS = 1_000  # per group


@dataclass(frozen=True)
class Drift:
    """Differences between a group and what its servers offer, as public names."""

    missing: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.new)


def drift(group: Group) -> Drift:
    """Return what changed since the members of a group were last chosen.

    `missing` are members that are unavailable to agents: removed by the server, hidden, rejected,
    not approved, or of a disabled server. `new` are tools that appeared on a server that some
    members belong to and the group does not follow, after the last write to its members.
    """
    return drifts([group])[group.pk]


def drifts(groups: Sequence[Group]) -> dict[int, Drift]:
    catalog = cache.current()
    cached = {group.pk: catalog.group(group) for group in groups}
    result = {pk: Drift([*_unavailable_tools(group)]) for pk, group in cached.items()}
    # The cache excludes tools that never had a definition.
    rows = Membership.objects.filter(group__in=result, tool__latest=None).order_by()
    for pk, name in rows.values_list("group_id", "tool__public_name"):
        result[pk].missing.append(name)
    for group_drift in result.values():
        group_drift.missing.sort()
    _add_new_tools(groups, cached, result)
    return result


@cache.memoize_per_revision
def _unavailable_tools(group: CachedGroup) -> list[str]:
    return [member.tool.name for member in group.members if not member.tool.offered]


@cache.memoize_per_revision
def _server_ids(group: CachedGroup) -> set[int]:
    return {member.tool.server_id for member in group.members if member.tool.server_id}


@cache.memoize_per_revision
def _tool_ids(group: CachedGroup) -> set[int]:
    return {member.tool.tool_id for member in group.members}


def _add_new_tools(
    groups: Sequence[Group], cached: Mapping[int, CachedGroup], result: dict[int, Drift]
) -> None:
    groups_by_server = defaultdict(set)
    for group in groups:
        for server_id in _server_ids(cached[group.pk]):
            if server_id != group.follows_id:
                groups_by_server[server_id].add(group.pk)
    if not groups_by_server:
        return
    last_edits = _last_membership_edits(groups)
    since = min(last_edits[pk] for pks in groups_by_server.values() for pk in pks)
    added = Tool.objects.current().filter(server__in=groups_by_server, created_at__gt=since)
    rows = added.order_by("public_name").values_list("pk", "public_name", "server_id", "created_at")
    for tool_id, name, server_id, created_at in rows:
        for pk in groups_by_server[server_id or 0]:
            if created_at > last_edits[pk] and tool_id not in _tool_ids(cached[pk]):
                result[pk].new.append(name)


def _last_membership_edits(groups: Sequence[Group]) -> dict[int, datetime]:
    """Return when the members of each group were last chosen, or its creation."""
    last_edits = {group.pk: group.created_at for group in groups}
    entries = AuditEntry.objects.filter(
        target_kind="group", target_id__in=last_edits, verb__in=MEMBERSHIP_VERBS
    ).order_by()
    for pk, at in entries.values_list("target_id").annotate(Max("at")):
        last_edits[pk] = max(last_edits[pk], at)
    return last_edits


def group_lints(groups: Sequence[Group]) -> dict[int, list[Lint]]:
    """Return the warnings about each group itself, by primary key; tools are not linted."""
    catalog = cache.current()
    return {group.pk: _lint_group(catalog.group(group)) for group in groups}


@cache.memoize_per_revision
def _lint_group(group: CachedGroup) -> list[Lint]:
    preloads: dict[str, int] = defaultdict(int)
    names: dict[str, list[str]] = defaultdict(list)
    for member in group.offered:
        preloads[member.tool.server] += member.preload
        names[member.tool.server].append(member.tool.original_name)
    return lints.lint_group(group.group_id, group.description, preloads, names)


def tool_lints(group: Group) -> list[Lint]:
    return _lint_tools(cache.current().group(group))


@cache.memoize_per_revision
def _lint_tools(group: CachedGroup) -> list[Lint]:
    return [
        lint
        for member in group.offered[:MAX_LINTED_TOOLS]
        for lint in lints.lint_tool(
            member.tool.name, member.tool.original_name, member.tool.description
        )
    ]
