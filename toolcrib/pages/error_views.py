"""Error pages, and the liveness and readiness endpoints."""

import logging
from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.db import DatabaseError, InterfaceError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.template.loader import render_to_string

from catalog.models import Revision
from toolcrib.lib.errors import (
    DatabaseUnavailable,
    Forbidden,
    InternalError,
    NotFound,
    ToolcribError,
)
from toolcrib.lib.protocols.redis_client import redis_error
from toolcrib.lib.request import is_htmx_fragment
from toolcrib.pages.about import redis_client
from toolcrib.runtime.lifespan import runtime
from toolcrib.runtime.write_probe import write_probe

logger = logging.getLogger(__name__)


def error_page(request: HttpRequest, error: ToolcribError) -> HttpResponse:
    """Render an error as a page, or as a notice for an htmx request."""
    template = "_error" if is_htmx_fragment(request) else "error"
    required_role = getattr(error, "required", None)
    context = {
        "title": {403: "Access denied", 404: "Not found"}.get(error.status, "Request failed"),
        "message": error.message,
        "hint": error.hint,
        "required_role": required_role.label if required_role else "",
        "request_id": getattr(request, "toolcrib_id", ""),
    }
    return render(request, f"toolcrib/pages/{template}.html", context, status=error.status)


def database_unavailable(request: HttpRequest, error: Exception) -> HttpResponse:
    """Render a 503 page without the database: no navigation, no user, no messages."""
    logger.error("Database unavailable: %s", error)
    unavailable = DatabaseUnavailable(error)
    template = "_error" if is_htmx_fragment(request) else "error"
    context = {
        "title": "Service unavailable",
        "message": unavailable.message,
        "hint": unavailable.hint,
        "request_id": getattr(request, "toolcrib_id", ""),
        "shell": {"theme": request.COOKIES.get("theme")},
    }
    page = render_to_string(f"toolcrib/pages/{template}.html", context)
    retry_after = str(unavailable.details["retry_after"])
    return HttpResponse(page, status=unavailable.status, headers={"Retry-After": retry_after})


def _is_api(request: HttpRequest) -> bool:
    return request.path.startswith("/api/")


def _json(error: ToolcribError) -> HttpResponse:
    return JsonResponse(error.as_json(), status=error.status)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    if _is_api(request):
        hint = "See /api/v1/docs for the list of endpoints."
        return _json(NotFound("Not found.", hint=hint))
    return error_page(request, NotFound("This page does not exist.", hint="Check the URL."))


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    return error_page(request, Forbidden("You do not have permission to do this."))


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    hint = "Check the host name and the URL."
    if _is_api(request):
        return _json(ToolcribError("Bad request.", hint=hint, code="bad_request"))
    return HttpResponse(
        f"Bad request. {hint}\n", status=400, content_type="text/plain; charset=utf-8"
    )


def server_error(request: HttpRequest) -> HttpResponse:
    if _is_api(request):
        return _json(InternalError(getattr(request, "toolcrib_id", "")))
    hint = "Try again. If the error persists, report the request id below to your admin."
    return error_page(request, ToolcribError("Internal server error.", hint=hint, status=500))


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    return error_page(
        request,
        Forbidden(
            "The form has expired or was submitted from another site.",
            hint="Go back, reload the page and submit the form again.",
        ),
    )


@login_not_required
def livez(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok\n", content_type="text/plain")


@login_not_required
def readyz(request: HttpRequest) -> JsonResponse:
    """Return whether requests can be served, and the catalog revision of this process.

    Every call is recorded, so without writes no request of an agent can be served.
    """
    reason = ""
    try:
        Revision.current()
        database = "ok"
    except (DatabaseError, InterfaceError) as error:
        database, reason = "down", DatabaseUnavailable(error).message
    else:
        reason = write_probe.problem()
    body: dict[str, Any] = {
        "status": "down" if reason else "ok",
        "database": "read-only" if reason and database == "ok" else database,
        "revision": runtime.revision.known,
        "version": settings.VERSION,
    }
    if reason:
        body["reason"] = reason
    if settings.REDIS_URL:
        body["redis"] = _redis_state()
        if body["redis"] != "ok" and body["status"] == "ok":
            body["status"] = "degraded"
    return JsonResponse(body, status=503 if body["status"] == "down" else 200)


def _redis_state() -> str:
    try:
        with redis_client() as client:
            client.ping()
    except redis_error():
        return "down"
    return "ok"
