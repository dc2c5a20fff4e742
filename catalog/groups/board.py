"""Queries of the group pages: the board, costs, comparison, usage and concurrent edits.

Members come from the cache that serves agents, in a fixed number of queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from django.db.models import Count, Exists, OuterRef, Q
from django.http import QueryDict
from django.utils import timezone

from catalog import cache, rendering
from catalog.audit import sentence
from catalog.cache import CachedGroup, CachedMember, CachedTool
from catalog.groups import preview
from catalog.groups.preview import cached_group, group_line
from catalog.groups.state import FIELDS, State, affected_tools, list_edits
from catalog.models import AuditEntry, Group, Membership, Tool
from catalog.tools.queries import ToolFilter
from servers.models import Server
from sessions_app.models import Agent
from sessions_app.usage import call_stats
from toolcrib.lib.figures import GroupCost
from toolcrib.lib.pagination import Page, offset_of, page_by_offset
from toolcrib.lib.request import number
from toolcrib.lib.roles import Actor
from toolcrib.lib.token_counter import count

TOOLS_PER_PAGE = 30
SECTION_SIZE = 50
MAX_SUGGESTIONS = 3
RARE_CALLS = 5  # a preload with fewer calls in 30 days is suggested for on demand
MAX_NAMED_EDITS = 5  # edits by others that a notice lists
MAX_EDITS_BY_OTHERS = 100
MAX_MERGED_EDITS = 200
MAX_COMPARED_ROWS = 100
MAX_LISTED_AGENTS = 200
TABS = {"catalog": "Catalog", "json": "JSON", "curl": "curl", "change": "Change"}


# --- Query parameters ---------------------------------------------------------------------------


@dataclass(frozen=True)
class BoardQuery:
    tool_filter: ToolFilter
    membership: str  # "yes" or "no" for tools in or not in the group, empty for all
    offset: int  # of the list of tools
    tab: str  # of the preview
    preload_from: int
    demand_from: int
    parameters: QueryDict

    @classmethod
    def parse(cls, parameters: QueryDict) -> "BoardQuery":
        membership = parameters.get("in", "")
        tab = parameters.get("tab", "")
        return cls(
            tool_filter=ToolFilter.read(parameters),
            membership=membership if membership in ("yes", "no") else "",
            offset=offset_of(parameters, TOOLS_PER_PAGE),
            tab=tab if tab in TABS else "catalog",
            preload_from=number(parameters, "p", digits=9),
            demand_from=number(parameters, "d", digits=9),
            parameters=parameters,
        )


# --- Members ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemberRow:
    pk: int
    name: str
    description: str
    tokens: int | None
    state: str
    offered: bool
    preload: bool | None  # the member's own setting; None is the group's default
    followed: bool  # the group follows its server, so it cannot be removed
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Section:
    """One page of the preloaded or the on-demand members."""

    rows: Sequence[MemberRow]
    total: int
    start: int
    tokens: int
    offered: int  # available to agents; the cost counts these

    @property
    def unavailable(self) -> int:
        return self.total - self.offered

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
class Board:
    preload: Section
    on_demand: Section
    cost: GroupCost
    tokens_per_stub: int
    suggestions: Sequence[tuple[CachedTool, int]]  # of a group over the budget


@lru_cache(maxsize=2_000)
def _stub_tokens(line: rendering.GroupLine) -> int:
    """Count the tokens of a catalog that contains this group only."""
    if not line.names:
        return 0
    return rendering.catalog([line], header="", budget=preview.BUDGET).tokens - count("\n\n")


@cache.memoize_per_revision
def group_cost(group: CachedGroup) -> GroupCost:
    """Return the cost of a group, as API and pages show it."""
    preloaded = [member for member in group.offered if member.preload]
    preload_tokens = sum(member.tool.tokens or 0 for member in preloaded)
    tokens = sum(member.tool.tokens or 0 for member in group.offered)
    return GroupCost(
        preload=preload_tokens,
        stub=_stub_tokens(group_line(group)),
        rest=tokens - preload_tokens,
        tools=len(group.offered),
        preloaded=len(preloaded),
    )


def list_groups_with_costs() -> list[tuple[Group, GroupCost]]:
    """Return all groups with their costs."""
    catalog = cache.current()
    groups = Group.objects.order_by("position", "group_id")
    return [(group, group_cost(catalog.group(group))) for group in groups]


def build_board(group: Group, query: BoardQuery) -> Board:
    """Return one page of each section, members in the order agents see them."""
    cached = cached_group(group)
    preload, on_demand = _sections(cached)
    first: Page[CachedMember] = page_by_offset(preload, query.preload_from, SECTION_SIZE)
    second: Page[CachedMember] = page_by_offset(on_demand, query.demand_from, SECTION_SIZE)
    tool_ids = [member.tool.tool_id for member in (*first.rows, *second.rows)]
    shown = group.memberships.filter(tool__in=tool_ids)
    own_preload = dict(shown.values_list("tool_id", "preload"))
    cost = group_cost(cached)
    return Board(
        _section(group, first, own_preload, cost.preload, cost.preloaded),
        _section(
            *(group, second, own_preload, cost.rest, cost.tools - cost.preloaded),
            _undefined_members(group),
        ),
        cost,
        cost.stub // cost.tools if cost.tools else 0,
        _suggestions(preload) if cost.over_budget else [],
    )


@cache.memoize_per_revision
def _sections(group: CachedGroup) -> tuple[Sequence[CachedMember], Sequence[CachedMember]]:
    preload = [member for member in group.members if member.preload]
    return preload, [member for member in group.members if not member.preload]


def _undefined_members(group: Group) -> list[MemberRow]:
    """Return members without any definition, which the cache excludes."""
    members = group.memberships.filter(tool__latest=None).order_by("position", "tool__public_name")
    rows = members.values_list("tool_id", "tool__public_name", "tool__state")
    return [
        MemberRow(pk, name, "", None, state, False, None, False, True, True)
        for pk, name, state in rows[:SECTION_SIZE]
    ]


def _section(
    group: Group,
    page: Page[CachedMember],
    own_preload: dict[int, bool | None],
    tokens: int,
    offered: int,
    undefined: Sequence[MemberRow] = (),
) -> Section:
    rows = [
        MemberRow(
            pk=tool.tool_id,
            name=tool.name,
            description=tool.description or (tool.latest.description if tool.latest else ""),
            tokens=tool.tokens,
            state=tool.state,
            offered=tool.offered,
            preload=own_preload.get(tool.tool_id),
            followed=tool.server_id is not None and tool.server_id == group.follows_id,
            is_first=at == 0,
            is_last=at == page.total - 1,
        )
        for at, tool in enumerate((member.tool for member in page.rows), page.first)
    ]
    if not page.next_cursor:
        rows += undefined
    return Section(rows, page.total + len(undefined), page.first, tokens, offered)


def _suggestions(preload: Sequence[CachedMember]) -> list[tuple[CachedTool, int]]:
    """Return the costliest of the rarely called preloads, with their calls in 30 days."""
    tools = {member.tool.tool_id: member.tool for member in preload if member.tool.offered}
    stats = call_stats.count_tool_calls(tools)
    calls = {pk: stats[pk].calls if pk in stats else 0 for pk in tools}
    rare = [pk for pk in tools if calls[pk] < RARE_CALLS]
    rare.sort(key=lambda pk: (-(tools[pk].tokens or 0), tools[pk].name))
    return [(tools[pk], calls[pk]) for pk in rare[:MAX_SUGGESTIONS]]


def section_names(group: Group, name: str) -> list[str]:
    """Return the names of all members in the same section as a tool, in order."""
    members = cached_group(group).members
    preloaded = next((member.preload for member in members if member.tool.name == name), False)
    return [member.tool.name for member in members if member.preload == preloaded]


def list_tools(group: Group, query: BoardQuery) -> Page[Tool]:
    """Return a page of all tools, those not in the group first."""
    membership = Membership.objects.filter(group=group, tool=OuterRef("pk"))
    rows = Tool.objects.with_definitions().annotate(in_group=Exists(membership))
    rows = rows.filter(query.tool_filter.condition()).order_by("in_group", "public_name")
    if query.membership:
        rows = rows.filter(in_group=query.membership == "yes")
    return page_by_offset(rows, query.offset, TOOLS_PER_PAGE)


# --- Comparison ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparedPart:
    """Tools in one of two groups or in both, with how each group delivers them."""

    title: str
    rows: Sequence[tuple[CachedTool, str, str]]
    total: int
    tokens: int


def compare_groups(first: Group, second: Group) -> list[ComparedPart]:
    """Split the tools of two groups into: only in the first, in both, only in the second."""
    left, right = (
        {member.tool.tool_id: member for member in cached_group(group).members}
        for group in (first, second)
    )
    return [
        _part(f"Only in {first.group_id}", [pk for pk in left if pk not in right], left, right),
        _part("In both", [pk for pk in left if pk in right], left, right),
        _part(f"Only in {second.group_id}", [pk for pk in right if pk not in left], left, right),
    ]


def _part(
    title: str, pks: list[int], left: dict[int, CachedMember], right: dict[int, CachedMember]
) -> ComparedPart:
    tools = [(left.get(pk) or right[pk]).tool for pk in pks]
    rows = [
        (tool, _delivery(left.get(tool.tool_id)), _delivery(right.get(tool.tool_id)))
        for tool in tools[:MAX_COMPARED_ROWS]
    ]
    tokens = sum(tool.tokens or 0 for tool in tools if tool.offered)
    return ComparedPart(title, rows, len(tools), tokens)


def _delivery(member: CachedMember | None) -> str:
    if member is None:
        return ""
    return "preloaded" if member.preload else "on demand"


# --- Usage --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupUsage:
    agents: int
    sessions: int  # opened today by these agents


def count_group_usage(groups: Sequence[Group]) -> dict[int, GroupUsage]:
    """Count agents and their sessions today, by group; agents with all groups count for each."""
    today = timezone.localtime().replace(hour=0, minute=0, second=0, microsecond=0)
    opened = Count("sessions", filter=Q(sessions__created_at__gte=today))
    sessions = dict(Agent.objects.order_by().annotate(opened=opened).values_list("pk", "opened"))
    with_all_groups = list(Agent.objects.filter(all_groups=True).values_list("pk", flat=True))
    agents = {group.pk: set(with_all_groups) for group in groups}
    for pk, agent in Group.objects.exclude(agents=None).order_by().values_list("pk", "agents"):
        if pk in agents:
            agents[pk].add(agent)
    return {
        pk: GroupUsage(len(agent_ids), sum(sessions.get(agent, 0) for agent in agent_ids))
        for pk, agent_ids in agents.items()
    }


def list_agents(group: Group) -> list[str]:
    """Return the names of the agents that have this group."""
    rows = Agent.objects.filter(Q(all_groups=True) | Q(groups=group)).order_by("name").distinct()
    return list(rows.values_list("name", flat=True)[:MAX_LISTED_AGENTS])


def list_followable_servers(group: Group | None) -> list[str]:
    """Return the slugs of the servers that no other group follows."""
    available = Q(group=None) | Q(group=group.pk) if group else Q(group=None)
    rows = Server.objects.filter(available).order_by("slug")
    return list(rows.values_list("slug", flat=True))


# --- Concurrent edits ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ConcurrentEdits:
    """Edits of a group by others since the page was rendered, newest last."""

    sentences: Sequence[str]
    more: int


def last_edit_id(group: Group) -> int:
    return list_edits(group).values_list("pk", flat=True).first() or 0


def edits_by_others(group: Group, since: int, actor: Actor) -> list[AuditEntry]:
    """Return the edits by other actors after entry `since`, oldest first."""
    entries = list_edits(group, since).exclude(actor_kind=actor.kind, actor_id=actor.id)
    return list(entries[:MAX_EDITS_BY_OTHERS])[::-1]


def describe_edits(entries: Sequence[AuditEntry]) -> ConcurrentEdits:
    """Describe the newest entries in sentences, and count the others."""
    sentences = [f"{sentence(entry)}{_names(entry)}" for entry in entries[-MAX_NAMED_EDITS:]]
    return ConcurrentEdits(sentences, max(len(entries) - MAX_NAMED_EDITS, 0))


def _names(entry: AuditEntry) -> str:
    names = sorted(affected_tools(entry.after))
    if not names:
        return ""
    return f": {names[0]}" if len(names) == 1 else f": {names[0]} and {len(names) - 1} more"


def fields_at(group: Group, current: State, since: int) -> tuple[State, dict[str, str]]:
    """Return the settings as they were after entry `since`, and who changed each field since."""
    fields, changed_by = dict(current), {}
    for entry in list_edits(group, since)[:MAX_MERGED_EDITS]:
        for name in FIELDS:
            if name in entry.before:
                fields[name] = entry.before[name]
                changed_by[name] = entry.actor_label
    return fields, changed_by
