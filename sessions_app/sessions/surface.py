"""The catalog text and tools array of a session: its immutable snapshot and loaded tools.

A pin fixes the definition that a session was shown, so a repeated request returns the same bytes
even if the tool has changed.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connection

from catalog import cache, rendering
from catalog.cache import CachedTool
from catalog.definitions.validation import fitting_examples
from catalog.models import CatalogSnapshot
from sessions_app.models import Agent, AgentSession, Mode, Strategy
from sessions_app.rules import agent_rules
from sessions_app.sessions.scope import SessionScope, scope_of_session
from sessions_app.sessions.snapshots import DEFERRED_FIELDS, Pin, Surface, surface_of
from toolcrib.lib.json_codec import canonical_in_pieces, digest

MAX_SNAPSHOTS_PER_SCOPE = 64


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


def catalog_text(session: AgentSession) -> tuple[str, int, dict[str, Any] | None]:
    """Return the text for the system prompt, its tokens, and what the budget left out.

    Fixed for dispatch. For inject, tools in the tools array are removed from the text.
    """
    surface = surface_of(session.snapshot)
    if session.strategy == Strategy.DISPATCH or not session.snapshot.text:
        return session.snapshot.text, session.snapshot.tokens, surface.left_out
    shown = surface.pins.keys() | pins_of(session).keys()
    groups = rendering.remaining_groups(surface.groups, shown)
    catalog = rendering.catalog(groups, header=surface.header, budget=surface.budget)
    return catalog.text, catalog.tokens, catalog.left_out


def tools_array(session: AgentSession, *, grown: bool = False) -> list[dict[str, Any]]:
    """Return the current tools array: the fixed part, then for inject the loaded tools.

    With `grown`, the loaded tools follow whatever the strategy (see `loading.add_new_tools`).
    """
    surface = surface_of(session.snapshot)
    if session.strategy == Strategy.DISPATCH and not grown:
        return surface.tools
    loaded = sorted(pins_of(session).items(), key=lambda pair: (pair[1]["seq"], pair[0]))
    return surface.tools + [
        render_pin(name, pin) for name, pin in loaded if name not in surface.pins
    ]


def pins_of(session: AgentSession) -> dict[str, Pin]:
    return first_pins(json.loads(row.pins) for row in session.expansions.all())


def newer_definitions(context: SessionContext) -> dict[str, Pin]:
    """Return the definitions that a `definition_changed` error returned, by tool name."""
    with connection.cursor() as cursor:
        cursor.execute(NEWER_DEFINITIONS_SQL, [context.session_pk])
        rows = cursor.fetchall()
    kept = context.scope.kept_names
    return {
        kept.get(tool, name): {"definition": pk, "override": override}
        for tool, name, pk, override in rows
    }


# Not through the ORM: building the query would take 10% of a load.
NEWER_DEFINITIONS_SQL = """
    SELECT tool.id, tool.public_name, shown.definition_id, shown."override"
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
    overruled = {} if tool.overruled is None else {"read_only": tool.overruled}
    examples = {"examples": list(tool.input_examples)} if tool.input_examples else {}
    return {
        **overruled,
        **examples,
        "definition": tool.approved.pk if tool.approved else None,
        "override": "",  # a text in pins of older releases; since then part of the definition
        "server": tool.server,
        "source": tool.source,
        "position": position,
        "seq": seq,
    }


def _read_deferred(pin: Pin) -> list[Any]:
    examples = [pin["examples"]] if "examples" in pin else []
    return [*(pin[name] for name in DEFERRED_FIELDS), *examples]


def all_tools(snapshot: CatalogSnapshot) -> dict[str, dict[str, Any]]:
    """Return every tool in the snapshot's scope by name, in the order of the groups."""
    surface = surface_of(snapshot)
    pins = dict(surface.pins)
    for name, values in surface.deferred.items():
        pin = dict(zip((*DEFERRED_FIELDS, "examples"), values, strict=False))
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
        examples=fitting_examples(definition, pin.get("examples")),
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
    has_check_call = agent_rules.can_hold(scope.revision)
    key = (
        header,
        strategy,
        mode,
        agent.catalog_budget,
        tuple(preload),
        has_check_call,
        agent.code_mode,
    )
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
    has_check_call: bool,
    has_scripts: bool,
) -> tuple[rendering.Catalog, str, str, list[str]]:
    full = mode == Mode.FULL
    preloaded, unavailable = _preloaded_tools(scope, preload)
    initial, unknown = (scope.offered, []) if full else (preloaded, unavailable)
    lines = scope.lines
    if strategy == Strategy.INJECT:  # what is in the tools array is not to be loaded
        lines = rendering.remaining_groups(lines, {tool.name for tool in initial})
    catalog = rendering.catalog([] if full else lines, header=header, budget=budget)
    meta_tools = (
        [] if full or not scope.offered else rendering.meta_tools(strategy, has_scripts=has_scripts)
    )
    if scope.offered and has_scripts:
        meta_tools.append(rendering.run_script())
    if scope.offered and (has_check_call or has_scripts):
        meta_tools.append(rendering.check_call(has_scripts=has_scripts))
    pins = {tool.name: pin_of(tool) for tool in initial}
    body = canonical_in_pieces(
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
