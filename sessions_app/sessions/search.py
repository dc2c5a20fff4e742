"""Tool search and tool details within a session's scope. Both are written as events."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from catalog import cache, rendering
from catalog.cache import CachedTool
from catalog.search import weights
from catalog.search.embeddings.encoder import split_identifiers
from catalog.search.engine import (
    MAX_HITS,
    MAX_QUERY_LENGTH,
    Hit,
    SearchResult,
    search,
    search_many,
    suggest_names,
)
from sessions_app.ledger.writer import LedgerCursor, write_event
from sessions_app.models import EventKind, Strategy
from sessions_app.sessions import feature_search, loading, surface
from sessions_app.sessions.loading import SessionLoads, write_refusal
from sessions_app.sessions.schemas import SearchIn
from sessions_app.sessions.scope import Ambiguous, NotAvailable, SessionScope
from sessions_app.sessions.snapshots import Pin
from sessions_app.sessions.surface import SessionContext
from toolcrib.lib.errors import Conflict, Invalid, ToolcribError
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.redaction.redactor import redact_text
from toolcrib.lib.token_counter import count

DEFAULT_LIMIT = 5
DEFAULT_MORE = 10  # names after the hits, where no limit was given
DEFAULT_LIMIT_WITHOUT_MORE = 10  # for patterns, names, and searches in a provider's format
MAX_QUERIES = 4
MAX_DEFAULT_TOKENS = 300  # of a response to a search without a limit


@dataclass(frozen=True)
class SessionQuery:
    query: str = ""
    queries: tuple[str, ...] = ()
    pattern: str = ""
    name: str = ""
    strategy: str = ""
    server: str = ""
    limit: int = DEFAULT_LIMIT
    more: int = DEFAULT_MORE  # names after the hits
    detail: str = "summary"
    explain: bool = False
    load: bool = False
    compat: str = ""  # name of another product, whose result the response is to be
    server_hint: str = ""  # free text that describes the server

    @property
    def texts(self) -> dict[str, Any]:
        """Return what the agent wrote, by field."""
        names = ("query", "pattern", "name", "server", "server_hint")
        return {name: getattr(self, name) for name in names} | {"queries": list(self.queries)}

    @property
    def all_queries(self) -> list[str]:
        return list(dict.fromkeys(text for text in (self.query, *self.queries) if text))


def parse_body(
    body: SearchIn,
    *,
    max_limit: int = MAX_HITS,
    full: bool = False,
    more: bool = True,
    compat: str = "",
) -> SessionQuery:
    """Convert a request body to a query. A search by name loads the tool and returns it in full."""
    more = more and not compat
    has_more = more and not (full or body.name or body.pattern or body.strategy == "regex")
    full = full or (bool(body.name) and body.detail == "summary")
    limit = body.limit
    if limit is None:
        limit = DEFAULT_LIMIT if has_more else DEFAULT_LIMIT_WITHOUT_MORE
    decided = {
        "queries": tuple(body.queries),
        "strategy": body.strategy or "",
        "limit": max(1, min(max_limit, limit)),
        "more": DEFAULT_MORE if has_more and body.limit is None else 0,
        "detail": "full" if full else body.detail,
        "load": bool(body.name or compat) if body.load is None else body.load,
        "compat": compat,
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
    parts: Sequence[SearchResult] = ()  # of each query, if there are several
    loads: SessionLoads | None = None
    error: ToolcribError | None = None  # to be raised once it is recorded

    def __post_init__(self) -> None:
        self.text = canonical(self.response)
        self.tokens = count(self.text)

    @property
    def loads_version(self) -> int:
        return self.loads.version if self.loads else self.context.loads_version

    def write(self, cursor: LedgerCursor) -> None:
        if self.error is not None:
            texts = {
                name: str(text)[:MAX_QUERY_LENGTH]
                for name, text in self.query.texts.items()
                if text
            }
            write_refusal(cursor, self.context.session_pk, "search", self.error.code, **texts)
            return
        if self.loads is not None:
            self.loads.write(cursor)
        query, terms = self.query, ("pattern", "name")
        values: dict[str, Any] = {
            name: getattr(query, name)[:MAX_QUERY_LENGTH] for name in terms
        } | {"query": "; ".join(query.all_queries)[:MAX_QUERY_LENGTH]}
        if len(self.parts) > 1:
            values["queries"] = [
                {"query": text, "hits": [hit.name for hit in part.hits]}
                for text, part in zip(query.all_queries, self.parts, strict=True)
            ]
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
            tokens_loaded=self.loads.shown_tokens if self.loads else 0,
        )


def search_session(
    context: SessionContext, query: SessionQuery, is_loaded: Callable[[str], bool]
) -> SessionSearch:
    """Search a session's tools; with `load`, also load the hits. Writes nothing.

    The error of a search that is refused is in the result, to be recorded before it is raised.
    """
    try:
        return _search_session(context, query, is_loaded)
    except (Invalid, Conflict) as error:
        return SessionSearch(context, query, SearchResult("", 0, ()), [], {}, error=error)


def _search_session(
    context: SessionContext, query: SessionQuery, is_loaded: Callable[[str], bool]
) -> SessionSearch:
    result, parts, error = search_scope(context.scope, query)
    loads, newly_loaded = None, []
    shown: dict[str, Pin] = {}
    if result.hits and (query.load or query.detail == "full"):
        loads = SessionLoads(context)
        names = [hit.name for hit in result.hits[: query.limit]] if query.load else []
        for loaded in loads.load_by_name(names, how="search")[0]:
            newly_loaded += loaded.newly_loaded
        if query.detail == "full":
            shown = loads.show(context.scope.tools[hit.name] for hit in result.hits[: query.limit])
    response = search_response(
        context.scope,
        query,
        result,
        error,
        pins=loads.pins if loads else {},
        shown=shown,
        is_loaded=is_loaded,
        newly_loaded=newly_loaded,
        with_schemas=query.load and context.strategy == Strategy.DISPATCH,
    )
    return SessionSearch(context, query, result, newly_loaded, response, parts, loads)


def search_response(
    scope: SessionScope,
    query: SessionQuery,
    result: SearchResult,
    error: str,
    *,
    pins: Mapping[str, Pin],
    is_loaded: Callable[[str], bool],
    shown: Mapping[str, Pin] = MappingProxyType({}),
    newly_loaded: Sequence[str] = (),
    with_schemas: bool = False,
) -> dict[str, Any]:
    """Return the response to a search.

    `pins` is what the session was given of loaded tools, `shown` what it gets of tools in full.
    """
    hits = result.hits[: query.limit]
    tools = [_render_hit(scope, hit, query, pins, shown, is_loaded) for hit in hits]
    if with_schemas:
        for tool in tools:
            tool |= _schema_and_examples(tool["name"], pins[tool["name"]])
    response: dict[str, Any] = {
        "status": "success" if tools else "no_matches",
        "strategy": result.strategy,
        "total_matches": result.total,
        "tools": tools,
        "newly_loaded": len(newly_loaded),
        "message": error or _message(scope, query, result, newly_loaded),
    }
    if more := [hit.name for hit in result.hits[query.limit :]]:
        response["more"] = more
    if not tools:
        response["suggestions"] = _suggestions(scope, query)
    if query.compat:
        return _as_logicore(query, response)
    if scope.feature_servers and (found := feature_search.search_features(scope, query.texts)):
        response["features"] = found
        response["features_message"] = feature_search.HOW_TO_GET
    if query.more and query.detail != "full" and not (query.explain or query.load):
        rendering.shorten_search_response(response, MAX_DEFAULT_TOKENS)
    return response


def _as_logicore(query: SessionQuery, response: dict[str, Any]) -> dict[str, Any]:
    """Return a response as the tool_search_regex of Logicore does; schemas are Toolcrib's own."""
    names, tools = ("name", "description", "schema"), response["tools"]
    message = response["message"]
    if tools:
        subject = "1 tool. It is" if len(tools) == 1 else f"{len(tools)} tools. They are"
        message = f"Found {subject} {'now available for use' if query.load else 'not loaded'}."
    return {
        "status": response["status"],
        "pattern": query.pattern or query.name or "; ".join(query.all_queries),
        "total_matches": response["total_matches"],
        "tools": [
            {name: tool[name] for name in names if name in tool}
            | {"loaded": tool.get("loaded", False)}
            for tool in tools
        ],
        "newly_loaded": response["newly_loaded"],
        "message": message,
    }


