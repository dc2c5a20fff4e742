"""Private attributes of the MCP SDK: raw requests of a client, connections of the server.

`session.list_tools` fails entirely when one tool is malformed, and `call_tool` validates on the
event loop. Hence mcp<2.4; no other module uses private attributes of the SDK.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from mcp.client import ClientSession
from mcp.shared.inbound import find_invalid_x_mcp_header, mcp_param_headers, x_mcp_header_map

from servers.spec import OnProgress

if TYPE_CHECKING:
    from mcp.server.connection import Connection
    from mcp.server.context import ServerRequestContext


def stamp_request(
    session: ClientSession,
    method: str,
    params: dict[str, Any],
    headers: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], Any]:
    """Return params and options with the additions of the negotiated protocol version."""
    data: dict[str, Any] = {"method": method, "params": params}
    options: Any = {}
    session._stamp(data, options)
    options["headers"].update(headers or {})
    return data["params"], options


async def raw_request(
    session: ClientSession,
    method: str,
    params: dict[str, Any],
    headers: Mapping[str, str] | None = None,
    *,
    on_progress: OnProgress | None = None,
    resume: str | None = None,
) -> dict[str, Any]:
    """Send a request and return its result unvalidated.

    With `resume`, resume the stream of an earlier response instead of sending the request again.
    """
    stamped, options = stamp_request(session, method, params, headers)
    if on_progress is not None:
        options["on_progress"] = _awaitable(on_progress)
    if resume is not None:
        options["resumption_token"] = resume
    return await session._dispatcher.send_raw_request(method, stamped, options)


def connection_of(ctx: "ServerRequestContext[Any, Any]") -> "Connection":
    """Return the handshake connection of a request to the MCP endpoint."""
    return ctx.session._connection


def param_headers(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments that the tool's schema maps to headers (modern protocol)."""
    if find_invalid_x_mcp_header(schema) is not None:
        return {}
    return mcp_param_headers(x_mcp_header_map(schema), arguments)


def _awaitable(on_progress: OnProgress) -> Callable[..., Coroutine[Any, Any, None]]:
    async def report(progress: float, total: float | None, message: str | None) -> None:
        on_progress(progress, total, message)

    return report
