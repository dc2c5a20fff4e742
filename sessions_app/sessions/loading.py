"""Load tools into a session within its budget; export session state and statistics.

A pin fixes the definition that a session was shown: a repeated load returns the same bytes even
if the tool has changed. A load and its event are one transaction.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from django.db import transaction
from django.utils import timezone

from catalog import cache, preferences
from catalog.cache import CachedGroup, CachedMember, CachedTool
from catalog.models import ToolState
from sessions_app.ledger import events
from sessions_app.models import AgentSession, EventKind, Expansion, SessionState, Strategy
from sessions_app.sessions.scope import Ambiguous, NotAvailable, SessionScope, scope_of_session
from sessions_app.sessions.surface import (
    Pin,
    expansions,
    first_pins,
    pin_of,
    pins_of,
    render_pin,
    replace_with_last_shown,
    surface_of,
)
from toolcrib.lib.errors import Conflict, Invalid, ToolcribError
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.prepared_query import PreparedQuery
from toolcrib.lib.token_counter import count

MAX_NAMES = 10_000
MIN_IDLE_SECONDS = preferences.PREFERENCES["session_idle_seconds"].minimum

_select_for_update = PreparedQuery(
    1, lambda pk: AgentSession.objects.with_catalog().select_for_update(of=("self",)).filter(pk=pk)
)


class OverBudget(ToolcribError):
    code = "over_budget"
    status = 409


@dataclass
class LoadResult:
    """The response to a load."""

    group_id: str
    expanded: bool = False
    tool_names: list[str] = field(default_factory=list)
    remaining: int = 0
    unknown: list[str] = field(default_factory=list)
    schemas: list[dict[str, Any]] | None = field(default_factory=list)
    error: dict[str, str] | None = None
    newly_loaded: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "group_id": self.group_id,
            "expanded": self.expanded,
            "tool_names": self.tool_names,
            "remaining": self.remaining,
            "unknown": self.unknown,
            "schemas": self.schemas,
            "error": self.error,
        }


# --- Loading --------------------------------------------------------------------------------------


def lock_session(session: AgentSession) -> AgentSession:
    """Lock and return an open session. Raises Conflict if it has ended."""
    row = _select_for_update.first(session.pk)
    if row is None:
        raise AgentSession.DoesNotExist
    check_open(row)
    return row


def current_state(session: AgentSession) -> str:
    """Return the session's state: expired after the idle timeout, even if not yet swept."""
    idle = (timezone.now() - session.last_used_at).total_seconds()
    # Fast path: below the smallest configurable timeout, skip reading the preference.
    if session.state != SessionState.OPEN or idle < MIN_IDLE_SECONDS:
        return session.state
    limit = preferences.value("session_idle_seconds")
    return SessionState.EXPIRED if idle > limit else session.state


