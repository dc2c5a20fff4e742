"""Authorization of an agent's operations: its key, agent and session, cached in this process.

Call, search, load and details all start here. A cached entry is revalidated against the database,
with one statement, in the transaction that commits the operation; if the key, agent, session,
loaded tools, server or catalog revision changed, the operation is repeated with a new entry. An
error is reported only if the entry is current. So every process rejects a revoked key or a closed
session at the next request, with the reason.
"""

import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import TypeVar, cast

from django.db import connection
from django.utils import timezone

from catalog.models import Revision
from servers.models import Server
from sessions_app.agents import api_keys
from sessions_app.agents.rate_limits import RateLimited
from sessions_app.held_calls.ending import unfetched_digests
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.writer import AGENT, CALL, SESSION, LedgerCursor, Row, WriteJob
from sessions_app.models import Agent, ApiKey
from sessions_app.rules import agent_rules
from sessions_app.rules.agent_rules import AgentRules
from sessions_app.sessions import lifecycle, loading, surface
from sessions_app.sessions.loading import SessionLoads
from sessions_app.sessions.scope import SessionScope
from sessions_app.sessions.snapshots import Pin
from sessions_app.sessions.surface import SessionContext
from toolcrib.lib.errors import ToolcribError

T = TypeVar("T")

MAX_ATTEMPTS = 10  # with a new entry each, while something changes all the time
MAX_ENTRIES, MAX_BYTES = 10_000, 8_000_000  # sessions, and bytes of their loaded definitions
BYTES_PER_NAME = 100  # estimate for one definition that is stored by name
TTL_SECONDS = 50.0  # loading an entry also updates the key's last use, at least this often
# A rate limit is reported from an entry of this age, so that rejecting a flood stays cheap.
RATE_LIMIT_AGE = 1.0

KEY, SERVER, REVISION = (model._meta.db_table for model in (ApiKey, Server, Revision))
AGENT_COLUMNS = tuple(field.column for field in Agent._meta.concrete_fields)
SERVER_COLUMNS = ("enabled", "generation", "isolation", "concurrency", "call_timeout", "slug")
LOADS_VERSION, TOKENS_LOADED = 4, 5  # positions in the row
# Columns that must not have changed; the server's columns follow.
AUTHORIZATION_COLUMNS = 6 + len(AGENT_COLUMNS)
# Only table and column names are formatted into the statement.
REVALIDATE_SQL = f"""
SELECT COALESCE(r.number, 0), k.revoked_at, k.expires_at, s.state, s.loads_version,
  s.tokens_loaded, {", ".join(f"a.{name}" for name in AGENT_COLUMNS)},
  {", ".join(f"v.{name}" for name in SERVER_COLUMNS)},
  s.holds_version, s.last_used_at,
  (SELECT COUNT(*) FROM {CALL} c WHERE c.agent_id = a.id
     AND c.state IN ('accepted', 'sent') AND c.deadline > %s)
FROM {SESSION} s
JOIN {AGENT} a ON a.id = s.agent_id
JOIN {KEY} k ON k.agent_id = a.id
LEFT JOIN {REVISION} r ON r.id = 1
LEFT JOIN {SERVER} v ON v.id = %s
WHERE k.sha256 = %s AND s.session_id = %s
"""  # noqa: S608


class Outdated(Exception):
    """The authorization changed since it was loaded. Nothing was written."""


class Busy(ToolcribError):
    code = "busy"
    status = 503


@dataclass(frozen=True)
class Caller:
    """The digest of a key, and the session that its request names."""

    digest: str
    session_id: str
    max_idle: float = float("inf")  # seconds, besides the idle timeout of all sessions

    async def find_session(self, *, renew: bool) -> str:
        """Return the id of the session; with `renew`, what was found before is outdated."""
        return self.session_id


