"""The session of an MCP request, and the handshake connections of older protocol versions.

The session in the URL, if there is one; otherwise the session of the handshake connection;
otherwise the key's rolling session. An id does not authorize: sessions and connections are looked
up among those of the key. Connections are rows, so that every process serves them.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.db.models.functions import Coalesce
from django.utils import timezone

from sessions_app.agents import api_keys
from sessions_app.dispatch.authorization import Caller
from sessions_app.held_calls.ending import has_waiting_calls
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.event_details import read_object
from sessions_app.models import (
    Agent,
    AgentSession,
    ApiKey,
    McpConnection,
    RollingSession,
    SessionState,
    Strategy,
)
from sessions_app.sessions import lifecycle, loading
from sessions_app.sessions.schemas import OpenIn
from toolcrib.lib.errors import NotFound, ToolcribError
from toolcrib.lib.json_codec import canonical, digest

K = TypeVar("K")
V = TypeVar("V")

ROLLING_IDLE_LIMIT = timedelta(minutes=30)
MIN_IDLE_FOR_EVICTION = timedelta(minutes=30)
UNUSED_CONNECTION_RETENTION = timedelta(days=1)
MAX_CLIENT_TEXT = 200  # characters of a client's name and version
MAX_EXPIRED_AT_ONCE = 1_000
MAX_CANCELLED = 20  # cancellations of a connection that wait for their process
MAX_CACHED = 10_000  # entries of each cache below


@dataclass(frozen=True)
class Client:
    """`clientInfo` of an MCP client, as it sent it, and its protocol version."""

    info: object
    protocol: str
    elicits: bool = False  # it can ask its user

    def as_json(self) -> dict[str, str]:
        """Return name, version and protocol; nothing if the client does not name itself."""
        if not isinstance(self.info, dict) or not isinstance(self.info.get("name"), str):
            return {}
        texts = {key: str(self.info.get(key, "")) for key in ("name", "version")}
        texts["protocol"] = self.protocol
        return {
            key: "".join(char for char in text if char.isprintable())[:MAX_CLIENT_TEXT]
            for key, text in texts.items()
        }


class TooManyConnections(ToolcribError):
    code = "too_many_connections"
    status = 429


class UnknownConnection(NotFound):
    code = "unknown_session"  # to MCP clients it is a session

    def __init__(self) -> None:
        super().__init__("Session not found.", hint="Initialize a new session.")


# --- Sessions in the URL --------------------------------------------------------------------------

_with_client: dict[str, None] = {}  # ids of sessions whose client is recorded


@dataclass(frozen=True)
class UrlCaller(Caller):
    client: Client | None = None

    async def find_session(self, *, renew: bool) -> str:
        if self.client is not None and self.session_id not in _with_client:
            await ledger_writer.run_off_loop(record_client, self)
            _limit(_with_client)[self.session_id] = None
        return self.session_id


def record_client(caller: UrlCaller) -> None:
    """Store the client in the metadata of a session that has none."""
    sessions = AgentSession.objects.filter(session_id=caller.session_id)
    session = sessions.filter(agent__keys__sha256=caller.digest).first()
    metadata = read_object(session.metadata) if session else {}
    if session is not None and "client" not in metadata:
        session.metadata = canonical({**metadata, **_metadata(caller.client)})
        session.elicits = session.elicits or bool(caller.client and caller.client.elicits)
        session.save(update_fields=["metadata", "elicits"])


# --- Rolling sessions -----------------------------------------------------------------------------

_rolling: dict[tuple[str, str], str] = {}  # session ids, by the key's digest and the label


@dataclass(frozen=True)
class RollingCaller(Caller):
    """A request that names no session. Its key has one for each client name, until idle.

    Clients may give it a name of their own, to tell conversations apart, and choose the mode.
    """

    session_id: str = ""
    max_idle: float = ROLLING_IDLE_LIMIT.total_seconds()
    client: Client | None = None
    name: str = ""
    mode: str = ""
    # Sessions that this request has opened whose tool list is another than before.
    changed_lists: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        info = self.client.info if self.client else None
        client = str(info.get("name", ""))[:MAX_CLIENT_TEXT] if isinstance(info, dict) else ""
        asking = ("asks",) if self.client and self.client.elicits else ()
        return "\0".join((self.mode, self.name, client, *asking))

    async def find_session(self, *, renew: bool) -> str:
        label = self.label
        known = None if renew else _rolling.get((self.digest, label))
        if known is not None:
            return known
        opened = await ledger_writer.run_off_loop(_rolling_session, self)
        _limit(_rolling)[self.digest, label] = opened.session_id
        if opened.has_other_list:
            self.changed_lists.append(opened.session_id)
        return opened.session_id


def has_changed_list(caller: Caller) -> bool:
    """Return whether this request has opened a session with another tool list than before."""
    return isinstance(caller, RollingCaller) and bool(caller.changed_lists)


class _Opened(NamedTuple):
    session_id: str
    has_other_list: bool = False


def _rolling_session(caller: RollingCaller) -> _Opened:
    """Return the rolling session, and whether its tool list is another than before."""
    key, label = api_keys.require_agent_key(caller.digest), digest(caller.label)
    rows = RollingSession.objects.select_related("session").filter(key=key, label=label)
    row = rows.first()
    if row is not None and _is_reusable(row.session):
        return _Opened(row.session.session_id)
    with transaction.atomic():
        # Lock the agent first, in the same order as open_session.
        agent = Agent.objects.select_for_update(of=("self",)).get(keys=key)
        lifecycle.check_mode(agent, caller.mode)
        row = rows.first()
        if row is not None and _is_reusable(row.session):
            return _Opened(row.session.session_id)
        old = row.session if row is not None else None
        if old is not None and old.state == SessionState.OPEN and not has_waiting_calls(old):
            lifecycle.end_session(old, SessionState.EXPIRED)
        # The tool list of such a client must not change, so loaded tools are not added to it.
        metadata = _metadata(caller.client) | ({"name": caller.name} if caller.name else {})
        values = {"strategy": "dispatch", "mode": caller.mode or None, "metadata": metadata}
        elicits = caller.client is not None and caller.client.elicits
        session, _ = lifecycle.open_session(
            agent, OpenIn.model_validate(values), over_mcp=True, elicits=elicits
        )
        RollingSession.objects.update_or_create(key=key, label=label, defaults={"session": session})
        is_same = old is not None and old.snapshot_id == session.snapshot_id
        return _Opened(session.session_id, has_other_list=not is_same)


def _is_reusable(session: AgentSession) -> bool:
    is_open = loading.current_state(session) == SessionState.OPEN
    return is_open and timezone.now() - session.last_used_at < ROLLING_IDLE_LIMIT


# --- Handshake connections ------------------------------------------------------------------------


@dataclass(frozen=True)
class Connection:
    """A handshake connection, as its requests need it."""

    connection_id: str
    digest: str  # of its key
    protocol_version: str
    session_id: str | None  # None before the first request that needs a session
    capabilities: Mapping[str, Any] = field(default_factory=dict)  # that Toolcrib passes on


_connections: dict[str, Connection] = {}  # by connection id


@dataclass(frozen=True)
class ConnectionCaller(Caller):
    session_id: str = ""
    connection_id: str = ""

    async def find_session(self, *, renew: bool) -> str:
        connection = await find_connection(self.digest, self.connection_id, renew=renew)
        if connection.session_id is None:
            connection = await ledger_writer.run_off_loop(_open_session, self)
            _limit(_connections)[self.connection_id] = connection
        return connection.session_id or ""


async def find_connection(digest: str, connection_id: str, *, renew: bool = False) -> Connection:
    """Return a connection of this key. Raises UnknownConnection."""
    connection = None if renew else _connections.get(connection_id)
    if connection is None or connection.digest != digest:
        connection = await ledger_writer.run_off_loop(_read_connection, digest, connection_id)
        _limit(_connections)[connection_id] = connection
    return connection


def _read_connection(digest: str, connection_id: str) -> Connection:
    api_keys.require_agent_key(digest)
    return _describe(_row(digest, connection_id))


def _row(digest: str, connection_id: str) -> McpConnection:
    rows = McpConnection.objects.select_related("key__agent", "session")
    found = rows.filter(connection_id=connection_id, key__sha256=digest)
    row = None if "\0" in connection_id else found.first()
    if row is None or (row.session is not None and row.session.state == SessionState.CLOSED):
        raise UnknownConnection
    if row.session is not None and loading.current_state(row.session) != SessionState.OPEN:
        row.session = None  # expired: the client goes on in a new one, without a new handshake
    return row


def _describe(row: McpConnection) -> Connection:
    session_id = row.session.session_id if row.session else None
    declared = elicitation_of(json.loads(row.capabilities))
    capabilities = {} if declared is None else {"elicitation": declared}
    fields = row.connection_id, row.key.sha256, row.protocol_version, session_id
    return Connection(*fields, capabilities)


def elicitation_of(capabilities: object) -> Mapping[str, Any] | None:
    """Return how a client can ask its user, as it declares that; None if it cannot."""
    declared = capabilities.get("elicitation") if isinstance(capabilities, Mapping) else None
    return declared if isinstance(declared, Mapping) else None


@transaction.atomic
def _open_session(caller: ConnectionCaller) -> Connection:
    """Open the session of a connection, unless another request has done so."""
    row = _row(caller.digest, caller.connection_id)
    assert row.key.agent is not None  # noqa: S101 - only agents have connections
    agent = Agent.objects.select_for_update().get(pk=row.key.agent.pk)
    row = _row(caller.digest, caller.connection_id)  # again, now that the agent is locked
    if row.session is None:
        client = json.loads(row.client)
        values = {
            "strategy": row.strategy or None,
            "mode": row.mode or None,
            "metadata": {"client": client} if client else {},
        }
        elicits = elicitation_of(json.loads(row.capabilities)) is not None
        row.session, _ = lifecycle.open_session(
            agent, OpenIn.model_validate(values), over_mcp=True, elicits=elicits
        )
        row.save(update_fields=["session"])
    return _describe(row)


@transaction.atomic
def create_connection(
    key: ApiKey, client: Client, capabilities: object, strategy: str, mode: str = ""
) -> McpConnection:
    """Record a handshake. Raises TooManyConnections, and Invalid for a mode it may not choose."""
    assert key.agent is not None  # noqa: S101 - only agents have connections
    lifecycle.check_mode(key.agent, mode)
    Agent.objects.select_for_update().get(pk=key.agent.pk)
    _enforce_connection_limit(key)
    return McpConnection.objects.create(
        key=key,
        protocol_version=client.protocol,
        client=canonical(client.as_json()),
        capabilities=canonical(capabilities if isinstance(capabilities, dict) else {}),
        strategy=strategy,
        mode=mode,
    )


def _enforce_connection_limit(key: ApiKey) -> None:
    """Close the longest idle connections to make room for one more."""
    last_used = Coalesce(F("session__last_used_at"), F("created_at"))
    rows = McpConnection.objects.filter(key=key).annotate(last_used=last_used)
    excess = rows.count() + 1 - settings.MAX_CONNECTIONS
    if excess <= 0:
        return
    idle_since = timezone.now() - MIN_IDLE_FOR_EVICTION
    idle = list(rows.filter(last_used__lt=idle_since).order_by("last_used")[:excess])
    if len(idle) < excess:
        raise TooManyConnections(
            f"This key has reached the limit of {settings.MAX_CONNECTIONS} open connections.",
            hint="Close one with DELETE; those idle for 30 minutes are closed when a new one "
            "opens. TOOLCRIB_MAX_CONNECTIONS sets the limit.",
            details={"retry_after": 60},
        )
    for row in idle:
        _close(row)


def close_connection(digest: str, connection_id: str) -> str | None:
    """Close a connection and its session, as its client asked; return the session's id."""
    row = _row(digest, connection_id)
    session_id = row.session.session_id if row.session else None
    _close(row)
    _connections.pop(connection_id, None)
    return session_id


