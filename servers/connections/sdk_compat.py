"""Requests that go past the SDK's own checks: stamped as it would, sent through it or beside it.

`session.list_tools` fails as a whole when one tool is malformed, and `call_tool` validates on the
event loop. `_stamp` and `_dispatcher` are private, hence mcp<2.4; nothing else touches them.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from mcp.client import ClientSession
from mcp.shared.inbound import find_invalid_x_mcp_header, mcp_param_headers, x_mcp_header_map

from servers.spec import OnProgress


def stamp_request(
    session: ClientSession,
    method: str,
    params: dict[str, Any],
    headers: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], Any]:
    """Return parameters and options with what the protocol in use adds to a request."""
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

    With `resume`, ask for what is left of an answer's stream instead of asking again.
    """
    sent, options = stamp_request(session, method, params, headers)
    if on_progress is not None:
        options["on_progress"] = _awaitable(on_progress)
    if resume is not None:
        options["resumption_token"] = resume
    return await session._dispatcher.send_raw_request(method, sent, options)


def param_headers(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments that a tool wants repeated in headers, as the newer era does."""
    if find_invalid_x_mcp_header(schema) is not None:
        return {}
    return mcp_param_headers(x_mcp_header_map(schema), arguments)


def _awaitable(on_progress: OnProgress) -> Callable[..., Coroutine[Any, Any, None]]:
    async def report(progress: float, total: float | None, message: str | None) -> None:
        on_progress(progress, total, message)

    return report
