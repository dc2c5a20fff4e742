"""What came of it: searches that led nowhere, how far sessions came, definitions that are old.

Reads only, from the newest rows up to a limit that the page names.
"""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Count, OuterRef, Q, Subquery

from catalog.models import CatalogSnapshot, Tool
from sessions_app.models import AgentSession, Event, EventKind
from sessions_app.review import timeline
from sessions_app.review.queries import read_object
from sessions_app.usage.filters import UsageFilter

PAGE = 25
SEARCHES = 2_000  # newest searches that are read
LIVE = 500  # open sessions, the last used first, whose definitions are compared
LEADS_ON = (EventKind.LOADED, EventKind.IMPLICIT_LOAD, EventKind.CALLED)


@dataclass(frozen=True)
class Asked:
    """Something agents searched for, and when last."""

    asked: str
    query: str
    strategy: str
    times: int
    last_at: datetime


@dataclass(frozen=True)
class Searches:
    read: int
    lost: list[Asked]  # nothing was found
    astray: list[Asked]  # something was found, and nothing of it was loaded or called


def searches(wanted: UsageFilter, most: int | None = PAGE) -> Searches:
    following = Event.objects.filter(
        session=OuterRef("session"), pk__gt=OuterRef("pk"), kind__in=[EventKind.SEARCHED, *LEADS_ON]
    ).order_by("pk")
    rows = wanted.events(EventKind.SEARCHED).order_by("-at")
    rows = rows.annotate(following=Subquery(following.values("kind")[:1]))
    lost, astray = _Tally(), _Tally()
    read = 0
    for at, text, after in rows.values_list("at", "details", "following")[:SEARCHES]:
        read += 1
        details = read_object(text)
        if "total" not in details:
            continue
        if not timeline.number(details, "total"):
            lost.add(details, at)
        elif after not in LEADS_ON and not timeline.number(details, "newly_loaded"):
            astray.add(details, at)
    return Searches(read, lost.ranked(most), astray.ranked(most))


class _Tally:
    """Count what was asked for; rows come newest first."""

    def __init__(self) -> None:
        self.times: Counter[tuple[str, str, str]] = Counter()
        self.last: dict[tuple[str, str, str], datetime] = {}

    def add(self, details: dict[str, object], at: datetime) -> None:
        query = str(details.get("query") or details.get("name") or "")
        key = (timeline.asked(details), query, str(details.get("strategy") or ""))
        self.times[key] += 1
        self.last.setdefault(key, at)

    def ranked(self, most: int | None) -> list[Asked]:
        ranked = sorted(self.times.items(), key=lambda one: (-one[1], one[0]))[:most]
        return [Asked(*key, count, self.last[key]) for key, count in ranked]


@dataclass(frozen=True)
class Funnel:
    """How far an agent's sessions came: searched, then loaded, then called."""

    agent: str
    sessions: int
    searched: int
    loaded: int
    called: int
    unsearched: int  # called without searching


def funnels(wanted: UsageFilter, most: int | None = PAGE) -> list[Funnel]:
    searched, loaded, called = Q(tokens_search__gt=0), Q(tokens_load__gt=0), Q(calls__gt=0)
    rows = (
        wanted.sessions()
        .order_by()
        .values_list("agent__name")
        .annotate(
            sessions=Count("pk"),
            searched=Count("pk", filter=searched),
            loaded=Count("pk", filter=searched & loaded),
            called=Count("pk", filter=searched & loaded & called),
            unsearched=Count("pk", filter=called & ~searched),
        )
        .order_by("-sessions", "agent__name")
    )
    return [Funnel(*row) for row in rows[:most]]


# --- Sessions with old definitions --------------------------------------------------------------


@dataclass(frozen=True)
class Holding:
    """An open session that goes on seeing definitions which new sessions no longer get."""

    session: AgentSession
    names: list[str]


def old_definitions(wanted: UsageFilter, most: int | None = PAGE) -> list[Holding]:
    """Compare what the last used open sessions were shown with what is approved now."""
    rows = AgentSession.objects.open().select_related("agent").defer("metadata")
    if wanted.agent:
        rows = rows.filter(agent__name=wanted.agent)
    rows = rows.order_by("-last_used_at")
    live = list(rows.prefetch_related("expansions", "shown_definitions__tool")[:LIVE])
    snapshots = CatalogSnapshot.objects.filter(pk__in={one.snapshot_id for one in live})
    given = {
        pk: _definitions(read_object(body).get("pins"))
        for pk, body in snapshots.values_list("pk", "body")
    }
    shown = {}
    for session in live:
        shown[session] = dict(given[session.snapshot_id])
        for expansion in session.expansions.all():
            shown[session] |= _definitions(read_object(expansion.pins))
        for row in session.shown_definitions.all():
            shown[session][row.tool.public_name] = row.definition_id
    names = {name for pins in shown.values() for name in pins}
    tools = Tool.objects.servable().filter(public_name__in=names)
    if wanted.group:
        tools = tools.filter(memberships__group__group_id=wanted.group)
    approved = dict(tools.values_list("public_name", "approved_id"))
    holding = [
        Holding(session, sorted(n for n, pk in pins.items() if n in approved and approved[n] != pk))
        for session, pins in shown.items()
    ]
    return [one for one in holding if one.names][:most]


def _definitions(pins: object) -> dict[str, int | None]:
    found = pins if isinstance(pins, dict) else {}
    return {name: pin.get("definition") for name, pin in found.items() if isinstance(pin, dict)}
