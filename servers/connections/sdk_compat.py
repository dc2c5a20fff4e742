"""Private attributes of the MCP SDK: raw requests of a client.

`session.list_tools` fails entirely when one tool is malformed, and `call_tool` validates on the
event loop. Hence mcp<2.4; no other module uses private attributes of the SDK.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from mcp.client import ClientSession
from mcp.shared.inbound import (
    find_invalid_x_mcp_header,
    mcp_param_headers,
    x_mcp_header_map,
)
from mcp_types import CLIENT_CAPABILITIES_META_KEY

from servers.spec import OnProgress

Stamp = Callable[[dict[str, Any], Any], None]


def stamp_of(session: ClientSession) -> Stamp:
    """Return the function that adds what the protocol version requires to (message, options)."""
    return session._stamp


async def raw_request(
    session: ClientSession,
    method: str,
    params: dict[str, Any],
    headers: Mapping[str, str] | None = None,
    *,
    on_progress: OnProgress | None = None,
    resume: str | None = None,
    capabilities: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Send a request, or resume the stream of an earlier response; return the raw result."""
    message: dict[str, Any] = {"method": method, "params": params}
    options: Any = {}
    stamp_of(session)(message, options)
    options["headers"].update(headers or {})
    if capabilities is not None:  # of the calling client, in versions that declare them here
        meta = message["params"]["_meta"]
        own = meta.get(CLIENT_CAPABILITIES_META_KEY) or {}
        meta[CLIENT_CAPABILITIES_META_KEY] = {**own, **capabilities}
    if on_progress is not None:
        options["on_progress"] = _awaitable(on_progress)
    if resume is not None:
        options["resumption_token"] = resume
    return await session._dispatcher.send_raw_request(method, message["params"], options)


def param_headers(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments that the tool's schema maps to headers (modern protocol)."""
    if find_invalid_x_mcp_header(schema) is not None:
        return {}
    return mcp_param_headers(x_mcp_header_map(schema), arguments)


def _awaitable(on_progress: OnProgress) -> Callable[..., Coroutine[Any, Any, None]]:
    async def report(progress: float, total: float | None, message: str | None) -> None:
        on_progress(progress, total, message)

    return report
