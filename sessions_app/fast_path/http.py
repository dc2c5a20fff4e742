"""HTTP requests and responses of the fast paths, without Django.

A fast path handles only plain requests and passes all others to the ordinary route.
"""

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache
from typing import Any, TypeVar, TypeVarTuple

from django.conf import settings
from django.http.request import split_domain_port, validate_host

from sessions_app.agents import api_keys
from toolcrib.lib.asgi import Message, Receive, Scope, Send, send_response, single_headers
from toolcrib.lib.errors import ToolcribError

T = TypeVar("T")
More = TypeVarTuple("More")

START = "/api/v1/sessions/"
RATE_LIMIT_CHECKED = "toolcrib.counted"  # scope key: the rate limit a call was counted against
ON_LOOP = 64 * 1024  # larger bodies are parsed off the event loop: they are not authenticated yet


class ClientDisconnected(Exception):
    """The client disconnected before the response was ready."""


# --- Requests -------------------------------------------------------------------------------------


def match_fast_path(scope: Scope) -> tuple[str, dict[bytes, bytes]] | None:
    """Return the digest of a plain request's key, and its headers; None for other requests."""
    found = single_headers(scope)
    if found is None:
        return None
    length = found.get(b"content-length", b"")
    scheme, _, token = found.get(b"authorization", b"").partition(b" ")
    plain = (
        scheme == b"Bearer"
        and token.startswith(api_keys.PREFIX.encode())
        and length.isdigit()
        and int(length) <= settings.MAX_BODY_BYTES
        and found.get(b"content-type", b"").lower() == b"application/json"
        and b"transfer-encoding" not in found
        and b"content-encoding" not in found
        and not scope["query_string"]
        and is_allowed_host(found.get(b"host", b""))
    )
    return (hashlib.sha256(token).hexdigest(), found) if plain else None


@lru_cache(maxsize=64)
def is_allowed_host(host: bytes) -> bool:
    domain, _ = split_domain_port(host.decode("latin-1"))
    return bool(domain) and validate_host(domain, settings.ALLOWED_HOSTS)


async def run_off_loop_if_large(read: Callable[[bytes, *More], T], body: bytes, *more: *More) -> T:
    """Parse a body; a large one is parsed in a thread."""
    if len(body) <= ON_LOOP:
        return read(body, *more)
    return await asyncio.to_thread(read, body, *more)


def replay_body(body: bytes, complete: bool, receive: Receive) -> Receive:
    """Return a `receive` that replays a body that has been read."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        if not complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def cancel_on_disconnect(working: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Await a coroutine, and cancel it if the client disconnects."""
    task, watch = asyncio.current_task(), asyncio.ensure_future(receive())
    assert task is not None  # noqa: S101 - a running coroutine has a task
    waiting, left = True, False

    def leave(_: object) -> None:
        nonlocal left
        if waiting:
            left = True
            task.cancel()

    watch.add_done_callback(leave)
    try:
        return await working
    except asyncio.CancelledError:
        if left and not task.uncancel():
            raise ClientDisconnected from None
        raise
    finally:
        waiting = False
        watch.cancel()


# --- Responses ------------------------------------------------------------------------------------


async def send_json(send: Send, body: str) -> None:
    await _answer(send, 200, "application/json", body.encode())


async def send_error(send: Send, error: ToolcribError) -> None:
    headers = {}
    if "retry_after" in error.details:
        headers["retry-after"] = str(error.details["retry_after"])
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = json.dumps(error.as_json()).encode()
    await _answer(send, error.status, "application/json; charset=utf-8", body, headers)


async def _answer(
    send: Send, status: int, kind: str, body: bytes, headers: Mapping[str, str] | None = None
) -> None:
    marked = {"x-request-id": secrets.token_hex(6), **(headers or {})}
    await send_response(send, status, kind, body, marked)