def search_scope(
    scope: SessionScope, query: SessionQuery, *, explain: bool = False
) -> tuple[SearchResult, Sequence[SearchResult], str]:
    """Search a scope without recording it.

    Return the result, the results of each query if there are several, and an error for a search
    by name.
    """
    queries = query.all_queries
    if not (query.name or queries or query.pattern):
        raise Invalid("Give a query in words, a pattern, or the exact name of a tool.")
    if not query.name:
        options: dict[str, Any] = {
            "strategy": query.strategy,
            "server": query.server,
            "server_hint": query.server_hint,
            "limit": query.limit + query.more,
            "explain": explain,
        }
        if len(queries) > MAX_QUERIES:
            raise Invalid(f"At most {MAX_QUERIES} queries can be searched for at once.")
        if len(queries) > 1 and not query.pattern:
            return *search_many(scope.index, queries, **options), ""
        text = queries[0] if queries else ""
        return search(scope.index, query=text, pattern=query.pattern, **options), (), ""
    try:
        tool = scope.find_tool(query.name)
    except (NotAvailable, Ambiguous) as error:
        return SearchResult("name", 0, ()), (), error.sentence
    if not tool.offered:
        return SearchResult("name", 0, ()), (), loading.unavailable_reason(tool)
    return SearchResult("name", 1, (Hit(tool.name, None, ("name",)),)), (), ""


