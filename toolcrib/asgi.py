"""The ASGI application: one lifespan, two Django handlers and the MCP endpoint.

`/api/` goes to a handler without cookies, sessions and CSRF, which costs a third and cannot be
attacked through a cookie; `/mcp` to the SDK's session manager; everything else to ordinary
Django.
"""

import asyncio
import json
import os
import warnings
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")

import django

django.setup()

from django.conf import settings  # noqa: E402
from django.core.exceptions import ImproperlyConfigured  # noqa: E402
from django.core.handlers.asgi import ASGIHandler  # noqa: E402

from sessions_app import call_path, mcp_endpoint, mcp_short  # noqa: E402
from toolcrib.errors import ToolcribError  # noqa: E402
from toolcrib.runtime import runtime  # noqa: E402

# WhiteNoise hands files over as plain iterators; they are small, and reading them whole is fine.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous")

SLACK = 64 * 1024  # what a form adds around its fields; the exact cap is Django's to tell
DOCS = "/api/v1/docs"  # a page, with a page's headers
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ApiHandler(ASGIHandler):
    """Django with the few middlewares a bearer-only API needs."""

    def load_middleware(self, is_async: bool = False) -> None:
        usual = settings.MIDDLEWARE
        settings.MIDDLEWARE = settings.API_MIDDLEWARE
        try:
            super().load_middleware(is_async)
        finally:
            settings.MIDDLEWARE = usual


class Unread(Exception):
    """A body that is not read to its end. `answer` says why, with its status."""

    def __init__(self, answer: ToolcribError) -> None:
        super().__init__(answer.message)
        self.answer = answer


def _capped(receive: Receive) -> Receive:
    """Count a request's body as it comes in, whoever sends it, before it is written to disk."""
    size = 0

    async def counted() -> MutableMapping[str, Any]:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > settings.MAX_BODY_BYTES + SLACK:
            cap = f"The request is over {settings.MAX_BODY_BYTES // 1024} KB."
            raise Unread(
                ToolcribError(cap, hint="Send less at a time.", code="too_large", status=413)
            )
        return message

    return counted


def _timely(receive: Receive) -> Receive:
    """Give a request's body a time to arrive in; what comes after it may take longer."""
    ends = asyncio.get_running_loop().time() + settings.BODY_TIMEOUT
    whole = False

    async def timed() -> MutableMapping[str, Any]:
        nonlocal whole
        if whole:
            return await receive()
        try:
            async with asyncio.timeout_at(ends):
                message = await receive()
        except TimeoutError:
            late = f"The request did not arrive within {settings.BODY_TIMEOUT} s."
            raise Unread(
                ToolcribError(late, hint="Send it again.", code="too_slow", status=408)
            ) from None
        whole = not message.get("more_body")
        return message

    return timed


async def _refuse(send: Send, error: ToolcribError) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error.as_json()).encode()})


class Router:
    def __init__(self) -> None:
        self.pages = ASGIHandler()
        self.api = ApiHandler()
        self.mcp = mcp_endpoint.Endpoint()
        self.started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.lifespan(receive, send)
            return
        if not self.started:
            raise ImproperlyConfigured(
                "This ASGI server sends no lifespan events, so nothing behind the pages runs. "
                "Use `manage.py serve` or uvicorn."
            )
        try:
            await self.route(scope, _timely(receive), send)
        except Unread as unread:
            await _refuse(send, unread.answer)

    async def route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request to whom it is for, the short ways first."""
        path, is_http = scope["path"], scope["type"] == "http"
        if is_http and mcp_endpoint.handles(path):
            if mcp_short.is_call(scope):
                await mcp_short.call(scope, receive, send, self.mcp)
            else:
                await self.mcp(scope, receive, send)
        elif is_http and call_path.is_call(scope):
            await call_path.call(scope, _capped(receive), send, self.api)  # type: ignore[arg-type]
        else:
            is_api = path.startswith("/api/") and path != DOCS
            handler = self.api if is_api else self.pages
            await handler(scope, _capped(receive), send)  # type: ignore[arg-type]

    async def lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with runtime.running(), self.mcp.running():
            self.started = True
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


application = Router()
