"""JSON-RPC error responses of the MCP endpoint."""

from collections.abc import Mapping

from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.protocols.asgi import Send, error_headers, send_response

SERVER_ERROR = -32000  # JSON-RPC reserves -32000 to -32099 for server errors

Id = int | str | None


class ProtocolError(Exception):
    """A request that violates the protocol: a JSON-RPC error with an HTTP status."""

    def __init__(self, status: int, code: int, message: str, data: object = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.data = status, code, message, data


def error_message(request_id: Id, code: int, message: str, data: object = None) -> str:
    error = {"code": code, "message": message}
    if data is not None:
        error["data"] = data
    return canonical({"jsonrpc": "2.0", "id": request_id, "error": error})


async def send_protocol_error(send: Send, error: ProtocolError, request_id: Id = None) -> None:
    body = error_message(request_id, error.code, error.message, error.data)
    await send_response(send, error.status, "application/json", body.encode())


async def send_error(
    send: Send, error: ToolcribError, extra_headers: Mapping[str, str] | None = None
) -> None:
    """Send an error of Toolcrib's own; without an id, since it is not about the message."""
    body = error_message(None, SERVER_ERROR, error.sentence, error.as_json()["error"])
    headers = {**error_headers(error), **(extra_headers or {})}
    await send_response(send, error.status, "application/json", body.encode(), headers)
