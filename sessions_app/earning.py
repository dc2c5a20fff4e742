"""What earns its place: use by day and by tool, preloads nobody calls, loads worth preloading.

Reads only. Counting is done by the database; what must be parsed is read from the newest rows of
the time asked for, up to a limit that the page names.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from django.db.models import CharField, Count, Exists, OuterRef, Q, QuerySet, Sum
from django.db.models.functions import Cast, Substr

from catalog.browsing import Page
from catalog.group_reads import is_preloaded
from catalog.models import Group, Membership, Tool
from sessions_app import timeline
from sessions_app.figures import FAILED, OF_A_TOOL
from sessions_app.models import Agent, Call, CallPath, EventKind
from sessions_app.usage import read_object
from sessions_app.usage_filter import UsageFilter

PAGE = 25
DURATIONS = 5_000  # newest answered calls that percentiles are of
LOADS = 20_000  # newest loads that are read
OFTEN = 3  # sessions
PRELOADED = (
    Q(preload=True) | Q(preload=None, group__preload_default=True) | Q(group__deferred=False)
)


# --- Calls by day and by tool -------------------------------------------------------------------


@dataclass(frozen=True)
class Day:
    """One bucket; `calls` is None where nothing was recorded yet."""

    at: datetime
    calls: int | None
    errors: int = 0


@dataclass
class ToolUse:
    """How one tool was used, and how often in each bucket."""

    name: str
    calls: int = 0
    errors: int = 0
    tokens: int = 0
    p50: int | None = None
    p95: int | None = None
    by_bucket: Counter[str] = field(default_factory=Counter)
    trend: list[int] = field(default_factory=list)

    @property
    def error_rate(self) -> float:
        return 100 * self.errors / self.calls if self.calls else 0.0

    @property
    def each(self) -> int:
        return round(self.tokens / self.calls) if self.calls else 0


@dataclass(frozen=True)
class Use:
    """All calls of a time, by bucket and by tool."""

    days: list[Day]
    tools: list[ToolUse]
    calls: int
    errors: int
    nameless: int  # calls of names that no tool had

    def page(self, offset: int, size: int = PAGE) -> Page[ToolUse]:
        total = len(self.tools)
        offset = max(0, min(offset, (total - 1) // size * size if total else 0))
        return Page(
            rows=self.tools[offset : offset + size],
            total=total,
            first=offset,
            previous_cursor=str(offset) if offset else "",
            next_cursor=str(offset + size) if offset + size < total else "",
        )


def use(wanted: UsageFilter) -> Use:
    """Count calls, errors and tokens in one pass over the ledger."""
    digits = wanted.range.digits
    rows = (
        wanted.calls()
        .annotate(bucket=Substr(Cast("accepted_at", CharField()), 1, digits))
        .values_list("tool_name", "bucket")
        .annotate(
            n=Count("pk"),
            failed=Count("pk", filter=FAILED),
            known=Count("pk", filter=OF_A_TOOL),
            paid=Sum("tokens"),
        )
    )
    calls: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    tools: dict[str, ToolUse] = {}
    nameless = 0
    for name, bucket, count, failed, known, paid in rows:
        calls[bucket] += count
        errors[bucket] += failed
        if not known:
            nameless += count
            continue
        one = tools.setdefault(name, ToolUse(name))
        one.calls += count
        one.errors += failed
        one.tokens += paid or 0
        one.by_bucket[bucket] += count
    _time(wanted, tools)
    names = [_bucket_name(at, digits) for at in wanted.buckets]
    for one in tools.values():
        one.trend = [one.by_bucket[name] for name in names]
    return Use(
        days=_days(wanted, names, calls, errors),
        tools=_sorted(tools.values(), wanted.sort),
        calls=calls.total(),
        errors=errors.total(),
        nameless=nameless,
    )


def _bucket_name(at: datetime, digits: int) -> str:
    return at.strftime("%Y-%m-%d %H")[:digits]


def _days(
    wanted: UsageFilter, names: Sequence[str], calls: Counter[str], errors: Counter[str]
) -> list[Day]:
    first = kept_since()
    return [
        Day(at, calls[name], errors[name])
        if first and at + wanted.range.step > first
        else Day(at, None)
        for at, name in zip(wanted.buckets, names, strict=True)
    ]


def kept_since() -> datetime | None:
    """When the first call that is kept was made."""
    return Call.objects.order_by("accepted_at").values_list("accepted_at", flat=True).first()


def _time(wanted: UsageFilter, tools: dict[str, ToolUse]) -> None:
    answered = wanted.calls().filter(sent_at__isnull=False, finished_at__isnull=False)
    times: defaultdict[str, list[int]] = defaultdict(list)
    rows = answered.order_by("-accepted_at").values_list("tool_name", "accepted_at", "finished_at")
    for name, start, end in rows[:DURATIONS]:
        if end is not None:
            times[name].append(round((end - start).total_seconds() * 1000))
    for name, values in times.items():
        if name in tools:
            values.sort()
            tools[name].p50 = timeline.percentile(values, 0.5)
            tools[name].p95 = timeline.percentile(values, 0.95)


def _sorted(tools: Iterable[ToolUse], sort: str) -> list[ToolUse]:
    keys = {
        "calls": lambda one: one.calls,
        "errors": lambda one: (one.error_rate, one.calls),
        "p50": lambda one: one.p50 or 0,
        "p95": lambda one: one.p95 or 0,
        "tokens": lambda one: one.tokens,
        "each": lambda one: one.each,
    }
    named = sorted(tools, key=lambda one: one.name, reverse=sort == "-name")
    key = keys.get(sort.removeprefix("-"))
    return sorted(named, key=key, reverse=sort.startswith("-")) if key else named


# --- Places: what is preloaded, and what should be ----------------------------------------------


@dataclass(frozen=True)
class Place:
    """A tool in a group, with what its definition costs each session that is given it."""

    group: Group
    tool: Tool
    sessions: int = 0  # that loaded it
    share: int = 0  # of all sessions, in percent

    @property
    def tokens(self) -> int:
        return self.tool.approved.tokens if self.tool.approved else 0

    @property
    def movable(self) -> bool:
        """Whether the member's own setting decides: a group given whole asks nobody."""
        return self.group.deferred


