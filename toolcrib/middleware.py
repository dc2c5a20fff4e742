"""What every request passes: an id, the age of the session, a sign-in, errors as pages."""

import json
import secrets
import time
from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from typing import Any

from django.conf import settings
from django.contrib.auth import logout
from django.contrib.auth.middleware import LoginRequiredMiddleware
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

from toolcrib.lib.errors import ToolcribError

GetResponse = Callable[[HttpRequest], Any]


@sync_and_async_middleware
def request_id(get_response: GetResponse) -> Callable[[HttpRequest], Any]:
    """Give each request a short id that error pages and logs show, and check its host."""

    def begin(request: HttpRequest) -> None:
        request.get_host()  # raises for a host that is not ours
        request.toolcrib_id = secrets.token_hex(6)  # type: ignore[attr-defined]

    def end(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        if response.status_code == 405 and request.path.startswith("/api/"):
            response = _not_allowed(response)
        response.headers["X-Request-Id"] = request.toolcrib_id  # type: ignore[attr-defined]
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    if iscoroutinefunction(get_response):

        async def handle_async(request: HttpRequest) -> HttpResponseBase:
            begin(request)
            waiting: Awaitable[HttpResponseBase] = get_response(request)
            return end(request, await waiting)

        return handle_async

    def handle(request: HttpRequest) -> HttpResponseBase:
        begin(request)
        return end(request, get_response(request))

    return handle


def _not_allowed(bare: HttpResponseBase) -> HttpResponse:
    """Say in the one shape of errors what Django says with an empty body."""
    allowed = bare.headers.get("Allow", "")
    error = ToolcribError(
        "This address does not take this method.",
        hint=f"It takes {allowed}." if allowed else "See /api/v1/docs.",
        code="method_not_allowed",
        status=405,
    )
    response = HttpResponse(
        json.dumps(error.as_json()), status=405, content_type="application/json; charset=utf-8"
    )
    response.headers["Allow"] = allowed
    return response


def session_age(get_response: GetResponse) -> Callable[[HttpRequest], HttpResponseBase]:
    """End a session that was idle too long or began too long ago.

    Polling does not count as being there.
    """
    idle = settings.SESSION_IDLE.total_seconds()
    absolute = settings.SESSION_ABSOLUTE.total_seconds()

    def handle(request: HttpRequest) -> HttpResponseBase:
        if request.user.is_authenticated:
            now = time.time()
            began = request.session.setdefault("began", now)
            seen = request.session.get("seen", now)
            if now - began > absolute or now - seen > idle:
                logout(request)
            elif "seen" not in request.session or (
                now - seen > 60 and "X-Poll" not in request.headers
            ):
                request.session["seen"] = now
        response: HttpResponseBase = get_response(request)
        return response

    return handle


class SignInRequired(LoginRequiredMiddleware):
    """Ask everybody to sign in, but on pages that say otherwise. The API has keys of its own."""

    def process_view(
        self, request: HttpRequest, view_func: Any, view_args: Any, view_kwargs: Any
    ) -> HttpResponseBase | None:
        if request.path.startswith("/api/"):
            return None
        answer: HttpResponseBase | None = super().process_view(
            request, view_func, view_args, view_kwargs
        )
        if answer is not None and request.headers.get("HX-Request"):
            # A swapped-in sign-in form would be lost in a fragment: send the whole page there.
            return HttpResponse(status=204, headers={"HX-Redirect": settings.SIGN_IN_PATH})
        return answer


class PageErrors:
    """Show our own errors as a page, or as a notice where htmx asked for a fragment."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response: HttpResponseBase = self.get_response(request)
        return response

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        from toolcrib.pages.error_views import error_page  # views import models; apps load first

        if not isinstance(error, ToolcribError):
            return None
        return error_page(request, error)
