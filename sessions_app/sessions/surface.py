"""The catalog text and tools array of a session: its immutable snapshot and loaded tools.

A pin fixes the definition that a session was shown, so a repeated request returns the same bytes
even if the tool has changed.
"""

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

from django.db import connection

from catalog import cache, rendering
from catalog.cache import CachedTool
from catalog.models import CatalogSnapshot
from catalog.rendering import GroupLine
from sessions_app.models import Agent, AgentSession, Mode, Strategy
from sessions_app.sessions.scope import SessionScope, scope_of_session
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.token_counter import count

MAX_SNAPSHOTS_PER_SCOPE = 64
MAX_CACHED_CHARACTERS = 16_000_000  # of snapshot bodies; parsed, a body takes several times that

Pin = dict[str, Any]  # definition, override, server, source, position, seq
DEFERRED_FIELDS = ("definition", "override", "server")  # of the pin of a tool not shown yet
_read_deferred = itemgetter(*DEFERRED_FIELDS)


@dataclass(frozen=True)
class Surface:
    """Parsed body of a snapshot. Immutable, shared by all sessions with this snapshot."""

    groups: tuple[GroupLine, ...]
    keys: dict[str, int]  # primary keys of groups, by the group id in the catalog
    tools: list[dict[str, Any]]
    pins: dict[str, Pin]
    left_out: dict[str, Any] | None
    header: str
    budget: int
    tools_tokens: int
    mode: str
    preloaded: tuple[str, ...]
    deferred: dict[str, list[Any]]  # values of DEFERRED_FIELDS, to render a tool as it was

    @cached_property
    def names_by_group(self) -> dict[str, frozenset[str]]:
        """Return the tools in each group's catalog line when the session opened."""
        return {line.group_id: frozenset(line.names) for line in self.groups}

    @cached_property
    def groups_json(self) -> str:
        """The groups with the names of their tools, as canonical JSON."""
        fields = ("group_id", "display_name", "description")
        return canonical(
            [
                {**{name: getattr(line, name) for name in fields}, "tool_names": line.names}
                for line in self.groups
            ]
        )

    @cached_property
    def servers(self) -> list[str]:
        """The servers whose tools were in scope when the session opened."""
        pinned = {pin["server"] for pin in self.pins.values()}
        return sorted((pinned | {server for _, _, server in self.deferred.values()}) - {""})


@dataclass(slots=True)
class SessionContext:
    """What the operations of a session work with."""

    session_pk: int
    session_id: str
    agent: Agent
    strategy: str
    surface: Surface
    scope: SessionScope
    tokens_loaded: int  # of the budget
    loads_version: int


def context_of(session: AgentSession) -> SessionContext:
    return SessionContext(
        session_pk=session.pk,
        session_id=session.session_id,
        agent=session.agent,
        strategy=session.strategy,
        surface=surface_of(session.snapshot),
        scope=scope_of_session(session),
        tokens_loaded=session.tokens_loaded,
        loads_version=session.loads_version,
    )


_cache: dict[str, tuple[Surface, int]] = {}  # by digest: surface, size of its body
_cache_lock = threading.Lock()


def surface_of(snapshot: CatalogSnapshot) -> Surface:
    """Return the parsed body of a snapshot, cached in this process."""
    entry = _cache.get(snapshot.sha256)
    if entry is None:
        entry = _parse(snapshot.body), len(snapshot.body)
        with _cache_lock:
            _cache[snapshot.sha256] = entry
            while (
                len(_cache) > 1 and sum(size for _, size in _cache.values()) > MAX_CACHED_CHARACTERS
            ):
                del _cache[next(iter(_cache))]  # the oldest
    return entry[0]


def _parse(text: str) -> Surface:
    body = json.loads(text)
    return Surface(
        groups=tuple(
            GroupLine(row["group_id"], row["display_name"], row["description"], tuple(row["names"]))
            for row in body["groups"]
        ),
        keys={row["group_id"]: row["key"] for row in body["groups"]},
        **{name: body[name] for name in ("tools", "pins", "left_out", "header", "budget", "mode")},
        tools_tokens=count(canonical(body["tools"])) if body["tools"] else 0,
        # Snapshots of older releases lack these two fields.
        preloaded=tuple(body.get("preloaded", body["pins"])),
        deferred=body.get("deferred", {}),
    )


def catalog_text(session: AgentSession) -> tuple[str, int, dict[str, Any] | None]:
    """Return the text for the system prompt, its tokens, and what the budget left out.

    Fixed for dispatch. For inject, tools in the tools array are removed from the text.
    """
    surface = surface_of(session.snapshot)
    if session.strategy == Strategy.DISPATCH or not session.snapshot.text:
        return session.snapshot.text, session.snapshot.tokens, surface.left_out
    groups = rendering.remaining_groups(surface.groups, pins_of(session).keys())
    catalog = rendering.catalog(groups, header=surface.header, budget=surface.budget)
    return catalog.text, catalog.tokens, catalog.left_out


def tools_array(session: AgentSession) -> list[dict[str, Any]]:
    """Return the current tools array: the fixed part, then for inject the loaded tools."""
    surface = surface_of(session.snapshot)
    if session.strategy == Strategy.DISPATCH:
        return surface.tools
    loaded = sorted(pins_of(session).items(), key=lambda pair: (pair[1]["seq"], pair[0]))
    return surface.tools + [
        render_pin(name, pin) for name, pin in loaded if name not in surface.pins
    ]


def pins_of(session: AgentSession) -> dict[str, Pin]:
    return first_pins(json.loads(row.pins) for row in session.expansions.all())


