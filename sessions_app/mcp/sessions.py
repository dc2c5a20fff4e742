"""Which session a request of an MCP client means, and whether its key may have it.

The URL's, if it names one; else that of the handshake connection, which has its own; else the
key's rolling one. An id is a name and never a proof: all are looked for among the sessions of
the key's agent. Database work, called off the loop.
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

ROLLS_AFTER = timedelta(minutes=30)  # of quiet


@dataclass(frozen=True)
class Client:
    """What a client says of itself."""

    name: str
    version: str
    protocol: str

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "protocol": self.protocol}


@dataclass(frozen=True)
class AuthenticatedRequest:
    """One request that came in with a good key."""

    key: ApiKey
    agent: Agent
    session: AgentSession | None  # the one the URL names
    strategy: str  # asked for in the URL, for a connection's own session
    seen: SessionScope  # what the agent may see, for what must be known before a handler runs


class NoKey(ToolcribError):
    code = "unauthorized"
    status = 401


def no_key() -> NoKey:
    return NoKey(
        "A valid key is needed.",
        hint="Send `Authorization: Bearer tcb_…` with an agent's key; `manage.py create_agent` "
        "makes one.",
    )


def authenticate(token: str, session_id: str, strategy: str) -> AuthenticatedRequest:
    """Check the key and the session in the URL, as the agent API does."""
    key = api_keys.find_key(token)
    if key is None:
        raise no_key()
    if key.agent is None:
        raise Forbidden("This endpoint is for agents.", hint="Use an agent's key.")
    if strategy and strategy not in Strategy.values:
        raise Invalid(f"strategy is one of: {', '.join(Strategy.values)}.")
    session = lifecycle.find_session(key.agent, session_id) if session_id else None
    seen = scope.scope_of_session(session) if session else scope.scope_of_agent(key.agent)
    return AuthenticatedRequest(key, key.agent, session, strategy, seen)


def connection_session(asking: AuthenticatedRequest, client: Client | None) -> AgentSession:
    """Open the session of a new connection."""
    wanted = OpenSessionRequest(strategy=asking.strategy or None, metadata=_metadata(client))
    return lifecycle.open_session(asking.agent, wanted).session


def rolling_session(
    asking: AuthenticatedRequest, client: Client | None
) -> tuple[AgentSession, bool]:
    """Return the key's rolling session, and whether it was opened just now."""
    found = _in_use(asking.agent, asking.key.rolling_session_id)
    if found is not None:
        return found, False
    with transaction.atomic():
        Agent.objects.select_for_update().get(pk=asking.agent.pk)  # as opening does, and first
        key = ApiKey.objects.get(pk=asking.key.pk)
        found = _in_use(asking.agent, key.rolling_session_id)
        if found is not None:
            return found, False
        _end_old(key)
        # Such a client's list of tools must not change, so nothing can join it.
        wanted = OpenSessionRequest(strategy=Strategy.DISPATCH, metadata=_metadata(client))
        key.rolling_session = lifecycle.open_session(asking.agent, wanted).session
        key.save(update_fields=["rolling_session"])
        return key.rolling_session, True


def _in_use(agent: Agent, pk: int | None) -> AgentSession | None:
    if pk is None:
        return None
    rows = AgentSession.objects.with_catalog()
    session = rows.filter(pk=pk, agent=agent, state=SessionState.OPEN).first()
    if session is None or loading.current_state(session) != SessionState.OPEN:
        return None
    quiet = timezone.now() - session.last_used_at
    session.agent = agent
    return session if quiet < ROLLS_AFTER else None


def _end_old(key: ApiKey) -> None:
    old = key.rolling_session
    if old is not None and old.state == SessionState.OPEN:
        lifecycle.end_session(old, SessionState.EXPIRED)


def close(agent: Agent, session_id: str) -> None:
    """End the session of a connection that has ended; it may be gone with its agent."""
    session = AgentSession.objects.filter(agent=agent.pk, session_id=session_id).first()
    if session is not None:
        lifecycle.close_session(session)


def _metadata(client: Client | None) -> dict[str, Any]:
    return {"client": client.as_json()} if client else {}


def remember(session: AgentSession, client: Client | None) -> None:
    """Keep the client's name with a session that was opened without one."""
    metadata = json.loads(session.metadata)
    if client is None or "client" in metadata:
        return
    session.metadata = canonical({**metadata, **_metadata(client)})
    session.save(update_fields=["metadata"])