def _render_hit(
    scope: SessionScope,
    hit: Hit,
    query: SessionQuery,
    pins: Mapping[str, Pin],
    shown: Mapping[str, Pin],
    is_loaded: Callable[[str], bool],
) -> dict[str, Any]:
    """Return a hit as small as a model needs it; the rest if it was asked for."""
    tool, full = scope.tools[hit.name], query.detail == "full"
    pin = pins.get(hit.name)
    body: dict[str, Any] = {"name": tool.name}
    if query.detail != "name":
        body["description"] = tool.description if full else rendering.summary(tool.description)
    body["group_id"] = scope.groups_by_tool[tool.name][0].group_id
    loaded = pin is not None or is_loaded(hit.name)
    if loaded:
        body["loaded"] = True
    if not (full or query.explain):
        return body
    body |= {
        "server": tool.server or None,
        "source": tool.source,
        "loaded": loaded,
        "tokens": tool.approved.tokens if tool.approved else 0,
    }
    if tool.server:
        body["mcpServer"] = tool.server
    if hit.score is not None:
        body["score"] = round(hit.score, 3)
    if full and tool.approved:
        given = shown.get(tool.name) or pin or surface.pin_of(tool)
        body |= _schema_and_examples(tool.name, given)
    return body


def _schema_and_examples(name: str, pin: Pin) -> dict[str, Any]:
    tool = surface.render_pin(name, pin)
    examples = tool.get("input_examples")
    return {"schema": tool["parameters"], **({"input_examples": examples} if examples else {})}


def _message(
    scope: SessionScope, query: SessionQuery, result: SearchResult, newly_loaded: Sequence[str]
) -> str:
    if not result.hits:
        text = f"No tool matches. Try other words, or fewer. {result.note}"
    else:
        text = f"Found {result.total} tool{'' if result.total == 1 else 's'}"
        if result.total > len(result.hits):
            text = f"Best {len(result.hits)} of {result.total} tools"
        loaded = "It is loaded." if len(result.hits[: query.limit]) == 1 else "They are loaded."
        text += f". {loaded if query.load else rendering.NEXT_STEP} {result.note}"
    if result.coverage < weights.LOW_COVERAGE and query.all_queries:
        text = f"{text.strip()} {_advice(scope, result)}"
    return text.strip()


def _advice(scope: SessionScope, result: SearchResult) -> str:
    """Say how to ask, with an example in the words of a tool: the best hit, or the first tool."""
    example = scope.tools[result.hits[0].name] if result.hits else next(iter(scope.offered), None)
    advice = "To find more, name verb, object and product, one need per query"
    if example is None:
        return f"{advice}."
    words = split_identifiers(f"{example.original_name} {example.server}").replace("-", " ").lower()
    return f'{advice}: "{rendering.one_line(words)[:60]}".'


def _suggestions(scope: SessionScope, query: SessionQuery) -> list[str]:
    text = query.name or next(iter(query.all_queries), "") or query.pattern
    return suggest_names(scope.index, text) or [line.group_id for line in scope.lines[:10]]


@dataclass
class ToolDetails:
    """The response to a request for a tool's definition, or the error."""

    session_pk: int
    tool_name: str
    response: dict[str, Any]
    error: ToolcribError | None = None
    loads: SessionLoads | None = None

    def __post_init__(self) -> None:
        self.text = canonical(self.response)
        self.tokens = 0 if self.error else count(self.text)

    def write(self, cursor: LedgerCursor) -> None:
        if isinstance(self.error, Conflict) and self.error.code == "over_budget":
            name = redact_text(self.tool_name)
            write_refusal(cursor, self.session_pk, "details", self.error.code, name=name)
            return
        if self.loads is not None:
            self.loads.write(cursor)
        write_event(
            cursor,
            self.session_pk,
            EventKind.DETAILS,
            tool_name=redact_text(self.tool_name) if self.error else self.tool_name,
            tokens=self.tokens,
            details={"found": self.error is None},
            tokens_loaded=self.loads.shown_tokens if self.loads else 0,
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
    if detail != "full":
        body = _render_details(tool, loads.pin_as_shown(tool), detail)
        return ToolDetails(context.session_pk, tool.name, body)
    try:
        pin = loads.show([tool])[tool.name]
    except Conflict as error:
        return ToolDetails(context.session_pk, tool.name, {}, error)
    body = _render_details(tool, pin, detail)
    return ToolDetails(context.session_pk, tool.name, body, loads=loads)


def _render_details(tool: CachedTool, pin: Pin, detail: str) -> dict[str, Any]:
    body = surface.render_pin(tool.name, pin)
    if detail == "name":
        return {key: body[key] for key in ("name", "source", "mcpServer") if key in body}
    if detail == "summary":
        body["description"] = rendering.summary(body["description"])
        return {key: body[key] for key in body if key not in ("parameters", "input_examples")}
    definition = cache.cached_definition(pin["definition"]).tool
    for key in ("title", "outputSchema", "annotations"):
        if definition.get(key) is not None:
            body[key] = definition[key]
    return body | {"original_name": tool.original_name}
