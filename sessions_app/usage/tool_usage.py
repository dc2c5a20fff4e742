"""What earns its place: use by day and by tool, preloads nobody calls, loads worth preloading.

Reads only. Counting is done by the database, in one pass over an index for each way of counting;
what must be parsed is read from the newest rows of the time asked for, up to a limit that the page
names. What is preloaded comes from the shelf that agents are served from.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from django.db.models import CharField, Count, QuerySet, Sum
from django.db.models.functions import Cast, Substr

from catalog import cache
from catalog.cache import ShelfGroup
from catalog.models import Group, Tool
from sessions_app.models import Agent, AgentGroup, Call, Event, EventKind
from sessions_app.review import timeline
from sessions_app.review.queries import read_object
from sessions_app.usage.figures import FAILED, OF_A_TOOL, answered
from sessions_app.usage.filters import UsageFilter
from toolcrib.lib.pagination import Page, page_by_offset
from toolcrib.lib.percentile import percentile

PAGE = 25
DURATIONS = 5_000  # newest answered calls that percentiles are of
LOADS = 2_000  # newest loads that are read
OFTEN = 3  # sessions


# --- Calls by day and by tool -------------------------------------------------------------------


@dataclass(frozen=True)
class Day:
    """One bucket; `calls` is None where nothing was recorded yet."""

    at: datetime
    calls: int | None
    errors: int = 0


@dataclass
class ToolUse:
    """How one tool was used; `trend` is how often in each bucket, where it was asked for."""

    name: str
    calls: int = 0
    errors: int = 0
    tokens: int = 0
    p50: int | None = None
    p95: int | None = None
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
        return page_by_offset(self.tools, offset, size)


def use(wanted: UsageFilter) -> Use:
    """Count calls, errors and tokens, by tool and by bucket."""
    calls: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    for bucket, count, failed in (
        _by_bucket(wanted)
        .values_list("bucket")
        .annotate(n=Count("pk"), failed=Count("pk", filter=FAILED))
    ):
        calls[bucket], errors[bucket] = count, failed
    tools: dict[str, ToolUse] = {}
    nameless = 0
    for name, count, failed, known, paid in (
        wanted.calls()
        .values_list("tool_name")
        .annotate(
            n=Count("pk"),
            failed=Count("pk", filter=FAILED),
            known=Count("pk", filter=OF_A_TOOL),
            paid=Sum("tokens"),
        )
    ):
        if known:
            tools[name] = ToolUse(name, count, failed, paid or 0)
        else:
            nameless += count
    _time(wanted, tools)
    return Use(
        days=_days(wanted, calls, errors),
        tools=_sorted(tools.values(), wanted.sort),
        calls=calls.total(),
        errors=errors.total(),
        nameless=nameless,
    )


def add_trends(wanted: UsageFilter, tools: Sequence[ToolUse]) -> None:
    """Say of the tools that are shown how often they were called in each bucket."""
    rows = _by_bucket(wanted).filter(tool_name__in=[one.name for one in tools])
    counts = {
        (name, bucket): count
        for name, bucket, count in rows.values_list("tool_name", "bucket").annotate(Count("pk"))
    }
    names = _bucket_names(wanted)
    for one in tools:
        one.trend = [counts.get((one.name, name), 0) for name in names]


def _by_bucket(wanted: UsageFilter) -> QuerySet[Any]:
    # Cutting the database's own text of a time costs less than any function on times.
    text = Cast("accepted_at", CharField())
    return wanted.calls().annotate(bucket=Substr(text, 1, wanted.range.digits))


def _bucket_names(wanted: UsageFilter) -> list[str]:
    return [at.strftime("%Y-%m-%d %H")[: wanted.range.digits] for at in wanted.buckets]


def _days(wanted: UsageFilter, calls: Counter[str], errors: Counter[str]) -> list[Day]:
    first, names = kept_since(), _bucket_names(wanted)
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
    times: defaultdict[str, list[int]] = defaultdict(list)
    for name, _, took in answered(wanted.calls(), DURATIONS):
        times[name].append(took)
    for name, values in times.items():
        if name in tools:
            values.sort()
            tools[name].p50 = percentile(values, 0.5)
            tools[name].p95 = percentile(values, 0.95)


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
    tokens: int
    sessions: int = 0  # that loaded it
    share: int = 0  # of all sessions, in percent

    @property
    def movable(self) -> bool:
        """Whether the member's own setting decides: a group given whole asks nobody."""
        return self.group.deferred


