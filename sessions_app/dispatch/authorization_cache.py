"""In-process authorization cache for calls.

Entries are revalidated against the database, with one statement, in the transaction that accepts
the call. If the key, agent, session, loaded tools, server or catalog revision changed, the entry
is loaded again once; after that the call takes the ordinary path. So every process rejects a
revoked key or a closed session at the next request.
"""

import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

from django.db import connection
from django.utils import timezone

from catalog.models import Revision
from servers.models import Server
from sessions_app.agents import api_keys
from sessions_app.ledger.batch_writer import WriteJob, commit
from sessions_app.ledger.calls import close_abandoned, insert_call
from sessions_app.ledger.sql import CallRow, LedgerCursor, Row
from sessions_app.models import (
    Agent,
    AgentSession,
    ApiKey,
    Call,
    Expansion,
    SessionState,
    ShownDefinition,
)
from sessions_app.sessions import lifecycle, scope, surface
from sessions_app.sessions.loading import MIN_IDLE_SECONDS
from sessions_app.sessions.scope import SessionScope
from sessions_app.sessions.surface import Pin

CallerId = str | int  # a key's digest, or the id of an agent whose key is already checked
MAX_ENTRIES, MAX_BYTES = 10_000, 8_000_000  # sessions, and bytes of their loaded definitions
BYTES_PER_NAME = 100  # estimate for one definition that is stored by name
TTL_SECONDS = 50.0  # loading an entry also updates the key's last use, at least this often

KEY, AGENT, SESSION, CALL, EXPANSION, SHOWN, SERVER, REVISION = (
    model._meta.db_table
    for model in (
        *(ApiKey, Agent, AgentSession, Call, Expansion, ShownDefinition, Server, Revision),
    )
)
AGENT_COLUMNS = ("name", "enabled", "all_groups", "calls_in_flight", "calls_per_minute")
SERVER_COLUMNS = ("enabled", "generation", "isolation", "concurrency", "call_timeout", "slug")
# Columns of the key, agent and session; the server's columns follow.
AUTHORIZATION_COLUMNS = 9 + len(AGENT_COLUMNS)
KEY_ID, REVOKED_AT, EXPIRES_AT = 1, 3, 4  # positions in the row
# Only table and column names are formatted into the statement. The counts and sums detect changes
# of rows that have no version number: pins are only ever added.
REVALIDATE_SQL = f"""
SELECT r.number, k.id, k.rolling_session_id, k.revoked_at, k.expires_at, s.state,
  (SELECT COUNT(*) FROM {EXPANSION} e WHERE e.session_id = s.id),
  (SELECT COALESCE(SUM(LENGTH(e.pins)), 0) FROM {EXPANSION} e WHERE e.session_id = s.id),
  (SELECT COALESCE(SUM(d.version), 0) FROM {SHOWN} d WHERE d.session_id = s.id),
  {", ".join(f"a.{name}" for name in AGENT_COLUMNS)},
  {", ".join(f"v.{name}" for name in SERVER_COLUMNS)},
  s.last_used_at,
  (SELECT COUNT(*) FROM {CALL} c WHERE c.agent_id = a.id
     AND c.state IN ('accepted', 'sent') AND c.deadline > %s)
FROM {SESSION} s
JOIN {AGENT} a ON a.id = s.agent_id
JOIN {REVISION} r ON r.id = 1
JOIN {SERVER} v ON v.id = %s
LEFT JOIN {KEY} k ON k.id = %s AND k.agent_id = a.id
WHERE s.id = %s
"""  # noqa: S608


class Acceptance(Enum):
    """Verdict of the ledger on a call with a cached authorization."""

    ACCEPTED = "accepted"
    CHANGED = "changed"  # the cached authorization is outdated
    REFUSED = "refused"  # it is current, and does not permit the call


