"""Authorization scope of a session: the groups and tools it may use.

Catalog, search, details, load and call all use `scope_of_session`. A tool out of scope does not
exist for a session: it is not counted, ranked, suggested or named in an error. Scopes are cached
per catalog revision; after a change, a background thread rebuilds the search indexes in use.
"""

import logging
import threading
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from django.db import DatabaseError

from catalog import cache
from catalog.cache import CachedFeature, CachedGroup, CachedServer, CachedTool, CatalogCache
from catalog.definitions.resource_uris import view_uri
from catalog.rendering import GroupLine
from catalog.search import index_cache as index
from catalog.search.embeddings import store as vector_store
from catalog.search.engine import suggest_names
from catalog.search.index import Index, Searchable, make_searchable
from sessions_app.models import Agent, AgentSession
from sessions_app.sessions.snapshots import surface_of
from toolcrib.lib.db_threads import fresh_connections
from toolcrib.lib.errors import ToolcribError

NAMES_IN_ERROR = 20
MAX_SCOPES_PER_REVISION = 256
MAX_RECENT_SCOPES = 32
logger = logging.getLogger(__name__)
_warming_requested = threading.Event()
_warming_lock = threading.Lock()


class NotAvailable(ToolcribError):
    code = "unknown_tool"
    status = 404


class Ambiguous(ToolcribError):
    code = "ambiguous_tool"
    status = 409


@dataclass(frozen=True)
class ScopeFilter:
    """Restrictions that a session requested when it opened. None means unrestricted."""

    groups: tuple[int, ...] | None = None  # primary keys: a group may be renamed later
    servers: tuple[str, ...] | None = None
    without_mcp: bool = False
    without_custom: bool = False  # opened over MCP by an agent that does not run custom tools
    elicits: bool = False  # the client can ask its user


NO_FILTER = ScopeFilter()
KeptNames = tuple[tuple[int, str], ...]  # tool id and name


