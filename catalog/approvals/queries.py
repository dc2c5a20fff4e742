"""What waits for a person: changed definitions, and new tools of strict servers. Reads, and `hold`.

Approving and keeping old are written in `catalog.ingest`, holding in `catalog.tools`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.db.models import Count, Q, QuerySet
from django.db.models.functions import Coalesce

from catalog.audit.queries import AuditRow
from catalog.models import AuditEntry, Group, Membership, Tool
from catalog.tools import detail
from toolcrib.lib.pagination import Page, page_by_offset

PAGE = 20  # changes on a page, each compared word by word
DECISIONS = ("tool.approve", "tool.keep_old", "tool.hold")
LAST = 5


@dataclass(frozen=True)
class PendingReview:
    """One tool with what a person needs to decide about its latest definition."""

    tool: Tool
    change: detail.Change
    groups: Sequence[Group]
    agents: int

    @property
    def is_new(self) -> bool:
        return self.tool.approved_id is None

    @property
    def annotations(self) -> Mapping[str, Any]:
        found = self.change.after.get("annotations")
        return found if isinstance(found, dict) else {}

    @property
    def destructive(self) -> bool:
        """Whether the server says so of either definition: then no single key approves it."""
        said = (self.change.before or {}).get("annotations")
        before = said.get("destructiveHint") if isinstance(said, dict) else None
        return True in (before, self.annotations.get("destructiveHint"))

    @property
    def effect(self) -> str:
        """Say who is touched by the decision."""
        if not self.groups:
            return "It is in no group, so no agent is affected."
        many = "" if self.agents == 1 else "s"
        if not self.agents:
            return "No agent has these groups yet."
        return f"{self.agents:,} agent{many} {'are' if many else 'is'} affected."


def pending_count() -> int:
    return Tool.objects.waiting().count()


def page_of(server: str = "", *, offset: int) -> Page[Tool]:
    """Return a page of what waits, the longest waiting first."""
    rows = _open()
    if server:
        rows = rows.filter(server__slug=server)
    return page_by_offset(rows, offset, PAGE)


def _open() -> QuerySet[Tool]:
    return (
        Tool.objects.waiting()
        .with_definitions()
        .exclude(latest=None)
        .order_by(Coalesce("changed_at", "created_at"), "public_name")
    )


def servers() -> list[tuple[str, int]]:
    """List the servers that something waits of, with how much."""
    rows = Tool.objects.waiting().exclude(server=None).values_list("server__slug")
    return list(rows.annotate(Count("pk")).order_by("server__slug"))


def pending_reviews(found: Iterable[Tool]) -> list[PendingReview]:
    """Put beside each tool its comparison, its groups and the agents that have them."""
    listed = [tool for tool in found if tool.latest is not None]
    groups: dict[int, list[Group]] = {}
    links = Membership.objects.filter(tool__in=listed).select_related("group")
    for link in links.order_by("group__position", "group__group_id"):
        groups.setdefault(link.tool_id, []).append(link.group)
    everywhere, having = _agents({group.pk for some in groups.values() for group in some})
    return [
        PendingReview(
            tool=tool,
            change=detail.Change.between(tool.approved, tool.latest, tool.findings),
            groups=(own := groups.get(tool.pk, [])),
            agents=len(everywhere.union(*(having.get(group.pk, set()) for group in own)))
            if own
            else 0,
        )
        for tool in listed
        if tool.latest is not None
    ]


def _agents(groups: set[int]) -> tuple[set[int], dict[int, set[int]]]:
    """Return the agents that have all groups, and those that have each of these."""
    # By name: agents live in an app that the catalog does not import.
    agents = apps.get_model("sessions_app", "Agent")._default_manager.filter(enabled=True)
    rows = agents.filter(Q(all_groups=True) | Q(groups__in=groups)).values_list(
        "pk", "all_groups", "groups"
    )
    everywhere: set[int] = set()
    having: dict[int, set[int]] = {}
    for agent, has_all, group in rows.distinct():
        if has_all:
            everywhere.add(agent)
        elif group in groups:
            having.setdefault(group, set()).add(agent)
    return everywhere, having


def last_decisions() -> list[AuditRow]:
    rows = AuditEntry.objects.filter(verb__in=DECISIONS, target_kind="tool")
    return [AuditRow.of(entry) for entry in rows[:LAST]]


def decision_on(tool: Tool) -> AuditRow | None:
    """Return the newest decision about a tool: who was faster."""
    rows = AuditEntry.objects.filter(target_kind="tool", target_id=tool.pk, verb__in=DECISIONS)
    entry = rows.first()
    return AuditRow.of(entry) if entry else None