@dataclass(slots=True)
class Authorization(SessionContext):
    """Authorization of a key for one session, with what the session was shown."""

    digest: str  # of the key
    key_id: int
    key_expires_at: datetime | None
    idle_limit: float  # seconds
    loaded_bits: int  # one bit per tool in scope: its current definition was loaded
    older_definitions: dict[str, int]  # definitions of other loaded tools, by tool name
    detailed: dict[str, int]  # definitions that were shown in full without a load, likewise
    initial_pins: dict[str, Pin]  # definitions shown at the start; shared between sessions
    rules: AgentRules | None  # None if no rule concerns the agent
    held: frozenset[str]  # digests of held calls whose results were not fetched
    holds_version: int  # of the session, when they were read
    row: Row
    loaded_at: float  # monotonic time

    def shown_definition(self, name: str) -> int | None:
        """Return the id of the definition of a tool that the session was shown, if any."""
        if (older := self.older_definitions.get(name)) is not None:
            return older
        tool = self.scope.tools.get(name)
        if tool and tool.approved and self.loaded_bits >> self.scope.tool_index(tool) & 1:
            return tool.approved.pk
        pin = self.initial_pins.get(name)
        return pin["definition"] if pin else self.detailed.get(name)

    def is_loaded(self, name: str) -> bool:
        """Return whether the session has loaded a tool, or had it from the start."""
        return name not in self.detailed and self.shown_definition(name) is not None

    @property
    def trace_attributes(self) -> dict[str, str]:
        return {"toolcrib.session.id": self.session_id, "toolcrib.agent": self.agent.name}

    @property
    def size_bytes(self) -> int:
        """Approximate memory of the loaded definitions."""
        names = len(self.older_definitions) + len(self.detailed)
        return self.loaded_bits.bit_length() // 8 + BYTES_PER_NAME * names

    def revalidate(
        self,
        cursor: LedgerCursor,
        now: datetime,
        server: int | None = None,
        server_row: Row | None = None,
        is_repeated: Callable[[LedgerCursor], bool] | None = None,
    ) -> int | None:
        """Return the agent's calls in flight; None if this authorization is outdated.

        `is_repeated` is asked if calls were held since: whether one of them is this call.
        """
        row = cursor.fetch_one(REVALIDATE_SQL, (now, server, self.digest, self.session_id))
        if row is None:
            return None
        *columns, holds_version, last_used_at, in_flight = row
        if holds_version != self.holds_version and is_repeated is not None and is_repeated(cursor):
            return None
        idle = (now - (cursor.decode_time(last_used_at) or now)).total_seconds()
        is_current = (
            tuple(columns[:AUTHORIZATION_COLUMNS]) == self.row
            and (server_row is None or tuple(columns[AUTHORIZATION_COLUMNS:]) == server_row)
            and (self.key_expires_at is None or self.key_expires_at > now)
            and idle <= self.idle_limit
        )
        return int(in_flight) if is_current else None

    async def commit(
        self, write: Callable[[LedgerCursor], T], successor: "Authorization | None" = None
    ) -> T:
        """Commit rows if this authorization is current; raise Outdated otherwise.

        `successor` is the authorization after a load, which is cached then.
        """
        now = timezone.now()

        def work(cursor: LedgerCursor) -> tuple[bool, T | None]:
            if successor is not None:
                cursor.lock_session(self.session_pk)
            is_current = self.revalidate(cursor, now) is not None
            return is_current, write(cursor) if is_current else None

        is_current, result = await ledger_writer.commit(WriteJob(work, order=self.session_pk))
        if not is_current:
            raise Outdated
        if successor is not None:
            _store(successor)
        return cast(T, result)

    def after(self, loads: SessionLoads) -> "Authorization":
        """Return the authorization that is current once these loads are committed."""
        row = list(self.row)
        row[LOADS_VERSION], row[TOKENS_LOADED] = loads.version, loads.tokens_loaded
        bits, older = _split_pins(self.scope, loads.pins)
        return replace(
            self,
            row=tuple(row),
            tokens_loaded=loads.tokens_loaded,
            loads_version=loads.version,
            loaded_bits=bits,
            older_definitions=older,
            detailed=loads.detailed,
        )


# --- Cache ----------------------------------------------------------------------------------------

CacheKey = tuple[str, str]  # digest of the key, and session id
_entries: dict[CacheKey, Authorization] = {}  # the newest last
_server_rows: dict[int, Row] = {}
_total_bytes = 0
_revision = 0  # of the newest entry
_lock = threading.Lock()