class SessionScope:
    """The groups and tools of a session at one revision. Immutable, shared by sessions."""

    def __init__(
        self,
        revision: int,
        groups: Sequence[CachedGroup],
        own_phrases: Mapping[int, tuple[str, ...]] = MappingProxyType({}),
        kept_names: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.revision = revision
        # By tool id: the names of tools that were renamed after the session had opened.
        self.kept_names = kept_names
        self.own_phrases = own_phrases  # by tool id, of an agent with hints from its own use
        self.groups = tuple(groups)
        self.by_id = {group.group_id: group for group in groups}
        self.tools: dict[str, CachedTool] = {}  # by public name
        self.by_former_name: dict[str, CachedTool] = {}
        self.by_bare_name: dict[str, list[CachedTool]] = {}
        self.groups_by_tool: dict[str, list[CachedGroup]] = {}
        self.snapshots: dict[object, Any] = {}  # cache of surface.take_snapshot
        for group in groups:
            for member in group.members:
                tool = member.tool
                self.groups_by_tool.setdefault(tool.name, []).append(group)
                if tool.name in self.tools:
                    continue
                self.tools[tool.name] = tool
                for name in tool.former_names:
                    self.by_former_name[name] = tool
                for name in tool.bare_names:
                    self.by_bare_name.setdefault(name, []).append(tool)

    @cached_property
    def offered(self) -> list[CachedTool]:
        return [tool for tool in self.tools.values() if tool.offered]

    @cached_property
    def _ids(self) -> "array[int]":
        return array("Q", sorted(tool.tool_id for tool in self.tools.values()))

    def tool_index(self, tool: CachedTool) -> int:
        """Return the tool's position in this scope, used as its bit in bit sets."""
        return bisect_left(self._ids, tool.tool_id)

    @cached_property
    def tokens_all(self) -> int:
        return sum(tool.approved.tokens for tool in self.offered if tool.approved)

    @cached_property
    def lines(self) -> list[GroupLine]:
        return [group.line for group in self.groups if group.line.names]

    @cached_property
    def by_short_name(self) -> dict[str, list[CachedTool]]:
        """Tools by their names without the words that all names of their group begin with."""
        found: dict[str, dict[str, CachedTool]] = {}
        for line in self.lines:
            for short, name in line.by_short_name.items():
                found.setdefault(short, {})[name] = self.tools[name]
        return {short: list(tools.values()) for short, tools in found.items()}

    @cached_property
    def feature_servers(self) -> dict[str, CachedServer]:
        """The servers whose prompts and resources the session has, by slug.

        Those that a group follows: a group of chosen tools gives nothing but these.
        """
        found = (group.server for group in self.groups)
        return {server.slug: server for server in found if server is not None}

    def features(self, kind: str) -> list[CachedFeature]:
        """Return the prompts, resources or templates of the session, in canonical order."""
        return [
            feature
            for server in self.feature_servers.values()
            for feature in server.features
            if feature.kind == kind
        ]

    @cached_property
    def client_capabilities(self) -> frozenset[str]:
        """What a client is offered besides tools: prompts, resources, subscribe, completions."""
        found = (server.capabilities for server in self.feature_servers.values())
        return frozenset[str]().union(*found)

    @cached_property
    def views(self) -> frozenset[tuple[str, str]]:
        """Server and URI of the views (MCP Apps) of tools, which are read with the tools."""
        return frozenset(
            (tool.server, uri)
            for tool in self.offered
            if tool.approved is not None and (uri := view_uri(tool.approved.body))
        )

    @cached_property
    def servers(self) -> list[str]:
        return sorted({tool.server for tool in self.offered if tool.server})

    @cached_property
    def index(self) -> Index:
        """The search index. Contains only offered tools, so others do not affect statistics."""
        return index.get_index([self._searchable(tool) for tool in self.offered])

    def _searchable(self, tool: CachedTool) -> Searchable:
        texts = tuple(
            text
            for group in self.groups_by_tool[tool.name]
            for text in (group.group_id, group.display_name, group.description)
            if text
        )
        return make_searchable(tool, texts, self.own_phrases.get(tool.tool_id))

    def lookup(self, name: str) -> CachedTool | None:
        """Return the tool with this public, former, bare or short name; None if not exactly one.

        Builds no error, so it is cheap for requests with thousands of names.
        """
        tool = self.tools.get(name) or self.by_former_name.get(name)
        if tool is not None:
            return tool
        candidates = self._candidates(name)
        return candidates[0] if len(candidates) == 1 else None

    def candidates(self, name: str) -> list[str]:
        """Return the tools that an ambiguous bare name may mean; empty for any other name."""
        is_exact = name in self.tools or name in self.by_former_name
        names = [] if is_exact else [tool.name for tool in self._candidates(name)]
        return sorted(names)[:NAMES_IN_ERROR] if len(names) > 1 else []

    def _candidates(self, name: str) -> list[CachedTool]:
        candidates = self.by_bare_name.get(name) or self.by_short_name.get(name, [])
        offered = [tool for tool in candidates if tool.offered]
        return offered or candidates

    def find_tool(self, name: str) -> CachedTool:
        """Return the tool with this public or bare name. Raises Ambiguous or NotAvailable."""
        tool = self.lookup(name)
        if tool is not None:
            return tool
        if candidates := self._candidates(name):
            names = sorted(candidate.name for candidate in candidates)
            raise Ambiguous(
                f"{len(names)} tools are named {name!r}: {_join_names(names)}.",
                hint="Use the full name.",
                details={"candidates": names[:NAMES_IN_ERROR]},
            )
        raise self.unknown_tool_error(name)

    def unknown_tool_error(self, name: str) -> NotAvailable:
        """Return an error that lists the available tools, the most similar names first."""
        similar = suggest_names(self.index, name)
        names = similar + sorted({tool.name for tool in self.offered} - set(similar))
        groups = _join_names([line.group_id for line in self.lines]) or "none"
        return NotAvailable(
            f"{name[:100]!r} is not available in this session. "
            f"Valid names: {_join_names(names) or 'none'}.",
            hint="Find tools with search_tools, or list a group's with load_tools(group_id=…). "
            f"Groups: {groups}.",
            details={"suggestions": similar, "servers": self.servers},
        )


def _join_names(names: Sequence[str]) -> str:
    more = len(names) - NAMES_IN_ERROR
    return ", ".join(names[:NAMES_IN_ERROR]) + (f" and {more} more" if more > 0 else "")


def scope_of_agent(
    agent: Agent, scope_filter: ScopeFilter = NO_FILTER, kept_names: KeptNames = ()
) -> SessionScope:
    groups = None
    if not agent.all_groups:
        groups = tuple(agent.group_links.values_list("group_id", flat=True))
    return _scope((groups, scope_filter, kept_names), agent.pk)


def scope_of_session(session: AgentSession) -> SessionScope:
    groups, servers = session.wanted_groups, session.wanted_servers
    scope_filter = ScopeFilter(
        None if groups is None else tuple(groups),
        None if servers is None else tuple(servers),
        session.without_mcp,
        session.without_custom,
        session.elicits,
    )
    return scope_of_agent(session.agent, scope_filter, _kept_names(session))


def _kept_names(session: AgentSession) -> KeptNames:
    """Return the tools that were renamed since the session opened: it keeps their names."""
    former = cache.current().by_former_name
    if not former:
        return ()
    names = surface_of(session.snapshot).names
    return tuple(
        sorted(
            (tool.tool_id, name)
            for name, tool in former.items()
            if name in names and tool.name not in names
        )
    )


# --- Scope cache ----------------------------------------------------------------------------------

# Keys of groups (None: all), filter, names that the session keeps.
ScopeKey = tuple[tuple[int, ...] | None, ScopeFilter, KeptNames]
# The second key is the agent, where it has hints of its own.
AgentScopeKey = tuple[ScopeKey, int | None]
_scopes: WeakKeyDictionary[CatalogCache, dict[AgentScopeKey, SessionScope]] = WeakKeyDictionary()
_recent: dict[AgentScopeKey, None] = {}  # least recently used first


def rebuild_recent_indexes() -> None:
    """Build the indexes of recently used scopes at the current revision."""
    for key in list(_recent)[::-1]:
        _scope(*key).index  # noqa: B018 - cached property


def _scope(scope_key: ScopeKey, agent: int | None) -> SessionScope:
    """Return the cached scope. It lives as long as the catalog of its revision."""
    catalog = cache.current()
    key = scope_key, agent if agent in catalog.agent_phrases else None
    _recent[key] = _recent.pop(key, None)
    if len(_recent) > MAX_RECENT_SCOPES:
        with suppress(KeyError, RuntimeError):  # another thread changed it
            del _recent[next(iter(_recent))]
    scopes = _scopes.setdefault(catalog, {})
    scope = scopes.get(key)
    if scope is None:
        if len(scopes) >= MAX_SCOPES_PER_REVISION:
            scopes.clear()  # other threads keep references to the scopes they use
        scope = scopes[key] = _build(catalog, scope_key, agent)
    return scope


def _build(catalog: CatalogCache, scope_key: ScopeKey, agent: int | None) -> SessionScope:
    keys, scope_filter, kept = scope_key
    kept_names = dict(kept)
    groups = list(catalog.groups)
    if keys is not None:
        groups = [catalog.by_pk[key] for key in keys if key in catalog.by_pk]
    if scope_filter.groups is not None:
        groups = [group for group in groups if group.pk in scope_filter.groups]
    if scope_filter.servers is not None or scope_filter.without_mcp:
        # Drop groups that became empty: their ids would disclose that they exist.
        filtered = (_filter_group(group, scope_filter) for group in groups)
        groups = [group for group in filtered if group.members or group.server]
    if scope_filter.without_custom:
        rest = (_without_custom_tools(group) for group in groups)
        groups = [group for group in rest if group is not None]
    if not scope_filter.elicits:
        groups = [_without_needs(group) for group in groups]
    if kept_names:
        groups = [_with_kept_names(group, kept_names) for group in groups]
    phrases = catalog.agent_phrases.get(agent or 0, {})
    return SessionScope(catalog.revision, groups, phrases, kept_names)


def _with_kept_names(group: CachedGroup, names: Mapping[int, str]) -> CachedGroup:
    if not any(member.tool.tool_id in names for member in group.members):
        return group
    members = [
        replace(member, tool=member.tool.renamed(names.get(member.tool.tool_id, member.tool.name)))
        for member in group.members
    ]
    members.sort(key=lambda member: (member.position, member.tool.name))
    return replace(group, members=tuple(members))


def _filter_group(group: CachedGroup, scope_filter: ScopeFilter) -> CachedGroup:
    def is_allowed(tool: CachedTool) -> bool:
        servers = scope_filter.servers
        is_excluded = scope_filter.without_mcp or (
            servers is not None and tool.server not in servers
        )
        return not tool.server_id or not is_excluded

    members = tuple(member for member in group.members if is_allowed(member.tool))
    server, wanted = group.server, scope_filter.servers
    if server is not None and (
        scope_filter.without_mcp or (wanted is not None and server.slug not in wanted)
    ):
        server = None
    return replace(group, members=members, server=server)


def _without_custom_tools(group: CachedGroup) -> CachedGroup | None:
    """Return the group without custom tools; None if it has no other tools."""
    members = tuple(member for member in group.members if member.tool.server_id)
    if len(members) == len(group.members):
        return group
    return replace(group, members=members) if members or group.server else None


def _without_needs(group: CachedGroup) -> CachedGroup:
    """Return the group without tools whose server lists them only to more capable clients."""
    members = tuple(member for member in group.members if not member.tool.needs)
    return group if len(members) == len(group.members) else replace(group, members=members)


# --- Index warming --------------------------------------------------------------------------------


def warm_indexes_in_background(revision: int) -> None:
    """Rebuild indexes in a thread. If one is running, it starts another round afterwards."""
    _warming_requested.set()
    threading.Thread(target=_warm_indexes, name="warming", daemon=True).start()


def _warm_indexes() -> None:
    while _warming_requested.is_set() and _warming_lock.acquire(blocking=False):
        try:
            with fresh_connections():
                _warming_requested.clear()
                vector_store.model.load_in_background()
                rebuild_recent_indexes()
        except DatabaseError:
            logger.exception("Index warming failed; searches will build the indexes")
        finally:
            _warming_lock.release()
