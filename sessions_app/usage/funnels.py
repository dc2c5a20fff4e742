"""Search-to-call funnel per agent, and open sessions on outdated definitions."""

from dataclasses import dataclass

from django.db.models import Count, Q

from catalog.models import CatalogSnapshot, Tool
from sessions_app.ledger.event_details import read_object
from sessions_app.models import AgentSession
from sessions_app.usage.filters import UsageFilter

PAGE = 25
MAX_OPEN_SESSIONS = 500  # most recently used open sessions whose definitions are compared


@dataclass(frozen=True)
class Funnel:
    """An agent's sessions that searched, then loaded, then called."""

    agent: str
    sessions: int
    searched: int
    loaded: int
    called: int
    unsearched: int  # called without a search


def funnels(filters: UsageFilter, limit: int | None = PAGE) -> list[Funnel]:
    """Return the funnel of each agent, those with the most sessions first."""
    searched, loaded, called = Q(tokens_search__gt=0), Q(tokens_load__gt=0), Q(calls__gt=0)
    rows = (
        filters.sessions()
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
    return [Funnel(*row) for row in rows[:limit]]


def outdated_sessions(
    filters: UsageFilter, limit: int | None = PAGE
) -> list[tuple[AgentSession, list[str]]]:
    """Return open sessions with the names of tools whose definition new sessions no longer get."""
    rows = AgentSession.objects.open().select_related("agent").defer("metadata")
    if filters.agent:
        rows = rows.filter(agent__name=filters.agent)
    rows = rows.order_by("-last_used_at")
    sessions = list(
        rows.prefetch_related("expansions", "shown_definitions__tool")[:MAX_OPEN_SESSIONS]
    )
    snapshots = CatalogSnapshot.objects.filter(pk__in={session.snapshot_id for session in sessions})
    in_catalog = {
        pk: _definitions(read_object(body).get("pins"))
        for pk, body in snapshots.values_list("pk", "body")
    }
    sent = {}
    for session in sessions:
        sent[session] = dict(in_catalog[session.snapshot_id])
        for expansion in session.expansions.all():
            sent[session] |= _definitions(read_object(expansion.pins))
        for row in session.shown_definitions.all():
            sent[session][row.tool.public_name] = row.definition_id
    names = {name for pins in sent.values() for name in pins}
    tools = Tool.objects.servable().filter(public_name__in=names)
    if filters.group:
        tools = tools.filter(memberships__group__group_id=filters.group)
    columns = (
        *("public_name", "approved_id", "approved__readable_id"),
        *("effective_id", "effective__readable_id"),
    )
    approved = {row[0]: row[1:] for row in tools.values_list(*columns)}
    outdated = [
        (session, sorted(n for n, pk in pins.items() if n in approved and pk not in approved[n]))
        for session, pins in sent.items()
    ]
    return [row for row in outdated if row[1]][:limit]


def _definitions(pins: object) -> dict[str, int | None]:
    pairs = pins.items() if isinstance(pins, dict) else ()
    return {name: pin.get("definition") for name, pin in pairs if isinstance(pin, dict)}
