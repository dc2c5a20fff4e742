"""Load tools into a session within its budget; export session state and statistics.

A pin fixes the definition that a session was shown: a repeated load returns the same bytes even
if the tool has changed. A load and its event are one transaction.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from catalog import cache, preferences
from catalog.cache import CachedGroup, CachedMember, CachedTool
from catalog.models import ToolState
from sessions_app.ledger.writer import ExpansionRow, LedgerCursor, write_event
from sessions_app.models import AgentSession, EventKind, SessionState, Strategy
from sessions_app.sessions import surface
from sessions_app.sessions.scope import Ambiguous, NotAvailable, scope_of_session
from sessions_app.sessions.surface import Pin, SessionContext
from toolcrib.lib.errors import Conflict, Invalid
from toolcrib.lib.json_codec import canonical, join_items, join_members
from toolcrib.lib.token_counter import count

MAX_NAMES = 10_000
MIN_IDLE_SECONDS = preferences.PREFERENCES["session_idle_seconds"].minimum


class SessionEnded(Conflict):
    """The session was closed or has expired."""


@dataclass
class LoadResult:
    group_id: str
    expanded: bool = False
    tool_names: list[str] = field(default_factory=list)
    remaining: int = 0
    unknown: list[str] = field(default_factory=list)
    schemas: list[str] | None = field(default_factory=list)  # each as canonical JSON
    error: dict[str, str] | None = None
    newly_loaded: list[str] = field(default_factory=list)
    loads_version: int = 0  # of the session, afterwards

    @property
    def size(self) -> int:
        """Return about how many characters the response has."""
        return 200 + sum(map(len, self.schemas or ()))

    def as_json(self) -> str:
        names = ("group_id", "expanded", "tool_names", "remaining", "unknown", "error")
        members = {name: canonical(getattr(self, name)) for name in names}
        members["schemas"] = "null" if self.schemas is None else join_items(self.schemas)
        return join_members(members)


# --- Loading --------------------------------------------------------------------------------------


def lock_session(session: AgentSession) -> AgentSession:
    """Lock and return an open session. Raises Conflict if it has ended."""
    rows = AgentSession.objects.with_catalog().select_for_update(of=("self",))
    row = rows.get(pk=session.pk)
    check_open(row)
    return row


def idle_limit() -> int:
    """Return the seconds of idle time after which a session expires."""
    limit: int = preferences.value("session_idle_seconds")
    return limit


def current_state(session: AgentSession) -> str:
    """Return the session's state: expired after the idle timeout, even if not yet swept."""
    idle = (timezone.now() - session.last_used_at).total_seconds()
    # Below the smallest configurable timeout, skip reading the preference.
    if session.state != SessionState.OPEN or idle < MIN_IDLE_SECONDS:
        return session.state
    return SessionState.EXPIRED if idle > idle_limit() else session.state


def check_open(session: AgentSession) -> None:
    state = current_state(session)
    if state != SessionState.OPEN:
        raise SessionEnded(
            f"This session is {state}.",
            hint=f"GET /sessions/{session.session_id}/state still returns what it had loaded. Open "
            'a new session with that as "resume".',
            code=f"session_{state}",
        )


def check_name_count(names: Sequence[str]) -> None:
    if len(names) > MAX_NAMES:
        raise Invalid(
            f"{len(names):,} names in one request; the limit is {MAX_NAMES:,}.",
            hint="Send fewer names.",
        )


