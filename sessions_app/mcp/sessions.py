"""Authentication of MCP requests, and the session that each request uses.

The session in the URL, if there is one; otherwise the session of the handshake connection;
otherwise the key's rolling session. An id does not authorize: sessions are looked up among those
of the key's agent. Database code, called off the event loop.
"""

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.utils import timezone

from sessions_app.agents import api_keys
from sessions_app.models import Agent, AgentSession, ApiKey, SessionState, Strategy
from sessions_app.sessions import lifecycle, loading, scope
from sessions_app.sessions.lifecycle import OpenSessionRequest
from sessions_app.sessions.scope import SessionScope
from toolcrib.lib.errors import Forbidden, Invalid, ToolcribError
from toolcrib.lib.json_codec import canonical

ROLLING_IDLE_LIMIT = timedelta(minutes=30)


@dataclass(frozen=True)
class Client:
    """Name and version that an MCP client reports, and its protocol version."""

    name: str
    version: str
    protocol: str

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "protocol": self.protocol}


@dataclass(frozen=True)
class AuthenticatedRequest:
    """A request with a valid key."""

    key: ApiKey
    agent: Agent
    session: AgentSession | None  # from the URL
    strategy: str  # from the URL, for the session of a connection
    scope: SessionScope  # for checks before a handler runs


class MissingKey(ToolcribError):
    code = "unauthorized"
    status = 401


def missing_key() -> MissingKey:
    return MissingKey(
        "A valid API key is required.",
        hint="Send `Authorization: Bearer tcb_…` with an agent's key; `manage.py create_agent` "
        "creates one.",
    )


def authenticate(token: str, session_id: str, strategy: str) -> AuthenticatedRequest:
    """Check the key and the session in the URL, as the agent API does."""
    key = api_keys.find_key(token)
    if key is None:
        raise missing_key()
    if key.agent is None:
        raise Forbidden("This endpoint is for agents.", hint="Use an agent's key.")
    if strategy and strategy not in Strategy.values:
        raise Invalid(f"strategy must be one of: {', '.join(Strategy.values)}.")
    session = lifecycle.find_session(key.agent, session_id) if session_id else None
    agent_scope = scope.scope_of_session(session) if session else scope.scope_of_agent(key.agent)
    return AuthenticatedRequest(key, key.agent, session, strategy, agent_scope)


def open_connection_session(caller: AuthenticatedRequest, client: Client | None) -> AgentSession:
    """Open the session of a new handshake connection."""
    request = OpenSessionRequest(strategy=caller.strategy or None, metadata=_metadata(client))
    return lifecycle.open_session(caller.agent, request).session


def rolling_session(
    caller: AuthenticatedRequest, client: Client | None
) -> tuple[AgentSession, bool]:
    """Return the key's rolling session, and whether it is new."""
    session = _reusable_session(caller.agent, caller.key.rolling_session_id)
    if session is not None:
        return session, False
    with transaction.atomic():
        # Lock the agent first, in the same order as open_session.
        Agent.objects.select_for_update().get(pk=caller.agent.pk)
        key = ApiKey.objects.get(pk=caller.key.pk)
        session = _reusable_session(caller.agent, key.rolling_session_id)
        if session is not None:
            return session, False
        _expire_previous(key)
        # The tool list of such a client must not change, so loaded tools are not added to it.
        request = OpenSessionRequest(strategy=Strategy.DISPATCH, metadata=_metadata(client))
        key.rolling_session = lifecycle.open_session(caller.agent, request).session
        key.save(update_fields=["rolling_session"])
        return key.rolling_session, True


def _reusable_session(agent: Agent, pk: int | None) -> AgentSession | None:
    if pk is None:
        return None
    rows = AgentSession.objects.with_catalog()
    session = rows.filter(pk=pk, agent=agent, state=SessionState.OPEN).first()
    if session is None or loading.current_state(session) != SessionState.OPEN:
        return None
    idle = timezone.now() - session.last_used_at
    session.agent = agent
    return session if idle < ROLLING_IDLE_LIMIT else None


def _expire_previous(key: ApiKey) -> None:
    previous = key.rolling_session
    if previous is not None and previous.state == SessionState.OPEN:
        lifecycle.end_session(previous, SessionState.EXPIRED)


def close_session(agent: Agent, session_id: str) -> None:
    """Close the session of a closed connection, unless it was deleted with its agent."""
    session = AgentSession.objects.filter(agent=agent.pk, session_id=session_id).first()
    if session is not None:
        lifecycle.close_session(session)


def _metadata(client: Client | None) -> dict[str, Any]:
    return {"client": client.as_json()} if client else {}


def record_client(session: AgentSession, client: Client | None) -> None:
    """Store the client in the metadata of a session that has none."""
    metadata = json.loads(session.metadata)
    if client is None or "client" in metadata:
        return
    session.metadata = canonical({**metadata, **_metadata(client)})
    session.save(update_fields=["metadata"])
