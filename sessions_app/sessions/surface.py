"""What a session sees: the fixed part from its snapshot, and what it loaded as it was then.

A pin keeps what a session was shown of a tool, so that whatever changes later, the same request
gives the same bytes.
"""

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from catalog import cache, rendering
from catalog.cache import CachedTool
from catalog.models import CatalogSnapshot
from catalog.rendering import GroupLine
from sessions_app.models import (
    Agent,
    AgentSession,
    Expansion,
    Mode,
    ShownDefinition,
    Strategy,
)
from sessions_app.sessions.scope import SessionScope
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.prepared_query import PreparedQuery
from toolcrib.lib.token_counter import count

MOST_SURFACES = 64  # kept ready for one scope

Pin = dict[str, Any]  # definition, override, server, source, position, seq
DeferredTool = list[Any]  # of a tool that was not shown yet: definition, override, server

expansions = PreparedQuery(1, lambda session: Expansion.objects.filter(session=session))

MOST_KEPT = 16_000_000  # characters of bodies; read, a body takes a few times that


@dataclass(frozen=True)
class Surface:
    """What a snapshot holds: fixed for the life of every session that has it."""

    groups: tuple[GroupLine, ...]
    keys: dict[str, int]  # of groups, by the id the model knows
    tools: list[dict[str, Any]]
    pins: dict[str, Pin]
    left_out: dict[str, Any] | None
    header: str
    budget: int
    tools_tokens: int
    mode: str
    preloaded: tuple[str, ...]
    deferred: dict[str, DeferredTool]


_kept: dict[str, tuple[Surface, int]] = {}  # by digest, with the size of its body
_lock = threading.Lock()


def surface_of(snapshot: CatalogSnapshot) -> Surface:
    """What a snapshot holds; its body is read from the database once, while it is kept here."""
    kept = _kept.get(snapshot.sha256)
    if kept is None:
        kept = _read(snapshot.body), len(snapshot.body)
        with _lock:
            _kept[snapshot.sha256] = kept
            while len(_kept) > 1 and sum(size for _, size in _kept.values()) > MOST_KEPT:
                del _kept[next(iter(_kept))]  # the oldest
    return kept[0]


def _read(body: str) -> Surface:
    found = json.loads(body)
    return Surface(
        groups=tuple(
            GroupLine(row["group_id"], row["display_name"], row["description"], tuple(row["names"]))
            for row in found["groups"]
        ),
        keys={row["group_id"]: row["key"] for row in found["groups"]},
        tools=found["tools"],
        pins=found["pins"],
        left_out=found["left_out"],
        header=found["header"],
        budget=found["budget"],
        tools_tokens=count(canonical(found["tools"])) if found["tools"] else 0,
        mode=found["mode"],
        # Snapshots made before these were kept have neither.
        preloaded=tuple(found.get("preloaded", found["pins"])),
        deferred=found.get("deferred", {}),
    )


def catalog_text(session: AgentSession) -> tuple[str, int, dict[str, Any] | None]:
    """The text for the system prompt, its tokens, and what the budget left out.

    Fixed for dispatch. For inject, what is in the tools array leaves the text.
    """
    if session.strategy == Strategy.DISPATCH or not session.snapshot.text:
        surface = surface_of(session.snapshot)
        return session.snapshot.text, session.snapshot.tokens, surface.left_out
    surface = surface_of(session.snapshot)
    left = rendering.remaining(surface.groups, pins_of(session).keys())
    made = rendering.catalog(left, header=surface.header, budget=surface.budget)
    return made.text, made.tokens, made.left_out


def tools_array(session: AgentSession) -> list[dict[str, Any]]:
    """What belongs in the tools array now: the fixed part, then for inject what was loaded."""
    surface = surface_of(session.snapshot)
    if session.strategy == Strategy.DISPATCH:
        return surface.tools
    added = sorted(pins_of(session).items(), key=lambda pair: (pair[1]["seq"], pair[0]))
    return surface.tools + [
        render_pin(name, pin) for name, pin in added if name not in surface.pins
    ]


def pins_of(session: AgentSession) -> dict[str, Pin]:
    """Everything loaded, by name."""
    return first_pins(json.loads(row.pins) for row in expansions.all(session.pk))


def shown_pins(session: AgentSession) -> dict[str, Pin]:
    """Everything loaded, by name, as the session was last shown it."""
    return replace_with_last_shown(session, pins_of(session))


def replace_with_last_shown(session: AgentSession, pins: dict[str, Pin]) -> dict[str, Pin]:
    """Replace the definitions for which a `definition_changed` answer gave a newer one."""
    rows = ShownDefinition.objects.filter(session=session).values_list(
        "tool__public_name", "definition_id", "override"
    )
    newer = {name: {"definition": pk, "override": override} for name, pk, override in rows}
    return {name: {**pin, **newer.get(name, {})} for name, pin in pins.items()} if newer else pins


def first_pins(groups: Iterable[dict[str, Pin]]) -> dict[str, Pin]:
    """Of a tool that was loaded through several groups, what was shown first."""
    found: dict[str, Pin] = {}
    for pins in groups:
        for name, pin in pins.items():
            if name not in found or pin["seq"] < found[name]["seq"]:
                found[name] = pin
    return found