class SessionLoads:
    """The loaded tools of a session: read once, changed by loads, written in one transaction."""

    def __init__(self, context: SessionContext) -> None:
        self.context = context
        self.newer = surface.newer_definitions(context.session_pk)
        with connection.wrap_database_errors:
            rows = LedgerCursor(connection).read_expansions(context.session_pk)
        self._rows = {row.group_id: row for row in rows}
        self._pins: dict[str, dict[str, Pin]] = {
            row.group_id: json.loads(row.pins) for row in self._rows.values()
        }
        self.tokens_loaded = context.tokens_loaded
        self._unwritten: list[tuple[ExpansionRow | None, dict[str, Any]]] = []
        self.version = context.loads_version  # once `write` has written everything

    @property
    def pins(self) -> dict[str, Pin]:
        """Return the pins of all loaded tools, by name, with the definitions last shown."""
        return surface.with_newer(surface.first_pins(self._pins.values()), self.newer)

    def load(self, group_id: str, names: Sequence[str] | None, *, how: str = "load") -> LoadResult:
        """Load all tools of a group (`names` is None) or those named."""
        check_name_count(names or ())
        group = self._find_group(group_id)
        if group is None:
            return LoadResult(group_id, error=self._unknown_group(group_id))
        known = self._rows.get(group_id)
        position = len(self._rows) + 1
        row = known or ExpansionRow(self.context.session_pk, group_id, [], None, "{}", position)
        others = {other: pins for other, pins in self._pins.items() if other != group_id}
        load = _GroupLoad(self.context, group, row, self._pins.get(group_id, {}), others)
        result = load.load_all() if names is None else load.load_names(names)
        if result.error is None:
            self._apply(load, result, how)
        if self.context.strategy == Strategy.INJECT:
            result.schemas = None
        return result

    def load_by_name(self, names: Sequence[str], *, how: str) -> tuple[list[LoadResult], list[str]]:
        """Load tools from any group; also return the unknown names."""
        check_name_count(names)
        by_group: dict[str, list[str]] = {}
        unknown = []
        scope = self.context.scope
        for name in dict.fromkeys(names):
            tool = scope.lookup(name)
            if tool is not None and tool.offered:
                group_id = scope.groups_by_tool[tool.name][0].group_id
                by_group.setdefault(group_id, []).append(tool.name)
            else:
                unknown.append(name)
        return [self.load(group_id, some, how=how) for group_id, some in by_group.items()], unknown

    def write(self, cursor: LedgerCursor) -> None:
        for row, event in self._unwritten:
            if row is not None:
                cursor.save_expansion(row)
            write_event(cursor, self.context.session_pk, EventKind.LOADED, **event)

    def _apply(self, load: "_GroupLoad", result: LoadResult, how: str) -> None:
        budget = self.context.agent.budget
        if budget is not None and load.cost and self.tokens_loaded + load.cost > budget:
            raise Conflict(
                f"Loading this needs {load.cost:,} tokens; "
                f"{max(budget - self.tokens_loaded, 0):,} of {budget:,} are free.",
                hint="Load fewer tools, by name, or ask for a larger budget.",
                code="over_budget",
            )
        pins = surface.with_newer(load.pins, self.newer)
        result.schemas = [
            canonical(surface.render_pin(name, pins[name])) for name in result.tool_names
        ]
        self.tokens_loaded += load.cost
        is_new = load.row.group_id not in self._rows
        row = load.row if is_new or load.is_changed else None
        if row is not None:
            row.pins = json.dumps(load.pins)
            self._rows[row.group_id], self._pins[row.group_id] = row, load.pins
            self.version += 1
        # A resumed session's model has these schemas; a search counts its own response.
        is_counted = how in ("load", "preload")
        event = {
            "tokens": count(join_items(result.schemas)) if is_counted else 0,
            "group_id": result.group_id,
            "details": {
                "names": result.tool_names,
                "all": result.remaining == 0,
                "how": how,
                "unknown": result.unknown,
                "remaining": result.remaining,
            },
            "tokens_loaded": load.cost,
            "loads_version": int(row is not None),
        }
        self._unwritten.append((row, event))
        result.loads_version = self.version

    def _find_group(self, group_id: str) -> CachedGroup | None:
        """Find a group by the id in the session's catalog; it may have been renamed since."""
        scope = self.context.scope
        if group_id in scope.by_id:
            return scope.by_id[group_id]
        key = self.context.surface.keys.get(group_id)
        return next((group for group in scope.groups if group.pk == key), None)

    def _unknown_group(self, group_id: str) -> dict[str, str]:
        lines = self.context.scope.lines
        available = ", ".join(sorted(line.group_id for line in lines)) or "none"
        return {
            "code": "unknown_group",
            "message": f"Unknown group_id: {group_id[:80]!r} is not available in this session. "
            f"Available: {available}",
            "hint": "Use one of the ids in the catalog.",
        }


