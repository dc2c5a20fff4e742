"""Which sessions last, for the connections that are theirs alone: those end with them."""

from collections.abc import Collection

from sessions_app.models import AgentSession


def still_open(session_ids: Collection[str]) -> set[str]:
    """Return those that are open, in one question; a session that is no more is not."""
    rows = AgentSession.objects.open().filter(session_id__in=session_ids)
    return set(rows.values_list("session_id", flat=True))