def last_shown(session: AgentSession, name: str) -> Pin | None:
    """What the session was last shown of a tool, if anything."""
    pin = pins_of(session).get(name) or surface_of(session.snapshot).pins.get(name)
    return replace_with_last_shown(session, {name: pin})[name] if pin else None


def pin_of(item: CachedTool, position: int = 0, seq: int = 0) -> Pin:
    return {
        "definition": item.approved.pk if item.approved else None,
        "override": item.description_override,
        "server": item.server,
        "source": item.source,
        "position": position,
        "seq": seq,
    }


def deferred_tool_of(item: CachedTool) -> DeferredTool:
    """What is kept of a tool in scope, so that a provider can be given it as it was."""
    return [item.approved.pk if item.approved else None, item.description_override, item.server]


def all_tools(snapshot: CatalogSnapshot) -> dict[str, dict[str, Any]]:
    """Every tool that was in scope, as it was then, by name in the order of its groups."""
    surface = surface_of(snapshot)
    pins = dict(surface.pins)
    for name, (definition, override, server) in surface.deferred.items():
        source = "mcp" if server else "custom"
        pins[name] = {
            "definition": definition,
            "override": override,
            "server": server,
            "source": source,
        }
    names = dict.fromkeys(name for line in surface.groups for name in line.names)
    return {name: render_pin(name, pins[name]) for name in names if name in pins}


def render_pin(name: str, pin: Pin) -> dict[str, Any]:
    kept = cache.cached_definition(pin["definition"])
    return rendering.tool_object(
        name,
        pin["override"] or kept.description,
        kept.input_schema,
        source=pin["source"],
        server=pin["server"],
    )


def take_snapshot(
    agent: Agent,
    seen: SessionScope,
    strategy: str,
    mode: str,
    *,
    header: str | None = None,
    preload: Sequence[str] = (),
) -> tuple[CatalogSnapshot, list[str]]:
    """Fix the catalog text and the tools array, stored by their content.

    Also returns the names to preload that are not available.
    """
    if header is None:
        header = agent.catalog_header
    ours = rendering.DISPATCH_HEADER if strategy == Strategy.DISPATCH else rendering.INJECT_HEADER
    asked = (header or ours, strategy, mode, agent.catalog_budget, tuple(preload))
    made = seen.surfaces.get(asked)
    if made is None:
        made = _build_snapshot(seen, *asked)
        if len(seen.surfaces) < MOST_SURFACES:
            seen.surfaces[asked] = made
    text, body, sha256, unknown = made
    return _stored(text, body, sha256), list(unknown)


def _build_snapshot(
    seen: SessionScope, header: str, strategy: str, mode: str, budget: int, preload: tuple[str, ...]
) -> tuple[rendering.Catalog, str, str, list[str]]:
    full = mode == Mode.FULL
    early, missing = _preloaded(seen, preload)
    chosen, unknown = (seen.offered, []) if full else (early, missing)
    text = rendering.catalog([] if full else seen.lines, header=header, budget=budget)
    meta = [] if full or not seen.offered else rendering.meta_tools(strategy)
    pins = {item.name: pin_of(item) for item in chosen}
    body = canonical(
        {
            "budget": budget,
            "deferred": {
                item.name: deferred_tool_of(item) for item in seen.offered if item.name not in pins
            },
            "groups": [
                {
                    "group_id": line.group_id,
                    "display_name": line.display_name,
                    "description": line.description,
                    "names": list(line.names),
                    "key": seen.by_id[line.group_id].pk,
                }
                for line in seen.lines
            ],
            "header": header,
            "left_out": text.left_out,
            "mode": mode,
            "pins": pins,
            "preloaded": [item.name for item in early],
            "strategy": strategy,
            "tools": [*meta, *(render_pin(name, pin) for name, pin in pins.items())],
        }
    )
    return text, body, digest(text.text + "\0" + body), unknown


def _preloaded(seen: SessionScope, asked: Sequence[str]) -> tuple[list[CachedTool], list[str]]:
    """Tools whose schemas are there from the start: by flag, then those asked for."""
    chosen = {
        member.tool.name: member.tool
        for group in seen.groups
        for member in group.members
        if member.preload and member.tool.offered
    }
    unknown = []
    for name in dict.fromkeys(asked):
        item = seen.lookup(name)
        if item is not None and item.offered:
            chosen.setdefault(item.name, item)
        else:
            unknown.append(name)
    return list(chosen.values()), unknown


def _stored(text: rendering.Catalog, body: str, sha256: str) -> CatalogSnapshot:
    found = CatalogSnapshot.objects.filter(sha256=sha256).first()
    if found is None:
        row = CatalogSnapshot(sha256=sha256, text=text.text, body=body, tokens=text.tokens)
        CatalogSnapshot.objects.bulk_create([row], ignore_conflicts=True)
        found = CatalogSnapshot.objects.get(sha256=sha256)
    return found
