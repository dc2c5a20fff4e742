"""The short way for `POST /api/v1/sessions/{id}/call`: no Django request, no ORM.

It takes only what it knows to the last detail: a good key, an open session, a tool that may be
called, a plain JSON body. Everything else, and every refusal, goes to the ordinary route (api.py)
with the body it has read, so there is one place that says no, and answers are the same bytes
whichever way they went.
"""

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from functools import lru_cache
from typing import Any, TypeVar

from django.conf import settings
from django.db import DatabaseError
from django.http.request import split_domain_port, validate_host

from sessions_app import dispatch, keys
from sessions_app.planning import CallRequest
from sessions_app.strict_json import parsed
from toolcrib.errors import Failed, ToolcribError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

START, END = "/api/v1/sessions/", "/call"
COUNTED = "toolcrib.counted"  # in the scope: the limit that the call was held to already
FIELDS = frozenset({"tool_name", "arguments", "timeout"})


class Gone(Exception):
    """The caller has left, and no answer can reach them."""


def is_call(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.endswith(END) and path.startswith(START) and scope["method"] == "POST"


async def call(scope: Scope, receive: Receive, send: Send, ordinary: Application) -> None:
    """Answer a call the short way, or hand it to the ordinary route."""
    session_id = scope["path"][len(START) : -len(END)]
    token, key = _recognised(scope)
    if token is None:
        await ordinary(scope, receive, send)
        return
    body, whole = await whole_body(receive)
    request = _request(body, key) if whole else None
    answer: str | int = 0
    if request is not None:
        try:
            working = dispatch.quickly(token, session_id, request, len(body))
            answer = await unless_gone(working, receive)
        except Gone:
            return
        except ToolcribError as error:
            await _refuse(send, error)
            return
        except DatabaseError as error:
            logger.error("The database did not answer: %s", error)  # noqa: TRY400 - as the API does
            await _refuse(send, _away())
            return
        except Exception:
            mark = secrets.token_hex(6)
            logger.exception("Request %s failed", mark)
            await _refuse(send, Failed(mark))
            return
    if isinstance(answer, str):
        await _answer(send, 200, b"application/json", answer.encode())
        return
    scope[COUNTED] = answer
    await ordinary(scope, again(body, whole, receive), send)


async def unless_gone(working: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Wait for an answer for as long as the caller does; give the call up when they leave."""
    task, watch = asyncio.current_task(), asyncio.ensure_future(receive())
    assert task is not None  # noqa: S101 - a coroutine that runs has one
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
            raise Gone from None
        raise
    finally:
        waiting = False
        watch.cancel()


def _recognised(scope: Scope) -> tuple[str | None, str | None]:
    """Return the digest of the key that a plain request carries, and the idempotency key."""
    found = single_headers(scope)
    if found is None:
        return None, None
    length = found.get(b"content-length", b"")
    scheme, _, token = found.get(b"authorization", b"").partition(b" ")
    plain = (
        scheme == b"Bearer"
        and length.isdigit()
        and int(length) <= settings.MAX_BODY_BYTES
        and found.get(b"content-type", b"").lower() == b"application/json"
        and b"transfer-encoding" not in found
        and b"content-encoding" not in found
        and not scope["query_string"]
        and is_ours(found.get(b"host", b""))
    )
    if not plain:
        return None, None
    if not token.startswith(keys.PREFIX.encode()):
        return None, None
    digest = hashlib.sha256(token).hexdigest()
    key = found.get(b"idempotency-key")
    return digest, None if key is None else key.decode("latin-1")


def single_headers(scope: Scope) -> dict[bytes, bytes] | None:
    """Return the headers by name; None where one is there twice, which others know to join."""
    found = dict(scope["headers"])
    return found if len(found) == len(scope["headers"]) else None


@lru_cache(maxsize=64)
def is_ours(host: bytes) -> bool:
    domain, _ = split_domain_port(host.decode("latin-1"))
    return bool(domain) and validate_host(domain, settings.ALLOWED_HOSTS)


async def whole_body(receive: Receive) -> tuple[bytes, bool]:
    """Return a request's body, and whether it came to its end."""
    message = await receive()
    body: bytes = message.get("body", b"")
    chunks = [body]
    while message["type"] == "http.request" and message.get("more_body"):
        message = await receive()
        chunks.append(message.get("body", b""))
    return b"".join(chunks), message["type"] == "http.request"


def again(body: bytes, whole: bool, receive: Receive) -> Receive:
    """Give what was read to somebody else."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        if not whole:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _request(body: bytes, key: str | None) -> CallRequest | None:
    """Read a body of the plain form; None where api.py has to say what is wrong with it."""
    try:
        given = parsed(body)
    except (ValueError, RecursionError, ToolcribError):
        return None
    if not isinstance(given, dict) or not given.keys() <= FIELDS:
        return None
    name, timeout = given.get("tool_name"), given.get("timeout")
    if not isinstance(name, str) or not 0 < len(name) <= 500:
        return None
    if timeout is not None and not (type(timeout) in (int, float) and 0 < timeout <= 900):
        return None
    return CallRequest(name, given.get("arguments"), timeout, key)


def _away() -> ToolcribError:
    return ToolcribError(
        "The database does not answer.",
        hint="Try again.",
        code="busy",
        status=503,
    )


async def _refuse(send: Send, error: ToolcribError) -> None:
    body = json.dumps(error.as_json()).encode()
    wait = str(error.details.get("retry_after", "2" if error.message == _away().message else ""))
    more = [(b"retry-after", wait.encode())] if wait else []
    if error.status == 401:
        more.append((b"www-authenticate", b"Bearer"))
    await _answer(send, error.status, b"application/json; charset=utf-8", body, more)


async def _answer(
    send: Send,
    status: int,
    kind: bytes,
    body: bytes,
    more: list[tuple[bytes, bytes]] | None = None,
) -> None:
    headers = [
        (b"content-type", kind),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", secrets.token_hex(6).encode()),
        (b"x-content-type-options", b"nosniff"),
        *(more or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