@dataclass(slots=True)
class CachedAuthorization:
    """Authorization of a key, or of an agent, for one session."""

    key_id: int | None
    agent: Agent
    session_pk: int
    session_id: str
    scope: SessionScope
    loaded_bits: int  # one bit per tool in scope: its current definition was loaded
    older_definitions: dict[str, int]  # definitions of other loaded tools, by tool name
    initial_pins: dict[str, Pin]  # definitions shown at the start; shared between sessions
    authorization_row: Row
    key_expires_at: datetime | None
    valid_until: float  # monotonic time
    server_rows: dict[int, Row] = field(default_factory=dict)

    def shown_definition(self, name: str) -> int | None:
        """Return the id of the definition of a tool that the session was shown, if any."""
        if (older := self.older_definitions.get(name)) is not None:
            return older
        tool = self.scope.tools.get(name)
        if tool and tool.approved and self.loaded_bits >> self.scope.tool_index(tool) & 1:
            return tool.approved.pk
        pin = self.initial_pins.get(name)
        return pin["definition"] if pin else None

    @property
    def size_bytes(self) -> int:
        """Approximate memory of the loaded definitions."""
        return self.loaded_bits.bit_length() // 8 + BYTES_PER_NAME * len(self.older_definitions)

    def can_plan(self, tool_name: str) -> bool:
        """Return whether a call of the tool can be planned without loading its server's row."""
        tool = self.scope.lookup(tool_name)
        return tool is None or not tool.server_id or tool.server_id in self.server_rows

    def revalidate(self, cursor: LedgerCursor, server_id: int, now: datetime) -> Acceptance:
        """Compare this entry with the database, and check the agent's concurrency limit."""
        row = _revalidation_row(cursor, self.key_id, self.session_pk, server_id, now)
        if row is None:
            return Acceptance.CHANGED
        *columns, last_used_at, in_flight = row
        last_used = cursor.decode_time(last_used_at)
        if tuple(columns[:AUTHORIZATION_COLUMNS]) != self.authorization_row or tuple(
            columns[AUTHORIZATION_COLUMNS:]
        ) != self.server_rows.get(server_id):
            return Acceptance.CHANGED
        allowed = (
            (self.key_expires_at is None or self.key_expires_at > now)
            and last_used is not None
            and (now - last_used).total_seconds() < MIN_IDLE_SECONDS
            and in_flight < self.agent.calls_in_flight
        )
        return Acceptance.ACCEPTED if allowed else Acceptance.REFUSED


CacheKey = tuple[CallerId, str]  # caller and session id
_entries: dict[CacheKey, CachedAuthorization] = {}  # the newest last
_total_bytes = 0
_lock = threading.Lock()


def get(caller: CallerId, session_id: str) -> CachedAuthorization | None:
    entry = _entries.get((caller, session_id))
    return entry if entry is not None and entry.valid_until > time.monotonic() else None


def invalidate(caller: CallerId, session_id: str) -> None:
    with _lock:
        _remove((caller, session_id))


def clear() -> None:
    with _lock:
        for cache_key in list(_entries):
            _remove(cache_key)


def _remove(cache_key: CacheKey) -> None:
    global _total_bytes
    entry = _entries.pop(cache_key, None)
    _total_bytes -= entry.size_bytes if entry else 0


def _store(cache_key: CacheKey, entry: CachedAuthorization) -> None:
    """Add an entry, and evict the oldest ones above the limits."""
    global _total_bytes
    with _lock:
        _remove(cache_key)
        if _update_revision(entry.scope.revision):
            for other_key, other in list(_entries.items()):
                if other.scope.revision != entry.scope.revision:  # it would keep an old catalog
                    _remove(other_key)
        _entries[cache_key] = entry
        _total_bytes += entry.size_bytes
        now = time.monotonic()
        while len(_entries) > 1:
            oldest = next(iter(_entries))
            within_limits = len(_entries) <= MAX_ENTRIES and _total_bytes <= MAX_BYTES
            if _entries[oldest].valid_until > now and within_limits:
                break
            _remove(oldest)


_revision = 0


def _update_revision(revision: int) -> bool:
    """Set the catalog revision of the newest entry, and return whether it changed."""
    global _revision
    previous, _revision = _revision, revision
    return revision != previous


def _revalidation_row(
    cursor: LedgerCursor, key_id: int | None, session: int, server_id: int, now: datetime
) -> Row | None:
    return cursor.fetch_one(REVALIDATE_SQL, (cursor.encode_time(now), server_id, key_id, session))