def check_open(session: AgentSession) -> None:
    state = current_state(session)
    if state != SessionState.OPEN:
        raise Conflict(
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


@transaction.atomic
def load(
    session: AgentSession, group_id: str, names: Sequence[str] | None, *, how: str = "load"
) -> LoadResult:
    """Load all tools of a group (`names` is None) or those named."""
    check_name_count(names or ())
    session = lock_session(session)
    scope = scope_of_session(session)
    group = _find_group(session, scope, group_id)
    if group is None:
        return LoadResult(group_id, error=_unknown_group(group_id, scope))
    operation = _GroupLoad(session, group_id, group)
    result = operation.load_all() if names is None else operation.load_names(names)
    if result.error is None:
        operation.save()
        _record_load(session, result, how, operation.cost)
    if session.strategy == Strategy.INJECT:
        result.schemas = None
    return result


def _find_group(session: AgentSession, scope: SessionScope, group_id: str) -> CachedGroup | None:
    """Find a group by the id in the session's catalog; the group may have been renamed since."""
    if group_id in scope.by_id:
        return scope.by_id[group_id]
    key = surface_of(session.snapshot).keys.get(group_id)
    return next((group for group in scope.groups if group.pk == key), None)


def _unknown_group(group_id: str, scope: SessionScope) -> dict[str, str]:
    available = ", ".join(sorted(line.group_id for line in scope.lines)) or "none"
    return {
        "code": "unknown_group",
        "message": f"Unknown group_id: {group_id[:80]!r} is not available in this session. "
        f"Available: {available}",
        "hint": "Use one of the ids in the catalog.",
    }


class _GroupLoad:
    """One load of a group. Lives inside one transaction."""

    def __init__(self, session: AgentSession, group_id: str, group: CachedGroup) -> None:
        self.session = session
        self.group = group
        rows = expansions.all(session.pk)
        self.row = next((row for row in rows if row.group_id == group_id), None) or Expansion(
            session=session, group_id=group_id, names=[], sequence=len(rows) + 1
        )
        pins: dict[str, dict[str, Pin]] = {row.group_id: json.loads(row.pins) for row in rows}
        self.next_seq = 1 + sum(map(len, pins.values()))
        self.pins = pins.pop(group_id, {})
        self.other_pins = first_pins(pins.values())  # loaded through other groups
        self.offered = {member.tool.name: member for member in group.members if member.tool.offered}
        self.newly_loaded: list[str] = []
        self.cost = 0  # tokens of the newly loaded definitions

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
            return LoadResult(
                self.row.group_id,
                remaining=self._remaining(),
                unknown=unknown,
                error={
                    "code": errors[0].code,
                    "message": errors[0].message,
                    "hint": errors[0].hint,
                },
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
        matches = self.by_bare_name.get(name, [])
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise Ambiguous(
                f"{len(matches)} tools of {self.row.group_id} are named {name!r}: "
                f"{', '.join(sorted(matches))}.",
                hint="Use the full name.",
            )
        if name in self.unavailable:
            tool = self.unavailable[name]
            raise NotAvailable(unavailable_reason(tool), hint="", code=unavailable_code(tool))
        raise NotAvailable(
            f"{name[:100]!r} is not available in this session under {self.row.group_id}.",
            hint=f"Its tools: {', '.join(islice(self.offered, 50)) or 'none'}.",
        )

    @cached_property
    def by_bare_name(self) -> dict[str, list[str]]:
        """Public names by the server's name for the tool and by its safe form."""
        names: dict[str, list[str]] = {}
        for name, member in self.offered.items():
            for bare_name in {member.tool.original_name, name.partition("__")[2]}:
                names.setdefault(bare_name, []).append(name)
        for name, pin in self.pins.items():  # loaded tools that are no longer offered
            original_name = cache.cached_definition(pin["definition"]).tool["name"]
            for bare_name in {original_name, name.partition("__")[2]}:
                names.setdefault(bare_name, [name])
        return names

    @cached_property
    def unavailable(self) -> dict[str, CachedTool]:
        """Tools of the group that are not offered now, by public and original name."""
        tools = [member.tool for member in self.group.members if not member.tool.offered]
        return {name: tool for tool in reversed(tools) for name in (tool.original_name, tool.name)}

    def _pin(self, member: CachedMember) -> None:
        name = member.tool.name
        if name in self.pins:
            return
        if pin := self.other_pins.get(name):  # keep the definition and the load order
            self.pins[name] = {**pin, "position": member.position}
            return
        self.pins[name] = pin_of(member.tool, member.position, self.next_seq)
        self.next_seq += 1
        self.newly_loaded.append(name)

    def _sort(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: (self.pins[name]["position"], name))

    def _initial_names(self) -> Iterable[str]:
        """Return the names in the group's catalog line when the session opened."""
        lines = surface_of(self.session.snapshot).groups
        line = next((line for line in lines if line.group_id == self.row.group_id), None)
        return line.names if line else list(self.offered)

    def _is_complete(self, names: Sequence[str]) -> bool:
        loaded = set(names)
        return bool(loaded) and (
            loaded >= self.offered.keys() or loaded >= set(self._initial_names())
        )

    def _remaining(self) -> int:
        if self.row.names is None:
            return 0
        return len(set(self._initial_names()) - set(self.row.names))

    def _result(self, names: list[str]) -> LoadResult:
        pins = replace_with_last_shown(self.session, self.pins)
        return LoadResult(
            self.row.group_id,
            expanded=True,
            tool_names=names,
            remaining=self._remaining(),
            schemas=[render_pin(name, pins[name]) for name in names],
            newly_loaded=self.newly_loaded,
        )

    def save(self) -> None:
        self._check_budget()
        self.row.pins = json.dumps(self.pins)
        self.row.save()

    def _check_budget(self) -> None:
        budget = self.session.agent.budget
        cost = sum(
            cache.cached_definition(self.pins[name]["definition"]).tokens
            for name in self.newly_loaded
        )
        used = self.session.tokens_loaded
        if budget is not None and cost and used + cost > budget:
            raise OverBudget(
                f"Loading this needs {cost:,} tokens; {max(budget - used, 0):,} of {budget:,} "
                "are free.",
                hint="Load fewer tools, by name, or ask for a larger budget.",
            )
        self.cost = cost


def _record_load(session: AgentSession, result: LoadResult, how: str, cost: int) -> None:
    # A resumed session's model already has these schemas; a search counts its own response.
    tokens = count(canonical(result.schemas)) if how in ("load", "preload") else 0
    events.record_event(
        session,
        EventKind.LOADED,
        tokens=tokens,
        group_id=result.group_id,
        details={
            "names": result.tool_names,
            "all": result.remaining == 0,
            "how": how,
            "unknown": result.unknown,
            "remaining": result.remaining,
        },
        tokens_loaded=cost,
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


def preload(session: AgentSession, names: Sequence[str]) -> dict[str, Any]:
    """Load tools by name from any group."""
    check_name_count(names)
    with transaction.atomic():
        session = lock_session(session)
        by_group, unknown = names_by_group(scope_of_session(session), names)
        results = [
            load(session, group_id, group_names, how="preload")
            for group_id, group_names in by_group.items()
        ]
    schemas: list[dict[str, Any]] | None = [
        schema for result in results for schema in result.schemas or []
    ]
    if session.strategy == Strategy.INJECT:
        schemas = None
    return {
        "preloaded": [name for result in results for name in result.tool_names],
        "unknown": unknown,
        "schemas": schemas,
    }


def names_by_group(
    scope: SessionScope, names: Sequence[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Group names by the first group that has the tool; also return the unknown names."""
    by_group: dict[str, list[str]] = {}
    unknown = []
    for name in dict.fromkeys(names):
        tool = scope.lookup(name)
        if tool is not None and tool.offered:
            group_id = scope.groups_by_tool[tool.name][0].group_id
            by_group.setdefault(group_id, []).append(tool.name)
        else:
            unknown.append(name)
    return by_group, unknown


# --- State and stats ------------------------------------------------------------------------------


def export_state(session: AgentSession) -> dict[str, Any]:
    """Export the loaded groups and tools, to resume in another session."""
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
    offered = {tool.name for tool in scope_of_session(session).offered}
    loaded = {**surface_of(session.snapshot).pins, **pins_of(session)}.keys() & offered
    return {
        "total_registered": len(offered),
        "loaded": len(loaded),
        "deferred": len(offered) - len(loaded),
        "deferred_mode": session.mode == "deferred",
        "auto_deferred": session.auto_deferred,
        "threshold": session.agent.tool_threshold,
        "tool_names": sorted(loaded),
        "tokens": token_ledger(session),
    }
