"""What agents could not find: no result, a result nobody took, a load nobody called.

Reads only, from the newest events up to a limit that the page names. A session that still runs
may yet take what it found, so only what came of ended ones is counted as left or uncalled. Test
sessions, which people open from the playground, are nobody's use.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from django.db.models import OuterRef, QuerySet, Subquery

from catalog import cache
from sessions_app.models import Call, Event, EventKind, SessionState
from sessions_app.review import timeline
from sessions_app.review.queries import read_object
from sessions_app.usage.filters import UsageFilter
from sessions_app.usage.funnels import LEADS_ON

SEARCHES = 5_000  # newest that are read
LOADS = 2_000
CHUNK = 500
PAGE = 25
TEST = "tried_by"  # what the metadata of a test session has
NO_GROUP = "(no group)"


@dataclass(frozen=True)
class Lost:
    """Something agents searched for: how often, when last, who, and what stood first, if any."""

    asked: str
    query: str
    pattern: bool
    times: int
    last_at: datetime
    agents: list[str]
    first: str = ""


@dataclass(frozen=True)
class Uncalled:
    """A tool that sessions loaded and never called."""

    name: str
    group_id: str
    times: int
    loads: int
    agents: list[str]


@dataclass
class Sum:
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
    lost: list[Lost]
    astray: list[Lost]
    uncalled: list[Uncalled]
    agents: list[Sum]
    groups: list[Sum]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def report(wanted: UsageFilter, most: int = PAGE) -> Report:
    work = _Work(wanted.group)
    for found in _searches(wanted):
        work.searched(found)
    _loads(wanted, work)
    return work.report(most)


def lately(most: int = 12, read: int = 500) -> list[Lost]:
    """What agents asked for last, each once: what found nothing first, then the newest."""
    seen: dict[tuple[str, bool], _Tally] = {}
    rows = _no_tests(Event.objects.filter(kind=EventKind.SEARCHED)).order_by("-at")
    for at, text, agent in rows.values_list("at", "details", "session__agent__name")[:read]:
        details = read_object(text)
        if "total" not in details or details.get("name"):
            continue
        found = bool(timeline.number(details, "total"))
        tally = seen.setdefault((timeline.asked(details), found), _Tally(details, at))
        tally.add(agent)
    ranked = sorted(seen.items(), key=lambda one: (one[0][1], -one[1].at.timestamp()))
    return [tally.lost() for _, tally in ranked[:most]]


@dataclass(frozen=True)
class _Search:
    at: datetime
    details: dict[str, object]
    agent: str
    following: str | None
    running: bool


def _no_tests(events: QuerySet[Event]) -> QuerySet[Event]:
    return events.exclude(session__metadata__contains=f'"{TEST}":')


def _searches(wanted: UsageFilter) -> Iterator[_Search]:
    following = Event.objects.filter(
        session=OuterRef("session"), pk__gt=OuterRef("pk"), kind__in=[EventKind.SEARCHED, *LEADS_ON]
    ).order_by("pk")
    rows = _no_tests(wanted.events(EventKind.SEARCHED)).order_by("-at")
    rows = rows.annotate(following=Subquery(following.values("kind")[:1]))
    fields = ("at", "details", "session__agent__name", "session__state", "following")
    for at, text, agent, state, after in rows.values_list(*fields)[:SEARCHES]:
        details = read_object(text)
        if "total" in details:
            yield _Search(at, details, agent, after, state == SessionState.OPEN)


def _loads(wanted: UsageFilter, work: "_Work") -> None:
    rows = _no_tests(wanted.events(EventKind.LOADED)).exclude(session__state=SessionState.OPEN)
    fields = ("session_id", "session__agent__name", "group_id", "details")
    loads = list(rows.order_by("-at").values_list(*fields)[:LOADS])
    called = _called({row[0] for row in loads})
    counted: set[tuple[int, str]] = set()
    for session, agent, group, text in loads:
        details = read_object(text)
        if details.get("how") == "resume":
            continue
        for name in timeline.words(details, "names"):
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


@dataclass
class _Tally:
    """Counts one thing; what is asked for comes newest first."""

    details: dict[str, object]
    at: datetime
    times: int = 0
    agents: dict[str, None] = field(default_factory=dict)

    def add(self, agent: str) -> None:
        self.times += 1
        self.agents[agent] = None

    def lost(self) -> Lost:
        details = self.details
        query = details.get("pattern") or details.get("query") or details.get("name") or ""
        hits = timeline.words(details, "hits")
        return Lost(
            timeline.asked(details),
            str(query),
            bool(details.get("pattern")) or details.get("strategy") == "regex",
            self.times,
            self.at,
            sorted(self.agents)[:5],
            hits[0] if hits else "",
        )


class _Work:
    """A report while it is counted; with a group, only what concerns its tools."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.read = 0
        self.lost: dict[str, _Tally] = {}
        self.astray: dict[str, _Tally] = {}
        self.loads: Counter[tuple[str, str]] = Counter()
        self.unused: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.agents: dict[str, Sum] = {}
        self.groups: dict[str, Sum] = {}
        self.homes = {
            place.item.name: home.group_id
            for home in reversed(cache.current().groups)
            for place in home.places
        }

    def searched(self, one: _Search) -> None:
        hits = timeline.words(one.details, "hits")
        home = self.homes.get(hits[0], NO_GROUP) if hits else ""
        if self.group and home != self.group:
            return
        self.read += 1
        sums = [_of(self.agents, one.agent), *([_of(self.groups, home)] if home else [])]
        lost = not timeline.number(one.details, "total")
        taken = one.following in LEADS_ON or timeline.number(one.details, "newly_loaded")
        astray = not lost and not taken and not (one.running and one.following is None)
        for total in sums:
            total.searches += 1
            total.lost += lost
            total.astray += astray
        if lost or astray:
            kept = self.lost if lost else self.astray
            asked = timeline.asked(one.details)
            kept.setdefault(asked, _Tally(one.details, one.at)).add(one.agent)

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
        lost = sorted(self.lost.items(), key=_by_times)
        astray = sorted(self.astray.items(), key=_by_times)
        unused = sorted(self.unused.items(), key=lambda one: (-one[1].total(), one[0]))
        return Report(
            self.read,
            [tally.lost() for _, tally in lost[:most]],
            [tally.lost() for _, tally in astray[:most]],
            [
                Uncalled(name, group, agents.total(), self.loads[name, group], sorted(agents)[:5])
                for (name, group), agents in unused[:most]
            ],
            sorted(self.agents.values(), key=lambda one: (-one.lost - one.astray, one.name))[:most],
            sorted(self.groups.values(), key=lambda one: (-one.astray - one.uncalled, one.name))[
                :most
            ],
        )


def _of(sums: dict[str, Sum], name: str) -> Sum:
    return sums.setdefault(name, Sum(name))


def _by_times(one: tuple[str, _Tally]) -> tuple[int, str]:
    return -one[1].times, one[0]
