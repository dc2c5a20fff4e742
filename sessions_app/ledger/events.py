"""Session timeline and token counters, written in the transaction of the recorded change."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from sessions_app.ledger.writer import LedgerCursor
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


def write_event(
    cursor: LedgerCursor,
    session: int,
    kind: EventKind,
    *,
    tokens: int = 0,
    tool_name: str = "",
    group_id: str = "",
    call: int | None = None,
    details: Mapping[str, object] | None = None,
    at: datetime | None = None,
    **increments: int,
) -> None:
    """Append an event and add its tokens; `increments` are added to other session columns."""
    at = at or timezone.now()
    if tokens and kind in TOKEN_COLUMNS:
        increments[TOKEN_COLUMNS[kind]] = tokens
    cursor.insert_event(
        session,
        kind,
        at,
        tool_name=tool_name,
        group_id=group_id,
        call=call,
        tokens=tokens,
        details=canonical(details) if details else "{}",
    )
    cursor.increment(session, at, increments)


def record_event(session: AgentSession, kind: EventKind, **fields: Any) -> None:
    """Write an event in the current transaction, or in one of its own."""
    with transaction.atomic(savepoint=False), connection.wrap_database_errors:
        write_event(LedgerCursor(connection), session.pk, kind, **fields)
