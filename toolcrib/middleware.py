"""Middleware: request ids, session expiry, required sign-in, error pages."""

import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from typing import Any

from django.conf import settings
from django.contrib.auth import logout
from django.contrib.auth.middleware import LoginRequiredMiddleware
from django.db import DatabaseError, InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

from toolcrib.lib import display
from toolcrib.lib.errors import ToolcribError

GetResponse = Callable[[HttpRequest], Any]
HEAD_PATH = re.compile(r"/api/v1/(?!calls/|scripts/)")
DATABASE_AWAY = (OperationalError, InterfaceError)


@sync_and_async_middleware
def request_id(get_response: GetResponse) -> Callable[[HttpRequest], Any]:
    """Assign each request a short id, shown on error pages and in logs, and check its host."""

    def begin(request: HttpRequest) -> None:
        request.get_host()  # raises for a host that is not allowed
        request.toolcrib_id = secrets.token_hex(6)  # type: ignore[attr-defined]
        if is_head(request):
            request.method = "GET"  # the API declares no HEAD

    def end(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        if response.status_code == 405 and request.path.startswith("/api/"):
            response = _method_not_allowed(response)
        elif is_head(request):
            response = _without_body(response)
        response.headers["X-Request-Id"] = request.toolcrib_id  # type: ignore[attr-defined]
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    if iscoroutinefunction(get_response):

        async def handle_async(request: HttpRequest) -> HttpResponseBase:
            begin(request)
            pending: Awaitable[HttpResponseBase] = get_response(request)
            return end(request, await pending)

        return handle_async

    def handle(request: HttpRequest) -> HttpResponseBase:
        begin(request)
        return end(request, get_response(request))

    return handle


def is_head(request: HttpRequest) -> bool:
    """Return whether this is a HEAD request to the API, which is answered as GET.

    Not for calls and scripts: a result is handed out once, so HEAD must not fetch it.
    """
    return request.META["REQUEST_METHOD"] == "HEAD" and bool(HEAD_PATH.match(request.path))


def _without_body(response: HttpResponseBase) -> HttpResponseBase:
    """Return the status and headers of a response to GET. A stream is not started."""
    if not isinstance(response, HttpResponse):
        return HttpResponse(status=response.status_code, headers=dict(response.headers))
    response.headers["Content-Length"] = str(len(response.content))
    response.content = b""
    return response


def _method_not_allowed(empty: HttpResponseBase) -> HttpResponse:
    """Return the API's error format instead of Django's empty 405 response."""
    allowed = empty.headers.get("Allow", "")
    error = ToolcribError(
        "Method not allowed.",
        hint=f"Allowed methods: {allowed}." if allowed else "See /api/v1/docs.",
        code="method_not_allowed",
        status=405,
    )
    headers = {"Content-Type": "application/json; charset=utf-8", "Allow": allowed}
    return HttpResponse(json.dumps(error.as_json()), status=405, headers=headers)


def session_age(get_response: GetResponse) -> Callable[[HttpRequest], HttpResponseBase]:
    """Sign out a session that was idle too long or started too long ago.

    Polling requests do not count as activity.
    """
    idle = settings.SESSION_IDLE.total_seconds()
    absolute = settings.SESSION_ABSOLUTE.total_seconds()

    def check(request: HttpRequest) -> None:
        if request.user.is_authenticated:
            now = time.time()
            began = request.session.setdefault("began", now)
            last_seen = request.session.get("seen", now)
            if now - began > absolute or now - last_seen > idle:
                logout(request)
            elif "seen" not in request.session or (
                now - last_seen > 60 and "X-Poll" not in request.headers
            ):
                request.session["seen"] = now

    def handle(request: HttpRequest) -> HttpResponseBase:
        try:
            check(request)
        except (DatabaseError, InterfaceError) as error:
            return _database_unavailable(request, error)
        response: HttpResponseBase = get_response(request)
        return response

    return handle


class SignInRequired(LoginRequiredMiddleware):
    """Require sign-in, except for views marked login_not_required and the API, which has keys."""

    def process_view(
        self, request: HttpRequest, view_func: Any, view_args: Any, view_kwargs: Any
    ) -> HttpResponseBase | None:
        if request.path.startswith("/api/"):
            return None
        response: HttpResponseBase | None = super().process_view(
            request, view_func, view_args, view_kwargs
        )
        if response is not None and request.headers.get("HX-Request"):
            # Redirect the whole page: a sign-in form swapped into a fragment would not work.
            return HttpResponse(status=204, headers={"HX-Redirect": settings.SIGN_IN_PATH})
        return response


def display_preferences(get_response: GetResponse) -> Callable[[HttpRequest], HttpResponseBase]:
    """Show times and numbers as the reader's browser asks for it."""

    def handle(request: HttpRequest) -> HttpResponseBase:
        with display.activate(display.read(request.COOKIES)):
            response: HttpResponseBase = get_response(request)
        return response

    return handle


class PageErrors:
    """Render a ToolcribError as a page, or as a notice if htmx requested a fragment."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response: HttpResponseBase = self.get_response(request)
        return response

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        from toolcrib.pages.error_views import error_page  # views import models; apps load first

        if isinstance(error, ToolcribError):
            return error_page(request, error)
        if isinstance(error, DATABASE_AWAY) or type(error) is DatabaseError:
            return _database_unavailable(request, error)
        return None


def _database_unavailable(request: HttpRequest, error: Exception) -> HttpResponse:
    from toolcrib.pages.error_views import database_unavailable

    return database_unavailable(request, error)
