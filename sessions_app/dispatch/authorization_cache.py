"""What was found out about a key and its session at an earlier call, so that the next is cheap.

Nothing here is trusted: the transaction that accepts a call compares it with the database, in one
statement, and where anything changed (key, agent, session, what it loaded, server, revision) it
is found out anew, once, or the call goes the long way. So a revoked key or a closed session is
refused by every process at the next request, and what is remembered only saves work.
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

Token = str | int  # a key's digest, or an agent whose key was checked by the caller
MAX_ENTRIES, MAX_BYTES = 10_000, 8_000_000  # sessions, and bytes of what they loaded
BYTES_PER_NAME = 100  # bytes for one by name
TTL_SECONDS = 50.0  # seconds; whoever learns also notes when the key was last used

KEY, AGENT, SESSION, CALL, EXPANSION, SHOWN, SERVER, REVISION = (
    model._meta.db_table
    for model in (
        *(ApiKey, Agent, AgentSession, Call, Expansion, ShownDefinition, Server, Revision),
    )
)
AGENT_COLUMNS = ("name", "enabled", "all_groups", "calls_in_flight", "calls_per_minute")
SERVER_COLUMNS = ("enabled", "generation", "isolation", "concurrency", "call_timeout", "slug")
AUTHORIZATION_COLUMNS = 9 + len(
    AGENT_COLUMNS
)  # columns about key, agent and session; then those of the server
KEY_ID, REVOKED_AT, EXPIRES_AT = 1, 3, 4  # of these
# No value is put into the text. The counts make up for what has no number of its own that rises:
# pins are only ever added to.
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
    """What the ledger says to a call that goes by what is remembered."""

    ACCEPTED = "accepted"
    CHANGED = "changed"  # something is no longer as it was
    REFUSED = "refused"  # all is as it was, and it may not be


@dataclass(slots=True)
class CachedAuthorization:
    """A key, its agent and one of its sessions, as they were."""

    key_id: int | None
    agent: Agent
    session_pk: int
    session_id: str
    seen: SessionScope
    loaded: int  # a bit for each tool in scope: it was loaded, and shown as it is today
    older: dict[str, int]  # definitions that it was shown of the others it loaded, by name
    at_once: dict[str, Pin]  # what it was shown when it opened; shared with others like it
    stamp: Row
    expires: datetime | None
    until: float  # by the monotonic clock
    servers: dict[int, Row] = field(default_factory=dict)

    def shown(self, name: str) -> int | None:
        """Return the definition that the session was shown of a tool, if it was."""
        if (found := self.older.get(name)) is not None:
            return found
        item = self.seen.items.get(name)
        if item is not None and item.approved and self.loaded >> self.seen.number_of(item) & 1:
            return item.approved.pk
        pin = self.at_once.get(name)
        return pin["definition"] if pin else None

    @property
    def held(self) -> int:
        """About how many bytes it takes to know what was loaded."""
        return self.loaded.bit_length() // 8 + BYTES_PER_NAME * len(self.older)

    def knows(self, tool: str) -> bool:
        """Tell whether all is at hand that a call of the tool needs, if it may be called."""
        item = self.seen.lookup(tool)
        return item is None or not item.server_id or item.server_id in self.servers

    def compare(self, cursor: LedgerCursor, server_id: int, now: datetime) -> Acceptance:
        """Say whether all of it is still so, and the agent may have one more call under way."""
        found = _revalidation_row(cursor, self.key_id, self.session_pk, server_id, now)
        if found is None:
            return Acceptance.CHANGED
        *facts, last_used, under_way = found
        used = cursor.moment(last_used)
        if tuple(facts[:AUTHORIZATION_COLUMNS]) != self.stamp or tuple(
            facts[AUTHORIZATION_COLUMNS:]
        ) != self.servers.get(server_id):
            return Acceptance.CHANGED
        allowed = (
            (self.expires is None or self.expires > now)
            and used is not None
            and (now - used).total_seconds() < MIN_IDLE_SECONDS
            and under_way < self.agent.calls_in_flight
        )
        return Acceptance.ACCEPTED if allowed else Acceptance.REFUSED


_known: dict[tuple[Token, str], CachedAuthorization] = {}  # the newest last
_held = 0  # bytes, of all of them
_lock = threading.Lock()


def get(token: Token, session_id: str) -> CachedAuthorization | None:
    found = _known.get((token, session_id))
    return found if found is not None and found.until > time.monotonic() else None


def invalidate(token: Token, session_id: str) -> None:
    with _lock:
        _drop((token, session_id))


def clear() -> None:
    with _lock:
        for known_as in list(_known):
            _drop(known_as)


def _drop(known_as: tuple[Token, str]) -> None:
    global _held
    found = _known.pop(known_as, None)
    _held -= found.held if found else 0


def _keep(known_as: tuple[Token, str], ready: CachedAuthorization) -> None:
    """Remember it, and forget the oldest where it is too much."""
    global _held
    with _lock:
        _drop(known_as)
        for other, one in list(_known.items()) if _is_new(ready.seen.revision) else ():
            if one.seen.revision != ready.seen.revision:  # else old catalogs would be held for ever
                _drop(other)
        _known[known_as] = ready
        _held += ready.held
        now = time.monotonic()
        while len(_known) > 1:
            oldest = next(iter(_known))
            if _known[oldest].until > now and len(_known) <= MAX_ENTRIES and _held <= MAX_BYTES:
                break
            _drop(oldest)


_revision = 0


def _is_new(revision: int) -> bool:
    global _revision
    before, _revision = _revision, revision
    return revision != before


def _revalidation_row(
    cursor: LedgerCursor, key_id: int | None, session: int, server_id: int, now: datetime
) -> Row | None:
    return cursor.one(REVALIDATE_SQL, (cursor.time(now), server_id, key_id, session))


def load(token: Token, session_id: str, tool: str) -> CachedAuthorization | None:
    """Find out what a call of this tool needs, and remember it. Asks the database.

    None where the long way has to say why not.
    """
    key = api_keys.find_key_by_digest(token) if isinstance(token, str) else None
    session = lifecycle.session_by_id.first(session_id) if "\0" not in session_id else None
    if session is None or not _is_authorized(token, key, session):
        return None
    item = scope.scope_of_session(session).lookup(tool)
    if item is None or not item.server_id:
        return None
    # Before what it stands for is read: what changes in between is then noticed.
    key_id = key.pk if key else None
    with connection.wrap_database_errors:
        cursor = LedgerCursor(connection)
        found = _revalidation_row(cursor, key_id, session.pk, item.server_id, timezone.now())
    # The key was read before, and whoever noted its use may have waited for its revocation.
    if found is None or found[KEY_ID] != key_id or found[REVOKED_AT] is not None:
        return None
    ready = get(token, session_id)
    if ready is None or ready.stamp != tuple(found[:AUTHORIZATION_COLUMNS]):
        ready = _read(token, key, session_id, found, cursor.moment(found[EXPIRES_AT]))
        if ready is None:
            return None
    ready.servers[item.server_id] = tuple(
        found[AUTHORIZATION_COLUMNS : AUTHORIZATION_COLUMNS + len(SERVER_COLUMNS)]
    )
    _keep((token, session_id), ready)
    return ready


def _is_authorized(token: Token, key: ApiKey | None, session: AgentSession) -> bool:
    if isinstance(token, str) and (key is None or key.agent_id != session.agent_id):
        return False
    if isinstance(token, int) and token != session.agent_id:
        return False
    return bool(session.agent.enabled) and session.state == SessionState.OPEN


def _read(
    token: Token, key: ApiKey | None, session_id: str, found: Row, expires: datetime | None
) -> CachedAuthorization | None:
    session = lifecycle.session_by_id.first(session_id)
    if session is None or not _is_authorized(token, key, session):
        return None
    seen = scope.scope_of_session(session)
    if seen.revision != found[0]:
        return None
    loaded, older = _split_pins(seen, surface.shown_pins(session))
    return CachedAuthorization(
        key_id=key.pk if key else None,
        agent=session.agent,
        session_pk=session.pk,
        session_id=session_id,
        seen=seen,
        loaded=loaded,
        older=older,
        at_once=surface.replace_with_last_shown(session, surface.surface_of(session.snapshot).pins),
        stamp=tuple(found[:AUTHORIZATION_COLUMNS]),
        expires=expires,
        until=time.monotonic() + TTL_SECONDS,
    )


def _split_pins(seen: SessionScope, pins: dict[str, Pin]) -> tuple[int, dict[str, int]]:
    """Tell what is as the catalog has it, which takes a bit to remember, from the rest.

    Thousands of sessions may have loaded hundreds of tools each, and each time one loads more, it
    is all written anew.
    """
    same = bytearray(1 + len(seen.items) // 8)
    older: dict[str, int] = {}
    for name, pin in pins.items():
        item = seen.items.get(name)
        if item is not None and item.approved and item.approved.pk == pin["definition"]:
            at = seen.number_of(item)
            same[at // 8] |= 1 << at % 8
        elif pin["definition"] is not None:
            older[name] = pin["definition"]
    return int.from_bytes(same, "little"), older


async def accept_call(entry: CallRow, ready: CachedAuthorization) -> Acceptance:
    """Commit a call's row where all that is remembered still holds; say whether it did."""
    server, agent = entry.server_id or 0, ready.agent.pk

    def work(cursor: LedgerCursor) -> Acceptance:
        verdict = ready.compare(cursor, server, entry.accepted_at)
        if verdict is Acceptance.ACCEPTED and not insert_call(cursor, entry):
            return Acceptance.REFUSED
        return verdict

    def left(verdict: Acceptance) -> None:
        if verdict is Acceptance.ACCEPTED:
            close_abandoned(entry)

    return await commit(WriteJob(work, order=entry.session_id or 0, agent=agent, left=left))
