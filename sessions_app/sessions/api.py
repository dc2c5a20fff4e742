"""Agent API: open a session, read its catalog, search, load, call.

Responses that must be byte-stable are serialized as canonical JSON.
"""

import json
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Annotated, Any

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponse
from ninja import Query, Router, Status
from ninja.decorators import decorate_view

from servers.connections import calls as upstream_calls
from sessions_app.agents import rate_limits
from sessions_app.agents.rate_limits import CATALOG_COST, REQUEST_COST
from sessions_app.formats import catalog
from sessions_app.ledger import events, reported_results
from sessions_app.ledger.event_details import read_object
from sessions_app.ledger.event_messages import event_body
from sessions_app.ledger.reported_results import Report
from sessions_app.models import Agent, AgentSession, Event, EventKind, SessionState
from sessions_app.review.queries import SessionFilter
from sessions_app.sessions import lifecycle, loading, schemas, servers, surface
from sessions_app.sessions.scope import scope_of_session
from toolcrib.lib.api_schemas import (
    CONFLICTS,
    ERROR_BODIES,
    ERRORS,
    NO_FIELDS,
    Cursor,
    Limit,
    NoFields,
    choices,
    set_location,
)
from toolcrib.lib.errors import Forbidden, Invalid
from toolcrib.lib.json_codec import canonical, canonical_in_pieces, digest
from toolcrib.lib.pagination import cut_page, parse_id
from toolcrib.lib.payloads import check_value
from toolcrib.lib.roles import key_actor

router = Router(tags=["sessions"])
AGENT_ERRORS = {**ERRORS, 429: ERROR_BODIES[429]}
# Of operations that agents use for their own sessions, and operators for all.
READ_ERRORS = {status: body for status, body in AGENT_ERRORS.items() if status != 403}
CALL_ERRORS = {**AGENT_ERRORS, 502: ERROR_BODIES[502], 504: ERROR_BODIES[504]}
CATALOG = {200: dict[str, Any], 304: None}
TEXT_RESPONSE = {"responses": {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}}


def _caller(request: HttpRequest) -> Agent | None:
    """Return the authenticated agent; None for an operator."""
    agent: Agent | None = request.agent  # type: ignore[attr-defined]
    return agent


def agent_of(request: HttpRequest) -> Agent:
    """Return the authenticated agent. Raises Forbidden for other keys."""
    agent = _caller(request)
    if agent is None:
        raise Forbidden("This endpoint requires an agent key.", hint="Use an agent's key.")
    return agent


def _own_session(request: HttpRequest, session_id: str) -> AgentSession:
    return lifecycle.find_session(agent_of(request), session_id)


def readable_session(request: HttpRequest, session_id: str) -> AgentSession:
    """Return a session for reading: agents may read their own, operators all."""
    return lifecycle.find_session(_caller(request), session_id)


def _json(body: object, status: int = 200) -> HttpResponse:
    return _response(canonical_in_pieces(body), status)


def _response(text: str, status: int = 200) -> HttpResponse:
    return HttpResponse(text, status=status, content_type="application/json")


