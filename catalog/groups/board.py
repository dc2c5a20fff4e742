"""One group as its board shows it: two sections, their cost, and what others did meanwhile.

Reads only, from the shelf that agents are served from, so that the sections are what a session
would get. Costs the same few queries however many members there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from django.db.models import Exists, OuterRef, QuerySet

from catalog import cache, rendering
from catalog.audit import Actor, sentence
from catalog.cache import CachedGroup, CachedMember, CachedTool
from catalog.groups.state import FIELDS, State, touched
from catalog.models import AuditEntry, Group, Membership, Tool, ToolState
from catalog.tools.queries import ToolFilter
from sessions_app.usage import call_stats
from toolcrib.lib.pagination import Page, page_by_offset
from toolcrib.lib.token_counter import count

BUDGET = 4_000  # tokens a group may cost a session's start before the board warns
SECTION_SIZE = 50
MAX_SUGGESTIONS = 3
RARE_CALLS = 5  # calls in 30 days; a preload with fewer does not earn its place
MAX_NAMED_EDITS = 5  # acts of others that a notice names


@dataclass(frozen=True)
class MemberRow:
    """One member: its tool, what it costs, how it is given, where it can go."""

    pk: int
    name: str
    server: str
    description: str
    tokens: int | None
    state: str
    offered: bool
    preload: bool | None  # its own setting; null follows the group's default
    followed: bool  # it belongs to the group as long as that follows its server
    first: bool
    last: bool
    calls: int = 0  # in 30 days; counted for suggestions only

    @property
    def gone(self) -> bool:
        return self.state == ToolState.MISSING


@dataclass(frozen=True)
class Section:
    rows: Sequence[MemberRow]
    total: int
    start: int
    tokens: int

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    @property
    def previous(self) -> int | None:
        return max(self.start - SECTION_SIZE, 0) if self.start else None

    @property
    def next(self) -> int | None:
        return self.end if self.end < self.total else None


@dataclass(frozen=True)
class GroupCost:
    """What a group costs a session: definitions at its start, its lines, what could be loaded."""

    preload: int
    stub: int
    rest: int
    tools: int = 0
    preloaded: int = 0

    @property
    def paid(self) -> int:
        return self.preload + self.stub

    @property
    def all(self) -> int:
        return self.preload + self.rest

    @property
    def over(self) -> int:
        return max(self.paid - BUDGET, 0)


@dataclass(frozen=True)
class Board:
    preload: Section
    demand: Section
    cost: GroupCost
    each_stub: int
    suggested: Sequence[
        MemberRow
    ]  # costly preloads that are rarely called, where the budget is passed


def cached_group(group: Group) -> CachedGroup | None:
    return cache.current().by_pk.get(group.pk)


@cache.memoize_per_revision
def line_of(group: CachedGroup) -> rendering.GroupLine:
    names = tuple(member.tool.name for member in group.offered)
    return rendering.GroupLine(group.group_id, group.display_name, group.description, names)


@lru_cache(maxsize=2_000)
def stub_tokens(line: rendering.GroupLine, budget: int) -> int:
    """Count the lines a catalog has for this group alone."""
    if not line.names:
        return 0
    return rendering.catalog([line], header="", budget=budget).tokens - count("\n\n")


def cost(group: CachedGroup | None, budget: int) -> GroupCost:
    if group is None:
        return GroupCost(0, 0, 0)
    return replace(definitions_cost(group), stub=stub_tokens(line_of(group), budget))


@cache.memoize_per_revision
def definitions_cost(group: CachedGroup) -> GroupCost:
    """Sum what the definitions cost, the lines of the catalog left out."""
    at_start = [member for member in group.offered if member.preload]
    paid = sum(tokens_of(member.tool) or 0 for member in at_start)
    whole = sum(tokens_of(member.tool) or 0 for member in group.offered)
    return GroupCost(paid, 0, whole - paid, len(group.offered), len(at_start))


def list_groups_with_costs() -> list[Any]:
    """Return all groups, each with its tool_count, all_tokens, preload_tokens and rest_tokens."""
    here = cache.current().by_pk
    found: list[Any] = list(Group.objects.order_by("position", "group_id"))
    for group in found:
        cost = definitions_cost(here[group.pk]) if group.pk in here else GroupCost(0, 0, 0)
        group.tool_count, group.all_tokens = cost.tools, cost.all
        group.preload_tokens, group.rest_tokens = cost.preload, cost.rest
    return found


def tokens_of(item: CachedTool) -> int | None:
    kept = item.approved or item.latest
    return kept.tokens if kept else None


def board(group: Group, budget: int, *, preload_from: int = 0, demand_from: int = 0) -> Board:
    """Lay out a group's members in the order agents see them, a page of each section."""
    here = cached_group(group)
    preload, demand = _sections(here) if here else ((), ())
    shown = [*_cut(preload, preload_from), *_cut(demand, demand_from)]
    own = dict(
        group.memberships.filter(tool__in=[member.tool.tool_id for member in shown]).values_list(
            "tool_id", "preload"
        )
    )
    made = cost(here, budget)
    first = _section(group, preload, preload_from, own, made.preload)
    rest = _section(group, demand, demand_from, own, made.rest, _undefined(group))
    suggested = _suggested(group, preload) if made.over else []
    return Board(first, rest, made, made.stub // made.tools if made.tools else 0, suggested)


@cache.memoize_per_revision
def _sections(group: CachedGroup) -> tuple[Sequence[CachedMember], Sequence[CachedMember]]:
    """Split the members in those that are preloaded and the others."""
    preload = [member for member in group.members if member.preload]
    return preload, [member for member in group.members if not member.preload]


def _undefined(group: Group) -> list[MemberRow]:
    """Members without any definition, which the shelf does not have."""
    found = group.memberships.filter(tool__latest=None).order_by("position", "tool__public_name")
    rows = found.values_list("tool_id", "tool__public_name", "tool__server__slug", "tool__state")
    return [
        MemberRow(pk, name, slug or "", "", None, state, False, None, False, True, True)
        for pk, name, slug, state in rows[:SECTION_SIZE]
    ]


def _start(members: Sequence[CachedMember], start: int) -> int:
    return max(0, min(start, (len(members) - 1) // SECTION_SIZE * SECTION_SIZE if members else 0))


def _cut(members: Sequence[CachedMember], start: int) -> Sequence[CachedMember]:
    start = _start(members, start)
    return members[start : start + SECTION_SIZE]


def _section(
    group: Group,
    members: Sequence[CachedMember],
    start: int,
    own: dict[int, bool | None],
    tokens: int,
    extra: Sequence[MemberRow] = (),
) -> Section:
    start, last = _start(members, start), len(members) - 1
    rows = [
        _row(group, member.tool, own.get(member.tool.tool_id), start + at == 0, start + at == last)
        for at, member in enumerate(_cut(members, start))
    ]
    if start + len(rows) == len(members):
        rows += extra
    return Section(rows, len(members) + len(extra), start, tokens)


def _row(
    group: Group, item: CachedTool, preload: bool | None, first: bool, last: bool
) -> MemberRow:
    return MemberRow(
        pk=item.tool_id,
        name=item.name,
        server=item.server,
        description=item.description or (item.latest.description if item.latest else ""),
        tokens=tokens_of(item),
        state=item.state,
        offered=item.offered,
        preload=preload,
        followed=item.server_id is not None and item.server_id == group.follows_id,
        first=first,
        last=last,
    )


def _suggested(group: Group, preload: Sequence[CachedMember]) -> list[MemberRow]:
    """Choose what to give on demand first: of the rarely called preloads, the costliest."""
    given = {member.tool.tool_id: member.tool for member in preload if member.tool.offered}
    seen = call_stats.count_tool_calls(given)
    calls = {pk: seen[pk].calls if pk in seen else 0 for pk in given}
    rare = [pk for pk in given if calls[pk] < RARE_CALLS]
    rare.sort(key=lambda pk: (-(tokens_of(given[pk]) or 0), given[pk].name))
    return [
        replace(_row(group, given[pk], None, False, False), calls=calls[pk])
        for pk in rare[:MAX_SUGGESTIONS]
    ]


def section_names(group: Group, name: str) -> list[str]:
    """Name the members of the section that a tool is in, in order."""
    here = cached_group(group)
    members = here.members if here else ()
    preloaded = next((member.preload for member in members if member.tool.name == name), False)
    return [member.tool.name for member in members if member.preload == preloaded]


def board_tools(
    group: Group, wanted: ToolFilter, *, inside: str, offset: int, size: int
) -> Page[Tool]:
    """Return a page of all tools, those outside the group first; `inside` may ask for one kind."""
    held = Membership.objects.filter(group=group, tool=OuterRef("pk"))
    rows = (
        Tool.objects.with_definitions()
        .filter(wanted.condition())
        .annotate(inside=Exists(held))
        .order_by("inside", "public_name")
    )
    if inside in ("yes", "no"):
        rows = rows.filter(inside=inside == "yes")
    return page_by_offset(rows, offset, size)


# --- Two groups ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparedPart:
    """Tools that one of two groups has, or both; with how each gives them."""

    title: str
    rows: Sequence[tuple[CachedTool, str, str]]
    total: int
    tokens: int


def compare_groups(one: Group, other: Group) -> list[ComparedPart]:
    """Split the tools of two groups in three: of the one, of both, of the other."""
    left, right = (
        {member.tool.tool_id: member for member in _members(each)} for each in (one, other)
    )
    return [
        _part(f"Only in {one.group_id}", [pk for pk in left if pk not in right], left, right),
        _part("In both", [pk for pk in left if pk in right], left, right),
        _part(f"Only in {other.group_id}", [pk for pk in right if pk not in left], left, right),
    ]


def _members(group: Group) -> Sequence[CachedMember]:
    here = cached_group(group)
    return here.members if here else ()


def _part(
    title: str, pks: list[int], left: dict[int, CachedMember], right: dict[int, CachedMember]
) -> ComparedPart:
    found = [(left.get(pk) or right[pk]).tool for pk in pks]
    rows = [
        (item, _given(left.get(item.tool_id)), _given(right.get(item.tool_id)))
        for item in found[: 2 * SECTION_SIZE]
    ]
    tokens = sum(tokens_of(item) or 0 for item in found if item.offered)
    return ComparedPart(title, rows, len(found), tokens)


def _given(member: CachedMember | None) -> str:
    if member is None:
        return ""
    return "preloaded" if member.preload else "on demand"


# --- Others at the same group -------------------------------------------------------------------


@dataclass(frozen=True)
class ConcurrentEdits:
    """What others did to a group since somebody looked, newest last."""

    sentences: Sequence[str]
    more: int

    def __bool__(self) -> bool:
        return bool(self.sentences)


def last_edit_id(group: Group) -> int:
    """Return the key of the newest entry about a group: what a person has seen of it."""
    return edits(group).values_list("pk", flat=True).first() or 0


def edits(group: Group, since: int = 0) -> QuerySet[AuditEntry]:
    entries = AuditEntry.objects.filter(target_kind="group", target_id=group.pk, pk__gt=since)
    return entries.order_by("-pk")


def edits_by_others(group: Group, since: int, actor: Actor) -> list[AuditEntry]:
    """List what others did to a group since, oldest first."""
    found = edits(group, since).exclude(actor_kind=actor.kind, actor_id=actor.id)
    return list(found[: 2 * SECTION_SIZE])[::-1]


def concurrent_edits(entries: Sequence[AuditEntry]) -> ConcurrentEdits:
    last = [f"{sentence(entry)}{_names(entry)}" for entry in entries[-MAX_NAMED_EDITS:]]
    return ConcurrentEdits(last, max(len(entries) - MAX_NAMED_EDITS, 0))


def _names(entry: AuditEntry) -> str:
    names = sorted(touched(entry.after))
    if not names:
        return ""
    return f": {names[0]}" if len(names) == 1 else f": {names[0]} and {len(names) - 1} more"


def fields_as_seen(group: Group, now: State, since: int) -> tuple[State, dict[str, str]]:
    """Return the settings as they were after entry `since`, and who changed each meanwhile."""
    then, who = dict(now), {}
    for entry in edits(group, since)[: 4 * SECTION_SIZE]:
        for name in FIELDS:
            if name in entry.before:
                then[name] = entry.before[name]
                who[name] = entry.actor_label
    return then, who