class _GroupLoad:
    """One load of a group. Changes its row and pins, which `SessionLoads` writes."""

    def __init__(
        self,
        context: SessionContext,
        group: CachedGroup,
        row: ExpansionRow,
        pins: dict[str, Pin],
        others: dict[str, dict[str, Pin]],  # pins of other groups
    ) -> None:
        self.group, self.row = group, row
        self.pins = dict(pins)
        self.other_pins = surface.first_pins(others.values())
        self.next_seq = 1 + len(pins) + sum(map(len, others.values()))
        self.offered = group.offered_by_name
        # The names in the group's catalog line when the session opened.
        self.initial_names = context.surface.names_by_group.get(row.group_id)
        self.newly_loaded: list[str] = []
        self.cost = 0  # tokens of the newly loaded definitions
        self._before = row.names, row.listed, len(pins)

    @property
    def is_changed(self) -> bool:
        return (self.row.names, self.row.listed, len(self.pins)) != self._before

    def load_all(self) -> LoadResult:
        if self.row.listed is None:
            for member in self.offered.values():
                self._pin(member)
            self.row.listed = list(self.offered)
        self.row.names = None
        return self._result(self.row.listed)

    def load_names(self, names: Sequence[str]) -> LoadResult:
        resolved, unknown, errors = [], [], []
        for name in dict.fromkeys(names):
            try:
                resolved.append(self._resolve(name))
            except (NotAvailable, Ambiguous) as error:
                unknown.append(name)
                errors.append(error)
        if errors and not resolved:
            first = errors[0]
            return LoadResult(
                self.row.group_id,
                remaining=self._remaining(),
                unknown=unknown,
                error={"code": first.code, "message": first.message, "hint": first.hint},
            )
        for name in resolved:
            if name not in self.pins:
                self._pin(self.offered[name])
        if self.row.names is not None and not set(resolved) <= set(self.row.names):
            loaded = self._sort({*self.row.names, *resolved})
            complete = self._is_complete(loaded)
            self.row.names = None if complete else loaded
            if complete:
                self.row.listed = loaded
        result = self._result(self._sort(resolved))
        result.unknown = unknown
        return result

    def _resolve(self, name: str) -> str:
        """Return the public name of a tool in this group. Loaded tools remain loadable."""
        if name in self.pins or name in self.offered:
            return name
        matches = self.group.offered_by_bare_name.get(name) or self._loaded_by_bare_name(name)
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise Ambiguous(
                f"{len(matches)} tools of {self.row.group_id} are named {name!r}: "
                f"{', '.join(sorted(matches))}.",
                hint="Use the full name.",
            )
        tool = self.group.unavailable_by_name.get(name)
        if tool is not None:
            raise NotAvailable(unavailable_reason(tool), hint="", code=unavailable_code(tool))
        raise NotAvailable(
            f"{name[:100]!r} is not available in this session under {self.row.group_id}.",
            hint=f"Its tools: {', '.join(islice(self.offered, 50)) or 'none'}.",
        )

    def _loaded_by_bare_name(self, bare_name: str) -> list[str]:
        """Return a loaded tool with this bare name that is no longer offered."""
        for name, pin in self.pins.items():
            if bare_name == name.partition("__")[2]:
                return [name]
            if bare_name == cache.cached_definition(pin["definition"]).tool["name"]:
                return [name]
        return []

    def _pin(self, member: CachedMember) -> None:
        name = member.tool.name
        if name in self.pins:
            return
        if pin := self.other_pins.get(name):  # keep the definition and the load order
            self.pins[name] = {**pin, "position": member.position}
            return
        self.pins[name] = pin = surface.pin_of(member.tool, member.position, self.next_seq)
        self.next_seq += 1
        self.newly_loaded.append(name)
        self.cost += cache.cached_definition(pin["definition"]).tokens

    def _sort(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: (self.pins[name]["position"], name))

    def _is_complete(self, loaded: Sequence[str]) -> bool:
        names = set(loaded)
        initial = self.initial_names
        return bool(names) and (
            names >= self.offered.keys() or (initial is not None and names >= initial)
        )

    def _remaining(self) -> int:
        if self.row.names is None:
            return 0
        initial = self.offered.keys() if self.initial_names is None else self.initial_names
        return len(initial) - sum(name in initial for name in self.row.names)

    def _result(self, names: list[str]) -> LoadResult:
        return LoadResult(
            self.row.group_id,
            expanded=True,
            tool_names=names,
            remaining=self._remaining(),
            newly_loaded=self.newly_loaded,
        )


