"""Client of Toolcrib's agent API, and an agent loop around a model.

`Toolcrib` and `AsyncToolcrib` send requests with retries; `AgentLoop` and `AsyncAgentLoop` answer
every tool call of a model's reply. Needs httpx2 and nothing of the server.
"""

from toolcrib_client.errors import ToolcribError
from toolcrib_client.http import ApiError, AsyncToolcrib, Toolcrib, Unreachable
from toolcrib_client.loop import AgentLoop, AsyncAgentLoop
from toolcrib_client.providers import ToolCall, ToolResult
from toolcrib_client.requests import CallResult, Catalog, Found, Loaded, Session, State
from toolcrib_client.resume import ResumedState, prepare_resumed_state
from toolcrib_client.steps import MissingServers, ToolFailed

__version__ = "0.1.0"

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
