"""REST API: routers of all apps, key authentication and error responses."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import RequestDataTooBig
from django.db import DatabaseError, DataError, InterfaceError
from django.http import Http404, HttpRequest, HttpResponse
from ninja.errors import AuthenticationError, HttpError, ValidationError
from ninja.parser import Parser
from ninja.security import HttpBearer

from catalog.audit import Actor
from catalog.groups.api import router as groups_router
from catalog.hints.api import router as hints_router
from catalog.tools.api import router as catalog_router
from servers.api import router as servers_router
from sessions_app.agents import api_keys
from sessions_app.agents.api import router as agents_router
from sessions_app.held_calls.api import router as held_calls_router
from sessions_app.models import ApiKey, KeyScope
from sessions_app.playground.api import router as search_router
from sessions_app.review.api import router as operators_router
from sessions_app.rules.api import presets_router as rule_presets_router
from sessions_app.rules.api import router as rules_router
from sessions_app.scripts.api import router as scripts_router
from sessions_app.sessions.api import router as sessions_router
from sessions_app.usage.api import router as usage_router
from toolcrib.lib.api_schemas import check_parameters
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
from toolcrib.lib.openapi.docs_page import ApiReference
from toolcrib.lib.openapi.document import DescribedAPI
from toolcrib.lib.pagination import open_cursor, seal_cursor
from toolcrib.lib.protocols.asgi import BodyTooLarge, error_headers
from toolcrib.lib.roles import Role, role_of
from toolcrib.notifications.api import router as notifications_router
from toolcrib.pages.api import router as settings_router
from toolcrib.runtime.event_streams import router as event_streams_router
from toolcrib.runtime.health_api import router as health_router

logger = logging.getLogger(__name__)
View = Callable[..., HttpResponse]
WRITES = {"POST", "PUT", "PATCH", "DELETE"}


class KeyAuth(HttpBearer):
    """Bearer key with sufficient scope: operator reads, admin writes. Cookies are ignored."""

    writing_scopes: tuple[str, ...] = (KeyScope.ADMIN,)

    def authenticate(self, request: HttpRequest, token: str) -> Actor | None:
        key = api_keys.find_key(token)
        if key is None:
            return None
        if key.scope == KeyScope.AGENT:
            raise Forbidden(
                "Agents cannot use this endpoint.",
                hint="Use a key with the scope operator or admin.",
            )
        if request.method in WRITES and key.scope not in self.writing_scopes:
            raise Forbidden("This key is read-only.", hint="Use a key with the scope admin.")
        actor = Actor("token", key.name, key.pk)
        request.actor = actor  # type: ignore[attr-defined]
        return actor


class DecisionAuth(KeyAuth):
    """An operator's or admin's key: both decide about held calls. An agent's key never does."""

    writing_scopes = (KeyScope.ADMIN, KeyScope.OPERATOR)


class AgentAuth(HttpBearer):
    """An agent's key; an operator's key reads sessions of all agents, an admin's deletes them."""

    def authenticate(self, request: HttpRequest, token: str) -> ApiKey | None:
        key = api_keys.find_key(token)
        if key is not None:
            deletes = request.method == "DELETE" and key.scope == KeyScope.ADMIN
            if key.agent is None and request.method in WRITES and not deletes:
                raise Forbidden("Only agents can use this endpoint.", hint="Use an agent's key.")
            request.agent = key.agent  # type: ignore[attr-defined]
            request.actor = Actor("token", key.name, key.pk)  # type: ignore[attr-defined]
        return key


class StrictParser(Parser):
    """JSON parser that rejects duplicate keys."""

    def parse_body(self, request: HttpRequest) -> dict[str, Any]:
        try:
            body: dict[str, Any] = parse_strict(request.body)
        except RecursionError:
            raise Invalid("The body is nested too deeply.", hint="Send flatter values.") from None
        return body


def for_known_readers(view: View) -> View:
    """Show the description of the API to people with a role and to holders of a key."""

    def check(request: HttpRequest, **kwargs: Any) -> HttpResponse:
        is_known = (
            settings.PUBLIC_API_DOCS
            or role_of(request.user) >= Role.OPERATOR
            or api_keys.find_key(request.headers.get("Authorization", "").partition(" ")[2])
        )
        if is_known:
            return view(request, **kwargs)
        if request.path.endswith(".json"):
            return handle_error(request, api_keys.Unauthorized())
        return redirect_to_login(request.get_full_path())

    return check


def reject_unknown_parameters(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Reject query parameters that an operation does not declare, after authentication."""
    known = {
        name
        for model in operation._ninja_operation.models  # type: ignore[attr-defined]
        if model.__ninja_param_source__ == "query"
        for name in model.__ninja_flatten_map__
    }

    @wraps(operation)
    def check_and_run(request: HttpRequest, **values: Any) -> Any:
        check_parameters(request.GET, known)
        return operation(request, **values)  # a coroutine if the operation is asynchronous

    return check_and_run


def seal_cursors(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Accept only cursors that the same list has issued, and issue such cursors."""
    name = operation.__name__

    @wraps(operation)
    def open_and_seal(request: HttpRequest, **values: Any) -> Any:
        options: Any = values.get("options")
        if values.get("cursor"):
            values["cursor"] = open_cursor(name, values["cursor"])
        elif options is not None and getattr(options, "cursor", None):
            cursor = open_cursor(name, options.cursor)
            values["options"] = options.model_copy(update={"cursor": cursor})
        answer = operation(request, **values)
        if isinstance(answer, dict) and answer.get("next_cursor"):
            return {**answer, "next_cursor": seal_cursor(name, answer["next_cursor"])}
        return answer

    return open_and_seal


api = DescribedAPI(
    title="Toolcrib",
    version=settings.VERSION,
    description="Register MCP servers, sync and review their tools, and hand them to agents. Each "
    "operation lists the statuses that it can answer. Any request may also be answered 405 (with "
    "`Allow`: the path has no such method), 408 (the body arrives too slowly), 421 (a host name "
    "that is not Toolcrib's) or 500 (a bug), in the same format.",
    auth=KeyAuth(),
    parser=StrictParser(),
    docs=ApiReference(),
    docs_decorator=for_known_readers,
    urls_namespace="api",
)
api.add_decorator(seal_cursors)
api.add_decorator(reject_unknown_parameters)
api.add_router("/servers", servers_router)
api.add_router("/groups", groups_router)
api.add_router("", catalog_router)
api.add_router("", hints_router)
api.add_router("/search", search_router)
api.add_router("", agents_router)
api.add_router("/rules", rules_router)
api.add_router("/rule-presets", rule_presets_router)
api.add_router("/usage", usage_router)
api.add_router("", operators_router)
api.add_router("/settings", settings_router)
api.add_router("", health_router)
api.add_router("", notifications_router)
api.add_router("", held_calls_router, auth=DecisionAuth())
api.add_router("", sessions_router, auth=AgentAuth())
api.add_router("", scripts_router, auth=AgentAuth())
api.add_router("", event_streams_router, auth=AgentAuth())


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
        case DatabaseError() | InterfaceError():
            logger.error("Database unavailable: %s", error)
            return DatabaseUnavailable(error)
    request_id = getattr(request, "toolcrib_id", "")
    logger.error("Request %s failed", request_id, exc_info=error)
    return InternalError(request_id)