async def run_authorized(caller: Caller, attempt: Callable[[Authorization], Awaitable[T]]) -> T:
    """Run an operation, which commits at most once and last, with a current authorization."""
    for number in range(MAX_ATTEMPTS):
        session_id = await caller.find_session(renew=number > 0)
        entry = None if number else _entries.get((caller.digest, session_id))
        is_new = entry is None or time.monotonic() - entry.loaded_at >= TTL_SECONDS
        if entry is None or is_new:
            entry = await ledger_writer.run_off_loop(_load, caller, session_id)
        try:
            return await attempt(entry)
        except Outdated:
            _server_rows.clear()
        except ToolcribError as error:
            age = time.monotonic() - entry.loaded_at
            if is_new or (isinstance(error, RateLimited) and age < RATE_LIMIT_AGE):
                raise
    raise Busy(
        "The catalog or this session changes all the time.",
        hint="Try again.",
        details={"retry_after": 1},
    )


async def find_server(server_id: int, *, renew: bool = False) -> Row | None:
    """Return the columns of a server that a call needs; with `renew`, not from the cache."""
    row: Row | None = None if renew else _server_rows.get(server_id)
    if row is None:
        rows = Server.objects.filter(pk=server_id).values_list(*SERVER_COLUMNS)
        row = await ledger_writer.run_off_loop(rows.first)
        if row is not None:
            _server_rows[server_id] = row
    return row


def clear() -> None:
    with _lock:
        _server_rows.clear()
        for cache_key in list(_entries):
            _remove(cache_key)


def _remove(cache_key: CacheKey) -> None:
    global _total_bytes
    entry = _entries.pop(cache_key, None)
    _total_bytes -= entry.size_bytes if entry else 0


def _store(entry: Authorization) -> None:
    """Add or replace an entry, and evict the oldest ones above the limits."""
    global _revision, _total_bytes
    with _lock:
        _remove((entry.digest, entry.session_id))
        if entry.scope.revision != _revision:
            _revision = entry.scope.revision
            for cache_key, other in list(_entries.items()):
                if other.scope.revision != _revision:  # it would keep an old catalog
                    _remove(cache_key)
        _entries[entry.digest, entry.session_id] = entry
        _total_bytes += entry.size_bytes
        now = time.monotonic()
        while len(_entries) > 1:
            oldest = next(iter(_entries))
            within_limits = len(_entries) <= MAX_ENTRIES and _total_bytes <= MAX_BYTES
            if now - _entries[oldest].loaded_at < TTL_SECONDS and within_limits:
                break
            _remove(oldest)


# --- Loading --------------------------------------------------------------------------------------


def _load(caller: Caller, session_id: str) -> Authorization:
    """Load an authorization from the database and cache it; raise if there is none."""
    # Read the row before the data it describes: revalidation then notices every later change.
    row = None
    if "\0" not in session_id:
        with connection.wrap_database_errors:
            values = (timezone.now(), None, caller.digest, session_id)
            row = LedgerCursor(connection).fetch_one(REVALIDATE_SQL, values)
    key = api_keys.require_agent_key(caller.digest)
    session = lifecycle.find_session(key.agent, session_id)
    loading.check_open(session)
    context = surface.context_of(session)
    loads = SessionLoads(context)
    bits, older = _split_pins(context.scope, loads.pins)
    entry = Authorization(
        **{field.name: getattr(context, field.name) for field in fields(context)},
        digest=caller.digest,
        key_id=key.pk,
        key_expires_at=key.expires_at,
        idle_limit=min(loading.idle_limit(), caller.max_idle),
        loaded_bits=bits,
        older_definitions=older,
        detailed=loads.detailed,
        initial_pins=surface.with_newer(context.surface.pins, loads.newer),
        held=unfetched_digests(session),
        holds_version=row[-3] if row else 0,
        rules=agent_rules.load_rules(row[0] if row else 0, context.agent.pk),
        row=tuple((row or ())[:AUTHORIZATION_COLUMNS]),
        loaded_at=time.monotonic(),
    )
    _store(entry)
    return entry


def _split_pins(scope: SessionScope, pins: dict[str, Pin]) -> tuple[int, dict[str, int]]:
    """Split pins into a bit set of current definitions and a dict of older ones.

    Thousands of sessions may have loaded hundreds of tools each, and each load rebuilds the entry.
    """
    current = bytearray(1 + len(scope.tools) // 8)
    older: dict[str, int] = {}
    for name, pin in pins.items():
        tool = scope.tools.get(name)
        if tool is not None and tool.approved and tool.approved.pk == pin["definition"]:
            number = scope.tool_index(tool)
            current[number // 8] |= 1 << number % 8
        elif pin["definition"] is not None:
            older[name] = pin["definition"]
    return int.from_bytes(current, "little"), older
