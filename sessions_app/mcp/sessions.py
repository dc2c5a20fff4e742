"""The session of an MCP request, and the handshake connections of older protocol versions.

The session in the URL, if there is one; otherwise the session of the handshake connection;
otherwise the key's rolling session. An id does not authorize: sessions and connections are looked
up among those of the key. Connections are rows, so that every process serves them.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.db.models.functions import Coalesce
from django.utils import timezone

from sessions_app.agents import api_keys
from sessions_app.dispatch.authorization import Caller
from sessions_app.ledger import writer as ledger_writer
from sessions_app.models import Agent, AgentSession, ApiKey, McpConnection, SessionState
from sessions_app.sessions import lifecycle, loading
from sessions_app.sessions.schemas import OpenIn
from toolcrib.lib.errors import NotFound, ToolcribError
from toolcrib.lib.json_codec import canonical

ROLLING_IDLE_LIMIT = timedelta(minutes=30)
MIN_IDLE_FOR_EVICTION = timedelta(minutes=30)
UNUSED_CONNECTION_RETENTION = timedelta(days=1)
MAX_CLIENT_TEXT = 200  # characters of a client's name and version
MAX_CANCELLED = 20  # cancellations of a connection that wait for their process
MAX_CACHED = 10_000  # entries of each cache below


@dataclass(frozen=True)
class Client:
    """`clientInfo` of an MCP client, as it sent it, and its protocol version."""

    info: object
    protocol: str

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
    metadata = json.loads(session.metadata) if session else {}
    if session is not None and "client" not in metadata:
        session.metadata = canonical({**metadata, **_metadata(caller.client)})
        session.save(update_fields=["metadata"])


# --- Rolling sessions -----------------------------------------------------------------------------

_rolling: dict[str, str] = {}  # session ids, by the key's digest


@dataclass(frozen=True)
class RollingCaller(Caller):
    """A request that names no session. Its key has one, until it is idle for half an hour."""

    session_id: str = ""
    max_idle: float = ROLLING_IDLE_LIMIT.total_seconds()
    client: Client | None = None
    new_sessions: list[str] = field(default_factory=list)  # that this request has opened

    async def find_session(self, *, renew: bool) -> str:
        known = None if renew else _rolling.get(self.digest)
        if known is not None:
            return known
        session_id, is_new = await ledger_writer.run_off_loop(_rolling_session, self)
        _limit(_rolling)[self.digest] = session_id
        if is_new:
            self.new_sessions.append(session_id)
        return session_id


def _rolling_session(caller: RollingCaller) -> tuple[str, bool]:
    """Return the id of the key's rolling session, and whether it is new."""
    key = api_keys.require_agent_key(caller.digest)
    session = _reusable_session(key)
    if session is not None:
        return session.session_id, False
    with transaction.atomic():
        # Lock the agent first, in the same order as open_session.
        agent = Agent.objects.select_for_update(of=("self",)).get(keys=key)
        key = ApiKey.objects.select_related("rolling_session").get(pk=key.pk)
        session = _reusable_session(key)
        if session is not None:
            return session.session_id, False
        if key.rolling_session is not None and key.rolling_session.state == SessionState.OPEN:
            lifecycle.end_session(key.rolling_session, SessionState.EXPIRED)
        # The tool list of such a client must not change, so loaded tools are not added to it.
        request = OpenIn(strategy="dispatch", metadata=_metadata(caller.client))
        key.rolling_session, _ = lifecycle.open_session(agent, request)
        key.save(update_fields=["rolling_session"])
        return key.rolling_session.session_id, True


def _reusable_session(key: ApiKey) -> AgentSession | None:
    session = AgentSession.objects.filter(pk=key.rolling_session_id or 0).first()
    if session is None or loading.current_state(session) != SessionState.OPEN:
        return None
    return session if timezone.now() - session.last_used_at < ROLLING_IDLE_LIMIT else None


# --- Handshake connections ------------------------------------------------------------------------


@dataclass(frozen=True)
class Connection:
    """A handshake connection, as its requests need it."""

    connection_id: str
    digest: str  # of its key
    protocol_version: str
    session_id: str | None  # None before the first request that needs a session


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
    if row is None or (row.session is not None and row.session.state != SessionState.OPEN):
        raise UnknownConnection
    return row


def _describe(row: McpConnection) -> Connection:
    session_id = row.session.session_id if row.session else None
    return Connection(row.connection_id, row.key.sha256, row.protocol_version, session_id)


@transaction.atomic
def _open_session(caller: ConnectionCaller) -> Connection:
    """Open the session of a connection, unless another request has done so."""
    row = _row(caller.digest, caller.connection_id)
    assert row.key.agent is not None  # noqa: S101 - only agents have connections
    agent = Agent.objects.select_for_update().get(pk=row.key.agent.pk)
    row.refresh_from_db(fields=["session"])
    if row.session is None:
        client = json.loads(row.client)
        values = {
            "strategy": row.strategy or None,
            "metadata": {"client": client} if client else {},
        }
        row.session, _ = lifecycle.open_session(agent, OpenIn.model_validate(values))
        row.save(update_fields=["session"])
    return _describe(row)


@transaction.atomic
def create_connection(
    key: ApiKey, client: Client, capabilities: object, strategy: str
) -> McpConnection:
    """Record a handshake. Raises TooManyConnections."""
    assert key.agent is not None  # noqa: S101 - only agents have connections
    Agent.objects.select_for_update().get(pk=key.agent.pk)
    _enforce_connection_limit(key)
    return McpConnection.objects.create(
        key=key,
        protocol_version=client.protocol,
        client=canonical(client.as_json()),
        capabilities=canonical(capabilities if isinstance(capabilities, dict) else {}),
        strategy=strategy,
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


def prune_connections() -> int:
    """Close connections of invalid keys; delete those of ended sessions and unused ones."""
    now = timezone.now()
    rows = McpConnection.objects.order_by()
    keys = set(rows.values_list("key", flat=True).distinct())
    for row in rows.select_related("session").filter(key__in=keys - api_keys.valid_keys(keys)):
        _close(row)
    ended = rows.exclude(session=None).exclude(session__state=SessionState.OPEN)
    unused = rows.filter(session=None, created_at__lt=now - UNUSED_CONNECTION_RETENTION)
    return ended.delete()[0] + unused.delete()[0]


def clear_caches() -> None:
    for cache in (_with_client, _rolling, _connections):
        cache.clear()


def _limit(cache: dict[str, Any]) -> dict[str, Any]:
    """Empty a cache that is full."""
    if len(cache) >= MAX_CACHED:
        cache.clear()
    return cache


def _metadata(client: Client | None) -> dict[str, Any]:
    described = client.as_json() if client else {}
    return {"client": described} if described else {}
