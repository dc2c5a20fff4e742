"""Toolcrib from an agent's side: the agent API in Python, and a loop around a model.

Needs httpx2 and nothing else: no Django, no settings. `toolcrib/client*.py` and
`toolcrib/lib/errors.py` may be copied into any project.
"""

from toolcrib.client_asks import CallResult, Catalog, Found, Loaded, Session, State
from toolcrib.client_http import ApiError, AsyncToolcrib, Toolcrib, Unreachable
from toolcrib.client_loop import AgentLoop, AsyncAgentLoop
from toolcrib.client_providers import ToolCall, ToolResult
from toolcrib.client_state import ResumedState, prepare_resumed_state
from toolcrib.client_steps import MissingServers, ToolFailed
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