def load(caller: CallerId, session_id: str, tool_name: str) -> CachedAuthorization | None:
    """Load the authorization for a call of this tool from the database, and cache it.

    Return None if the call is not authorized; the ordinary path then reports the reason.
    """
    key = api_keys.find_key_by_digest(caller) if isinstance(caller, str) else None
    session = lifecycle.session_by_id.first(session_id) if "\0" not in session_id else None
    if session is None or not _is_authorized(caller, key, session):
        return None
    tool = scope.scope_of_session(session).lookup(tool_name)
    if tool is None or not tool.server_id:
        return None
    # Read the row before the data it describes: revalidation then detects changes in between.
    key_id = key.pk if key else None
    with connection.wrap_database_errors:
        cursor = LedgerCursor(connection)
        row = _revalidation_row(cursor, key_id, session.pk, tool.server_id, timezone.now())
    # Looking up the key updates its last use, which may have waited for its revocation.
    if row is None or row[KEY_ID] != key_id or row[REVOKED_AT] is not None:
        return None
    authorization = get(caller, session_id)
    if authorization is None or authorization.authorization_row != tuple(
        row[:AUTHORIZATION_COLUMNS]
    ):
        authorization = _build(caller, key, session_id, row, cursor.decode_time(row[EXPIRES_AT]))
        if authorization is None:
            return None
    authorization.server_rows[tool.server_id] = tuple(
        row[AUTHORIZATION_COLUMNS : AUTHORIZATION_COLUMNS + len(SERVER_COLUMNS)]
    )
    _store((caller, session_id), authorization)
    return authorization


def _is_authorized(caller: CallerId, key: ApiKey | None, session: AgentSession) -> bool:
    if isinstance(caller, str) and (key is None or key.agent_id != session.agent_id):
        return False
    if isinstance(caller, int) and caller != session.agent_id:
        return False
    return bool(session.agent.enabled) and session.state == SessionState.OPEN


def _build(
    caller: CallerId, key: ApiKey | None, session_id: str, row: Row, expires_at: datetime | None
) -> CachedAuthorization | None:
    session = lifecycle.session_by_id.first(session_id)
    if session is None or not _is_authorized(caller, key, session):
        return None
    session_scope = scope.scope_of_session(session)
    if session_scope.revision != row[0]:
        return None
    loaded_bits, older_definitions = _split_pins(session_scope, surface.shown_pins(session))
    initial_pins = surface.surface_of(session.snapshot).pins
    return CachedAuthorization(
        key_id=key.pk if key else None,
        agent=session.agent,
        session_pk=session.pk,
        session_id=session_id,
        scope=session_scope,
        loaded_bits=loaded_bits,
        older_definitions=older_definitions,
        initial_pins=surface.replace_with_last_shown(session, initial_pins),
        authorization_row=tuple(row[:AUTHORIZATION_COLUMNS]),
        key_expires_at=expires_at,
        valid_until=time.monotonic() + TTL_SECONDS,
    )


def _split_pins(session_scope: SessionScope, pins: dict[str, Pin]) -> tuple[int, dict[str, int]]:
    """Split pins into a bit set of current definitions and a dict of older ones.

    Thousands of sessions may have loaded hundreds of tools each, and each load rebuilds the entry.
    """
    current = bytearray(1 + len(session_scope.tools) // 8)
    older: dict[str, int] = {}
    for name, pin in pins.items():
        tool = session_scope.tools.get(name)
        if tool is not None and tool.approved and tool.approved.pk == pin["definition"]:
            number = session_scope.tool_index(tool)
            current[number // 8] |= 1 << number % 8
        elif pin["definition"] is not None:
            older[name] = pin["definition"]
    return int.from_bytes(current, "little"), older


async def accept_call(entry: CallRow, authorization: CachedAuthorization) -> Acceptance:
    """Revalidate the authorization and commit the call's row in one transaction."""
    server, agent = entry.server_id or 0, authorization.agent.pk

    def work(cursor: LedgerCursor) -> Acceptance:
        verdict = authorization.revalidate(cursor, server, entry.accepted_at)
        if verdict is Acceptance.ACCEPTED and not insert_call(cursor, entry):
            return Acceptance.REFUSED
        return verdict

    def close_if_accepted(verdict: Acceptance) -> None:
        if verdict is Acceptance.ACCEPTED:
            close_abandoned(entry)

    return await commit(
        WriteJob(work, order=entry.session_id or 0, agent=agent, on_abandoned=close_if_accepted)
    )
