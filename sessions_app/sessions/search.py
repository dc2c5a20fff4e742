"""Tool search and tool details within a session's scope. Both are written as events."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from sessions_app.ledger.writer import LedgerCursor, write_event
from sessions_app.models import EventKind
from sessions_app.sessions import loading, surface
from sessions_app.sessions.loading import SessionLoads
from sessions_app.sessions.schemas import SearchIn
from sessions_app.sessions.scope import Ambiguous, NotAvailable, SessionScope
from sessions_app.sessions.surface import SessionContext
from toolcrib.lib.errors import Invalid, ToolcribError
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

    @property
    def texts(self) -> dict[str, str]:
        """Return what the agent wrote, by field."""
        names = ("query", "pattern", "name", "server", "server_hint")
        return {name: getattr(self, name) for name in names}


def parse_body(body: SearchIn, *, max_limit: int = MAX_HITS, full: bool = False) -> SessionQuery:
    """Convert a request body to a query. A search by name loads the tool and returns it in full."""
    full = full or (bool(body.name) and body.detail == "summary")
    decided = {
        "strategy": body.strategy or "",
        "limit": max(1, min(max_limit, body.limit)),
        "detail": "full" if full else body.detail,
        "load": bool(body.name) if body.load is None else body.load,
    }
    return SessionQuery(**{**dict(body), **decided})


@dataclass
class SessionSearch:
    """The response to a search, and what is to be written of it."""

    context: SessionContext
    query: SessionQuery
    result: SearchResult
    newly_loaded: list[str]
    response: dict[str, Any]
    loads: SessionLoads | None = None

    def __post_init__(self) -> None:
        self.text = canonical(self.response)
        self.tokens = count(self.text)

    @property
    def loads_version(self) -> int:
        return self.loads.version if self.loads else self.context.loads_version

    def write(self, cursor: LedgerCursor) -> None:
        if self.loads is not None:
            self.loads.write(cursor)
        query, terms = self.query, ("query", "pattern", "name")
        values = {name: getattr(query, name)[:MAX_QUERY_LENGTH] for name in terms}
        write_event(
            cursor,
            self.context.session_pk,
            EventKind.SEARCHED,
            tokens=self.tokens,
            details={
                **{name: value for name, value in values.items() if value},
                "strategy": self.result.strategy,
                "server": query.server,
                "total": self.result.total,
                "hits": [hit.name for hit in self.result.hits],
                "newly_loaded": len(self.newly_loaded),
            },
        )


def search_session(
    context: SessionContext, query: SessionQuery, is_shown: Callable[[str], bool]
) -> SessionSearch:
    """Search a session's tools; with `load`, also load the hits. Writes nothing."""
    result, error = search_scope(context.scope, query)
    loads, newly_loaded = None, []
    if result.hits and (query.load or query.detail == "full"):
        loads = SessionLoads(context)
        names = [hit.name for hit in result.hits] if query.load else []
        for loaded in loads.load_by_name(names, how="search")[0]:
            newly_loaded += loaded.newly_loaded
    response = search_response(
        context.scope,
        query,
        result,
        error,
        pins=loads.pins if loads else {},
        is_shown=is_shown,
        newly_loaded=newly_loaded,
    )
    return SessionSearch(context, query, result, newly_loaded, response, loads)


def search_response(
    scope: SessionScope,
    query: SessionQuery,
    result: SearchResult,
    error: str,
    *,
    pins: Mapping[str, surface.Pin],
    is_shown: Callable[[str], bool],
    newly_loaded: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the response to a search. `pins`: what the session was shown of loaded tools."""
    tools = [
        _render_hit(scope, hit, query.detail, pins.get(hit.name), is_shown) for hit in result.hits
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


def _render_hit(
    scope: SessionScope,
    hit: Hit,
    detail: str,
    pin: surface.Pin | None,
    is_shown: Callable[[str], bool],
) -> dict[str, Any]:
    tool = scope.tools[hit.name]
    body: dict[str, Any] = {"name": tool.name}
    if detail != "name":
        full = detail == "full"
        body["description"] = tool.description if full else rendering.summary(tool.description)
    body |= {
        "group_id": scope.groups_by_tool[tool.name][0].group_id,
        "server": tool.server or None,
        "source": tool.source,
        "loaded": pin is not None or is_shown(hit.name),
        "tokens": tool.approved.tokens if tool.approved else 0,
    }
    if tool.server:
        body["mcpServer"] = tool.server
    if hit.score is not None:
        body["score"] = round(hit.score, 3)
    if detail == "full" and tool.approved:
        body["schema"] = surface.render_pin(tool.name, pin or surface.pin_of(tool))["parameters"]
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


@dataclass
class ToolDetails:
    """The response to a request for a tool's definition, or the error."""

    session_pk: int
    tool_name: str
    response: dict[str, Any]
    error: ToolcribError | None = None

    def __post_init__(self) -> None:
        self.text = canonical(self.response)
        self.tokens = 0 if self.error else count(self.text)

    def write(self, cursor: LedgerCursor) -> None:
        write_event(
            cursor,
            self.session_pk,
            EventKind.DETAILS,
            tool_name=self.tool_name,
            tokens=self.tokens,
            details={"found": self.error is None},
        )


def tool_details(context: SessionContext, name: str, detail: str) -> ToolDetails:
    """Return a tool's definition as shown to this session, including its output schema."""
    try:
        tool = context.scope.find_tool(name)
        if not tool.offered:
            raise NotAvailable(
                loading.unavailable_reason(tool), code=loading.unavailable_code(tool)
            )
    except (NotAvailable, Ambiguous) as error:
        return ToolDetails(context.session_pk, name, {}, error)
    loads = SessionLoads(context)
    initial = surface.with_newer(context.surface.pins, loads.newer)
    pin = loads.pins.get(tool.name) or initial.get(tool.name) or surface.pin_of(tool)
    return ToolDetails(context.session_pk, tool.name, _render_details(tool, pin, detail))


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
