"""The ASGI application: one lifespan, two Django handlers.

`/api/` goes to a handler without cookies, sessions and CSRF, which costs a third and cannot be
attacked through a cookie; everything else goes to ordinary Django.
"""

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")

import django

django.setup()

from django.conf import settings  # noqa: E402
from django.core.exceptions import ImproperlyConfigured  # noqa: E402
from django.core.handlers.asgi import ASGIHandler  # noqa: E402

from toolcrib.runtime import runtime  # noqa: E402

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
        await handler(scope, receive, send)  # type: ignore[arg-type]

    async def lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with runtime.running():
            self.started = True
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


application = Router()
