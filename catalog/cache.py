"""In-memory cache of the catalog at one revision, shared by all threads; entries are immutable.

Definitions never change, so they are carried over from one revision to the next.
"""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
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

DEFINITIONS_PER_QUERY = 500
MAX_PARSED_DEFINITIONS = 2_048
K = TypeVar("K", "CachedGroup", "CatalogCache")
T = TypeVar("T")


class CachedDefinition:
    """One definition. Keeps its text: parsed, it takes ten times the memory."""

    __slots__ = (
        "_annotations", "_search_fields", "body", "has_header_mapping", "pk", "sha256", "tokens",
    )  # fmt: skip

    def __init__(self, pk: int, sha256: str, body: str, tokens: int) -> None:
        self.pk = pk
        self.sha256 = sha256
        self.body = body
        self.tokens = tokens
        self.has_header_mapping = '"x-mcp-header"' in body  # of arguments to HTTP headers
        self._search_fields: tuple[str, str, str] | None = None
        self._annotations: frozenset[str] | None = None

    @property
    def tool(self) -> dict[str, Any]:
        """Return the parsed body. Shared: do not change it."""
        return _parse(self.body)

    @property
    def input_schema(self) -> JsonSchema:
        schema: JsonSchema = self.tool["inputSchema"]
        return schema

    @property
    def output_schema(self) -> JsonSchema | None:
        return self.tool.get("outputSchema")

    @property
    def description(self) -> str:
        return self.search_fields[1]

    @property
    def search_fields(self) -> tuple[str, str, str]:
        """Return title, description, and the parameters' names and descriptions."""
        if self._search_fields is None:
            tool = self.tool
            texts = parameter_texts(tool.get("inputSchema"), depth=3)
            title, description = (str(tool.get(key) or "") for key in ("title", "description"))
            self._search_fields = title, description, "\n".join(texts)
        return self._search_fields

    @property
    def true_annotations(self) -> frozenset[str]:
        """Return the annotations the server sets to true."""
        if self._annotations is None:
            found = self.tool.get("annotations") if '"annotations":{' in self.body else None
            pairs = found.items() if isinstance(found, dict) else ()
            self._annotations = frozenset(name for name, value in pairs if value is True)
        return self._annotations


@lru_cache(maxsize=MAX_PARSED_DEFINITIONS)
def _parse(body: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(body)
    return parsed


@dataclass(frozen=True, eq=False, slots=True)
class CachedTool:
    tool_id: int
    name: str  # public
    original_name: str  # as the server calls it
    server_id: int | None
    server: str  # slug; empty for a custom tool
    trust: str
    server_enabled: bool
    state: str
    call_policy: str
    held_reason: str
    approved: CachedDefinition | None
    latest: CachedDefinition | None
    description_override: str
    hints: tuple[str, ...] = ()  # search aliases; not shown to agents
    # Whether agents get this tool: approved, and present on an enabled server.
    offered: bool = field(init=False)

    def __post_init__(self) -> None:
        is_present = self.server_enabled and self.state in (ToolState.AVAILABLE, ToolState.WAITING)
        object.__setattr__(self, "offered", self.approved is not None and is_present)

    @property
    def source(self) -> str:
        return "mcp" if self.server_id else "custom"

    @property
    def description(self) -> str:
        return self.description_override or (self.approved.description if self.approved else "")

    @property
    def tokens(self) -> int | None:
        definition = self.approved or self.latest
        return definition.tokens if definition else None

    @property
    def bare_names(self) -> set[str]:
        """Return the server's name for the tool, and its safe form as printed in the catalog."""
        return {self.original_name, self.name.partition("__")[2]} - {self.name, ""}


@dataclass(frozen=True, eq=False, slots=True)
class CachedMember:
    tool: CachedTool
    position: int
    preload: bool


@dataclass(frozen=True, eq=False)
class CachedGroup:
    """A group with its members in canonical order."""

    pk: int
    group_id: str
    display_name: str
    description: str
    position: int
    members: tuple[CachedMember, ...]

    @cached_property
    def offered(self) -> tuple[CachedMember, ...]:
        return tuple(member for member in self.members if member.tool.offered)

    @cached_property
    def offered_by_name(self) -> dict[str, CachedMember]:
        return {member.tool.name: member for member in self.offered}

    @cached_property
    def offered_by_bare_name(self) -> dict[str, list[str]]:
        """Return public names by the server's name for the tool and by its safe form."""
        names: dict[str, list[str]] = {}
        for member in self.offered:
            for bare_name in member.tool.bare_names:
                names.setdefault(bare_name, []).append(member.tool.name)
        return names

    @cached_property
    def unavailable_by_name(self) -> dict[str, CachedTool]:
        """Return the tools that are not offered now, by public and original name."""
        tools = [member.tool for member in self.members if not member.tool.offered]
        return {name: tool for tool in reversed(tools) for name in (tool.original_name, tool.name)}


class CatalogCache:
    def __init__(
        self,
        revision: int,
        groups: Iterable[CachedGroup],
        tools: dict[int, CachedTool],
        definitions: dict[int, CachedDefinition],
    ) -> None:
        self.revision = revision
        self.tools = tools  # by primary key, whether or not in a group
        self.groups = tuple(groups)
        self.by_pk = {group.pk: group for group in self.groups}
        self.definitions = definitions

    def group(self, group: Group) -> CachedGroup:
        """Return a group; one that is not part of this revision has no members."""
        return self.by_pk.get(group.pk) or _cached_group(group, [])


def memoize_per_revision(compute: Callable[[K], T]) -> Callable[[K], T]:
    """Memoize a function of a cached catalog or group for the lifetime of that object."""
    results: WeakKeyDictionary[K, T] = WeakKeyDictionary()

    @wraps(compute)
    def memoized(subject: K) -> T:
        if subject not in results:
            results[subject] = compute(subject)
        return results[subject]

    return memoized


_lock = threading.Lock()
_current: CatalogCache | None = None


def current() -> CatalogCache:
    """Return the catalog at the current revision. Queries the revision on every call."""
    global _current
    catalog = _current
    if catalog is not None and catalog.revision == Revision.current():
        return catalog
    with _lock:
        while _current is None or _current.revision != Revision.current():
            # Repeat if the revision changed during the read: the result may mix two revisions.
            _current = _load(Revision.current(), _current.definitions if _current else {})
        return _current


def cached_tool(tool_id: int) -> CachedTool:
    """Return a tool by id regardless of groups, for people, who may see every tool."""
    return current().tools[tool_id]


def clear() -> None:
    """Empty the cache, in tests and after a restore."""
    global _current
    with _lock:
        _current = None


def _load(revision: int, cached: dict[int, CachedDefinition]) -> CatalogCache:
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
            "description_override",
            slug=F("server__slug"),
            trust=F("server__trust"),
            enabled=F("server__enabled"),
        )
    )
    pks = {row[key] for row in rows for key in ("approved_id", "latest_id") if row[key]}
    definitions = _load_definitions(pks, cached)
    hints = _load_hints()
    tools = {row["pk"]: _cached_tool(dict(row), definitions, hints) for row in rows}
    return CatalogCache(revision, _load_groups(tools), tools, definitions)


