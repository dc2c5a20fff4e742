"""How far sessions get from search to call, and open sessions on outdated definitions.

Reads only, from the newest rows up to a limit that the page names.
"""

from dataclasses import dataclass

from django.db.models import Count, Q

from catalog.models import CatalogSnapshot, Tool
from sessions_app.ledger.event_details import read_object
from sessions_app.models import AgentSession
from sessions_app.usage.filters import UsageFilter

PAGE = 25
OPEN_SESSIONS = 500  # open sessions, the last used first, whose definitions are compared


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
class OutdatedSession:
    """An open session that goes on seeing definitions which new sessions no longer get."""

    session: AgentSession
    names: list[str]


def outdated_sessions(wanted: UsageFilter, most: int | None = PAGE) -> list[OutdatedSession]:
    """Compare what the last used open sessions were shown with what is approved now."""
    rows = AgentSession.objects.open().select_related("agent").defer("metadata")
    if wanted.agent:
        rows = rows.filter(agent__name=wanted.agent)
    rows = rows.order_by("-last_used_at")
    live = list(rows.prefetch_related("expansions", "shown_definitions__tool")[:OPEN_SESSIONS])
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
        OutdatedSession(
            session, sorted(n for n, pk in pins.items() if n in approved and approved[n] != pk)
        )
        for session, pins in shown.items()
    ]
    return [one for one in holding if one.names][:most]


def _definitions(pins: object) -> dict[str, int | None]:
    found = pins if isinstance(pins, dict) else {}
    return {name: pin.get("definition") for name, pin in found.items() if isinstance(pin, dict)}
