"""Queries on pending reviews: changed definitions, and new tools of servers with strict trust."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Count, Q
from django.db.models.functions import Coalesce

from catalog.approvals import actions
from catalog.audit.queries import AuditRow
from catalog.models import AuditEntry, Group, Membership, Tool
from catalog.tools import detail
from sessions_app.models import Agent
from toolcrib.lib.display import group_digits
from toolcrib.lib.pagination import Page, page_by_offset
from toolcrib.lib.text import plural

REVIEWS_PER_PAGE = 20  # each needs a word-by-word diff
DECISION_VERBS = ("tool.approve", "tool.keep_old", "tool.hold", "tool.undo_approval")
RECENT_DECISIONS = 5


@dataclass(frozen=True)
class PendingReview:
    """A tool with everything a reviewer needs to decide on its latest definition."""

    tool: Tool
    change: detail.Change
    groups: Sequence[Group]
    agents: int

    @property
    def is_new(self) -> bool:
        return self.tool.approved_id is None

    @property
    def annotations(self) -> Mapping[str, Any]:
        return self.tool.latest.annotations if self.tool.latest else {}

    @property
    def destructive(self) -> bool:
        """Return whether either definition is destructive: such tools are approved one by one."""
        before = self.tool.approved.annotations if self.tool.approved else {}
        return any(one.get("destructiveHint") is True for one in (before, self.annotations))

    @property
    def token_change(self) -> str:
        """Return what the change costs each session that gets the definition."""
        after = self.tool.latest.tokens if self.tool.latest else 0
        if self.tool.approved is None:
            return f"≈{plural(after, 'token')} when loaded."
        before = self.tool.approved.tokens
        sign = "+" if after >= before else "−"
        change = f"{sign}{group_digits(abs(after - before))}"
        return f"≈{group_digits(before)} → ≈{plural(after, 'token')} when loaded ({change})."

    @property
    def effect(self) -> str:
        if not self.groups:
            return "Not in any group: no agents are affected."
        if not self.agents:
            return "No agents have these groups."
        return f"Affects {plural(self.agents, 'agent')}."


def pending_count() -> int:
    return Tool.objects.waiting().count()


def list_pending(server: str = "", *, offset: int) -> Page[Tool]:
    rows = Tool.objects.waiting().with_definitions().exclude(latest=None)
    if server:
        rows = rows.filter(server__slug=server)
    oldest_first = rows.order_by(Coalesce("changed_at", "created_at"), "public_name")
    return page_by_offset(oldest_first, offset, REVIEWS_PER_PAGE)


def servers_with_pending() -> list[tuple[str, int]]:
    rows = Tool.objects.waiting().exclude(server=None).values_list("server__slug")
    return list(rows.annotate(Count("pk")).order_by("server__slug"))


def pending_reviews(tools: Iterable[Tool]) -> list[PendingReview]:
    """Add to each tool its diff, its groups and the number of affected agents."""
    listed = [(tool, tool.latest) for tool in tools if tool.latest is not None]
    groups: dict[int, list[Group]] = {}
    memberships = Membership.objects.filter(tool__in=[tool for tool, _ in listed])
    memberships = memberships.select_related("group")
    for membership in memberships.order_by("group__position", "group__group_id"):
        groups.setdefault(membership.tool_id, []).append(membership.group)
    with_all, by_group = _agents({group.pk for some in groups.values() for group in some})
    reviews = []
    for tool, latest in listed:
        change = detail.Change.between(tool.approved, latest, tool.findings)
        own = groups.get(tool.pk, [])
        agents = with_all.union(*(by_group.get(group.pk, set()) for group in own)) if own else ()
        reviews.append(PendingReview(tool, change, own, len(agents)))
    return reviews


def _agents(groups: set[int]) -> tuple[set[int], dict[int, set[int]]]:
    """Return the enabled agents with all groups, and those with each of the given groups."""
    agents = Agent.objects.filter(Q(all_groups=True) | Q(groups__in=groups), enabled=True)
    rows = agents.values_list("pk", "all_groups", "groups")
    with_all: set[int] = set()
    by_group: dict[int, set[int]] = {}
    for agent, has_all, group in rows.distinct():
        if has_all:
            with_all.add(agent)
        elif group in groups:
            by_group.setdefault(group, set()).add(agent)
    return with_all, by_group


def recent_decisions(**conditions: object) -> list[AuditRow]:
    rows = AuditEntry.objects.filter(verb__in=DECISION_VERBS, target_kind="tool", **conditions)
    return [AuditRow.from_entry(entry) for entry in rows[:RECENT_DECISIONS]]


def undoable_names() -> set[str]:
    """Return the tools among the recent decisions whose approval can still be undone."""
    recent = [row.entry for row in recent_decisions() if row.entry.verb == "tool.approve"]
    tools = Tool.objects.filter(pk__in=[entry.target_id for entry in recent if entry.target_id])
    return {tool.public_name for tool in tools if actions.find_undoable(tool) is not None}


def last_decision(tool: Tool) -> AuditRow | None:
    return next(iter(recent_decisions(target_id=tool.pk)), None)
