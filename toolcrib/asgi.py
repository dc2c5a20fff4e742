"""The ASGI application: one lifespan, two Django handlers and the MCP endpoint.

`/api/` goes to a handler without cookies, sessions and CSRF, which costs a third and cannot be
attacked through a cookie; `/mcp` to the SDK's session manager; everything else to ordinary
Django.
"""

import asyncio
import json
import logging
import os
import secrets
import warnings
from collections.abc import MutableMapping
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")

import django

django.setup()

from django.conf import settings  # noqa: E402
from django.core.exceptions import ImproperlyConfigured  # noqa: E402
from django.core.handlers.asgi import ASGIHandler  # noqa: E402

from sessions_app.fast_path import (  # noqa: E402
    mcp_call,
    rest_call,
    rest_load_search,
)
from sessions_app.mcp import endpoint as mcp_endpoint  # noqa: E402
from sessions_app.mcp import errors as mcp_errors  # noqa: E402
from toolcrib.lib.asgi import Receive, Scope, Send, send_response  # noqa: E402
from toolcrib.lib.errors import Failed, ToolcribError  # noqa: E402
from toolcrib.runtime.lifespan import runtime  # noqa: E402
from toolcrib.runtime.memory_tuning import gc_schedule, limit_malloc_arenas  # noqa: E402

# WhiteNoise hands files over as plain iterators; they are small, and reading them whole is fine.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous")

logger = logging.getLogger(__name__)

limit_malloc_arenas()

SLACK = 64 * 1024  # what a form adds around its fields; the exact cap is Django's to tell
DOCS = "/api/v1/docs"  # a page, with a page's headers


class ApiHandler(ASGIHandler):
    """Django with the few middlewares a bearer-only API needs."""

    def load_middleware(self, is_async: bool = False) -> None:
        usual = settings.MIDDLEWARE
        settings.MIDDLEWARE = settings.API_MIDDLEWARE
        try:
            super().load_middleware(is_async)
        finally:
            settings.MIDDLEWARE = usual


class RequestBodyRejected(Exception):
    """A body that is not read to its end. `answer` says why, with its status."""

    def __init__(self, answer: ToolcribError) -> None:
        super().__init__(answer.message)
        self.answer = answer


def _limit_body_size(receive: Receive) -> Receive:
    """Count a request's body as it comes in, whoever sends it, before it is written to disk."""
    size = 0

    async def counted() -> MutableMapping[str, Any]:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > settings.MAX_BODY_BYTES + SLACK:
            cap = f"The request is over {settings.MAX_BODY_BYTES // 1024} KB."
            raise RequestBodyRejected(
                ToolcribError(cap, hint="Send less at a time.", code="too_large", status=413)
            )
        return message

    return counted


def _limit_body_time(receive: Receive) -> Receive:
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
            raise RequestBodyRejected(
                ToolcribError(late, hint="Send it again.", code="too_slow", status=408)
            ) from None
        whole = not message.get("more_body")
        return message

    return timed


class ResponseGuard:
    """The answer to one request. Where none was begun, there is still one to be given."""

    def __init__(self, path: str, send: Send) -> None:
        self._path, self._send = path, send
        self.begun = self._over = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if not self._over:  # else from a handler that goes on although the request was cut
            self.begun = True
            await self._send(message)

    async def refuse(self, error: ToolcribError) -> None:
        """Say no in the form that is spoken at this address, and hang up."""
        self._over = True
        more = {"connection": "close"}
        if mcp_endpoint.handles(self._path):
            await mcp_errors.refuse(self._send, error, more)
            return
        if "retry_after" in error.details:
            more["retry-after"] = str(error.details["retry_after"])
        is_api = self._path.startswith("/api/")
        text = json.dumps(error.as_json()) if is_api else f"{error.sentence}\n"
        kind = "application/json; charset=utf-8" if is_api else "text/plain; charset=utf-8"
        await send_response(self._send, error.status, kind, text.encode(), more)


def _stopping() -> ToolcribError:
    return ToolcribError(
        "Toolcrib stopped before it could answer.",
        hint="Try again in a moment.",
        code="stopping",
        status=503,
        details={"retry_after": 2},
    )


class Router:
    def __init__(self) -> None:
        self.pages = ASGIHandler()
        self.api = ApiHandler()
        self.mcp = mcp_endpoint.Endpoint()
        self.started = False
        self.turns = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.lifespan(receive, send)
            return
        if not self.started:
            raise ImproperlyConfigured(
                "This ASGI server sends no lifespan events, so nothing behind the pages runs. "
                "Use `manage.py serve` or uvicorn."
            )
        if scope["type"] != "http":
            await self.pages(scope, receive, send)  # type: ignore[arg-type]
            return
        answering = ResponseGuard(scope["path"], send)
        gc_schedule.touch()
        try:
            await self.route(scope, _limit_body_time(receive), answering.send)
        except RequestBodyRejected as unread:
            await answering.refuse(unread.answer)
        except asyncio.CancelledError:
            # Only the end of the drain does this. An answer that was begun can but be broken off.
            if answering.begun:
                raise
            await answering.refuse(_stopping())
        except Exception:
            if answering.begun:
                raise
            mark = secrets.token_hex(6)
            logger.exception("Request %s failed", mark)
            await answering.refuse(Failed(mark))
        finally:
            gc_schedule.touch()

    async def route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request to whom it is for, the short ways first."""
        path = scope["path"]
        if mcp_endpoint.handles(path):
            if mcp_call.is_call(scope):
                await mcp_call.call(scope, receive, send, self.mcp)
            else:
                await self.turn()
                await self.mcp(scope, receive, send)
        elif rest_call.is_call(scope):
            await rest_call.call(scope, _limit_body_size(receive), send, self.api)  # type: ignore[arg-type]
        elif rest_load_search.is_load_or_search(scope):
            await rest_load_search.load_or_search(scope, _limit_body_size(receive), send, self.api)  # type: ignore[arg-type]
        else:
            is_api = path.startswith("/api/") and path != DOCS
            handler = self.api if is_api else self.pages
            await self.turn()
            await handler(scope, _limit_body_size(receive), send)  # type: ignore[arg-type]

    async def turn(self) -> None:
        """Let one request begin at a time, and others go on in between.

        To begin is 2 ms of work; thirty that come together would hold up everybody else.
        """
        async with self.turns:
            await asyncio.sleep(0)

    async def lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self.turns = asyncio.Lock()
        async with runtime.running(), self.mcp.running(), gc_schedule.working():
            self.started = True
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


application = Router()
