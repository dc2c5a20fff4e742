"""The ASGI application: one lifespan, two Django handlers.

`/api/` goes to a handler without cookies, sessions and CSRF, which costs a third and cannot be
attacked through a cookie; everything else goes to ordinary Django.
"""

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


class BodyTooLarge(Exception):
    """The client sends more than is ever looked at. Raised before Django writes it to disk."""


def _capped(receive: Receive) -> Receive:
    """Count a request's body as it comes in, whoever sends it."""
    size = 0

    async def counted() -> MutableMapping[str, Any]:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > settings.MAX_BODY_BYTES + SLACK:
            raise BodyTooLarge
        return message

    return counted


async def _refuse(send: Send) -> None:
    error = ToolcribError(
        f"The request is over {settings.MAX_BODY_BYTES // 1024} KB.",
        hint="Send less at a time.",
        code="too_large",
    )
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error.as_json()).encode()})


class Router:
    def __init__(self) -> None:
        self.pages = ASGIHandler()
        self.api = ApiHandler()
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
        is_api = scope["path"].startswith("/api/") and scope["path"] != DOCS
        handler = self.api if is_api else self.pages
        try:
            await handler(scope, _capped(receive), send)  # type: ignore[arg-type]
        except BodyTooLarge:
            await _refuse(send)

    async def lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with runtime.running():
            self.started = True
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


application = Router()