@dataclass(frozen=True)
class Unused:
    places: list[Place]
    total: int
    tokens: int


def _members(wanted: UsageFilter) -> QuerySet[Membership]:
    rows = Membership.objects.filter(tool__in=Tool.objects.servable())
    if wanted.group:
        rows = rows.filter(group__group_id=wanted.group)
    if wanted.agent and not Agent.objects.filter(name=wanted.agent, all_groups=True).exists():
        rows = rows.filter(group__agents__name=wanted.agent)
    return rows.select_related("group", "tool__approved")


def unused(wanted: UsageFilter, most: int | None = PAGE) -> Unused:
    """Return what is preloaded and was not called, the costliest first."""
    called = Call.objects.filter(tool=OuterRef("tool"), accepted_at__gte=wanted.since).exclude(
        path=CallPath.TRY
    )
    if wanted.agent:
        called = called.filter(agent__name=wanted.agent)
    rows = _members(wanted).filter(PRELOADED).exclude(Exists(called))
    sums = rows.order_by().aggregate(total=Count("pk"), tokens=Sum("tool__approved__tokens"))
    costly = rows.order_by("-tool__approved__tokens", "tool__public_name", "group__group_id")
    places = [Place(one.group, one.tool) for one in costly[:most]]
    return Unused(places, sums["total"] or 0, sums["tokens"] or 0)


def loaded_often(wanted: UsageFilter, most: int | None = PAGE) -> list[Place]:
    """Return what many sessions loaded and no setting preloads, the most often loaded first."""
    seen: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    rows = wanted.events(EventKind.LOADED).order_by("-at")
    for session, group, text in rows.values_list("session_id", "group_id", "details")[:LOADS]:
        for name in timeline.words(read_object(text), "names"):
            seen[group, name].add(session)
    often = {pair: len(found) for pair, found in seen.items() if len(found) >= OFTEN}
    ranked = sorted(often, key=lambda pair: (-often[pair], pair))[: PAGE * 4]
    named = _members(wanted).filter(
        group__group_id__in={group for group, _ in ranked},
        tool__public_name__in={name for _, name in ranked},
    )
    members = {(one.group.group_id, one.tool.public_name): one for one in named}
    all_sessions = wanted.sessions().count()
    places = [
        Place(
            members[pair].group,
            members[pair].tool,
            often[pair],
            min(round(100 * often[pair] / max(all_sessions, 1)), 100),
        )
        for pair in ranked
        if pair in members and not is_preloaded(members[pair].group, members[pair].preload)
    ]
    return places[:most]
