"""REST API: routers of all apps, key authentication and error responses."""

import logging
from typing import Any

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.db import DatabaseError, DataError
from django.http import Http404, HttpRequest, HttpResponse
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, ValidationError
from ninja.parser import Parser
from ninja.security import HttpBearer

from catalog.audit import Actor
from catalog.groups.api import router as groups_router
from catalog.tools.api import router as catalog_router
from servers.api import router as servers_router
from sessions_app.agents import api_keys
from sessions_app.agents.api import router as agents_router
from sessions_app.models import ApiKey, KeyScope
from sessions_app.playground.api import router as search_router
from sessions_app.review.api import router as operators_router
from sessions_app.sessions.api import router as sessions_router
from sessions_app.usage.api import router as usage_router
from toolcrib.lib.asgi import BodyTooLarge, error_headers
from toolcrib.lib.errors import (
    DatabaseUnavailable,
    Forbidden,
    InternalError,
    Invalid,
    InvalidRequest,
    MalformedBody,
    NotFound,
    ToolcribError,
    UnstorableValue,
)
from toolcrib.lib.json_codec import parse_strict
from toolcrib.runtime.health_api import router as health_router

logger = logging.getLogger(__name__)
WRITES = {"POST", "PUT", "PATCH", "DELETE"}


class KeyAuth(HttpBearer):
    """Bearer key with sufficient scope: operator reads, admin writes. Cookies are ignored."""

    def authenticate(self, request: HttpRequest, token: str) -> Actor | None:
        key = api_keys.find_key(token)
        if key is None:
            return None
        if key.scope == KeyScope.AGENT:
            raise Forbidden(
                "Agents cannot use this endpoint.",
                hint="Use a key with the scope operator or admin.",
            )
        if request.method in WRITES and key.scope != KeyScope.ADMIN:
            raise Forbidden("This key is read-only.", hint="Use a key with the scope admin.")
        actor = Actor("token", key.name, key.pk)
        request.actor = actor  # type: ignore[attr-defined]
        return actor


class AgentAuth(HttpBearer):
    """An agent's key, or an operator's key for reading sessions of all agents."""

    def authenticate(self, request: HttpRequest, token: str) -> ApiKey | None:
        key = api_keys.find_key(token)
        if key is not None:
            if key.agent is None and request.method in WRITES:
                raise Forbidden("Only agents can use this endpoint.", hint="Use an agent's key.")
            request.agent = key.agent  # type: ignore[attr-defined]
        return key


class StrictParser(Parser):
    """JSON parser that rejects duplicate keys."""

    def parse_body(self, request: HttpRequest) -> dict[str, Any]:
        try:
            body: dict[str, Any] = parse_strict(request.body)
        except RecursionError:
            raise Invalid("The body is nested too deeply.", hint="Send flatter values.") from None
        return body


api = NinjaAPI(
    title="Toolcrib",
    version=settings.VERSION,
    description="Register MCP servers, sync and review their tools, and hand them to agents.",
    auth=KeyAuth(),
    parser=StrictParser(),
    urls_namespace="api",
)
api.add_router("/servers", servers_router)
api.add_router("/groups", groups_router)
api.add_router("", catalog_router)
api.add_router("/search", search_router)
api.add_router("", agents_router)
api.add_router("/usage", usage_router)
api.add_router("", operators_router)
api.add_router("", health_router)
api.add_router("", sessions_router, auth=AgentAuth())


@api.exception_handler(Exception)
@api.exception_handler(Http404)
@api.exception_handler(HttpError)
@api.exception_handler(ValidationError)
def handle_error(request: HttpRequest, raised: Exception) -> HttpResponse:
    error = _toolcrib_error(request, raised)
    response = api.create_response(request, error.as_json(), status=error.status)
    for name, value in error_headers(error).items():
        if name != "connection":  # Django does not send it
            response.headers[name.title()] = value
    return response


def _toolcrib_error(request: HttpRequest, error: Exception) -> ToolcribError:
    match error:
        case ToolcribError():
            return error
        case AuthenticationError():
            return api_keys.Unauthorized()
        case ValidationError():
            return InvalidRequest(error.errors)
        case HttpError(__cause__=Invalid() as invalid):  # of StrictParser, wrapped by ninja
            return invalid
        case HttpError():
            return MalformedBody()
        case RequestDataTooBig():
            return BodyTooLarge(settings.MAX_BODY_BYTES)
        case Http404():
            return NotFound("Not found.", hint="Check the id in the URL.")
        case DataError():
            return UnstorableValue()
        case DatabaseError():
            logger.error("Database unavailable: %s", error)
            return DatabaseUnavailable()
    request_id = getattr(request, "toolcrib_id", "")
    logger.error("Request %s failed", request_id, exc_info=error)
    return InternalError(request_id)
