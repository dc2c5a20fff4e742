"""Unmet searches: searches without results, abandoned searches, loads that were never called.

Reads only, from the newest events up to a limit that the page states. An open session may still
use its results, so a search counts as abandoned once another follows it or its session has ended,
and a load as never called once its session has ended. Test sessions are left out. The fields of
`Report` and its rows are API fields.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, TypeVar

from django.db.models import OuterRef, QuerySet, Subquery

from catalog import cache
from sessions_app.ledger.event_details import describe_query, read_count, read_names, read_object
from sessions_app.models import Call, Event, EventKind, SessionState
from sessions_app.usage.filters import UsageFilter
from toolcrib.lib.pagination import cut_list

MAX_SEARCHES = 5_000  # newest searches read
MAX_LOADS = 2_000  # newest loads read
SESSIONS_PER_QUERY = 500
PAGE = 25
TEST_SESSION_KEY = "tried_by"  # in the metadata of test sessions, which the playground opens
NO_GROUP = "(no group)"
K = TypeVar("K")
USE_KINDS = (EventKind.LOADED, EventKind.IMPLICIT_LOAD, EventKind.CALLED)


@dataclass(frozen=True)
class RecordedSearch:
    at: datetime
    agent: str
    details: dict[str, object]
    description: str
    strategy: str
    hits: list[str]
    without_results: bool
    abandoned: bool  # it had results, and none was loaded or called

    @property
    def query(self) -> str:
        """Return what was asked; empty once the content of a deleted agent was erased."""
        details = self.details
        return str(details.get("pattern") or details.get("query") or details.get("name") or "")

    @property
    def is_listed(self) -> bool:
        """Whether the lists of failed searches name it; totals count every search."""
        return bool(self.query) and (self.without_results or self.abandoned)


@dataclass
class FailedSearch:
    """A failed query: count, time of the last, agents, and the tool that ranked first, if any."""

    asked: str
    query: str
    strategy: str
    pattern: bool
    times: int
    last_at: datetime
    agents: list[str]
    first: str = ""

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "strategy"}


def _count(rows: dict[K, FailedSearch], key: K, search: RecordedSearch) -> None:
    """Count a search in its row. Searches are read newest first, so the first is the latest."""
    if key not in rows:
        rows[key] = FailedSearch(
            asked=search.description,
            query=search.query,
            strategy=search.strategy,
            pattern=bool(search.details.get("pattern")) or search.strategy == "regex",
            times=0,
            last_at=search.at,
            agents=[],
            first=search.hits[0] if search.hits else "",
        )
    row = rows[key]
    row.times += 1
    row.agents = sorted({*row.agents, search.agent})[:5]


@dataclass(frozen=True)
class FailedSearches:
    read: int
    without_results: list[FailedSearch]
    abandoned: list[FailedSearch]


def failed_searches(filters: UsageFilter, limit: int | None = PAGE) -> FailedSearches:
    """Return failed queries by text and strategy, most frequent first."""
    failed: dict[bool, dict[tuple[str, str], FailedSearch]] = {True: {}, False: {}}
    read = 0
    for search in _read_searches(filters.events(EventKind.SEARCHED)):
        read += 1
        if search.is_listed:
            rows = failed[search.without_results]
            _count(rows, (search.description, search.strategy), search)
    return FailedSearches(
        read,
        _most_frequent(failed[True].values(), limit),
        _most_frequent(failed[False].values(), limit),
    )


def recent_queries(limit: int = 12, max_searches: int = 500) -> list[FailedSearch]:
    """Return the latest distinct queries: those without results first, then the newest."""
    queries: dict[tuple[str, bool], FailedSearch] = {}
    for search in _read_searches(Event.objects.filter(kind=EventKind.SEARCHED), max_searches):
        if search.query and not search.details.get("name"):
            _count(queries, (search.description, not search.without_results), search)
    ranked = sorted(queries.items(), key=lambda pair: (pair[0][1], -pair[1].last_at.timestamp()))
    return [query for _, query in ranked[:limit]]


def _read_searches(events: QuerySet[Event], limit: int = MAX_SEARCHES) -> Iterator[RecordedSearch]:
    """Yield the searches, newest first."""
    following = Event.objects.filter(
        session=OuterRef("session"),
        pk__gt=OuterRef("pk"),
        kind__in=[EventKind.SEARCHED, *USE_KINDS],
    ).order_by("pk")
    rows = _without_test_sessions(events).annotate(following=Subquery(following.values("kind")[:1]))
    fields = ("at", "details", "session__agent__name", "session__state", "following")
    for at, text, agent, state, next_kind in rows.order_by("-at").values_list(*fields)[:limit]:
        details = read_object(text)
        if "total" not in details:
            continue
        without_results = not read_count(details, "total")
        used = next_kind in USE_KINDS or read_count(details, "newly_loaded")
        undecided = state == SessionState.OPEN and next_kind is None
        yield RecordedSearch(
            at,
            agent,
            details,
            description=describe_query(details),
            strategy=str(details.get("strategy") or ""),
            hits=read_names(details, "hits"),
            without_results=without_results,
            abandoned=not (without_results or used or undecided),
        )


def _without_test_sessions(events: QuerySet[Event]) -> QuerySet[Event]:
    return events.exclude(session__metadata__contains=f'"{TEST_SESSION_KEY}":')


def _most_frequent(rows: Iterable[FailedSearch], limit: int | None) -> list[FailedSearch]:
    return sorted(rows, key=lambda row: (-row.times, row.asked, row.strategy))[:limit]


@dataclass(frozen=True)
class UncalledTool:
    """A tool that sessions loaded and never called."""

    name: str
    group_id: str
    times: int
    loads: int
    agents: list[str]


@dataclass
class Totals:
    """Totals of one agent, or of the tools of one group."""

    name: str
    searches: int = 0
    lost: int = 0
    astray: int = 0
    loads: int = 0
    uncalled: int = 0


@dataclass(frozen=True)
class Report:
    read: int
    lost: list[FailedSearch]
    astray: list[FailedSearch]
    uncalled: list[UncalledTool]
    agents: list[Totals]
    groups: list[Totals]

    def as_json(self) -> dict[str, Any]:
        failed = {
            name: [row.as_json() for row in getattr(self, name)] for name in ("lost", "astray")
        }
        return asdict(self) | failed

    def page(self, limit: int, cursor: str) -> dict[str, Any]:
        """Return one page of all lists, with the cursor of the next page while one has more."""
        body: dict[str, Any] = {"next_cursor": None}
        for name, value in self.as_json().items():
            if isinstance(value, list):
                body[name], next_cursor = cut_list(value, limit, cursor)
                body["next_cursor"] = body["next_cursor"] or next_cursor
        return body


def report(filters: UsageFilter, limit: int | None = PAGE) -> Report:
    """Return the report of unmet searches and uncalled loads; without a limit, all rows."""
    builder = _ReportBuilder(filters.group)
    for search in _read_searches(filters.events(EventKind.SEARCHED)):
        builder.add_search(search)
    _add_loads(filters, builder)
    return builder.build(limit)


def _add_loads(filters: UsageFilter, builder: "_ReportBuilder") -> None:
    rows = _without_test_sessions(filters.events(EventKind.LOADED))
    rows = rows.exclude(session__state=SessionState.OPEN)
    fields = ("session_id", "session__agent__name", "group_id", "details")
    loads = list(rows.order_by("-at").values_list(*fields)[:MAX_LOADS])
    called = _called_tools({row[0] for row in loads})
    counted: set[tuple[int, str]] = set()
    for session, agent, group, text in loads:
        details = read_object(text)
        if details.get("how") == "resume":
            continue
        for name in read_names(details, "names"):
            if (session, name) not in counted:
                counted.add((session, name))
                builder.add_load(name, group, agent, called=name in called[session])


def _called_tools(sessions: Iterable[int]) -> dict[int, set[str]]:
    """Return the names of the tools that each session called."""
    called: defaultdict[int, set[str]] = defaultdict(set)
    keys = sorted(sessions)
    for start in range(0, len(keys), SESSIONS_PER_QUERY):
        chunk = keys[start : start + SESSIONS_PER_QUERY]
        rows = Call.objects.filter(session__in=chunk).order_by()
        for session, name in rows.values_list("session_id", "tool_name").distinct():
            called[session or 0].add(name)
    return called


class _ReportBuilder:
    """Accumulates a report; with a group, counts only its tools."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.read = 0
        self.lost: dict[str, FailedSearch] = {}
        self.astray: dict[str, FailedSearch] = {}
        self.loads: Counter[tuple[str, str]] = Counter()
        self.uncalled: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.agents: dict[str, Totals] = {}
        self.groups: dict[str, Totals] = {}
        self.group_of_tool = {
            member.tool.name: cached.group_id
            for cached in reversed(cache.current().groups)
            for member in cached.members
        }

    def add_search(self, search: RecordedSearch) -> None:
        """Count a search under its agent and under the group of its first result."""
        group = self.group_of_tool.get(search.hits[0], NO_GROUP) if search.hits else ""
        if self.group and group != self.group:
            return
        self.read += 1
        for total in self._totals(search.agent, group):
            total.searches += 1
            total.lost += search.without_results
            total.astray += search.abandoned
        if search.is_listed:
            rows = self.lost if search.without_results else self.astray
            _count(rows, search.description, search)

    def add_load(self, name: str, group: str, agent: str, *, called: bool) -> None:
        if self.group and group != self.group:
            return
        self.loads[name, group] += 1
        if not called:
            self.uncalled[name, group][agent] += 1
        for total in self._totals(agent, group or NO_GROUP):
            total.loads += 1
            total.uncalled += not called

    def _totals(self, agent: str, group: str) -> Iterator[Totals]:
        yield self.agents.setdefault(agent, Totals(agent))
        if group:
            yield self.groups.setdefault(group, Totals(group))

    def build(self, limit: int | None) -> Report:
        uncalled = sorted(self.uncalled.items(), key=lambda pair: (-pair[1].total(), pair[0]))
        agents = sorted(self.agents.values(), key=lambda row: (-row.lost - row.astray, row.name))
        groups = sorted(
            self.groups.values(), key=lambda row: (-row.astray - row.uncalled, row.name)
        )
        return Report(
            self.read,
            _most_frequent(self.lost.values(), limit),
            _most_frequent(self.astray.values(), limit),
            [
                UncalledTool(name, group, names.total(), self.loads[name, group], sorted(names)[:5])
                for (name, group), names in uncalled[:limit]
            ],
            agents[:limit],
            groups[:limit],
        )
