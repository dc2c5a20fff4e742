"""What a session may see and do: the one authorization function, asked before everything else.

Catalog, search, details, load and call all go through `of`. A tool that is out of scope does
not exist for a session: it is not counted, ranked, suggested or named in an error.
"""

import logging
import threading
from array import array
from bisect import bisect_left
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from django.db import DatabaseError, close_old_connections

from catalog import cache
from catalog.cache import CachedGroup, CachedTool, CatalogCache
from catalog.rendering import GroupLine
from catalog.search import index_cache as index
from catalog.search.embeddings import store as vector_store
from catalog.search.engine import suggest_names
from catalog.search.index import Index, Searchable, make_searchable
from sessions_app.models import Agent, AgentSession
from toolcrib.lib.errors import ToolcribError

NAMES_IN_ERROR = 20  # names in an error
MOST_SCOPES = 256
MOST_RECENT = 32
logger = logging.getLogger(__name__)
_again = threading.Event()
_busy = threading.Lock()


class NotAvailable(ToolcribError):
    code = "unknown_tool"
    status = 404


class Ambiguous(ToolcribError):
    code = "ambiguous_tool"
    status = 409


@dataclass(frozen=True)
class ScopeFilter:
    """How far a session asked to be narrowed when it opened."""

    groups: tuple[int, ...] | None = None  # by key: a group may be renamed meanwhile
    servers: tuple[str, ...] | None = None
    without_mcp: bool = False


class SessionScope:
    """The groups and tools of one agent's session at one revision. Shared; never changed."""

    def __init__(self, revision: int, groups: Sequence[CachedGroup]) -> None:
        self.revision = revision
        self.groups = tuple(groups)
        self.by_id = {group.group_id: group for group in groups}
        self.items: dict[str, CachedTool] = {}
        self.bare: dict[str, list[CachedTool]] = {}
        self.homes: dict[str, list[CachedGroup]] = {}
        self.surfaces: dict[object, Any] = {}  # what opening.py made of this scope before
        for group in groups:
            for member in group.members:
                item = member.tool
                self.homes.setdefault(item.name, []).append(group)
                if item.name in self.items:
                    continue
                self.items[item.name] = item
                # The server's own name, and its safe form as the catalog prints it.
                for name in {item.original_name, item.name.partition("__")[2]} - {item.name, ""}:
                    self.bare.setdefault(name, []).append(item)

    @cached_property
    def offered(self) -> list[CachedTool]:
        return [item for item in self.items.values() if item.offered]

    @cached_property
    def _ids(self) -> "array[int]":
        return array("Q", sorted(item.tool_id for item in self.items.values()))

    def number_of(self, item: CachedTool) -> int:
        """Return a small number that stands for this tool in this scope."""
        return bisect_left(self._ids, item.tool_id)

    @cached_property
    def tokens_all(self) -> int:
        return sum(item.approved.tokens for item in self.offered if item.approved)

    @cached_property
    def lines(self) -> list[GroupLine]:
        return [
            GroupLine(group.group_id, group.display_name, group.description, names)
            for group in self.groups
            if (names := offered_names(group))
        ]

    @cached_property
    def servers(self) -> list[str]:
        return sorted({item.server for item in self.offered if item.server})

    @cached_property
    def index(self) -> Index:
        """What can be searched: offered tools only, so no statistic knows any other."""
        return index.get_index([self._searchable(item) for item in self.offered])

    def _searchable(self, item: CachedTool) -> Searchable:
        texts = tuple(
            text
            for group in self.homes[item.name]
            for text in (group.group_id, group.display_name, group.description)
            if text
        )
        return make_searchable(item, texts)

    def lookup(self, name: str) -> CachedTool | None:
        """Return the one tool of this name, public or bare. Cheap, where thousands are asked."""
        found = self.items.get(name)
        if found is not None:
            return found
        candidates = self._candidates(name)
        return candidates[0] if len(candidates) == 1 else None

    def _candidates(self, name: str) -> list[CachedTool]:
        candidates = self.bare.get(name, [])
        offered = [item for item in candidates if item.offered]
        return offered or candidates

    def find(self, name: str) -> CachedTool:
        """Return the tool of this name, public or bare. Says what there is if there is none."""
        found = self.lookup(name)
        if found is not None:
            return found
        if candidates := self._candidates(name):
            names = sorted(item.name for item in candidates)
            raise Ambiguous(
                f"{len(names)} tools are called {name!r}: {_listed(names)}.",
                hint="Use the full name.",
                details={"candidates": names[:NAMES_IN_ERROR]},
            )
        raise self.unknown(name)

    def unknown(self, name: str) -> NotAvailable:
        """Say that there is no such tool here, and which there are: the likeliest first."""
        near = suggest_names(self.index, name)
        names = near + sorted({item.name for item in self.offered} - set(near))
        groups = _listed([line.group_id for line in self.lines]) or "none"
        return NotAvailable(
            f"{name[:100]!r} is not available in this session. "
            f"Valid names: {_listed(names) or 'none'}.",
            hint="Find tools with search_tools, or list a group's with load_tools(group_id=…). "
            f"Groups: {groups}.",
            details={"suggestions": near, "servers": self.servers},
        )


