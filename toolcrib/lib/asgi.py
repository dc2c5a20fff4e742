"""ASGI types, request-body reading and response sending for handlers outside Django."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def single_headers(scope: Scope) -> dict[bytes, bytes] | None:
    """Return the headers by name, or None if any header is repeated."""
    headers = dict(scope["headers"])
    return headers if len(headers) == len(scope["headers"]) else None


async def read_body(receive: Receive) -> tuple[bytes, bool]:
    """Return a request's body and whether it was received completely."""
    message = await receive()
    body: bytes = message.get("body", b"")
    chunks = [body]
    while message["type"] == "http.request" and message.get("more_body"):
        message = await receive()
        chunks.append(message.get("body", b""))
    return b"".join(chunks), message["type"] == "http.request"


async def send_response(
    send: Send,
    status: int,
    content_type: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send a complete response. Header values must be latin-1."""
    all_headers = {
        "content-type": content_type,
        "content-length": str(len(body)),
        "x-content-type-options": "nosniff",
        **(headers or {}),
    }
    raw = [(name.encode(), value.encode("latin-1")) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