def _load_definitions(
    pks: set[int], cached: dict[int, CachedDefinition]
) -> dict[int, CachedDefinition]:
    definitions = {pk: cached[pk] for pk in pks if pk in cached}
    missing = sorted(pks - definitions.keys())
    for start in range(0, len(missing), DEFINITIONS_PER_QUERY):
        chunk = missing[start : start + DEFINITIONS_PER_QUERY]
        for row in Definition.objects.filter(pk__in=chunk).values_list(
            "pk", "sha256", "body", "tokens"
        ):
            definitions[row[0]] = CachedDefinition(*row)
    return definitions


def _load_hints() -> dict[int, tuple[str, ...]]:
    hints: dict[int, tuple[str, ...]] = {}
    for tool_id, text in ToolHint.objects.order_by("pk").values_list("tool_id", "text"):
        hints[tool_id] = (*hints.get(tool_id, ()), text)
    return hints


def _cached_tool(
    row: dict[str, Any], definitions: dict[int, CachedDefinition], hints: dict[int, tuple[str, ...]]
) -> CachedTool:
    return CachedTool(
        tool_id=row["pk"],
        name=row["public_name"],
        original_name=row["name"],
        server_id=row["server_id"],
        server=row["slug"] or "",
        trust=row["trust"] or "",
        server_enabled=row["enabled"] is not False,
        state=row["state"],
        call_policy=row["call_policy"],
        held_reason=row["held_reason"],
        approved=definitions.get(row["approved_id"]),
        latest=definitions.get(row["latest_id"]),
        description_override=row["description_override"],
        hints=hints.get(row["pk"], ()),
    )


def _load_groups(tools: dict[int, CachedTool]) -> list[CachedGroup]:
    memberships: dict[int, list[tuple[int, int, bool | None]]] = {}
    for group_id, tool_id, position, preload in Membership.objects.values_list(
        "group_id", "tool_id", "position", "preload"
    ):
        if tool_id in tools:
            memberships.setdefault(group_id, []).append((tool_id, position, preload))
    groups = []
    for group in Group.objects.order_by("position", "group_id"):
        members = [
            CachedMember(tools[tool_id], position, is_preloaded(group, tools[tool_id], preload))
            for tool_id, position, preload in memberships.get(group.pk, [])
        ]
        members.sort(key=lambda member: (member.position, member.tool.name))
        groups.append(_cached_group(group, members))
    return groups


def _cached_group(group: Group, members: Iterable[CachedMember]) -> CachedGroup:
    fields = group.pk, group.group_id, group.display_name, group.description, group.position
    return CachedGroup(*fields, tuple(members))


def is_preloaded(group: Group, tool: CachedTool | Tool, own: bool | None) -> bool:
    """Return a member's own flag, or the group's default; custom tools are preloaded by default."""
    if not group.deferred:
        return True
    if own is not None:
        return own
    return group.preload_default or not tool.server_id


def cached_definition(pk: int) -> CachedDefinition:
    """Return a definition by id; sessions may pin one that the current revision no longer has."""
    catalog = _current
    definition = catalog.definitions.get(pk) if catalog is not None else None
    if definition is not None:
        return definition
    row = Definition.objects.values_list("pk", "sha256", "body", "tokens").get(pk=pk)
    return CachedDefinition(*row)