@dataclass(frozen=True)
class Unused:
    places: list[Place]
    total: int
    tokens: int


Pair = tuple[ShelfGroup, cache.Place]


def _groups(wanted: UsageFilter) -> list[ShelfGroup]:
    """List the groups that the filter asks for."""
    groups: Iterable[ShelfGroup] = cache.current().groups
    if wanted.group:
        groups = [group for group in groups if group.group_id == wanted.group]
    if wanted.agent and not Agent.objects.filter(name=wanted.agent, all_groups=True).exists():
        links = AgentGroup.objects.filter(agent__name=wanted.agent)
        its = set(links.values_list("group_id", flat=True))
        groups = [group for group in groups if group.pk in its]
    return list(groups)


@cache.worked_out_once
def _preloads(group: ShelfGroup) -> list[Pair]:
    return [(group, place) for place in group.offered if place.preload]


def _places(pairs: Sequence[Pair], most: int | None) -> list[Place]:
    """Fetch what a page shows of the first of these."""
    groups = {group.pk: group for group in Group.objects.all()}
    rows = Tool.objects.only("public_name", "created_at", "server_id")
    if most is not None:
        rows = rows.filter(pk__in=[place.item.tool_id for _, place in pairs[:most]])
    tools = {tool.pk: tool for tool in rows}
    return [
        Place(groups[group.pk], tools[place.item.tool_id], _tokens(place))
        for group, place in pairs[:most]
        if group.pk in groups and place.item.tool_id in tools
    ]


def _tokens(place: cache.Place) -> int:
    return place.item.approved.tokens if place.item.approved else 0


def unused(
    wanted: UsageFilter, called: Collection[str] | None = None, most: int | None = PAGE
) -> Unused:
    """Return what is preloaded and was not called, the costliest first.

    `called` are the names that were, where they have been counted already.
    """
    if called is None:
        called = set(wanted.calls().values_list("tool_name", flat=True).distinct())
    pairs = [
        pair
        for group in _groups(wanted)
        for pair in _preloads(group)
        if pair[1].item.name not in called
    ]
    pairs.sort(key=lambda pair: (-_tokens(pair[1]), pair[1].item.name, pair[0].group_id))
    tokens = sum(_tokens(place) for _, place in pairs)
    return Unused(_places(pairs, most), len(pairs), tokens)


def loaded_often(wanted: UsageFilter, most: int | None = PAGE) -> list[Place]:
    """Return what many sessions loaded and no setting preloads, the most often loaded first."""
    seen: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    rows = wanted.events(EventKind.LOADED).order_by("-at")
    for session, group, text in rows.values_list("session_id", "group_id", "details")[:LOADS]:
        for name in timeline.words(read_object(text), "names"):
            seen[group, name].add(session)
    often = {pair: len(found) for pair, found in seen.items() if len(found) >= OFTEN}
    named = {group for group, _ in often}
    pairs = [
        (group, place)
        for group in _groups(wanted)
        if group.group_id in named
        for place in group.offered
        if not place.preload and (group.group_id, place.item.name) in often
    ]
    pairs.sort(key=lambda pair: (-often[_key(pair)], _key(pair)))
    all_sessions = max(_sessions_of(wanted, rows), 1)
    return [
        replace(place, sessions=times, share=min(round(100 * times / all_sessions), 100))
        for place in _places(pairs, most)
        for times in [often[place.group.group_id, place.tool.public_name]]
    ]


def _key(pair: Pair) -> tuple[str, str]:
    return pair[0].group_id, pair[1].item.name


def _sessions_of(wanted: UsageFilter, loads: QuerySet[Event]) -> int:
    """Count the sessions of the time that the loads which were read come from."""
    oldest = loads.values_list("at", flat=True)[LOADS - 1 : LOADS].first()
    rows = wanted.sessions()
    return (rows.filter(created_at__gte=oldest) if oldest else rows).count()
