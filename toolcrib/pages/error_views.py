"""Error pages, and the liveness and readiness endpoints."""

from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render

from catalog.models import Revision
from toolcrib.lib.errors import InternalError, ToolcribError
from toolcrib.lib.request import is_htmx_fragment
from toolcrib.runtime.lifespan import runtime


def error_page(request: HttpRequest, error: ToolcribError) -> HttpResponse:
    """Render an error as a page, or as a notice for an htmx request."""
    fragment = is_htmx_fragment(request)
    required_role = getattr(error, "required", None)
    return render(
        request,
        "toolcrib/pages/_error.html" if fragment else "toolcrib/pages/error.html",
        {
            "title": {403: "Access denied", 404: "Not found"}.get(error.status, "Request failed"),
            "message": error.message,
            "hint": error.hint,
            "required_role": required_role.label if required_role else "",
            "request_id": getattr(request, "toolcrib_id", ""),
        },
        status=error.status,
    )


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    if request.path.startswith("/api/"):
        error = ToolcribError(
            "Not found.",
            hint="See /api/v1/docs for the list of endpoints.",
            code="not_found",
        )
        return JsonResponse(error.as_json(), status=404)
    return error_page(
        request,
        ToolcribError("This page does not exist.", hint="Check the URL.", status=404),
    )


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    return error_page(request, ToolcribError("You do not have permission to do this.", status=403))


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    if request.path.startswith("/api/"):
        error = ToolcribError(
            "Bad request.",
            hint="Check the host name and the URL.",
            code="bad_request",
        )
        return JsonResponse(error.as_json(), status=400)
    return HttpResponse(
        "Bad request. Check the host name and the URL.\n",
        status=400,
        content_type="text/plain; charset=utf-8",
    )


def server_error(request: HttpRequest) -> HttpResponse:
    request_id = getattr(request, "toolcrib_id", "")
    if request.path.startswith("/api/"):
        return JsonResponse(InternalError(request_id).as_json(), status=500)
    return error_page(
        request,
        ToolcribError(
            "Internal server error.",
            hint="Try again. If the error persists, report the request id below to your admin.",
            status=500,
        ),
    )


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    return error_page(
        request,
        ToolcribError(
            "The form has expired or was submitted from another site.",
            hint="Go back, reload the page and submit the form again.",
            status=403,
        ),
    )


@login_not_required
def livez(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok\n", content_type="text/plain")


@login_not_required
def readyz(request: HttpRequest) -> JsonResponse:
    """Return whether requests can be served, and the catalog revision of this process."""
    try:
        Revision.current()
        database = "ok"
    except DatabaseError:
        database = "down"
    body: dict[str, Any] = {
        "status": "ok" if database == "ok" else "down",
        "database": database,
        "revision": runtime.revision.known,
        "version": settings.VERSION,
    }
    if settings.REDIS_URL:
        body["redis"] = _redis_state()
        if body["redis"] != "ok" and body["status"] == "ok":
            body["status"] = "degraded"
    return JsonResponse(body, status=503 if body["status"] == "down" else 200)


def _redis_state() -> str:
    import redis

    try:
        redis.Redis.from_url(
            settings.REDIS_URL, socket_connect_timeout=0.5, socket_timeout=0.5
        ).ping()
    except redis.RedisError:
        return "down"
    return "ok"
