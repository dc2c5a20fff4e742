"""Models for agents, sessions and calls.

Values sent by agents and servers are stored as JSON text, not as jsonb, which rejects some of them
and does not preserve key order.
"""

from sessions_app.models.agents import Agent, AgentGroup, ApiKey, KeyScope, Mode, Strategy
from sessions_app.models.calls import (
    IN_FLIGHT,
    NOT_RUN,
    UNFINISHED,
    WAITING,
    Call,
    CallAnswer,
    CallPath,
    CallState,
    Event,
    EventKind,
    new_call_id,
)
from sessions_app.models.conversations import WaitingConversation
from sessions_app.models.encryption import DataKey
from sessions_app.models.held_calls import Grant, HeldCall
from sessions_app.models.notifications import (
    Alert,
    AlertKind,
    Delivery,
    DeliveryState,
    Webhook,
    WebhookKind,
)
from sessions_app.models.rules import Approver, Rule, RuleEffect, SessionRead, ToolUse
from sessions_app.models.saved_filters import SavedView
from sessions_app.models.scripts import (
    ENDED_RUNS,
    RunState,
    ScriptLanguage,
    ScriptRun,
    new_run_id,
)
from sessions_app.models.sessions import (
    AgentSession,
    Expansion,
    McpConnection,
    RollingSession,
    SessionState,
    ShownDefinition,
    new_session_id,
)
from sessions_app.models.usage import UsageDay, UsageHour, UsageKind

__all__ = [
    "ENDED_RUNS",
    "IN_FLIGHT",
    "NOT_RUN",
    "UNFINISHED",
    "WAITING",
    "Agent",
    "AgentGroup",
    "AgentSession",
    "Alert",
    "AlertKind",
    "ApiKey",
    "Approver",
    "Call",
    "CallAnswer",
    "CallPath",
    "CallState",
    "DataKey",
    "Delivery",
    "DeliveryState",
    "Event",
    "EventKind",
    "Expansion",
    "Grant",
    "HeldCall",
    "KeyScope",
    "McpConnection",
    "Mode",
    "RollingSession",
    "Rule",
    "RuleEffect",
    "RunState",
    "SavedView",
    "ScriptLanguage",
    "ScriptRun",
    "SessionRead",
    "SessionState",
    "ShownDefinition",
    "Strategy",
    "ToolUse",
    "UsageDay",
    "UsageHour",
    "UsageKind",
    "WaitingConversation",
    "Webhook",
    "WebhookKind",
    "new_call_id",
    "new_run_id",
    "new_session_id",
]
