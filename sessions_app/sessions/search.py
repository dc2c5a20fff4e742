"""Tool search and tool details within a session's scope. Records both as events."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import transaction

from catalog import cache, rendering
from catalog.cache import CachedTool
from catalog.search.engine import (
    MAX_HITS,
    MAX_QUERY_LENGTH,
    Hit,
    SearchResult,
    search,
    suggest_names,
)
from sessions_app.ledger import events
from sessions_app.models import AgentSession, EventKind
from sessions_app.sessions import loading, surface
from sessions_app.sessions.schemas import SearchIn
from sessions_app.sessions.scope import Ambiguous, NotAvailable, SessionScope, scope_of_session
from toolcrib.lib.errors import Invalid
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.token_counter import count

NEXT_STEP = "Use load_tools or get_tool_details for a schema, or call the tool at once."


@dataclass(frozen=True)
class SessionQuery:
    query: str = ""
    pattern: str = ""
    name: str = ""
    strategy: str = ""
    server: str = ""
    limit: int = 10
    detail: str = "summary"
    load: bool = False
    server_hint: str = ""  # free text that describes the server


def parse_body(body: SearchIn, *, max_limit: int = MAX_HITS, full: bool = False) -> SessionQuery:
    """Convert a request body to a query. A search by name loads the tool and returns it in full."""
    full = full or (bool(body.name) and body.detail == "summary")
    return SessionQuery(
        query=body.query,
        pattern=body.pattern,
        name=body.name,
        strategy=body.strategy or "",
        server=body.server,
        limit=max(1, min(max_limit, body.limit)),
        detail="full" if full else body.detail,
        load=bool(body.name) if body.load is None else body.load,
        server_hint=body.server_hint,
    )


def search_session(session: AgentSession, query: SessionQuery) -> dict[str, Any]:
    """Search a session's tools and record the search; with `load`, also load the hits."""
    loading.check_open(session)
    scope = scope_of_session(session)
    result, error = search_scope(scope, query)
    with transaction.atomic():
        newly_loaded = _load_hits(session, scope, result) if query.load and result.hits else []
        response = search_response(
            scope,
            query,
            result,
            error,
            pins=surface.shown_pins(session),
            preloaded=surface.surface_of(session.snapshot).pins,
            newly_loaded=newly_loaded,
        )
        _record(session, query, result, newly_loaded, count(canonical(response)))
    return response


