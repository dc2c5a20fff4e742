"""Write a session's timeline and its token ledger, in the transaction of what happened."""

from collections.abc import Mapping
from datetime import datetime

from django.db.models import F
from django.utils import timezone

from catalog.canonical import canonical
from sessions_app.models import AgentSession, Call, Event, EventKind

# Which column of the ledger an event's tokens belong to.
COLUMNS = {
    EventKind.OPENED: "tokens_catalog",
    EventKind.SEARCHED: "tokens_search",
    EventKind.DETAILS: "tokens_load",
    EventKind.LOADED: "tokens_load",
    EventKind.CALLED: "tokens_call",
    EventKind.REFUSED: "tokens_call",
}


def note(
    session: AgentSession,
    kind: EventKind,
    *,
    tokens: int = 0,
    tool_name: str = "",
    group_id: str = "",
    details: Mapping[str, object] | None = None,
    call: Call | None = None,
    at: datetime | None = None,
    **raised: int,
) -> Event:
    """Append an event and add its tokens; `raised` adds to other columns of the session."""
    at = at or timezone.now()
    event = Event.objects.create(
        session=session,
        at=at,
        kind=kind,
        tool_name=tool_name[:200],
        group_id=group_id[:80],
        tokens=tokens,
        details=canonical(details or {}),
        call=call,
    )
    if tokens and kind in COLUMNS:
        raised[COLUMNS[kind]] = raised.get(COLUMNS[kind], 0) + tokens
    AgentSession.objects.filter(pk=session.pk).update(
        last_used_at=at, **{name: F(name) + amount for name, amount in raised.items() if amount}
    )
    return event