def _close(row: McpConnection) -> None:
    session = row.session
    row.delete()
    if session is not None:
        lifecycle.close_session(session)


@transaction.atomic
def add_cancellation(connection_id: str, request_id: int | str) -> None:
    """Leave a cancellation for the process that runs the call."""
    for row in McpConnection.objects.select_for_update().filter(connection_id=connection_id):
        row.cancelled = json.dumps([*json.loads(row.cancelled), request_id][-MAX_CANCELLED:])
        row.save(update_fields=["cancelled"])


@transaction.atomic
def take_cancellations(connection_ids: Collection[str]) -> list[tuple[str, int | str]]:
    """Return and remove the cancellations of these connections."""
    taken = []
    rows = McpConnection.objects.select_for_update().exclude(cancelled="[]")
    for row in rows.filter(connection_id__in=connection_ids).order_by("pk"):
        taken += [(row.connection_id, request_id) for request_id in json.loads(row.cancelled)]
        row.cancelled = "[]"
        row.save(update_fields=["cancelled"])
    return taken


@transaction.atomic
def add_answer(digest: str, connection_id: str, request_id: str, answer: object) -> None:
    """Leave the answer of a client's user for the process that asked."""
    rows = McpConnection.objects.select_for_update()
    for row in rows.filter(connection_id=connection_id, key__sha256=digest):
        row.answers = canonical([*json.loads(row.answers), [request_id, answer]][-MAX_CANCELLED:])
        row.save(update_fields=["answers"])


