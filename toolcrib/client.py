"""Deprecated name of the Python client: import `toolcrib_client` instead. Gone in 0.2."""

import warnings

from toolcrib_client import (
    AgentLoop,
    ApiError,
    AsyncAgentLoop,
    AsyncToolcrib,
    CallResult,
    Catalog,
    Found,
    Loaded,
    MissingServers,
    ResumedState,
    Session,
    State,
    ToolCall,
    Toolcrib,
    ToolcribError,
    ToolFailed,
    ToolResult,
    Unreachable,
    prepare_resumed_state,
)

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

warnings.warn(
    "toolcrib.client is now the package toolcrib-client: import toolcrib_client.",
    DeprecationWarning,
    stacklevel=2,
)