def search_response(
    scope: SessionScope,
    query: SessionQuery,
    result: SearchResult,
    error: str,
    *,
    pins: Mapping[str, surface.Pin],
    preloaded: Collection[str],
    newly_loaded: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the response to a search. `pins` and `preloaded`: tools the session already has."""
    tools = [
        _render_hit(scope, scope.tools[hit.name], hit, query.detail, pins, preloaded)
        for hit in result.hits
    ]
    response: dict[str, Any] = {
        "status": "success" if tools else "no_matches",
        "strategy": result.strategy,
        "total_matches": result.total,
        "tools": tools,
        "newly_loaded": len(newly_loaded),
        "message": error or _message(result, newly_loaded),
    }
    if not tools:
        response["suggestions"] = _suggestions(scope, query)
    return response


def search_scope(
    scope: SessionScope, query: SessionQuery, *, explain: bool = False
) -> tuple[SearchResult, str]:
    """Search a scope without recording it. Return the result, and an error for a search by name."""
    if not (query.name or query.query or query.pattern):
        raise Invalid("Give a query in words, a pattern, or the exact name of a tool.")
    if not query.name:
        result = search(
            scope.index,
            query=query.query,
            pattern=query.pattern,
            strategy=query.strategy,
            server=query.server,
            server_hint=query.server_hint,
            limit=query.limit,
            explain=explain,
        )
        return result, ""
    try:
        tool = scope.find_tool(query.name)
    except (NotAvailable, Ambiguous) as error:
        return SearchResult("name", 0, ()), error.sentence
    if not tool.offered:
        return SearchResult("name", 0, ()), loading.unavailable_reason(tool)
    return SearchResult("name", 1, (Hit(tool.name, None, ("name",)),)), ""


def _load_hits(session: AgentSession, scope: SessionScope, result: SearchResult) -> list[str]:
    by_group, _ = loading.names_by_group(scope, [hit.name for hit in result.hits])
    newly_loaded: list[str] = []
    for group_id, names in by_group.items():
        newly_loaded += loading.load(session, group_id, names, how="search").newly_loaded
    return newly_loaded


def _render_hit(
    scope: SessionScope,
    tool: CachedTool,
    hit: Hit,
    detail: str,
    pins: Mapping[str, surface.Pin],
    preloaded: Collection[str],
) -> dict[str, Any]:
    body: dict[str, Any] = {"name": tool.name}
    if detail != "name":
        full = detail == "full"
        body["description"] = tool.description if full else rendering.summary(tool.description)
    body |= {
        "group_id": scope.groups_by_tool[tool.name][0].group_id,
        "server": tool.server or None,
        "source": tool.source,
        "loaded": tool.name in pins or tool.name in preloaded,
        "tokens": tool.approved.tokens if tool.approved else 0,
    }
    if tool.server:
        body["mcpServer"] = tool.server
    if hit.score is not None:
        body["score"] = round(hit.score, 3)
    if detail == "full" and tool.approved:
        pin = pins.get(tool.name) or surface.pin_of(tool)
        body["schema"] = surface.render_pin(tool.name, pin)["parameters"]
    return body


def _message(result: SearchResult, newly_loaded: Sequence[str]) -> str:
    if not result.hits:
        return f"No tool matches. Try other words, or fewer. {result.note}".strip()
    total = f"Found {result.total} tool{'' if result.total == 1 else 's'}"
    if result.total > len(result.hits):
        total += f", the best {len(result.hits)} shown"
    next_step = "They are loaded." if newly_loaded else NEXT_STEP
    return f"{total}. {next_step} {result.note}".strip()


def _suggestions(scope: SessionScope, query: SessionQuery) -> list[str]:
    text = query.name or query.query or query.pattern
    return suggest_names(scope.index, text) or [line.group_id for line in scope.lines[:10]]


def _record(
    session: AgentSession,
    query: SessionQuery,
    result: SearchResult,
    newly_loaded: list[str],
    tokens: int,
) -> None:
    terms = {
        key: value[:MAX_QUERY_LENGTH]
        for key, value in (("query", query.query), ("pattern", query.pattern), ("name", query.name))
        if value
    }
    events.record_event(
        session,
        EventKind.SEARCHED,
        tokens=tokens,
        details={
            **terms,
            "strategy": result.strategy,
            "server": query.server,
            "total": result.total,
            "hits": [hit.name for hit in result.hits],
            "newly_loaded": len(newly_loaded),
        },
    )


def tool_details(session: AgentSession, name: str, detail: str) -> dict[str, Any]:
    """Return a tool's definition as shown to this session, including its output schema."""
    loading.check_open(session)
    try:
        tool = scope_of_session(session).find_tool(name)
        if not tool.offered:
            raise NotAvailable(
                loading.unavailable_reason(tool), code=loading.unavailable_code(tool)
            )
    except (NotAvailable, Ambiguous):
        events.record_event(session, EventKind.DETAILS, tool_name=name, details={"found": False})
        raise
    pin = surface.last_shown(session, tool.name) or surface.pin_of(tool)
    body = _render_details(tool, pin, detail)
    events.record_event(
        session,
        EventKind.DETAILS,
        tool_name=tool.name,
        tokens=count(canonical(body)),
        details={"found": True},
    )
    return body


def _render_details(tool: CachedTool, pin: surface.Pin, detail: str) -> dict[str, Any]:
    body = surface.render_pin(tool.name, pin)
    if detail == "name":
        return {key: body[key] for key in ("name", "source", "mcpServer") if key in body}
    if detail == "summary":
        body["description"] = rendering.summary(body["description"])
        del body["parameters"]
        return body
    definition = cache.cached_definition(pin["definition"]).tool
    for key in ("title", "outputSchema", "annotations"):
        if definition.get(key) is not None:
            body[key] = definition[key]
    return body | {"original_name": tool.original_name}
