"""The catalog at one revision, in memory: groups, their tools, what each may be handed out as.

Built once per revision and process and shared by all threads; nothing in it is ever changed.
Definitions never change, so they are kept from one revision to the next.
"""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from django.db.models import F

from catalog.definitions.parsing import parameter_texts
from catalog.models import (
    Definition,
    Group,
    JsonSchema,
    Membership,
    Revision,
    Tool,
    ToolHint,
    ToolState,
)

CHUNK = 500
K = TypeVar("K", "CachedGroup", "CatalogCache")
T = TypeVar("T")


class CachedDefinition:
    """One definition, parsed when first looked into."""

    def __init__(self, pk: int, sha256: str, body: str, tokens: int) -> None:
        self.pk = pk
        self.sha256 = sha256
        self.body = body
        self.tokens = tokens

    @cached_property
    def tool(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed

    @property
    def input_schema(self) -> JsonSchema:
        schema: JsonSchema = self.tool["inputSchema"]
        return schema

    @property
    def output_schema(self) -> JsonSchema | None:
        return self.tool.get("outputSchema")

    @property
    def description(self) -> str:
        return str(self.tool.get("description") or "")

    @cached_property
    def searched(self) -> tuple[str, str]:
        """Its title, and the names and texts of its parameters, as search reads them."""
        texts = parameter_texts(self.tool.get("inputSchema"), depth=3)
        return str(self.tool.get("title") or ""), "\n".join(texts)

    @cached_property
    def claims(self) -> frozenset[str]:
        """The annotations that its server sets to true; the parsed definition is not kept."""
        if '"annotations":{' not in self.body:
            return frozenset()
        said = json.loads(self.body).get("annotations")
        found = said.items() if isinstance(said, dict) else ()
        return frozenset(name for name, value in found if value is True)


@dataclass(frozen=True, eq=False)
class CachedTool:
    """One tool as agents may be handed it."""

    tool_id: int
    name: str  # public
    own_name: str
    server_id: int | None
    server: str  # slug; empty for a custom tool
    trust: str
    server_enabled: bool
    state: str
    call_policy: str
    held_reason: str
    approved: CachedDefinition | None
    latest: CachedDefinition | None
    override: str
    hints: tuple[str, ...] = ()  # what an admin lent it for search

    @property
    def source(self) -> str:
        return "mcp" if self.server_id else "custom"

    @cached_property
    def offered(self) -> bool:
        """Shown to agents: approved, and the server has it now."""
        return (
            self.approved is not None
            and self.server_enabled
            and self.state in (ToolState.AVAILABLE, ToolState.WAITING)
        )

    @property
    def description(self) -> str:
        return self.override or (self.approved.description if self.approved else "")


@dataclass(frozen=True, eq=False)
class CachedMember:
    """A tool's place in a group."""

    item: CachedTool
    position: int
    preload: bool


@dataclass(frozen=True, eq=False)
class CachedGroup:
    pk: int
    group_id: str
    display_name: str
    description: str
    position: int
    places: tuple[CachedMember, ...]  # in canonical order

    @cached_property
    def offered(self) -> tuple[CachedMember, ...]:
        return tuple(place for place in self.places if place.item.offered)


class CatalogCache:
    def __init__(
        self,
        revision: int,
        groups: Iterable[CachedGroup],
        items: dict[int, CachedTool],
        definitions: dict[int, CachedDefinition],
    ) -> None:
        self.revision = revision
        self.items = items  # by the tool's key, whether or not in a group
        self.groups = tuple(groups)
        self.by_pk = {group.pk: group for group in self.groups}
        self.definitions = definitions


def memoize_per_revision(read: Callable[[K], T]) -> Callable[[K], T]:
    """Keep what a function makes of a shelf, or of a group on it, as long as that is kept."""
    known: WeakKeyDictionary[K, T] = WeakKeyDictionary()

    @wraps(read)
    def look(one: K) -> T:
        if one not in known:
            known[one] = read(one)
        return known[one]

    return look


_lock = threading.Lock()
_current: CatalogCache | None = None


def current() -> CatalogCache:
    """Return the catalog as it is now. Asks the database for its revision every time."""
    global _current
    known = _current
    if known is not None and known.revision == Revision.current():
        return known
    with _lock:
        while _current is None or _current.revision != Revision.current():
            # Read again where a change came between: what was read then may be of both.
            _current = _read(Revision.current(), _current.definitions if _current else {})
        return _current


def cached_tool(tool_id: int) -> CachedTool:
    """Return one tool, whoever may see it: for people, who see all."""
    return current().items[tool_id]


def clear() -> None:
    """Drop what is kept, for tests and after a restore."""
    global _current
    with _lock:
        _current = None


def _read(revision: int, known: dict[int, CachedDefinition]) -> CatalogCache:
    rows = list(
        Tool.objects.exclude(latest=None).values(
            "pk",
            "public_name",
            "name",
            "server_id",
            "state",
            "call_policy",
            "held_reason",
            "approved_id",
            "latest_id",
            slug=F("server__slug"),
            trust=F("server__trust"),
            enabled=F("server__enabled"),
            override=F("description_override"),
        )
    )
    wanted = {row[key] for row in rows for key in ("approved_id", "latest_id") if row[key]}
    definitions = _definitions(wanted, known)
    hints = _hints()
    items = {row["pk"]: _item(dict(row), definitions, hints) for row in rows}
    return CatalogCache(revision, _groups(items), items, definitions)


def _definitions(
    wanted: set[int], known: dict[int, CachedDefinition]
) -> dict[int, CachedDefinition]:
    kept = {pk: known[pk] for pk in wanted if pk in known}
    missing = sorted(wanted - kept.keys())
    for start in range(0, len(missing), CHUNK):
        for row in Definition.objects.filter(pk__in=missing[start : start + CHUNK]).values_list(
            "pk", "sha256", "body", "tokens"
        ):
            kept[row[0]] = CachedDefinition(*row)
    return kept


def _hints() -> dict[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    for tool, text in ToolHint.objects.order_by("pk").values_list("tool_id", "text"):
        found[tool] = (*found.get(tool, ()), text)
    return found


def _item(
    row: dict[str, Any], definitions: dict[int, CachedDefinition], hints: dict[int, tuple[str, ...]]
) -> CachedTool:
    return CachedTool(
        tool_id=row["pk"],
        name=row["public_name"],
        own_name=row["name"],
        server_id=row["server_id"],
        server=row["slug"] or "",
        trust=row["trust"] or "",
        server_enabled=row["enabled"] is not False,
        state=row["state"],
        call_policy=row["call_policy"],
        held_reason=row["held_reason"],
        approved=definitions.get(row["approved_id"]),
        latest=definitions.get(row["latest_id"]),
        override=row["override"],
        hints=hints.get(row["pk"], ()),
    )


def _groups(items: dict[int, CachedTool]) -> list[CachedGroup]:
    places: dict[int, list[tuple[int, int, bool | None]]] = {}
    for home, tool, position, preload in Membership.objects.values_list(
        "group_id", "tool_id", "position", "preload"
    ):
        if tool in items:
            places.setdefault(home, []).append((tool, position, preload))
    made = []
    for group in Group.objects.order_by("position", "group_id"):
        found = [
            CachedMember(items[tool], position, is_preloaded(group, items[tool], own))
            for tool, position, own in places.get(group.pk, [])
        ]
        found.sort(key=lambda place: (place.position, place.item.name))
        made.append(
            CachedGroup(
                pk=group.pk,
                group_id=group.group_id,
                display_name=group.display_name,
                description=group.description,
                position=group.position,
                places=tuple(found),
            )
        )
    return made


def is_preloaded(group: Group, tool: CachedTool | Tool, own: bool | None) -> bool:
    """A member's own flag counts before the group's; a custom tool is useful at once."""
    if not group.deferred:
        return True
    if own is not None:
        return own
    return group.preload_default or not tool.server_id


def cached_definition(pk: int) -> CachedDefinition:
    """Return a definition by id: kept, or read for a session that pinned it long ago."""
    shelf = _current
    kept = shelf.definitions.get(pk) if shelf is not None else None
    if kept is not None:
        return kept
    row = Definition.objects.values_list("pk", "sha256", "body", "tokens").get(pk=pk)
    return CachedDefinition(*row)
