"""Pages nobody asks for by name: errors, health."""

from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render

from catalog.models import Revision
from toolcrib.lib.errors import Failed, ToolcribError
from toolcrib.lib.request import is_htmx_fragment
from toolcrib.runtime.lifespan import runtime


def error_page(request: HttpRequest, error: ToolcribError) -> HttpResponse:
    fragment = is_htmx_fragment(request)
    needed = getattr(error, "needed", None)
    return render(
        request,
        "toolcrib/pages/_error.html" if fragment else "toolcrib/pages/error.html",
        {
            "title": {403: "Not allowed", 404: "Not found"}.get(error.status, "That did not work"),
            "message": error.message,
            "hint": error.hint,
            "role_needed": needed.word if needed else "",
            "request_id": getattr(request, "toolcrib_id", ""),
        },
        status=error.status,
    )


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    if request.path.startswith("/api/"):
        error = ToolcribError(
            "There is nothing at this address.",
            hint="/api/v1/docs lists what there is.",
            code="not_found",
        )
        return JsonResponse(error.as_json(), status=404)
    return error_page(
        request,
        ToolcribError("There is no page at this address.", hint="Check the link.", status=404),
    )


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    return error_page(request, ToolcribError("You may not do this.", status=403))


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    if request.path.startswith("/api/"):
        error = ToolcribError(
            "The request was not understood.",
            hint="Check the host name and the address.",
            code="bad_request",
        )
        return JsonResponse(error.as_json(), status=400)
    return HttpResponse(
        "The request was not understood. Check the host name and the address.\n",
        status=400,
        content_type="text/plain; charset=utf-8",
    )


def server_error(request: HttpRequest) -> HttpResponse:
    mark = getattr(request, "toolcrib_id", "")
    if request.path.startswith("/api/"):
        return JsonResponse(Failed(mark).as_json(), status=500)
    return error_page(
        request,
        ToolcribError(
            "Toolcrib failed to show this page.",
            hint="Try again; if it stays, tell whoever runs this installation the number below.",
            status=500,
        ),
    )


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    return error_page(
        request,
        ToolcribError(
            "The form was too old or came from another site.",
            hint="Go back, reload the page and send it again.",
            status=403,
        ),
    )


@login_not_required
def livez(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok\n", content_type="text/plain")


@login_not_required
def readyz(request: HttpRequest) -> JsonResponse:
    """Say whether requests can be served, and which revision this process knows."""
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