def charged(base: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Charge an agent the base cost before an operation, and the bytes of its response after."""

    def add_bytes(run: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
        def run_and_charge(request: HttpRequest, **path: Any) -> HttpResponse:
            response = run(request, **path)
            if response.status_code < 400:
                rate_limits.add_cost(_caller(request), len(response.content))
            return response

        return run_and_charge

    def decorate(operation: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(operation)
        def check_and_run(request: HttpRequest, *args: Any, **values: Any) -> Any:
            rate_limits.check_cost(_caller(request), base)
            return operation(request, *args, **values)

        return decorate_view(add_bytes)(check_and_run)

    return decorate


# --- Sessions -------------------------------------------------------------------------------------


@router.post("/sessions", response={201: schemas.OpenedSession, **AGENT_ERRORS, **CONFLICTS})
@charged(CATALOG_COST)
def open_session(request: HttpRequest, body: schemas.OpenIn) -> HttpResponse:
    """Open a session. Returns its catalog, its tools array and how its mode was chosen."""
    check_value(body.metadata, "/metadata")
    if len(canonical(body.metadata).encode()) > schemas.MAX_METADATA_BYTES:
        raise Invalid(
            f"metadata has more than {schemas.MAX_METADATA_BYTES // 1024} KB.",
            hint="Store large values elsewhere, and send a reference.",
        )
    names = ("model", "header", "preload", "groups", "servers")
    check_value({name: getattr(body, name) for name in names}, "")
    check_value(body.resume.expanded_groups if body.resume else {}, "/resume/expanded_groups")
    session, unknown = lifecycle.open_session(agent_of(request), body)
    return _created(_session_body(session, unknown))


def _created(body: dict[str, Any]) -> HttpResponse:
    response = _json(body, 201)
    set_location(response, "sessions", body["id"])
    return response


def _session_body(
    session: AgentSession,
    unknown: Sequence[str] = (),
    include: Collection[str] = schemas.SESSION_PARTS,
) -> dict[str, Any]:
    scope = scope_of_session(session)
    candidates = {name: scope.candidates(name) for name in unknown}
    body: dict[str, Any] = {
        "id": session.session_id,
        "agent": session.agent.name,
        "state": loading.current_state(session),
        "parent": session.parent.session_id if session.parent_id and session.parent else None,
        "strategy": session.strategy,
        "mode": session.mode,
        "auto_deferred": session.auto_deferred,
        "decided_by": session.decided_by,
        "stats": loading.stats(session, with_names=False),
        "suggested_iteration_multiplier": (
            lifecycle.DEFERRED_ITERATION_MULTIPLIER if session.mode == "deferred" else 1
        ),
        "unknown": list(unknown),
        "ambiguous": {name: names for name, names in candidates.items() if names},
        "metadata": read_object(session.metadata),
        "created_at": session.created_at.isoformat(),
    }
    if "catalog" in include:
        text, tokens, left_out = surface.catalog_text(session)
        body["catalog"] = {
            "text": text,
            "etag": digest(text),
            "revision": session.revision,
            "tokens": tokens,
            "left_out": left_out,
        }
    if "tools" in include:
        body["tools"] = surface.tools_array(session)
    return body


@router.get("/sessions", response={200: schemas.SessionPage, **READ_ERRORS})
@charged(REQUEST_COST)
def list_sessions(
    request: HttpRequest,
    limit: Limit = 50,
    cursor: Cursor = "",
    state: Annotated[str, choices(SessionState, optional=True)] = "",
    agent: str = "",
    tool: str = "",
    errors: bool = False,
) -> dict[str, Any]:
    """List sessions, newest first: an agent's own, or all for an operator."""
    check_value([agent, tool], "")
    if state and state not in SessionState.values:
        raise Invalid(f"state must be one of: {', '.join(SessionState.values)}.")
    own = _caller(request)
    session_filter = SessionFilter(agent, (state,) if state else (), errors, tool)
    rows = session_filter.apply(AgentSession.objects.select_related("agent", "parent")).order_by(
        "-id"
    )
    if own is not None:
        rows = rows.filter(agent=own)
    if cursor:
        rows = rows.filter(pk__lt=parse_id(cursor))
    sessions, next_cursor = cut_page(rows, limit, lambda row: str(row.pk))
    return {"items": [_row_body(row) for row in sessions], "next_cursor": next_cursor}


def _row_body(session: AgentSession) -> dict[str, Any]:
    return {
        "id": session.session_id,
        "agent": session.agent.name,
        "state": loading.current_state(session),
        "strategy": session.strategy,
        "mode": session.mode,
        "parent": session.parent.session_id if session.parent_id and session.parent else None,
        "created_at": session.created_at,
        "last_used_at": session.last_used_at,
        "calls": session.calls,
        "errors": session.errors,
        "tokens": loading.token_ledger(session),
    }


@router.get("/sessions/{session_id}", response={200: schemas.SessionOut, **READ_ERRORS})
@charged(REQUEST_COST)
def get_session(
    request: HttpRequest, session_id: str, include: schemas.SessionInclude = ""
) -> HttpResponse:
    """Get a session; its catalog and its tools array only if `include` names them."""
    parts = include.split(",")
    return _json(_session_body(readable_session(request, session_id), include=parts))


@router.delete("/sessions/{session_id}", response={204: None, **AGENT_ERRORS, **CONFLICTS})
def delete_session(request: HttpRequest, session_id: str) -> Status[None]:
    """Delete a session with its timeline, calls and payloads, as an admin. Its forks stay."""
    if _caller(request) is not None:
        raise Forbidden("Agents cannot delete sessions.", hint="POST /sessions/{id}/close ends it.")
    lifecycle.delete_session(lifecycle.find_session(None, session_id), actor=key_actor(request))
    return Status(204, None)


@router.post("/sessions/{session_id}/close", response={200: schemas.SessionOut, **AGENT_ERRORS})
async def close_session(
    request: HttpRequest, session_id: str, body: NoFields = NO_FIELDS
) -> HttpResponse:
    """Close a session and its upstream connections."""
    response = await sync_to_async(_close)(request, session_id)
    await upstream_calls.forget_session(session_id)
    return response


def _close(request: HttpRequest, session_id: str) -> HttpResponse:
    rate_limits.check_cost(agent_of(request), REQUEST_COST)
    lifecycle.close_session(_own_session(request, session_id))
    response = _json(_session_body(_own_session(request, session_id), include=()))
    rate_limits.add_cost(agent_of(request), len(response.content))
    return response


@router.post(
    "/sessions/{session_id}/fork",
    response={201: schemas.OpenedSession, **AGENT_ERRORS, **CONFLICTS},
)
@charged(CATALOG_COST)
def fork_session(request: HttpRequest, session_id: str, body: NoFields = NO_FIELDS) -> HttpResponse:
    """Copy a session with its catalog and loaded tools. The copy is independent."""
    child = lifecycle.fork_session(_own_session(request, session_id))
    return _created(_session_body(child))


# --- Catalog and tools ----------------------------------------------------------------------------


@router.get(
    "/sessions/{session_id}/catalog",
    response={**CATALOG, **READ_ERRORS},
    openapi_extra=TEXT_RESPONSE,
)
@charged(CATALOG_COST)
def get_session_catalog(
    request: HttpRequest, session_id: str, options: Query[schemas.FormatIn]
) -> HttpResponse:
    """Get the text for the system prompt and the tools array, in a provider's format."""
    catalog.check_format(options)
    session = readable_session(request, session_id)
    response = _etag_response(request, catalog.session_catalog(session, options), options.format)
    is_open = loading.current_state(session) == SessionState.OPEN
    if response.status_code == 200 and is_open and _caller(request):
        events.record_event(session, EventKind.CATALOG, details={"format": options.format})
    return response


def _etag_response(request: HttpRequest, body: str, format_: str) -> HttpResponse:
    """Return the body with an ETag, or 304 if the client has it."""
    content_type = "text/plain; charset=utf-8" if format_ == "text" else "application/json"
    etag = f'"{digest(body)}"'
    known = [tag.strip() for tag in request.headers.get("If-None-Match", "").split(",")]
    response = HttpResponse(body, content_type=content_type)
    if not {etag, f"W/{etag}", "*"}.isdisjoint(known):
        rate_limits.add_cost(_caller(request), len(response.content))  # rendered all the same
        response = HttpResponse(status=304)
    response["ETag"] = etag
    response["Cache-Control"] = "private, no-cache"
    return response


@router.get("/sessions/{session_id}/tools", response={200: list[dict[str, Any]], **READ_ERRORS})
@charged(CATALOG_COST)
def get_session_tools(
    request: HttpRequest, session_id: str, options: Query[schemas.FormatIn]
) -> HttpResponse:
    """Get the current tools array."""
    catalog.check_format(options)
    return _json(catalog.current_tools(readable_session(request, session_id), options))


@router.get(
    "/sessions/{session_id}/servers", response={200: schemas.SessionServerPage, **READ_ERRORS}
)
@charged(REQUEST_COST)
def list_session_servers(
    request: HttpRequest, session_id: str, limit: Limit = 50, cursor: Cursor = ""
) -> dict[str, Any]:
    """List the servers in the session's scope by slug, with their groups and number of tools."""
    check_value(cursor, "/cursor")
    scope = scope_of_session(readable_session(request, session_id))
    rows = servers.servers_in_scope(scope).filter(slug__gt=cursor)
    page, next_cursor = cut_page(rows, limit, lambda server: server.slug)
    items = [servers.describe_server(scope, server) for server in page]
    return {"items": items, "next_cursor": next_cursor}


@router.get(
    "/sessions/{session_id}/tools/{name}",
    response={200: dict[str, Any], **AGENT_ERRORS, **CONFLICTS},
)
def get_session_tool(
    request: HttpRequest, session_id: str, name: str, options: Query[schemas.DetailIn]
) -> HttpResponse:
    """Get a tool's definition, including its output schema."""
    return served_by_endpoint()


@router.get(
    "/catalog", response={**CATALOG, **AGENT_ERRORS}, tags=["catalog"], openapi_extra=TEXT_RESPONSE
)
@charged(CATALOG_COST)
def get_catalog(request: HttpRequest, options: Query[schemas.FormatIn]) -> HttpResponse:
    """Get the catalog that a session opened now would receive."""
    catalog.check_format(options)
    body = catalog.preview_catalog(agent_of(request), options)
    return _etag_response(request, body, options.format)


# --- Search, load, call ---------------------------------------------------------------------------


def served_by_endpoint() -> HttpResponse:
    """Five operations are declared here for the API's schema; sessions/endpoint.py serves them."""
    raise NotImplementedError("toolcrib.asgi routes this request to sessions/endpoint.py.")


@router.post(
    "/sessions/{session_id}/load", response={200: schemas.LoadOut, **AGENT_ERRORS, **CONFLICTS}
)
def load_tools(request: HttpRequest, session_id: str, body: schemas.LoadIn) -> HttpResponse:
    """Load a group's tools, all or by name. Returns their schemas."""
    return served_by_endpoint()


@router.post(
    "/sessions/{session_id}/preload",
    response={200: schemas.PreloadOut, **AGENT_ERRORS, **CONFLICTS},
)
@charged(REQUEST_COST)
def preload_tools(request: HttpRequest, session_id: str, body: schemas.PreloadIn) -> HttpResponse:
    """Load tools by name from any group."""
    check_value(body.tool_names, "/tool_names")
    return _response(loading.preload(_own_session(request, session_id), body.tool_names))


@router.post(
    "/sessions/{session_id}/search",
    response={
        200: schemas.SearchOut
        | schemas.LogicoreSearchOut
        | schemas.ToolResult
        | schemas.ToolSearchOutput,
        **AGENT_ERRORS,
        **CONFLICTS,
    },
)
def search_tools(
    request: HttpRequest, session_id: str, body: schemas.SearchIn, options: Query[schemas.FoundIn]
) -> HttpResponse:
    """Search tools by query, by pattern, or by exact name."""
    return served_by_endpoint()


KEY_PARAMETER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "A retry with the same key and body returns the stored response; it runs once.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}


@router.post(
    "/sessions/{session_id}/call",
    response={200: schemas.CallOut, **CALL_ERRORS, **CONFLICTS},
    by_alias=True,
    openapi_extra={"parameters": [KEY_PARAMETER]},
)
def call_tool(request: HttpRequest, session_id: str, body: schemas.CallIn) -> HttpResponse:
    """Call a tool. Errors that the model can correct are returned as a result with is_error."""
    return served_by_endpoint()


@router.get(
    "/calls/{call_id}",
    response={200: schemas.CallOut, **AGENT_ERRORS},
    by_alias=True,
    tags=["calls"],
)
def get_call(request: HttpRequest, call_id: str, options: Query[schemas.WaitIn]) -> HttpResponse:
    """Get a call of this agent: its result once, or how it stands. May wait for its end."""
    return served_by_endpoint()


@router.post(
    "/calls/{call_id}/result",
    response={200: schemas.CallOut, **AGENT_ERRORS, **CONFLICTS},
    by_alias=True,
    tags=["calls"],
)
@charged(REQUEST_COST)
def report_result(request: HttpRequest, call_id: str, body: schemas.ResultIn) -> HttpResponse:
    """Report what a custom tool returned, once and within 24 hours of its call."""
    report = Report(body.content, body.structured_content, body.is_error)
    return _response(reported_results.report_result(agent_of(request), call_id, report).as_json())


# --- State, stats, events -------------------------------------------------------------------------


@router.get("/sessions/{session_id}/state", response={200: schemas.StateOut, **READ_ERRORS})
@charged(REQUEST_COST)
def get_session_state(request: HttpRequest, session_id: str) -> HttpResponse:
    """Get the loaded groups and tools, to resume in another session."""
    # Not canonical JSON: the groups must stay in load order.
    body = loading.export_state(readable_session(request, session_id))
    return HttpResponse(json.dumps(body, ensure_ascii=False), content_type="application/json")


@router.get("/sessions/{session_id}/stats", response={200: schemas.Stats, **READ_ERRORS})
@charged(REQUEST_COST)
def get_session_stats(request: HttpRequest, session_id: str) -> HttpResponse:
    """Get the number and size of the tools, and the ledger of tokens."""
    return _json(loading.stats(readable_session(request, session_id)))


@router.get("/sessions/{session_id}/events", response={200: schemas.EventPage, **READ_ERRORS})
@charged(REQUEST_COST)
def list_session_events(
    request: HttpRequest, session_id: str, limit: Limit = 100, cursor: Cursor = ""
) -> dict[str, Any]:
    """List the session's events, oldest first."""
    session = readable_session(request, session_id)
    rows = Event.objects.select_related("call").filter(session=session).order_by("pk")
    if cursor:
        rows = rows.filter(pk__gt=parse_id(cursor))
    page, next_cursor = cut_page(rows, limit, lambda row: str(row.pk))
    return {"items": [event_body(row) for row in page], "next_cursor": next_cursor}