def newer_definitions(session: int) -> dict[str, Pin]:
    """Return the definitions that a `definition_changed` error returned, by tool name."""
    with connection.cursor() as cursor:
        cursor.execute(NEWER_DEFINITIONS_SQL, [session])
        rows = cursor.fetchall()
    return {name: {"definition": pk, "override": override} for name, pk, override in rows}


# Not through the ORM: building the query would take 10% of a load.
NEWER_DEFINITIONS_SQL = """
    SELECT tool.public_name, shown.definition_id, shown."override"
    FROM sessions_app_showndefinition shown JOIN catalog_tool tool ON tool.id = shown.tool_id
    WHERE shown.session_id = %s
"""


def with_newer(pins: dict[str, Pin], newer: dict[str, Pin]) -> dict[str, Pin]:
    """Return pins with the definitions that replace them."""
    return {name: {**pin, **newer.get(name, {})} for name, pin in pins.items()} if newer else pins


def first_pins(groups: Iterable[dict[str, Pin]]) -> dict[str, Pin]:
    """Merge the pins of several groups; a tool in more than one keeps its first pin."""
    first: dict[str, Pin] = {}
    for pins in groups:
        for name, pin in pins.items():
            if name not in first or pin["seq"] < first[name]["seq"]:
                first[name] = pin
    return first


def pin_of(tool: CachedTool, position: int = 0, seq: int = 0) -> Pin:
    return {
        "definition": tool.approved.pk if tool.approved else None,
        "override": tool.description_override,
        "server": tool.server,
        "source": tool.source,
        "position": position,
        "seq": seq,
    }


def all_tools(snapshot: CatalogSnapshot) -> dict[str, dict[str, Any]]:
    """Return every tool in the snapshot's scope by name, in the order of the groups."""
    surface = surface_of(snapshot)
    pins = dict(surface.pins)
    for name, values in surface.deferred.items():
        pin = dict(zip(DEFERRED_FIELDS, values, strict=True))
        pins[name] = {**pin, "source": "mcp" if pin["server"] else "custom"}
    names = dict.fromkeys(name for line in surface.groups for name in line.names)
    return {name: render_pin(name, pins[name]) for name in names if name in pins}


def render_pin(name: str, pin: Pin) -> dict[str, Any]:
    definition = cache.cached_definition(pin["definition"])
    return rendering.tool_object(
        name,
        pin["override"] or definition.description,
        definition.input_schema,
        source=pin["source"],
        server=pin["server"],
    )


def take_snapshot(
    agent: Agent,
    scope: SessionScope,
    strategy: str,
    mode: str,
    *,
    header: str | None = None,
    preload: Sequence[str] = (),
) -> tuple[CatalogSnapshot, list[str]]:
    """Store the catalog text and the tools array, addressed by their content.

    Also return the names in `preload` that are not available.
    """
    if header is None:
        header = agent.catalog_header
    if not header:
        dispatch = strategy == Strategy.DISPATCH
        header = rendering.DISPATCH_HEADER if dispatch else rendering.INJECT_HEADER
    key = (header, strategy, mode, agent.catalog_budget, tuple(preload))
    snapshot = scope.snapshots.get(key)
    if snapshot is None:
        snapshot = _build_snapshot(scope, *key)
        if len(scope.snapshots) < MAX_SNAPSHOTS_PER_SCOPE:
            scope.snapshots[key] = snapshot
    catalog, body, sha256, unknown = snapshot
    values = {"text": catalog.text, "body": body, "tokens": catalog.tokens}
    stored, _ = CatalogSnapshot.objects.get_or_create(sha256=sha256, defaults=values)
    return stored, list(unknown)


def _build_snapshot(
    scope: SessionScope,
    header: str,
    strategy: str,
    mode: str,
    budget: int,
    preload: tuple[str, ...],
) -> tuple[rendering.Catalog, str, str, list[str]]:
    full = mode == Mode.FULL
    preloaded, unavailable = _preloaded_tools(scope, preload)
    initial, unknown = (scope.offered, []) if full else (preloaded, unavailable)
    catalog = rendering.catalog([] if full else scope.lines, header=header, budget=budget)
    meta_tools = [] if full or not scope.offered else rendering.meta_tools(strategy)
    pins = {tool.name: pin_of(tool) for tool in initial}
    body = canonical(
        {
            "budget": budget,
            "deferred": {
                tool.name: _read_deferred(pin_of(tool))
                for tool in scope.offered
                if tool.name not in pins
            },
            "groups": [
                {
                    "group_id": line.group_id,
                    "display_name": line.display_name,
                    "description": line.description,
                    "names": list(line.names),
                    "key": scope.by_id[line.group_id].pk,
                }
                for line in scope.lines
            ],
            "header": header,
            "left_out": catalog.left_out,
            "mode": mode,
            "pins": pins,
            "preloaded": [tool.name for tool in preloaded],
            "strategy": strategy,
            "tools": [*meta_tools, *(render_pin(name, pin) for name, pin in pins.items())],
        }
    )
    return catalog, body, digest(catalog.text + "\0" + body), unknown


def _preloaded_tools(
    scope: SessionScope, requested: Sequence[str]
) -> tuple[list[CachedTool], list[str]]:
    """Return the preloaded tools: by group setting, then by request; and unavailable names."""
    tools = {
        member.tool.name: member.tool
        for group in scope.groups
        for member in group.members
        if member.preload and member.tool.offered
    }
    unknown = []
    for name in dict.fromkeys(requested):
        tool = scope.lookup(name)
        if tool is not None and tool.offered:
            tools.setdefault(tool.name, tool)
        else:
            unknown.append(name)
    return list(tools.values()), unknown
