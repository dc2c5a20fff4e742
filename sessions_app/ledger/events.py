"""Session timeline and token counters, written in the transaction of the recorded change."""

from collections.abc import Mapping
from datetime import datetime

from django.db import connection, transaction
from django.utils import timezone

from sessions_app.ledger.sql import LedgerCursor
from sessions_app.models import AgentSession, EventKind
from toolcrib.lib.json_codec import canonical

# The session column to which an event's tokens are added.
TOKEN_COLUMNS = {
    EventKind.OPENED: "tokens_catalog",
    EventKind.SEARCHED: "tokens_search",
    EventKind.DETAILS: "tokens_load",
    EventKind.LOADED: "tokens_load",
    EventKind.CALLED: "tokens_call",
    EventKind.REFUSED: "tokens_call",
}


def record_event(
    session: AgentSession,
    kind: EventKind,
    *,
    tokens: int = 0,
    tool_name: str = "",
    group_id: str = "",
    details: Mapping[str, object] | None = None,
    at: datetime | None = None,
    **increments: int,
) -> None:
    """Append an event and add its tokens; `increments` are added to other session columns."""
    at = at or timezone.now()
    if tokens and kind in TOKEN_COLUMNS:
        increments[TOKEN_COLUMNS[kind]] = increments.get(TOKEN_COLUMNS[kind], 0) + tokens
    with transaction.atomic(savepoint=False), connection.wrap_database_errors:
        cursor = LedgerCursor(connection)
        cursor.insert_event(
            session.pk,
            kind,
            at,
            tool_name=tool_name,
            group_id=group_id,
            tokens=tokens,
            details=canonical(details or {}),
        )
        cursor.increment(session.pk, at, increments)
