"""Models for agents, sessions and calls.

Values sent by agents and servers are stored as JSON text, not as jsonb, which rejects some of them
and does not preserve key order.
"""

from sessions_app.models.agents import Agent, AgentGroup, ApiKey, KeyScope, Mode, Strategy
from sessions_app.models.calls import (
    IN_FLIGHT,
    Call,
    CallAnswer,
    CallPath,
    CallState,
    Event,
    EventKind,
    new_call_id,
)
from sessions_app.models.sessions import (
    AgentSession,
    Expansion,
    McpConnection,
    SessionState,
    ShownDefinition,
    new_session_id,
)

__all__ = [
    "IN_FLIGHT",
    "Agent",
    "AgentGroup",
    "AgentSession",
    "ApiKey",
    "Call",
    "CallAnswer",
    "CallPath",
    "CallState",
    "Event",
    "EventKind",
    "Expansion",
    "KeyScope",
    "McpConnection",
    "Mode",
    "SessionState",
    "ShownDefinition",
    "Strategy",
    "new_call_id",
    "new_session_id",
]
