"""Parsed snapshots: what sessions were given when they opened. Shared and immutable."""

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from catalog.models import CatalogSnapshot
from catalog.rendering import GroupLine
from toolcrib.lib.json_codec import canonical_in_pieces, parse_in_pieces
from toolcrib.lib.token_counter import count

MAX_CACHED_CHARACTERS = 16_000_000  # of snapshot bodies; parsed, a body takes several times that

Pin = dict[str, Any]  # definition, override, server, source, position, seq; maybe others
DEFERRED_FIELDS = ("definition", "override", "server")  # of the pin of a tool not shown yet


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
    # Values of DEFERRED_FIELDS, and maybe examples, to render a tool as it was.
    deferred: dict[str, list[Any]]

    @cached_property
    def names_by_group(self) -> dict[str, frozenset[str]]:
        """Return the tools in each group's catalog line when the session opened."""
        return {line.group_id: frozenset(line.names) for line in self.groups}

    @cached_property
    def names(self) -> frozenset[str]:
        """Return the names of all tools in scope when the session opened."""
        return frozenset(self.pins) | frozenset(self.deferred)

    @cached_property
    def groups_json(self) -> str:
        """The groups with the names of their tools, as canonical JSON."""
        fields = ("group_id", "display_name", "description")
        return canonical_in_pieces(
            [
                {**{name: getattr(line, name) for name in fields}, "tool_names": line.names}
                for line in self.groups
            ]
        )

    @cached_property
    def servers(self) -> list[str]:
        """The servers whose tools were in scope when the session opened."""
        pinned = {pin["server"] for pin in self.pins.values()}
        return sorted((pinned | {values[2] for values in self.deferred.values()}) - {""})


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
    body = parse_in_pieces(text)
    return Surface(
        groups=tuple(
            GroupLine(row["group_id"], row["display_name"], row["description"], tuple(row["names"]))
            for row in body["groups"]
        ),
        keys={row["group_id"]: row["key"] for row in body["groups"]},
        **{name: body[name] for name in ("tools", "pins", "left_out", "header", "budget", "mode")},
        tools_tokens=count(canonical_in_pieces(body["tools"])) if body["tools"] else 0,
        # Snapshots of older releases lack these two fields.
        preloaded=tuple(body.get("preloaded", body["pins"])),
        deferred=body.get("deferred", {}),
    )
