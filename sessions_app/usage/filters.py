"""Which part of what was recorded a person looks at: how far back, of which agent and group."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db.models import BigIntegerField, ExpressionWrapper, F, Q, QuerySet
from django.http import QueryDict
from django.utils import timezone

from catalog.models import Membership
from sessions_app.models import AgentSession, Call, CallPath, CallState, Event, EventKind
from toolcrib.lib.request import text

# A call counts as failed by its own error or by how it ended.
FAILED_STATES = (CallState.FAILED, CallState.REFUSED, CallState.TIMED_OUT, CallState.UNKNOWN)
FAILED = Q(is_error=True) | Q(state__in=FAILED_STATES)
# A call of a name that no tool ever had is a refusal, not usage of a tool.
OF_A_TOOL = Q(tool__isnull=False) | ~Q(state=CallState.REFUSED)
SORTS = ("name", "calls", "errors", "p50", "p95", "tokens", "each")


@dataclass(frozen=True)
class Range:
    """How far back to look, and in which steps."""

    label: str
    buckets: int
    bucket: str = "day"

    @property
    def step(self) -> timedelta:
        return timedelta(hours=1) if self.bucket == "hour" else timedelta(days=1)

    @property
    def digits(self) -> int:
        """How much of a moment, written out, names its bucket."""
        return 13 if self.bucket == "hour" else 10


RANGES = {
    "24h": Range("24 hours", 24, "hour"),
    "7d": Range("7 days", 7),
    "30d": Range("30 days", 30),
    "90d": Range("90 days", 90),
}


@dataclass(frozen=True)
class UsageFilter:
    """What a person asked for in the address. Unknown words ask for nothing that exists."""

    within: str = "30d"
    agent: str = ""
    group: str = ""
    sort: str = "-calls"
    now: datetime = field(default_factory=timezone.now)
    start: datetime | None = None  # instead of the start of the range

    @classmethod
    def read(cls, query: QueryDict) -> "UsageFilter":
        sort = query.get("sort", "")
        return cls(
            within=query.get("range", "") if query.get("range") in RANGES else "30d",
            agent=text(query, "agent"),
            group=text(query, "group"),
            sort=sort if sort.removeprefix("-") in SORTS else "-calls",
        )

    @property
    def range(self) -> Range:
        return RANGES[self.within]

    @property
    def narrows(self) -> bool:
        return bool(self.agent or self.group)

    @property
    def buckets(self) -> list[datetime]:
        """The start of each bucket, the last of which is still running."""
        last = self.now.replace(minute=0, second=0, microsecond=0)
        if self.range.bucket == "day":
            last = last.replace(hour=0)
        return [last - self.range.step * back for back in reversed(range(self.range.buckets))]

    @property
    def since(self) -> datetime:
        return self.start or self.buckets[0]

    def calls(self) -> QuerySet[Call]:
        """What agents called. Trying out a tool is no use of it."""
        rows = Call.objects.filter(accepted_at__gte=self.since).exclude(path=CallPath.TRY)
        if self.agent:
            rows = rows.filter(agent__name=self.agent)
        if self.group:
            members = Membership.objects.filter(group__group_id=self.group)
            # Added to nothing, so that the index of times is read through, in place of the table
            # a tool at a time.
            tool = ExpressionWrapper(F("tool_id") + 0, output_field=BigIntegerField())
            rows = rows.alias(of_tool=tool).filter(of_tool__in=members.values("tool_id"))
        return rows.order_by()

    def events(self, kind: EventKind) -> QuerySet[Event]:
        """What happened in sessions. Of any group: a search is bound to none."""
        rows = Event.objects.filter(kind=kind, at__gte=self.since)
        return rows.filter(session__agent__name=self.agent) if self.agent else rows

    def sessions(self) -> QuerySet[AgentSession]:
        """Sessions that began in this time. Of any group: most have several."""
        rows = AgentSession.objects.filter(created_at__gte=self.since)
        return rows.filter(agent__name=self.agent) if self.agent else rows
