"""Searches that failed agents: without results, abandoned, and loads that were never called.

Reads only, from the newest events up to a limit that the page names. A session that is still open
may yet use what it found, so only ended ones count as abandoned or never called. Test sessions,
which people open from the playground, are left out.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from django.db.models import OuterRef, QuerySet, Subquery

from catalog import cache
from sessions_app.ledger.event_details import (
    describe_query,
    read_count,
    read_names,
    read_object,
)
from sessions_app.models import Call, Event, EventKind, SessionState
from sessions_app.usage.filters import UsageFilter

SEARCHES = 5_000  # newest searches that are read
LOADS = 2_000
CHUNK = 500
PAGE = 25
TEST = "tried_by"  # the metadata key of test sessions
NO_GROUP = "(no group)"
USES = (EventKind.LOADED, EventKind.IMPLICIT_LOAD, EventKind.CALLED)


# --- Searches -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedSearch:
    """One search from the timeline, with the event that followed it in its session."""

    at: datetime
    details: dict[str, object]
    agent: str
    following: str | None
    session_open: bool

    @property
    def asked(self) -> str:
        return describe_query(self.details)

    @property
    def strategy(self) -> str:
        return str(self.details.get("strategy") or "")

    @property
    def hits(self) -> list[str]:
        return read_names(self.details, "hits")

    @property
    def without_results(self) -> bool:
        return not read_count(self.details, "total")

    @property
    def abandoned(self) -> bool:
        """Whether something was found, and nothing of it was loaded or called."""
        used = self.following in USES or read_count(self.details, "newly_loaded")
        undecided = self.session_open and self.following is None
        return not self.without_results and not used and not undecided


@dataclass
class FailedSearch:
    """A query that failed: how often, when last, whose, and which tool ranked first, if any."""

    asked: str
    query: str
    strategy: str
    pattern: bool
    times: int
    last_at: datetime
    agents: list[str]
    first: str = ""

    @classmethod
    def of(cls, search: RecordedSearch) -> "FailedSearch":
        """Start counting. Searches are read newest first, so the first one is the last."""
        details = search.details
        query = details.get("pattern") or details.get("query") or details.get("name") or ""
        return cls(
            asked=search.asked,
            query=str(query),
            strategy=search.strategy,
            pattern=bool(details.get("pattern")) or search.strategy == "regex",
            times=0,
            last_at=search.at,
            agents=[],
            first=search.hits[0] if search.hits else "",
        )

    def count(self, search: RecordedSearch) -> None:
        self.times += 1
        if search.agent not in self.agents:
            self.agents = sorted([*self.agents, search.agent])[:5]

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "strategy"}


@dataclass(frozen=True)
class FailedSearches:
    read: int
    without_results: list[FailedSearch]
    abandoned: list[FailedSearch]


def failed_searches(wanted: UsageFilter, most: int | None = PAGE) -> FailedSearches:
    """Return failed queries by text and strategy, the most frequent first."""
    failed: dict[bool, dict[tuple[str, str], FailedSearch]] = {True: {}, False: {}}
    read = 0
    for search in recorded_searches(wanted):
        read += 1
        if search.without_results or search.abandoned:
            found = failed[search.without_results]
            key = (search.asked, search.strategy)
            found.setdefault(key, FailedSearch.of(search)).count(search)
    return FailedSearches(
        read,
        _most_frequent(failed[True].values(), most),
        _most_frequent(failed[False].values(), most),
    )


def recorded_searches(wanted: UsageFilter) -> Iterator[RecordedSearch]:
    """Yield the newest searches of a time, newest first."""
    rows = _without_tests(wanted.events(EventKind.SEARCHED))
    yield from _read(rows.order_by("-at"), SEARCHES)


def recent_queries(most: int = 12, read: int = 500) -> list[FailedSearch]:
    """Return the latest queries, each once: those without results first, then the newest."""
    seen: dict[tuple[str, bool], FailedSearch] = {}
    rows = _without_tests(Event.objects.filter(kind=EventKind.SEARCHED))
    for search in _read(rows.order_by("-at"), read):
        if not search.details.get("name"):
            key = (search.asked, not search.without_results)
            seen.setdefault(key, FailedSearch.of(search)).count(search)
    ranked = sorted(seen.items(), key=lambda one: (one[0][1], -one[1].last_at.timestamp()))
    return [found for _, found in ranked[:most]]


def _read(rows: QuerySet[Event], most: int) -> Iterator[RecordedSearch]:
    following = Event.objects.filter(
        session=OuterRef("session"), pk__gt=OuterRef("pk"), kind__in=[EventKind.SEARCHED, *USES]
    ).order_by("pk")
    rows = rows.annotate(following=Subquery(following.values("kind")[:1]))
    fields = ("at", "details", "session__agent__name", "session__state", "following")
    for at, text, agent, state, after in rows.values_list(*fields)[:most]:
        details = read_object(text)
        if "total" in details:
            yield RecordedSearch(at, details, agent, after, state == SessionState.OPEN)


def _without_tests(events: QuerySet[Event]) -> QuerySet[Event]:
    return events.exclude(session__metadata__contains=f'"{TEST}":')


def _most_frequent(found: Iterable[FailedSearch], most: int | None) -> list[FailedSearch]:
    return sorted(found, key=lambda one: (-one.times, one.asked, one.strategy))[:most]


# --- The report ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uncalled:
    """A tool that sessions loaded and never called."""

    name: str
    group_id: str
    times: int
    loads: int
    agents: list[str]


@dataclass
class Totals:
    """What one agent, or the tools of one group, had of it."""

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
    uncalled: list[Uncalled]
    agents: list[Totals]
    groups: list[Totals]

    def as_json(self) -> dict[str, Any]:
        failed = {
            name: [one.as_json() for one in getattr(self, name)] for name in ("lost", "astray")
        }
        return asdict(self) | failed


def report(wanted: UsageFilter, most: int = PAGE) -> Report:
    work = _Work(wanted.group)
    for search in recorded_searches(wanted):
        work.searched(search)
    _loads(wanted, work)
    return work.report(most)


def _loads(wanted: UsageFilter, work: "_Work") -> None:
    rows = _without_tests(wanted.events(EventKind.LOADED)).exclude(session__state=SessionState.OPEN)
    fields = ("session_id", "session__agent__name", "group_id", "details")
    loads = list(rows.order_by("-at").values_list(*fields)[:LOADS])
    called = _called({row[0] for row in loads})
    counted: set[tuple[int, str]] = set()
    for session, agent, group, text in loads:
        details = read_object(text)
        if details.get("how") == "resume":
            continue
        for name in read_names(details, "names"):
            if (session, name) not in counted:
                counted.add((session, name))
                work.loaded(name, group, agent, called=name in called[session])


def _called(sessions: Iterable[int]) -> dict[int, set[str]]:
    found: defaultdict[int, set[str]] = defaultdict(set)
    keys = sorted(sessions)
    for start in range(0, len(keys), CHUNK):
        rows = Call.objects.filter(session__in=keys[start : start + CHUNK]).order_by()
        for session, name in rows.values_list("session_id", "tool_name").distinct():
            found[session or 0].add(name)
    return found


class _Work:
    """A report while it is counted; with a group, only what concerns its tools."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.read = 0
        self.lost: dict[str, FailedSearch] = {}
        self.astray: dict[str, FailedSearch] = {}
        self.loads: Counter[tuple[str, str]] = Counter()
        self.unused: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.agents: dict[str, Totals] = {}
        self.groups: dict[str, Totals] = {}
        self.homes = {
            member.tool.name: home.group_id
            for home in reversed(cache.current().groups)
            for member in home.members
        }

    def searched(self, search: RecordedSearch) -> None:
        home = self.homes.get(search.hits[0], NO_GROUP) if search.hits else ""
        if self.group and home != self.group:
            return
        self.read += 1
        totals = [_of(self.agents, search.agent), *([_of(self.groups, home)] if home else [])]
        for total in totals:
            total.searches += 1
            total.lost += search.without_results
            total.astray += search.abandoned
        if search.without_results or search.abandoned:
            found = self.lost if search.without_results else self.astray
            found.setdefault(search.asked, FailedSearch.of(search)).count(search)

    def loaded(self, name: str, group: str, agent: str, *, called: bool) -> None:
        if self.group and group != self.group:
            return
        self.loads[name, group] += 1
        if not called:
            self.unused[name, group][agent] += 1
        for total in (_of(self.agents, agent), _of(self.groups, group or NO_GROUP)):
            total.loads += 1
            total.uncalled += not called

    def report(self, most: int) -> Report:
        unused = sorted(self.unused.items(), key=lambda one: (-one[1].total(), one[0]))
        return Report(
            self.read,
            _most_frequent(self.lost.values(), most),
            _most_frequent(self.astray.values(), most),
            [
                Uncalled(name, group, agents.total(), self.loads[name, group], sorted(agents)[:5])
                for (name, group), agents in unused[:most]
            ],
            sorted(self.agents.values(), key=lambda one: (-one.lost - one.astray, one.name))[:most],
            sorted(self.groups.values(), key=lambda one: (-one.astray - one.uncalled, one.name))[
                :most
            ],
        )


def _of(sums: dict[str, Totals], name: str) -> Totals:
    return sums.setdefault(name, Totals(name))