def offered_names(group: CachedGroup) -> tuple[str, ...]:
    return tuple(member.tool.name for member in group.members if member.tool.offered)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMES_IN_ERROR
    return ", ".join(names[:NAMES_IN_ERROR]) + (f" and {more} more" if more > 0 else "")


def group_keys(agent: Agent) -> tuple[int, ...] | None:
    """The groups an agent may use, in its order; None means all."""
    if agent.all_groups:
        return None
    return tuple(agent.group_links.values_list("group_id", flat=True))


def scope_of_agent(agent: Agent, wish: ScopeFilter = ScopeFilter()) -> SessionScope:  # noqa: B008 - frozen
    """Return what this agent may see now, narrowed by the session's wish."""
    return _scope(cache.current(), group_keys(agent), wish)


def scope_of_session(session: AgentSession) -> SessionScope:
    return scope_of_agent(session.agent, scope_filter_of(session))


def scope_filter_of(session: AgentSession) -> ScopeFilter:
    groups, servers = session.wanted_groups, session.wanted_servers
    return ScopeFilter(
        None if groups is None else tuple(groups),
        None if servers is None else tuple(servers),
        session.without_mcp,
    )


_scopes: WeakKeyDictionary[
    CatalogCache, dict[tuple[tuple[int, ...] | None, ScopeFilter], SessionScope]
] = WeakKeyDictionary()


_recent: dict[tuple[tuple[int, ...] | None, ScopeFilter], None] = {}  # asked for last comes last


def rebuild_recent() -> None:
    """Build what was asked for lately at the newest revision, before it is asked for again."""
    for keys, wish in list(_recent)[::-1]:
        _scope(cache.current(), keys, wish).index  # noqa: B018 - worked out once


def _scope(standing: CatalogCache, keys: tuple[int, ...] | None, wish: ScopeFilter) -> SessionScope:
    """Build a scope once for each shelf; it goes when the shelf does."""
    _recent[keys, wish] = _recent.pop((keys, wish), None)
    if len(_recent) > MOST_RECENT:
        with suppress(KeyError, RuntimeError):  # another thread was at it too
            del _recent[next(iter(_recent))]
    made = _scopes.setdefault(standing, {})
    found = made.get((keys, wish))
    if found is None:
        if len(made) >= MOST_SCOPES:
            made.clear()  # other threads may be at it: what they found, they hold
        found = made[keys, wish] = _build(standing, keys, wish)
    return found


def _build(standing: CatalogCache, keys: tuple[int, ...] | None, wish: ScopeFilter) -> SessionScope:
    if keys is None:
        groups = list(standing.groups)
    else:
        groups = [standing.by_pk[key] for key in keys if key in standing.by_pk]
    if wish.groups is not None:
        groups = [group for group in groups if group.pk in wish.groups]
    if wish.servers is not None or wish.without_mcp:
        # A group of which nothing is left is not there at all: its id would tell of it.
        groups = [left for group in groups if (left := _filter_group(group, wish)).members]
    return SessionScope(standing.revision, groups)


def _filter_group(group: CachedGroup, wish: ScopeFilter) -> CachedGroup:
    members = tuple(member for member in group.members if _wanted(member.tool, wish))
    return CachedGroup(
        group.pk,
        group.group_id,
        group.display_name,
        group.description,
        group.position,
        members,
    )


def _wanted(item: CachedTool, wish: ScopeFilter) -> bool:
    if not item.server_id:
        return True
    return not wish.without_mcp and (wish.servers is None or item.server in wish.servers)


def unknown_names(wanted: Collection[str], known: Collection[str]) -> list[str]:
    return [name for name in wanted if name not in known]


# --- Building indexes ahead -----------------------------------------------------------------------


def warm_indexes_soon(revision: int) -> None:
    """Start a thread, or have the one that is at it go round again."""
    _again.set()
    threading.Thread(target=_warm, name="warming", daemon=True).start()


def _warm() -> None:
    while _again.is_set() and _busy.acquire(blocking=False):
        try:
            close_old_connections()
            _again.clear()
            vector_store.model.load_in_background()
            rebuild_recent()
        except DatabaseError:
            logger.exception("Indexes could not be built ahead; searches build them")
        finally:
            close_old_connections()
            _busy.release()
