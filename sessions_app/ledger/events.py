"""Session timeline and token counters, written in the transaction of the recorded change."""

from typing import Any

from django.db import connection, transaction

from sessions_app.ledger.writer import LedgerCursor, write_event
from sessions_app.models import AgentSession, EventKind


def record_event(session: AgentSession, kind: EventKind, **fields: Any) -> None:
    """Write an event in the current transaction, or in one of its own."""
    with transaction.atomic(savepoint=False), connection.wrap_database_errors:
        write_event(LedgerCursor(connection), session.pk, kind, **fields)
