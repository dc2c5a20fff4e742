"""Load tools into a session, within its budget, and serve what was loaded as it was.

A pin keeps what a session was shown of a tool: whatever changes later, the same load gives the
same bytes. A load either happens whole, with its event, or leaves nothing behind.
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
from sessions_app.sessions import scope
from sessions_app.sessions.scope import Ambiguous, NotAvailable, SessionScope
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
MIN_IDLE_SECONDS = preferences.PREFERENCES["session_idle_seconds"].low

_under_lock = PreparedQuery(
    1, lambda pk: AgentSession.objects.with_catalog().select_for_update(of=("self",)).filter(pk=pk)
)


class OverBudget(ToolcribError):
    code = "over_budget"
    status = 409


@dataclass
class LoadResult:
    """The answer to a load."""

    group_id: str
    expanded: bool = False
    tool_names: list[str] = field(default_factory=list)
    remaining: int = 0
    unknown: list[str] = field(default_factory=list)
    schemas: list[dict[str, Any]] | None = field(default_factory=list)
    error: dict[str, str] | None = None
    fresh: list[str] = field(default_factory=list)  # loaded by this very call

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
    """Read an open session under a lock; refuse one that has ended, with how to go on."""
    row = _under_lock.first(session.pk)
    if row is None:
        raise AgentSession.DoesNotExist
    check_open(row)
    return row


def current_state(session: AgentSession) -> str:
    """Say what state a session is in: one that was idle too long has expired, swept or not."""
    idle = (timezone.now() - session.last_used_at).total_seconds()
    # Used within the shortest time that may be chosen: nothing to look up.
    if session.state != SessionState.OPEN or idle < MIN_IDLE_SECONDS:
        return session.state
    limit = preferences.value("session_idle_seconds")
    return SessionState.EXPIRED if idle > limit else session.state


def check_open(session: AgentSession) -> None:
    state = current_state(session)
    if state != SessionState.OPEN:
        raise Conflict(
            f"This session is {state}.",
            hint=f"GET /sessions/{session.session_id}/state still gives what it had loaded: open "
            'a new session with it as "resume".',
            code=f"session_{state}",
        )


def check_number(names: Sequence[str]) -> None:
    if len(names) > MAX_NAMES:
        raise Invalid(
            f"{len(names):,} names at once; the cap is {MAX_NAMES:,}.", hint="Name fewer."
        )


@transaction.atomic
def load(
    session: AgentSession, group_id: str, names: Sequence[str] | None, *, how: str = "load"
) -> LoadResult:
    """Load a group, whole (names None) or by names."""
    check_number(names or ())
    session = lock_session(session)
    seen = scope.scope_of_session(session)
    group = _group(session, seen, group_id)
    if group is None:
        return LoadResult(group_id, error=_unknown_group(group_id, seen))
    work = _Load(session, group_id, group)
    result = work.whole() if names is None else work.some(names)
    if result.error is None:
        work.save()
        _count(session, result, how, work.cost)
    if session.strategy == Strategy.INJECT:
        result.schemas = None
    return result


def _group(session: AgentSession, seen: SessionScope, group_id: str) -> CachedGroup | None:
    """Find a group by the id the model knows, which may be an older one."""
    if group_id in seen.by_id:
        return seen.by_id[group_id]
    key = surface_of(session.snapshot).keys.get(group_id)
    return next((group for group in seen.groups if group.pk == key), None)


def _unknown_group(group_id: str, seen: SessionScope) -> dict[str, str]:
    available = ", ".join(sorted(line.group_id for line in seen.lines)) or "none"
    return {
        "code": "unknown_group",
        "message": f"Unknown group_id: {group_id[:80]!r} is not available in this session. "
        f"Available: {available}",
        "hint": "Use one of the ids in the catalog.",
    }


class _Load:
    """One load while it is worked out. Lives inside one transaction."""

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
        self.elsewhere = first_pins(pins.values())
        self.offered = {member.tool.name: member for member in group.members if member.tool.offered}
        self.fresh: list[str] = []
        self.cost = 0  # tokens of what is loaded anew

    def whole(self) -> LoadResult:
        if self.row.listed is None:
            for member in self.offered.values():
                self._pin(member)
            self.row.listed = list(self.offered)
        self.row.names = None
        return self._answer(self.row.listed)

    def some(self, names: Sequence[str]) -> LoadResult:
        chosen, unknown, problems = [], [], []
        for name in dict.fromkeys(names):
            try:
                chosen.append(self._resolve(name))
            except (NotAvailable, Ambiguous) as error:
                unknown.append(name)
                problems.append(error)
        if problems and not chosen:
            return LoadResult(
                self.row.group_id,
                remaining=self._remaining(),
                unknown=unknown,
                error={
                    "code": problems[0].code,
                    "message": problems[0].message,
                    "hint": problems[0].hint,
                },
            )
        for name in chosen:
            if name not in self.pins:
                self._pin(self.offered[name])
        if self.row.names is not None and not set(chosen) <= set(self.row.names):
            loaded = self._ordered({*self.row.names, *chosen})
            whole = self._complete(loaded)
            self.row.names = None if whole else loaded
            if whole:
                self.row.listed = loaded
        result = self._answer(self._ordered(chosen))
        result.unknown = unknown
        return result

    def _resolve(self, name: str) -> str:
        """Return the public name of a tool of this group; loaded ones stay loadable."""
        if name in self.pins or name in self.offered:
            return name
        found = self.bare.get(name, [])
        if len(found) == 1:
            return found[0]
        if found:
            raise Ambiguous(
                f"{len(found)} tools of {self.row.group_id} are called {name!r}: "
                f"{', '.join(sorted(found))}.",
                hint="Use the full name.",
            )
        if name in self.withheld:
            item = self.withheld[name]
            raise NotAvailable(unavailable_reason(item), hint="", code=unavailable_code(item))
        raise NotAvailable(
            f"{name[:100]!r} is not available in this session under {self.row.group_id}.",
            hint=f"Its tools: {', '.join(islice(self.offered, 50)) or 'none'}.",
        )

    @cached_property
    def bare(self) -> dict[str, list[str]]:
        """Public names by the server's own name and by its safe form."""
        found: dict[str, list[str]] = {}
        for name, member in self.offered.items():
            for other in {member.tool.original_name, name.partition("__")[2]}:
                found.setdefault(other, []).append(name)
        for name, pin in self.pins.items():  # loaded ones, though no longer offered
            original_name = cache.cached_definition(pin["definition"]).tool["name"]
            for other in {original_name, name.partition("__")[2]}:
                found.setdefault(other, [name])
        return found

    @cached_property
    def withheld(self) -> dict[str, CachedTool]:
        """Tools of the group that cannot be had now, by both their names."""
        items = [member.tool for member in self.group.members if not member.tool.offered]
        return {name: item for item in reversed(items) for name in (item.original_name, item.name)}

    def _pin(self, member: CachedMember) -> None:
        name = member.tool.name
        if name in self.pins:
            return
        if before := self.elsewhere.get(name):  # what it was shown, and after what, stays
            self.pins[name] = {**before, "position": member.position}
            return
        self.pins[name] = pin_of(member.tool, member.position, self.next_seq)
        self.next_seq += 1
        self.fresh.append(name)

    def _ordered(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: (self.pins[name]["position"], name))

    def _base(self) -> Iterable[str]:
        """What the group's line counted when the session opened."""
        lines = surface_of(self.session.snapshot).groups
        line = next((line for line in lines if line.group_id == self.row.group_id), None)
        return line.names if line else list(self.offered)

    def _complete(self, names: Sequence[str]) -> bool:
        loaded = set(names)
        return bool(loaded) and (loaded >= self.offered.keys() or loaded >= set(self._base()))

    def _remaining(self) -> int:
        if self.row.names is None:
            return 0
        return len(set(self._base()) - set(self.row.names))

    def _answer(self, names: list[str]) -> LoadResult:
        pins = replace_with_last_shown(self.session, self.pins)
        return LoadResult(
            self.row.group_id,
            expanded=True,
            tool_names=names,
            remaining=self._remaining(),
            schemas=[render_pin(name, pins[name]) for name in names],
            fresh=self.fresh,
        )

    def save(self) -> None:
        self._check_budget()
        self.row.pins = json.dumps(self.pins)
        self.row.save()

    def _check_budget(self) -> None:
        budget = self.session.agent.budget
        cost = sum(
            cache.cached_definition(self.pins[name]["definition"]).tokens for name in self.fresh
        )
        held = self.session.tokens_loaded
        if budget is not None and cost and held + cost > budget:
            raise OverBudget(
                f"Loading this needs {cost:,} tokens; {max(budget - held, 0):,} of {budget:,} "
                "are free.",
                hint="Load fewer tools, by name, or ask for a larger budget.",
            )
        self.cost = cost


