"""Map SDK exceptions to UpstreamError, with a code and a message."""

import mcp_types as types
from django.conf import settings
from mcp.shared.exceptions import MCPError

from servers.connections.connection_state import ConnectionState
from servers.connections.streams import unreadable_error
from servers.errors import UpstreamError, not_mcp_error
from servers.transports.request_trace import RequestTrace
from servers.transports.response_body import BodyError


def handshake_timeout(detail: str = "") -> UpstreamError:
    return UpstreamError(
        f"The server did not complete the handshake within {settings.HANDSHAKE_TIMEOUT} s.",
        code="timeout",
        hint="It may not support MCP, or be slow to start. TOOLCRIB_HANDSHAKE_TIMEOUT sets the "
        "limit.",
        detail=detail,
    )


def flatten_errors(error: BaseException | None) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [inner for each in error.exceptions for inner in flatten_errors(each)]
    return [] if error is None else [error]


async def explain_error(
    error: BaseException | None,
    trace: RequestTrace,
    state: ConnectionState,
    when: str,
    *,
    in_handshake: bool = False,
) -> UpstreamError:
    """Return the UpstreamError for an SDK exception, from the most specific source available."""
    errors = flatten_errors(error)
    for each in errors:
        if isinstance(each, UpstreamError):
            return each
        if isinstance(each, BodyError):
            return each.error
    if trace.error is not None:
        return trace.error
    codes = [each.code for each in errors if isinstance(each, MCPError)]
    if state.error is not None or types.CONNECTION_CLOSED in codes or not errors:
        return await state.close_reason(when)
    if in_handshake and types.PARSE_ERROR in codes:
        return not_mcp_error("something that is not MCP")
    if types.PARSE_ERROR in codes:
        return unreadable_error()
    if types.REQUEST_TIMEOUT in codes:
        return handshake_timeout(state.stderr_tail())
    if codes:
        return UpstreamError(
            f"The server answered with error {codes[0]} {when}.",
            hint="This is a bug in the server, or it does not support the request.",
        )
    kinds = ", ".join(sorted({type(each).__name__ for each in errors}))
    return UpstreamError(
        f"The server violated the protocol {when} ({kinds}).",
        hint="It may use a version of MCP that Toolcrib does not support.",
    )
