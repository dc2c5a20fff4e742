"""ASGI application: request routing, body limits, and error responses outside Django.

`/api/` is handled by Django without cookies, sessions and CSRF, which takes a third of the time
and rules out attacks through cookies; `/mcp` by the MCP endpoint; calls, searches, loads and
details by the session endpoint; everything else by Django with all middleware.
"""

import asyncio
import json
import logging
import os
import re
import secrets
import warnings
from collections import deque
from collections.abc import MutableMapping
from contextlib import AsyncExitStack
from functools import lru_cache
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")

import django

django.setup()

from django.conf import settings  # noqa: E402
from django.core.exceptions import ImproperlyConfigured  # noqa: E402
from django.core.handlers.asgi import ASGIHandler  # noqa: E402
from django.http.request import split_domain_port, validate_host  # noqa: E402

from sessions_app.agents import rate_limits, slots  # noqa: E402
from sessions_app.agents.rate_limits import RateLimited  # noqa: E402
from sessions_app.mcp import endpoint as mcp_endpoint  # noqa: E402
from sessions_app.mcp import errors as mcp_errors  # noqa: E402
from sessions_app.sessions import endpoint as session_endpoint  # noqa: E402
from toolcrib.http import cross_origin  # noqa: E402
from toolcrib.http.http_protocol import ClientState  # noqa: E402
from toolcrib.lib.errors import InternalError, ToolcribError  # noqa: E402
from toolcrib.lib.protocols.asgi import (  # noqa: E402
    BodyTooLarge,
    Receive,
    Scope,
    Send,
    bearer_digest,
    drain_body,
    error_headers,
    read_headers,
    send_response,
)
from toolcrib.runtime.lifespan import runtime  # noqa: E402

# WhiteNoise returns files as synchronous iterators; they are small enough to read at once.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous")

logger = logging.getLogger(__name__)

FORM_OVERHEAD = 64 * 1024  # bytes around form fields; Django enforces the exact limit
# For people who are signed in: served with cookies and the headers of pages.
API_DOCS = {"/api/v1/docs", "/api/v1/openapi.json"}
# Requests that compute: they take a slot of their key.
COMPUTING_PATH = re.compile(
    r"/api/v1/(?:catalog|sessions(?:/[^/]+(?:/(?:catalog|events|export|fork|preload|sdk|servers|tools))?)?)/?"
)


class ApiHandler(ASGIHandler):
    """Django handler with the reduced middleware of the bearer-only API."""

    def load_middleware(self, is_async: bool = False) -> None:
        page_middleware = settings.MIDDLEWARE
        settings.MIDDLEWARE = settings.API_MIDDLEWARE
        try:
            super().load_middleware(is_async)
        finally:
            settings.MIDDLEWARE = page_middleware


class RequestBodyRejected(Exception):
    """A request body that is too large or too slow. `error` is the response."""

    def __init__(self, error: ToolcribError) -> None:
        super().__init__(error.message)
        self.error = error


def _limit_body_size(receive: Receive) -> Receive:
    """Limit the size of a request body while it arrives, before Django writes it to disk."""
    size = 0

    async def receive_limited() -> MutableMapping[str, Any]:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > settings.MAX_BODY_BYTES + FORM_OVERHEAD:
            await drain_body(receive, message)
            raise RequestBodyRejected(BodyTooLarge(settings.MAX_BODY_BYTES))
        return message

    return receive_limited


def _limit_body_time(receive: Receive) -> Receive:
    """Limit the time in which a request body must arrive. Later messages have no timeout."""
    deadline = asyncio.get_running_loop().time() + settings.BODY_TIMEOUT
    is_complete = False

    async def receive_timed() -> MutableMapping[str, Any]:
        nonlocal is_complete
        if is_complete:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            message_text = f"The request body did not arrive within {settings.BODY_TIMEOUT} s."
            raise RequestBodyRejected(
                ToolcribError(message_text, hint="Retry.", code="too_slow", status=408)
            ) from None
        is_complete = not message.get("more_body")
        return message

    return receive_timed


async def _read_ahead(receive: Receive) -> Receive:
    """Read the request body, and return a `receive` that replays it."""
    messages = deque([await receive()])
    while messages[-1].get("more_body"):
        messages.append(await receive())

    async def replay() -> MutableMapping[str, Any]:
        return messages.popleft() if messages else await receive()

    return replay


def _delay_rejections(send: Send) -> Send:
    async def delayed_send(message: MutableMapping[str, Any]) -> None:
        if message.get("status") == RateLimited.status:
            await rate_limits.delay_rejection()
        await send(message)

    return delayed_send


class WrongHost(ToolcribError):
    """A host name that is not ours, to prevent DNS rebinding."""

    code = "wrong_host"
    status = 421

    def __init__(self) -> None:
        super().__init__(
            "Unknown host.",
            hint="Use Toolcrib's own address; TOOLCRIB_HOSTS sets additional hosts.",
        )


@lru_cache(maxsize=64)
def check_host(host: bytes) -> None:
    """Raise WrongHost for a host that is not allowed."""
    domain, _ = split_domain_port(host.decode("latin-1"))
    if not domain or not validate_host(domain, settings.ALLOWED_HOSTS):
        raise WrongHost


# Where clients look for OAuth. They print what they find there, so it must not be a page.
OAUTH_PATH = re.compile(
    r"(?:/mcp(?:/[^/]+)?)?/\.well-known/(?:oauth-|openid-configuration).*|(?:/mcp)?/register"
)


class NoOAuth(ToolcribError):
    status = 404

    def __init__(self) -> None:
        super().__init__(
            "Toolcrib has no OAuth.",
            hint="Send an agent's key in the header Authorization: Bearer tcb_…",
            code="no_oauth",
        )


