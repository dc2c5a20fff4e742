"""Python client for the agent API, and an agent loop around a model.

Needs only httpx2: no Django, no settings. `toolcrib/client/` and `toolcrib/lib/errors.py` can be
copied into any project.
"""

from toolcrib.client.http import ApiError, AsyncToolcrib, Toolcrib, Unreachable
from toolcrib.client.loop import AgentLoop, AsyncAgentLoop
from toolcrib.client.providers import ToolCall, ToolResult
from toolcrib.client.requests import CallResult, Catalog, Found, Loaded, Session, State
from toolcrib.client.resume import ResumedState, prepare_resumed_state
from toolcrib.client.steps import MissingServers, ToolFailed
from toolcrib.lib.errors import ToolcribError

__all__ = [
    "AgentLoop",
    "ApiError",
    "AsyncAgentLoop",
    "AsyncToolcrib",
    "CallResult",
    "Catalog",
    "Found",
    "Loaded",
    "MissingServers",
    "ResumedState",
    "Session",
    "State",
    "ToolCall",
    "ToolFailed",
    "ToolResult",
    "Toolcrib",
    "ToolcribError",
    "Unreachable",
    "prepare_resumed_state",
]
