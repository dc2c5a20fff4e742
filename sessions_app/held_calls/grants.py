"""Grants: which calls of a session pass a rule that holds them.

Asked and counted in the transaction that accepts a call, so that all processes agree.
"""

import json

from sessions_app.ledger.writer import CallRow, LedgerCursor
from sessions_app.models import Grant
from sessions_app.rules.evaluation import compile_globs

GRANT = Grant._meta.db_table
# Only the table name is formatted into these statements.
FIND = (
    f"SELECT id, tools FROM {GRANT} WHERE session_id = %s AND rule_pk = %s "  # noqa: S608
    "AND (count IS NULL OR used < count) AND (expires_at IS NULL OR expires_at > %s) ORDER BY id"
)
USE = f"UPDATE {GRANT} SET used = used + 1 WHERE id = %s"  # noqa: S608


class GrantCheck:
    """The grants that one call would use."""

    def __init__(self) -> None:
        self._found: list[int] = []

    def covers(self, cursor: LedgerCursor, entry: CallRow, rule: int) -> bool:
        """Return whether a grant of the session lifts the hold of a rule for this call."""
        lock = "" if cursor.is_sqlite else " FOR UPDATE"  # SQLite has a single writer
        values = entry.session_id, rule, entry.accepted_at
        for pk, tools in cursor.execute(FIND + lock, values).fetchall():
            patterns = json.loads(tools) if isinstance(tools, str) else tools
            if any(glob.match(entry.tool_name) for glob in compile_globs(patterns)):
                self._found.append(pk)
                return True
        return False

    def use(self, cursor: LedgerCursor) -> None:
        """Count the call, which is accepted."""
        for pk in self._found:
            cursor.execute(USE, (pk,))
