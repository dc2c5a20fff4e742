"""In-memory cache of the catalog at one revision, shared by all threads; entries are immutable.

Definitions never change, so they are carried over from one revision to the next.
"""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from django.conf import settings
from django.db.models import F

from catalog import redaction_patterns
from catalog.definitions.parsing import parameter_texts
from catalog.definitions.resource_uris import public_template, public_uri
from catalog.models import (
    ASKS,
    Definition,
    Feature,
    FeatureKind,
    FormerName,
    Group,
    HintSource,
    JsonSchema,
    Membership,
    Revision,
    Tool,
    ToolHint,
    ToolState,
)
from catalog.models.search import MAX_AUTOMATIC_HINTS
from catalog.rendering import GroupLine

DEFINITIONS_PER_QUERY = 500
HINT_PRIORITY = {source: rank for rank, source in enumerate(HintSource.values)}
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
class ParameterOverrides:
    """The parameters that an admin hides or fixes, for a tool that has such overrides."""

    hidden: frozenset[str]
    fixed: Mapping[str, Any]
    approved: CachedDefinition  # by which the complete arguments are validated and sent

    def problems(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return a line per argument that the caller may not give."""
        return [
            f"arguments: {name!r} is not a parameter of this tool"
            for name in sorted(self.hidden & arguments.keys())
        ] + [
            f"{name}: only the fixed value is allowed"
            for name, value in self.fixed.items()
            if name not in self.hidden and name in arguments and arguments[name] != value
        ]


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
    approved: CachedDefinition | None  # with the overrides of an admin: what agents get
    latest: CachedDefinition | None
    former_names: tuple[str, ...] = ()  # other public names that it is called by
    overrides: ParameterOverrides | None = None
    hints: tuple[str, ...] = ()  # search hints by people; not shown to agents
    phrases: tuple[str, ...] = ()  # other search hints, for all agents
    payload_storage: str = "default"
    read_only: str = "claimed"  # or an admin's word: yes, no
    input_examples: tuple[dict[str, Any], ...] = ()  # an admin's, instead of the definition's
    needs: str = ""  # a capability that clients must have
    has_resources: bool = False  # its server
    asks_users: bool = False  # its server may ask users of clients, on a connection of a session
    # Whether agents get this tool: approved, and present on an enabled server.
    offered: bool = field(init=False)

    def __post_init__(self) -> None:
        is_present = self.server_enabled and self.state in (ToolState.AVAILABLE, ToolState.WAITING)
        object.__setattr__(self, "offered", self.approved is not None and is_present)

    @property
    def source(self) -> str:
        return "mcp" if self.server_id else "custom"

    @property
    def overruled(self) -> bool | None:
        """Whether the tool only reads, by an admin's word; None if there is none."""
        return None if self.read_only == "claimed" else self.read_only == "yes"

    @property
    def only_reads(self) -> bool:
        """Whether the tool only reads: the admin's word, else the approved definition's."""
        if self.overruled is not None:
            return self.overruled
        return self.approved is not None and "readOnlyHint" in self.approved.true_annotations

    @property
    def description(self) -> str:
        return self.approved.description if self.approved else ""

    @property
    def tokens(self) -> int | None:
        definition = self.approved or self.latest
        return definition.tokens if definition else None

    @property
    def bare_names(self) -> set[str]:
        """Return the server's name for the tool, and its safe form as printed in the catalog."""
        names = (self.name, *self.former_names)
        bare = {self.original_name, *(name.partition("__")[2] for name in names)}
        return bare - {*names, ""}

    def complete(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with the fixed values."""
        return {**arguments, **self.overrides.fixed} if self.overrides else arguments

    def renamed(self, name: str) -> "CachedTool":
        """Return the tool by one of its former names."""
        others = [other for other in (self.name, *self.former_names) if other != name]
        return replace(self, name=name, former_names=tuple(others))


@dataclass(frozen=True, eq=False, slots=True)
class CachedFeature:
    """A prompt, resource or template of a server."""

    feature_id: int
    kind: str
    key: str  # as the server calls it
    name: str  # public: the name of a prompt, the URI or template of a resource
    body: str

    @property
    def item(self) -> dict[str, Any]:
        """Return what the server listed. Shared: do not change it."""
        return _parse(self.body)


@dataclass(frozen=True, eq=False, slots=True)
class CachedServer:
    """A server that agents may use, with what it offers besides tools."""

    server_id: int
    slug: str
    capabilities: frozenset[str]
    features: tuple[CachedFeature, ...]


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
    server: CachedServer | None = None  # that it follows, if it is enabled

    @cached_property
    def offered(self) -> tuple[CachedMember, ...]:
        return tuple(member for member in self.members if member.tool.offered)

    @cached_property
    def offered_by_name(self) -> dict[str, CachedMember]:
        return {member.tool.name: member for member in self.offered}

    @cached_property
    def line(self) -> GroupLine:
        """The group as catalogs list it; it may have no names."""
        names = tuple(self.offered_by_name)
        return GroupLine(self.group_id, self.display_name, self.description, names)

    @cached_property
    def offered_by_other_name(self) -> dict[str, list[str]]:
        """Return public names by other names of the tool: former, original, and its safe form."""
        names: dict[str, list[str]] = {}
        for member in self.offered:
            for former in member.tool.former_names:
                names[former] = [member.tool.name]
        for member in self.offered:
            for bare_name in member.tool.bare_names - self._former_names:
                names.setdefault(bare_name, []).append(member.tool.name)
        return names

    @cached_property
    def _former_names(self) -> frozenset[str]:
        return frozenset(name for member in self.offered for name in member.tool.former_names)

    @cached_property
    def unavailable_by_name(self) -> dict[str, CachedTool]:
        """Return the tools that are not offered now, by public and original name."""
        tools = [member.tool for member in self.members if not member.tool.offered]
        return {
            name: tool
            for tool in reversed(tools)
            for name in (tool.original_name, *tool.former_names, tool.name)
        }


class CatalogCache:
    def __init__(
        self,
        revision: int,
        groups: Iterable[CachedGroup],
        tools: dict[int, CachedTool],
        definitions: dict[int, CachedDefinition],
        agent_phrases: Mapping[int, Mapping[int, tuple[str, ...]]],
    ) -> None:
        self.revision = revision
        self.tools = tools  # by primary key, whether or not in a group
        self.groups = tuple(groups)
        self.by_pk = {group.pk: group for group in self.groups}
        self.definitions = definitions
        # By agent and tool: the phrases of a tool for an agent that has some of its own.
        self.agent_phrases = agent_phrases
        self.by_former_name = {name: tool for tool in tools.values() for name in tool.former_names}

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
            "payload_storage",
            "read_only",
            "input_examples",
            "held_reason",
            "approved_id",
            "latest_id",
            "effective_id",
            "parameter_overrides",
            "needs",
            slug=F("server__slug"),
            trust=F("server__trust"),
            enabled=F("server__enabled"),
            capabilities=F("server__capabilities"),
            approved_readable=F("approved__readable_id"),
            effective_readable=F("effective__readable_id"),
            latest_readable=F("latest__readable_id"),
        )
    )
    if settings.REMOVE_HIDDEN_CHARACTERS:
        for row in rows:
            row["approved_id"] = row["approved_readable"] or row["approved_id"]
            row["effective_id"] = row["effective_readable"] or row["effective_id"]
            row["latest_id"] = row["latest_readable"] or row["latest_id"]
    pks = {
        row[key] for row in rows for key in ("approved_id", "latest_id", "effective_id") if row[key]
    }
    definitions = _load_definitions(pks, cached)
    hints, phrases, agent_phrases = _load_hints()
    redaction_patterns.apply()
    former = _load_former_names()
    tools = {
        row["pk"]: _cached_tool(dict(row), definitions, hints, phrases, former) for row in rows
    }
    return CatalogCache(revision, _load_groups(tools), tools, definitions, agent_phrases)


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


Texts = dict[int, tuple[str, ...]]  # by tool


def _load_hints() -> tuple[Texts, Texts, dict[int, Texts]]:
    """Return hints by people, those of other sources, and the latter by agent with own ones."""
    rows: dict[tuple[int, int | None], list[tuple[int, int, str]]] = {}
    fields = ("tool_id", "agent_id", "source", "pk", "text")
    for tool, agent, source, pk, text in ToolHint.objects.active().values_list(*fields):
        rows.setdefault((tool, agent), []).append((HINT_PRIORITY[source], pk, text))
    hints: Texts = {}
    phrases: Texts = {}
    own: dict[int, Texts] = {}
    for (tool, agent), found in rows.items():
        if agent is not None:
            shared = rows.get((tool, None), [])
            own.setdefault(agent, {})[tool] = _merge_phrases(found + shared)
            continue
        if by_people := tuple(text for priority, _, text in sorted(found) if not priority):
            hints[tool] = by_people
        if merged := _merge_phrases(found):
            phrases[tool] = merged
    return hints, phrases, own


def _merge_phrases(rows: Iterable[tuple[int, int, str]]) -> tuple[str, ...]:
    """Return the texts that no person wrote, by priority, then age, as far as the limit allows."""
    texts = dict.fromkeys(text for priority, _, text in sorted(rows) if priority)
    return tuple(texts)[:MAX_AUTOMATIC_HINTS]


def _load_former_names() -> Texts:
    names: Texts = {}
    for tool, name in FormerName.objects.order_by("pk").values_list("tool_id", "name"):
        names[tool] = (*names.get(tool, ()), name)
    return names


def _cached_overrides(
    overrides: Mapping[str, Mapping[str, Any]], approved: CachedDefinition | None
) -> ParameterOverrides | None:
    hidden = frozenset(name for name, override in overrides.items() if override.get("hidden"))
    fixed = {name: override["fixed"] for name, override in overrides.items() if "fixed" in override}
    if approved is None or not (hidden or fixed):
        return None
    return ParameterOverrides(hidden, fixed, approved)


def _cached_tool(
    row: dict[str, Any],
    definitions: dict[int, CachedDefinition],
    hints: Texts,
    phrases: Texts,
    former_names: Texts,
) -> CachedTool:
    approved = definitions.get(row["approved_id"])
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
        payload_storage=row["payload_storage"],
        read_only=row["read_only"],
        input_examples=tuple(row["input_examples"]),
        needs=row["needs"],
        has_resources="resources" in (row["capabilities"] or ()),
        asks_users=ASKS in (row["capabilities"] or ()),
        held_reason=row["held_reason"],
        approved=definitions.get(row["effective_id"]) or approved,
        latest=definitions.get(row["latest_id"]),
        former_names=former_names.get(row["pk"], ()),
        overrides=_cached_overrides(row["parameter_overrides"], approved),
        hints=hints.get(row["pk"], ()),
        phrases=phrases.get(row["pk"], ()),
    )


def _load_groups(tools: dict[int, CachedTool]) -> list[CachedGroup]:
    memberships: dict[int, list[tuple[int, int, bool | None]]] = {}
    for group_id, tool_id, position, preload in Membership.objects.values_list(
        "group_id", "tool_id", "position", "preload"
    ):
        if tool_id in tools:
            memberships.setdefault(group_id, []).append((tool_id, position, preload))
    groups = []
    servers = _load_servers()
    for group in Group.objects.order_by("position", "group_id"):
        members = [
            CachedMember(tools[tool_id], position, is_preloaded(group, tools[tool_id], preload))
            for tool_id, position, preload in memberships.get(group.pk, [])
        ]
        members.sort(key=lambda member: (member.position, member.tool.name))
        groups.append(_cached_group(group, members, servers.get(group.follows_id)))
    return groups


def _cached_group(
    group: Group, members: Iterable[CachedMember], server: CachedServer | None = None
) -> CachedGroup:
    fields = group.pk, group.group_id, group.display_name, group.description, group.position
    return CachedGroup(*fields, tuple(members), server)


def _load_servers() -> dict[int | None, CachedServer]:
    """Return the enabled servers that a group follows and that offer more than tools."""
    rows = Group.objects.filter(follows__enabled=True).exclude(follows__capabilities=[])
    fields = ("follows_id", "follows__slug", "follows__capabilities")
    servers = {pk: (slug, capabilities) for pk, slug, capabilities in rows.values_list(*fields)}
    features: dict[int, list[Feature]] = {}
    if servers:
        for row in Feature.objects.filter(server__in=servers).order_by("kind", "position", "pk"):
            features.setdefault(row.server_id, []).append(row)
    return {
        pk: CachedServer(
            pk, slug, frozenset(capabilities), tuple(features_of(slug, features.get(pk, ())))
        )
        for pk, (slug, capabilities) in servers.items()
    }


def features_of(slug: str, rows: Iterable[Feature]) -> Iterable[CachedFeature]:
    """Return prompts, resources and templates with their public names."""
    for row in rows:
        name = _public_feature_name(slug, row)
        yield CachedFeature(row.pk, row.kind, row.key, name, row.body)


def _public_feature_name(slug: str, row: Feature) -> str:
    if row.kind == FeatureKind.PROMPT:
        return row.public_name
    make = public_template if row.kind == FeatureKind.TEMPLATE else public_uri
    return make(slug, row.key)


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