def is_mcp_path(path: str) -> bool:
    return path == "/mcp" or path.startswith("/mcp/")


def is_api_path(path: str) -> bool:
    return path.startswith("/api/") and path not in API_DOCS


def _has_key(scope: Scope) -> bool:
    """Return whether a successful response would mean that the client has a valid key."""
    needs_key = is_mcp_path(scope["path"]) or is_api_path(scope["path"])
    return needs_key and any(name == b"authorization" for name, _ in scope["headers"])


class ResponseGuard:
    """Response of one request. An error response can be sent while none has started."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._path, self._send = scope["path"], send
        self.started = self._finished = False
        state = scope.get("state")
        self._client: ClientState | None = state.get("client") if state else None
        if self._client is not None and (self._client.is_known or not _has_key(scope)):
            self._client = None  # nothing to find out

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if not self._finished:  # ignore a handler that continues after its request was aborted
            if self._client is not None and not self.started and message["status"] < 400:
                self._client.is_known = True
            self.started = True
            await self._send(message)

    async def send_error(self, error: ToolcribError) -> None:
        """Send an error in the format of this path (MCP, JSON or text) and close the connection."""
        self._finished = True
        headers = {**error_headers(error), "connection": "close"}
        if is_mcp_path(self._path):
            await mcp_errors.send_error(self._send, error, headers)
            return
        is_api = self._path.startswith("/api/")
        text = json.dumps(error.as_json()) if is_api else f"{error.sentence}\n"
        content_type = "application/json" if is_api else "text/plain"
        await send_response(
            self._send, error.status, f"{content_type}; charset=utf-8", text.encode(), headers
        )


def _stopping() -> ToolcribError:
    return ToolcribError(
        "Toolcrib is shutting down.",
        hint="Retry in a moment.",
        code="stopping",
        status=503,
        details={"retry_after": 2},
    )


class Router:
    def __init__(self) -> None:
        self.pages = ASGIHandler()
        self.api = ApiHandler()
        self.mcp = mcp_endpoint.Endpoint()
        self.session_endpoint = session_endpoint.serve
        self.started = False
        self._start_lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.lifespan(receive, send)
            return
        if not self.started:
            raise ImproperlyConfigured(
                "This ASGI server sends no lifespan events, so no background tasks run. "
                "Use `manage.py serve` or uvicorn."
            )
        if scope["type"] != "http":
            await self.pages(scope, receive, send)  # type: ignore[arg-type]
            return
        is_bearer_only = is_mcp_path(scope["path"]) or is_api_path(scope["path"])
        is_cross_origin = is_bearer_only and bool(settings.BROWSER_ORIGINS)
        origin = cross_origin.find_origin(scope) if is_cross_origin else None
        response = ResponseGuard(scope, cross_origin.allow(origin, send) if origin else send)
        try:
            await self.route(scope, _limit_body_time(receive), response.send)
        except RequestBodyRejected as rejected:
            await response.send_error(rejected.error)
        except WrongHost as error:
            host = dict(scope["headers"]).get(b"host", b"")[:100].decode("latin-1")
            logger.warning("Rejected a request for the host %r; see TOOLCRIB_HOSTS", host)
            await response.send_error(error)
        except asyncio.CancelledError:
            # Only the end of the drain cancels requests. A started response can only be aborted.
            if response.started:
                raise
            await response.send_error(_stopping())
        except Exception:
            if response.started:
                raise
            request_id = secrets.token_hex(6)
            logger.exception("Request %s failed", request_id)
            await response.send_error(InternalError(request_id))

    async def route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Route a request to its handler."""
        path = scope["path"]
        is_api = is_api_path(path)
        is_mcp = is_mcp_path(path)
        check_host(dict(scope["headers"]).get(b"host", b""))
        is_options = scope["method"] == "OPTIONS"
        if is_options and (is_api or is_mcp) and cross_origin.is_preflight(scope):
            await cross_origin.answer_preflight(scope, send)
        elif OAUTH_PATH.fullmatch(path):
            body = json.dumps(NoOAuth().as_json(), ensure_ascii=False).encode()
            await send_response(send, NoOAuth.status, "application/json", body)
        elif is_mcp:
            await self.mcp(scope, receive, send)
        elif (found := session_endpoint.find_operation(scope)) is not None:
            await self.session_endpoint(*found, scope, receive, rate_limits.add_headers(send))
        else:
            handler = self.api if is_api else self.pages
            send = rate_limits.add_headers(send) if is_api else send
            receive, send = _limit_body_size(receive), _delay_rejections(send)
            digest = bearer_digest(read_headers(scope)) if COMPUTING_PATH.fullmatch(path) else ""
            if digest:
                await self._serve_with_slot(digest, scope, receive, send)
            else:
                await self._stagger()
                await handler(scope, receive, send)  # type: ignore[arg-type]

    async def _serve_with_slot(
        self, digest: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve a request of the API while its key has a slot, until the response starts.

        A slow client holds no slot: the body is read before.
        """
        receive = await _read_ahead(receive)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(slots.slot(digest))
            await self._stagger()

            async def send_without_slot(message: MutableMapping[str, Any]) -> None:
                await stack.aclose()
                await send(message)

            await self.api(scope, receive, send_without_slot)  # type: ignore[arg-type]

    async def _stagger(self) -> None:
        """Start one request at a time, so that requests in progress continue in between.

        Starting takes 2 ms; thirty simultaneous requests would block the event loop.
        """
        async with self._start_lock:
            await asyncio.sleep(0)

    async def lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._start_lock = asyncio.Lock()
        async with runtime.running(), self.mcp.run():
            self.started = True
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


application = Router()
