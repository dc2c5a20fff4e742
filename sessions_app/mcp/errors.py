"""How the MCP endpoint says no outside the SDK: in JSON-RPC, with the one shape of errors in it."""

import json
from collections.abc import Mapping

from toolcrib.lib.asgi import Send, send_response
from toolcrib.lib.errors import ToolcribError

REFUSED = -32000  # of the range that JSON-RPC leaves to servers


def as_rpc(error: ToolcribError) -> dict[str, object]:
    """The error of a message that has no id, since none was read."""
    said = {"code": REFUSED, "message": error.sentence, "data": error.as_json()["error"]}
    return {"jsonrpc": "2.0", "id": None, "error": said}


async def refuse(send: Send, error: ToolcribError, more: Mapping[str, str] | None = None) -> None:
    headers = dict(more or {})
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["connection"] = "close"
    if "retry_after" in error.details:
        headers["retry-after"] = str(error.details["retry_after"])
    body = json.dumps(as_rpc(error), ensure_ascii=False)
    await send_response(send, error.status, "application/json", body.encode(), headers)
