"""JSON-RPC error responses of the MCP endpoint, for requests that do not reach the SDK."""

import json
from collections.abc import Mapping

from toolcrib.lib.asgi import Send, send_response
from toolcrib.lib.errors import ToolcribError

SERVER_ERROR = -32000  # JSON-RPC reserves -32000 to -32099 for server errors


def to_jsonrpc(error: ToolcribError) -> dict[str, object]:
    """Return an error as a JSON-RPC response; without an id, since the request was not parsed."""
    body = {"code": SERVER_ERROR, "message": error.sentence, "data": error.as_json()["error"]}
    return {"jsonrpc": "2.0", "id": None, "error": body}


async def send_error(
    send: Send, error: ToolcribError, extra_headers: Mapping[str, str] | None = None
) -> None:
    headers = dict(extra_headers or {})
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["connection"] = "close"
    if "retry_after" in error.details:
        headers["retry-after"] = str(error.details["retry_after"])
    body = json.dumps(to_jsonrpc(error), ensure_ascii=False)
    await send_response(send, error.status, "application/json", body.encode(), headers)