@transaction.atomic
def take_answers(connection_ids: Collection[str]) -> list[tuple[str, str, Any]]:
    """Return and remove the answers of these connections: connection, request, answer."""
    taken = []
    rows = McpConnection.objects.select_for_update()
    for row in rows.filter(connection_id__in=connection_ids).order_by("pk"):
        if answers := json.loads(row.answers):
            taken += [(row.connection_id, *answer) for answer in answers]
            row.answers = "[]"
            row.save(update_fields=["answers"])
    return taken


def prune_connections() -> int:
    """Close connections of invalid keys, expire idle sessions, delete what has not been used.

    Few clients close their connection. One that comes back after its session has expired goes on
    in a new session; the tools that it loaded with the inject strategy would be missing there, so
    such a session stays until the idle limit of all sessions.
    """
    now = timezone.now()
    rows = McpConnection.objects.order_by()
    keys = set(rows.values_list("key", flat=True).distinct())
    for row in rows.select_related("session").filter(key__in=keys - api_keys.valid_keys(keys)):
        _close(row)
    idle = rows.filter(
        session__state=SessionState.OPEN,
        session__strategy=Strategy.DISPATCH,
        session__last_used_at__lt=now - ROLLING_IDLE_LIMIT,
    )
    for row in idle.select_related("session")[:MAX_EXPIRED_AT_ONCE]:
        if row.session is not None and not has_waiting_calls(row.session):
            lifecycle.expire_session(row.session, ROLLING_IDLE_LIMIT)
    closed = rows.filter(session__state=SessionState.CLOSED)
    last_used = Coalesce(F("session__last_used_at"), F("created_at"))
    unused = (
        rows.annotate(last_used=last_used)
        .filter(last_used__lt=now - UNUSED_CONNECTION_RETENTION)
        .exclude(session__state=SessionState.OPEN)
    )
    return closed.delete()[0] + unused.delete()[0]


def clear_caches() -> None:
    for cache in (_with_client, _rolling, _connections):
        cache.clear()


def _limit(cache: dict[K, V]) -> dict[K, V]:
    """Empty a cache that is full."""
    if len(cache) >= MAX_CACHED:
        cache.clear()
    return cache


def _metadata(client: Client | None) -> dict[str, Any]:
    described = client.as_json() if client else {}
    return {"client": described} if described else {}