def _count(session: AgentSession, result: LoadResult, how: str, cost: int) -> None:
    # A resumed session's model has read these schemas; search gives its own account of them.
    given = count(canonical(result.schemas)) if how in ("load", "preload") else 0
    events.record_event(
        session,
        EventKind.LOADED,
        tokens=given,
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


def unavailable_code(item: CachedTool) -> str:
    return item.state if item.server_enabled else "server_disabled"


def unavailable_reason(item: CachedTool) -> str:
    """Say why a tool in scope cannot be used now."""
    reasons = {
        ToolState.HELD: f"{item.name} is held by an admin"
        + (f": {item.held_reason.rstrip('.')}" if item.held_reason else ""),
        ToolState.MISSING: f"{item.name} is no longer offered by {item.server}",
        ToolState.REJECTED: f"{item.name} cannot be used: its definition is not sound",
        ToolState.WAITING: f"{item.name} waits for an admin's approval",
    }
    if not item.server_enabled:
        return f"The server {item.server} of {item.name} is disabled."
    return reasons.get(ToolState(item.state), f"{item.name} is not available") + "."


def preload(session: AgentSession, names: Sequence[str]) -> dict[str, Any]:
    """Load tools by name, whatever group they are in."""
    check_number(names)
    with transaction.atomic():
        session = lock_session(session)
        found, unknown = names_by_group(session, scope.scope_of_session(session), names)
        results = [load(session, group, part, how="preload") for group, part in found.items()]
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
    session: AgentSession, seen: SessionScope, names: Sequence[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Sort names by the first group that has them; tell those that no group has."""
    found: dict[str, list[str]] = {}
    unknown = []
    for name in dict.fromkeys(names):
        item = seen.lookup(name)
        if item is not None and item.offered:
            group = seen.homes[item.name][0].group_id
            found.setdefault(group, []).append(item.name)
        else:
            unknown.append(name)
    return found, unknown


# --- State and stats ------------------------------------------------------------------------------


def export_state(session: AgentSession) -> dict[str, Any]:
    """Export what was loaded, to open another session with."""
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
    seen = scope.scope_of_session(session)
    offered = {item.name for item in seen.offered}
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
