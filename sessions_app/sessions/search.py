"""Search for tools and read one, within a session's scope; record what was asked and found."""

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
from sessions_app.sessions import loading, scope, surface
from sessions_app.sessions.schemas import SearchIn
from sessions_app.sessions.scope import Ambiguous, NotAvailable, SessionScope
from toolcrib.lib.errors import Invalid
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.token_counter import count

PLENTY = "Use load_tools or get_tool_details for a schema, or call the tool at once."


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
    server_hint: str = ""  # what kind of server is meant, in words


def parse_body(body: SearchIn, *, most: int = MAX_HITS, full: bool = False) -> SessionQuery:
    """What an agent asks for; a tool asked for by name is shown in full, and loaded."""
    full = full or (bool(body.name) and body.detail == "summary")
    return SessionQuery(
        query=body.query,
        pattern=body.pattern,
        name=body.name,
        strategy=body.strategy or "",
        server=body.server,
        limit=max(1, min(most, body.limit)),
        detail="full" if full else body.detail,
        load=bool(body.name) if body.load is None else body.load,
        server_hint=body.server_hint,
    )


def search_session(session: AgentSession, asked: SessionQuery) -> dict[str, Any]:
    """Answer a search; with `load`, what it finds is loaded too."""
    loading.check_open(session)
    seen = scope.scope_of_session(session)
    found, missing = search_scope(seen, asked)
    with transaction.atomic():
        newly = _load(session, seen, found) if asked.load and found.hits else []
        pins = surface.shown_pins(session)
        at_once = surface.surface_of(session.snapshot).pins
        told = search_answer(seen, asked, found, missing, pins=pins, at_once=at_once, newly=newly)
        _record(session, asked, found, newly, count(canonical(told)))
    return told


def search_answer(
    seen: SessionScope,
    asked: SessionQuery,
    found: SearchResult,
    missing: str,
    *,
    pins: Mapping[str, surface.Pin],
    at_once: Collection[str],
    newly: Sequence[str] = (),
) -> dict[str, Any]:
    """Say what was found as agents read it; `pins` and `at_once` are what they have already."""
    tools = [
        _shown(seen, seen.items[hit.name], hit, asked.detail, pins, at_once) for hit in found.hits
    ]
    told: dict[str, Any] = {
        "status": "success" if tools else "no_matches",
        "strategy": found.strategy,
        "total_matches": found.total,
        "tools": tools,
        "newly_loaded": len(newly),
        "message": missing or _message(found, newly),
    }
    if not tools:
        told["suggestions"] = _suggestions(seen, asked)
    return told


def search_scope(
    seen: SessionScope, asked: SessionQuery, *, explain: bool = False
) -> tuple[SearchResult, str]:
    """Search a scope: what is found, or why nothing of that name is there. Records nothing."""
    if not (asked.name or asked.query or asked.pattern):
        raise Invalid("Give a query in words, a pattern, or the exact name of a tool.")
    if not asked.name:
        found = search(
            seen.index,
            query=asked.query,
            pattern=asked.pattern,
            strategy=asked.strategy,
            server=asked.server,
            server_hint=asked.server_hint,
            limit=asked.limit,
            explain=explain,
        )
        return found, ""
    try:
        item = seen.find(asked.name)
    except (NotAvailable, Ambiguous) as error:
        return SearchResult("name", 0, ()), error.sentence
    if not item.offered:
        return SearchResult("name", 0, ()), loading.unavailable_reason(item)
    return SearchResult("name", 1, (Hit(item.name, None, ("name",)),)), ""


def _load(session: AgentSession, seen: SessionScope, found: SearchResult) -> list[str]:
    groups, _ = loading.names_by_group(session, seen, [hit.name for hit in found.hits])
    newly: list[str] = []
    for group_id, names in groups.items():
        newly += loading.load(session, group_id, names, how="search").fresh
    return newly


def _shown(
    seen: SessionScope,
    item: CachedTool,
    hit: Hit,
    detail: str,
    pins: Mapping[str, surface.Pin],
    at_once: Collection[str],
) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": item.name}
    if detail != "name":
        full = detail == "full"
        shown["description"] = item.description if full else rendering.summary(item.description)
    shown |= {
        "group_id": seen.homes[item.name][0].group_id,
        "server": item.server or None,
        "source": item.source,
        "loaded": item.name in pins or item.name in at_once,
        "tokens": item.approved.tokens if item.approved else 0,
    }
    if item.server:
        shown["mcpServer"] = item.server
    if hit.score is not None:
        shown["score"] = round(hit.score, 3)
    if detail == "full" and item.approved:
        pin = pins.get(item.name) or surface.pin_of(item)
        shown["schema"] = surface.render_pin(item.name, pin)["parameters"]
    return shown


def _message(found: SearchResult, newly: Sequence[str]) -> str:
    if not found.hits:
        return f"No tool matches. Try other words, or fewer. {found.note}".strip()
    count_ = f"Found {found.total} tool{'' if found.total == 1 else 's'}"
    if found.total > len(found.hits):
        count_ += f", the best {len(found.hits)} shown"
    told = f"{count_}. " + ("They are loaded." if newly else PLENTY)
    return f"{told} {found.note}".strip()


def _suggestions(seen: SessionScope, asked: SessionQuery) -> list[str]:
    text = asked.name or asked.query or asked.pattern
    return suggest_names(seen.index, text) or [line.group_id for line in seen.lines[:10]]


def _record(
    session: AgentSession, asked: SessionQuery, found: SearchResult, newly: list[str], tokens: int
) -> None:
    asked_for = {
        key: value[:MAX_QUERY_LENGTH]
        for key, value in (("query", asked.query), ("pattern", asked.pattern), ("name", asked.name))
        if value
    }
    events.record_event(
        session,
        EventKind.SEARCHED,
        tokens=tokens,
        details={
            **asked_for,
            "strategy": found.strategy,
            "server": asked.server,
            "total": found.total,
            "hits": [hit.name for hit in found.hits],
            "newly_loaded": len(newly),
        },
    )


def tool_details(session: AgentSession, name: str, detail: str) -> dict[str, Any]:
    """Return one tool's definition as this session knows it, its output schema included."""
    loading.check_open(session)
    seen = scope.scope_of_session(session)
    try:
        item = seen.find(name)
        if not item.offered:
            raise NotAvailable(
                loading.unavailable_reason(item), code=loading.unavailable_code(item)
            )
    except (NotAvailable, Ambiguous):
        events.record_event(session, EventKind.DETAILS, tool_name=name, details={"found": False})
        raise
    pin = surface.last_shown(session, item.name) or surface.pin_of(item)
    answer = _definition(item, pin, detail)
    events.record_event(
        session,
        EventKind.DETAILS,
        tool_name=item.name,
        tokens=count(canonical(answer)),
        details={"found": True},
    )
    return answer


def _definition(item: CachedTool, pin: surface.Pin, detail: str) -> dict[str, Any]:
    made = surface.render_pin(item.name, pin)
    if detail == "name":
        return {key: made[key] for key in ("name", "source", "mcpServer") if key in made}
    if detail == "summary":
        made["description"] = rendering.summary(made["description"])
        del made["parameters"]
        return made
    whole = cache.cached_definition(pin["definition"]).tool
    for key in ("title", "outputSchema", "annotations"):
        if whole.get(key) is not None:
            made[key] = whole[key]
    return made | {"original_name": item.original_name}