def unavailable_code(tool: CachedTool) -> str:
    return tool.state if tool.server_enabled else "server_disabled"


def unavailable_reason(tool: CachedTool) -> str:
    """Return a sentence that says why a tool in scope is not available."""
    reasons = {
        ToolState.HELD: f"{tool.name} is hidden by an admin"
        + (f": {tool.held_reason.rstrip('.')}" if tool.held_reason else ""),
        ToolState.MISSING: f"{tool.name} is no longer offered by {tool.server}",
        ToolState.REJECTED: f"{tool.name} is not available: its definition is invalid",
        ToolState.WAITING: f"{tool.name} is pending review by an admin",
    }
    if not tool.server_enabled:
        return f"The server {tool.server} of {tool.name} is disabled."
    return reasons.get(ToolState(tool.state), f"{tool.name} is not available") + "."


def write_loads(loads: SessionLoads) -> None:
    with connection.wrap_database_errors:
        loads.write(LedgerCursor(connection))


@transaction.atomic
def preload(session: AgentSession, names: Sequence[str]) -> str:
    """Load tools by name from any group, and return the response."""
    loads = SessionLoads(surface.context_of(lock_session(session)))
    results, unknown = loads.load_by_name(names, how="preload")
    write_loads(loads)
    schemas = [schema for result in results for schema in result.schemas or []]
    is_injected = session.strategy == Strategy.INJECT
    return join_members(
        {
            "preloaded": canonical([name for result in results for name in result.tool_names]),
            "unknown": canonical(unknown),
            "schemas": "null" if is_injected else join_items(schemas),
        }
    )


# --- State and stats ------------------------------------------------------------------------------


def export_state(session: AgentSession) -> dict[str, Any]:
    return {
        "strategy": session.strategy,
        "expanded_groups": {row.group_id: row.names for row in session.expansions.all()},
    }


def token_ledger(session: AgentSession) -> dict[str, Any]:
    return {
        "all_schemas": session.tokens_all,
        "delivered": session.tokens_delivered,
        "by": {
            "catalog": session.tokens_catalog,
            "search": session.tokens_search,
            "load": session.tokens_load,
            "call": session.tokens_call,
        },
    }


def stats(session: AgentSession) -> dict[str, Any]:
    scope = scope_of_session(session)
    shown = surface.surface_of(session.snapshot).pins.keys() | surface.pins_of(session).keys()
    loaded = [name for name in shown if (tool := scope.tools.get(name)) and tool.offered]
    return {
        "total_registered": len(scope.offered),
        "loaded": len(loaded),
        "deferred": len(scope.offered) - len(loaded),
        "deferred_mode": session.mode == "deferred",
        "auto_deferred": session.auto_deferred,
        "threshold": session.agent.tool_threshold,
        "tool_names": sorted(loaded),
        "tokens": token_ledger(session),
    }
