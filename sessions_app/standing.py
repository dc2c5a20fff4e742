"""What was found out about a key and its session at an earlier call, so that the next is cheap.

Nothing here is trusted: the transaction that accepts a call compares it with the database, in one
statement, and where anything changed (key, agent, session, what it loaded, server, revision) the
call starts over the long way. So a revoked key or a closed session is refused by every process at
the next request, and what is remembered only saves work.
"""

import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import connection

from catalog import shelf
from catalog.models import Revision
from catalog.shelf import Kept
from servers.models import Server
from sessions_app import scope, surfaces
from sessions_app.loading import LEAST_IDLE
from sessions_app.models import Agent, AgentSession, ApiKey, Call, Expansion, SessionState
from sessions_app.rows import Cursor, Row
from sessions_app.scope import Scope
from sessions_app.surfaces import Pin

Token = str | int  # a key's digest, or an agent whose key was checked by the caller
MOST = 10_000
FRESH_FOR = 50.0  # seconds; the long way also notes when a key was last used

KEY, AGENT, SESSION, CALL, EXPANSION, SERVER, REVISION = (
    model._meta.db_table
    for model in (ApiKey, Agent, AgentSession, Call, Expansion, Server, Revision)
)
AGENT_FACTS = ("name", "enabled", "all_groups", "calls_in_flight", "calls_per_minute")
SERVER_FACTS = ("enabled", "generation", "isolation", "concurrency", "call_timeout", "slug")
MINE = 8 + len(AGENT_FACTS)  # columns about key, agent and session; then those of the server
# No value is put into the text. The counts make up for what has no number of its own that rises:
# pins are only ever added to.
STAMP = f"""
SELECT r.number, k.id, k.rolling_session_id, k.revoked_at, k.expires_at, s.state,
  (SELECT COUNT(*) FROM {EXPANSION} e WHERE e.session_id = s.id),
  (SELECT COALESCE(SUM(LENGTH(e.pins)), 0) FROM {EXPANSION} e WHERE e.session_id = s.id),
  {", ".join(f"a.{name}" for name in AGENT_FACTS)},
  {", ".join(f"v.{name}" for name in SERVER_FACTS)},
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


@dataclass(slots=True)
class Standing:
    """A key, its agent and one of its sessions, as they were."""

    key_id: int | None
    agent: Agent
    session: AgentSession
    seen: Scope
    pins: dict[str, Pin]
    stamp: Row
    expires: datetime | None
    until: float  # by the monotonic clock
    servers: dict[int, Row] = field(default_factory=dict)
    definitions: dict[int, Kept] = field(default_factory=dict)

    def definition(self, pk: int) -> Kept:
        """Raises KeyError where it is not at hand."""
        return self.definitions[pk]

    def holds(self, cursor: Cursor, server_id: int, now: datetime) -> bool:
        """Tell whether all of it is still so, and the agent may have one more call under way."""
        found = _stamp(cursor, self.key_id, self.session.pk, server_id, now)
        if found is None:
            return False
        *facts, last_used, under_way = found
        used = cursor.moment(last_used)
        return (
            tuple(facts[:MINE]) == self.stamp
            and tuple(facts[MINE:]) == self.servers.get(server_id)
            and (self.expires is None or self.expires > now)
            and used is not None
            and (now - used).total_seconds() < LEAST_IDLE
            and under_way < self.agent.calls_in_flight
        )


_known: dict[tuple[Token, str], Standing] = {}


def known(token: Token, session_id: str) -> Standing | None:
    found = _known.get((token, session_id))
    return found if found is not None and found.until > time.monotonic() else None


def drop(token: Token, session_id: str) -> None:
    _known.pop((token, session_id), None)


def forget() -> None:
    _known.clear()


def _stamp(
    cursor: Cursor, key_id: int | None, session: int, server_id: int, now: datetime
) -> Row | None:
    return cursor.one(STAMP, (cursor.time(now), server_id, key_id, session))


def learn(token: Token, session_id: str, server_id: int, tool: str, now: datetime) -> None:
    """Remember what a call of this key, session and server needs. Asks the database."""
    rows = AgentSession.objects.with_catalog()
    session = rows.filter(session_id=session_id).first()
    key = ApiKey.objects.filter(sha256=token).first() if isinstance(token, str) else None
    if session is None or (isinstance(token, str) and key is None):
        return
    # Before what it stands for is read: what changes in between is then noticed.
    key_id = key.pk if key else None
    found = _stamp(Cursor(connection), key_id, session.pk, server_id, now)
    if found is None or not _good(key, session, found):
        return
    ready = known(token, session_id)
    if ready is None or ready.stamp != tuple(found[:MINE]):
        ready = _read(key, session_id, found)
        if ready is None:
            return
    ready.servers[server_id] = tuple(found[MINE : MINE + len(SERVER_FACTS)])
    pin = ready.pins.get(tool)
    if pin:
        ready.definitions[pin["definition"]] = shelf.definition(pin["definition"])
    if len(_known) >= MOST:
        _known.clear()
    _known[token, session_id] = ready


def _good(key: ApiKey | None, session: AgentSession, found: Row) -> bool:
    if key is not None and (key.agent_id != session.agent_id or key.revoked_at is not None):
        return False
    return bool(session.agent.enabled) and session.state == SessionState.OPEN


def _read(key: ApiKey | None, session_id: str, found: Row) -> Standing | None:
    session = AgentSession.objects.with_catalog().get(session_id=session_id)
    seen = scope.of_session(session)
    if seen.revision != found[0]:
        return None
    for token, other in list(_known.items()):
        if other.seen.revision != seen.revision:  # else old catalogs would be held for ever
            _known.pop(token, None)
    pins: dict[str, Any] = {**surfaces.surface_of(session.snapshot).pins}
    pins.update(surfaces.pins_of(session))
    return Standing(
        key_id=key.pk if key else None,
        agent=session.agent,
        session=session,
        seen=seen,
        pins=pins,
        stamp=tuple(found[:MINE]),
        expires=key.expires_at if key else None,
        until=time.monotonic() + FRESH_FOR,
    )
