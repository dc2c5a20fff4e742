"""ASGI types, requests and responses of handlers outside Django."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any, TypeVar

from toolcrib.lib.errors import ToolcribError

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_KEY_LENGTH = 100
DRAIN_BYTES = 32 * 1024 * 1024  # read of a body that is too large, so that the client can finish
WATCH_DELAY = 0.02  # seconds before a disconnect is noticed
OPTIONAL_WHITESPACE = b" \t"  # allowed around header values; ASGI servers do not strip it


class ClientDisconnected(Exception):
    """The client disconnected before the response was ready."""


class BodyTooLarge(ToolcribError):
    code = "too_large"
    status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The request body exceeds {limit // 1024} KB.", hint="Send a smaller request."
        )


def read_headers(scope: Scope) -> dict[str, str]:
    """Return the headers by name; repeated ones are joined with commas, as in HTTP."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1"), value.strip(OPTIONAL_WHITESPACE).decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


def content_type_of(headers: Mapping[str, str]) -> str:
    """Return the content type without its parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def bearer_digest(headers: Mapping[str, str]) -> str:
    """Return the SHA-256 of the key in an Authorization header; empty if there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key or len(key) > MAX_KEY_LENGTH:
        return ""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


async def read_body(receive: Receive, limit: int) -> bytes:
    """Return a request's body. Raises BodyTooLarge or ClientDisconnected."""
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            await drain_body(receive, message)
            raise BodyTooLarge(limit)
        more = message.get("more_body", False)
    return b"".join(chunks) if len(chunks) > 1 else chunks[0]


async def drain_body(receive: Receive, message: Message) -> None:
    """Read the rest of a body after `message`: many clients read a response only after sending.

    Closing a connection with unread data resets it, and the response is lost.
    """
    size = 0
    while message.get("more_body") and size < DRAIN_BYTES:
        message = await receive()
        size += len(message.get("body", b""))


async def cancel_on_disconnect(working: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Await a coroutine; if the client disconnects, cancel it and raise ClientDisconnected.

    Watching costs a task, so it begins only when the coroutine has not ended soon.
    """
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - a running coroutine has a task
    watch: asyncio.Future[Message] | None = None
    waiting, left = True, False

    def begin() -> None:
        nonlocal watch
        watch = asyncio.ensure_future(receive())
        watch.add_done_callback(leave)

    def leave(_: object) -> None:
        nonlocal left
        if waiting:
            left = True
            task.cancel()

    timer = asyncio.get_running_loop().call_later(WATCH_DELAY, begin)
    try:
        return await working
    except asyncio.CancelledError:
        if left and not task.uncancel():
            raise ClientDisconnected from None
        raise
    finally:
        waiting = False
        timer.cancel()
        if watch is not None:
            watch.cancel()


async def send_response(
    send: Send,
    status: int,
    content_type: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send a complete response. Header values must be latin-1."""
    raw = [
        (b"content-type", content_type.encode()),
        (b"content-length", b"%d" % len(body)),
        (b"x-content-type-options", b"nosniff"),
    ]
    if headers:
        raw += [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def without_body(send: Send) -> Send:
    """Send the headers of a response to GET, for a HEAD request."""

    async def send_headers(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_headers


def error_headers(error: ToolcribError) -> dict[str, str]:
    """Return the headers that belong to an error response."""
    headers = {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["connection"] = "close"
    if "retry_after" in error.details:
        headers["retry-after"] = str(error.details["retry_after"])
    return headers
