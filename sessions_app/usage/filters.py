"""Filters of usage reports: time range, agent and group."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db.models import BigIntegerField, ExpressionWrapper, F, Q, QuerySet
from django.http import QueryDict
from django.utils import timezone

from catalog.models import Group, Membership
from sessions_app.models import (
    NOT_RUN,
    Agent,
    AgentSession,
    Call,
    CallPath,
    CallState,
    Event,
    EventKind,
    UsageKind,
)
from toolcrib.lib.request import text
from toolcrib.lib.time_ranges import RANGES, Range, range_context, read_range

# A call counts as failed by its error flag or by its final state.
FAILED_STATES = (CallState.FAILED, *NOT_RUN, CallState.TIMED_OUT, CallState.UNKNOWN)
FAILED = Q(is_error=True) | Q(state__in=FAILED_STATES)
# A rejected call to an unknown name is not usage of a tool.
KNOWN_TOOL = Q(tool__isnull=False) | ~Q(state=CallState.REFUSED)
MAX_CHOICES = 500  # agents or groups in a filter
SORTS = ("name", "calls", "errors", "p50", "p95", "tokens", "each")


@dataclass(frozen=True)
class UsageFilter:
    """Filters of a usage report, from the query string. Unknown ranges and sorts are ignored."""

    within: str = "30d"
    agent: str = ""
    group: str = ""
    sort: str = "-calls"
    now: datetime = field(default_factory=timezone.now)
    start: datetime | None = None  # overrides the start of the range

    @classmethod
    def read(cls, query: QueryDict) -> "UsageFilter":
        sort = query.get("sort", "")
        return cls(
            within=read_range(query, "30d"),
            agent=text(query, "agent"),
            group=text(query, "group"),
            sort=sort if sort.removeprefix("-") in SORTS else "-calls",
        )

    @property
    def range(self) -> Range:
        return RANGES[self.within]

    @property
    def is_active(self) -> bool:
        return bool(self.agent or self.group)

    @property
    def buckets(self) -> list[datetime]:
        return self.range.starts(self.now)

    @property
    def since(self) -> datetime:
        return self.start or self.buckets[0]

    def calls(self) -> QuerySet[Call]:
        """Return the calls of agents. Trial calls are not usage."""
        rows = Call.objects.filter(accepted_at__gte=self.since).exclude(path=CallPath.TRY)
        if self.agent:
            rows = rows.filter(agent__name=self.agent)
        if self.group:
            members = Membership.objects.filter(group__group_id=self.group)
            # `+ 0` keeps the planner off the index on tools: scanning the index on time once is
            # cheaper than reading the table tool by tool.
            tool = ExpressionWrapper(F("tool_id") + 0, output_field=BigIntegerField())
            rows = rows.alias(member_tool=tool).filter(member_tool__in=members.values("tool_id"))
        return rows.order_by()

    def tools_of_group(self) -> list[str]:
        """Return the names of the tools in the chosen group."""
        members = Membership.objects.filter(group__group_id=self.group)
        return list(members.values_list("tool__public_name", flat=True))

    def counted_kind(self) -> tuple[UsageKind, str | list[str]]:
        """Return the kind and the keys of the hourly figures; an agent goes before a group."""
        if self.agent:
            agent = Agent.objects.filter(name=self.agent).first()
            return UsageKind.AGENT, str(agent.pk if agent else "")
        return (UsageKind.TOOL, self.tools_of_group()) if self.group else (UsageKind.ALL, "")

    def events(self, kind: EventKind) -> QuerySet[Event]:
        """Return session events. The group does not apply: a search belongs to no group."""
        rows = Event.objects.filter(kind=kind, at__gte=self.since)
        return rows.filter(session__agent__name=self.agent) if self.agent else rows

    def sessions(self) -> QuerySet[AgentSession]:
        """Return sessions opened in this range. The group does not apply: most have several."""
        rows = AgentSession.objects.filter(created_at__gte=self.since)
        return rows.filter(agent__name=self.agent) if self.agent else rows


def filter_context(filters: UsageFilter) -> dict[str, Any]:
    """Return the context of the fields for range, agent and group."""
    return {
        "filters": filters,
        **range_context(filters.within),
        "agents": choices(Agent.objects.values_list("name", flat=True), filters.agent),
        "groups": choices(Group.objects.values_list("group_id", flat=True), filters.group),
    }


def choices(names: Iterable[str], chosen: str) -> list[str]:
    """Return the names of a selection; the current one stays visible."""
    names = list(names)[:MAX_CHOICES]
    return [*names, chosen] if chosen and chosen not in names else names
