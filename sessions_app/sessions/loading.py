"""Load tools into a session within its budget; export session state and statistics.

A pin fixes the definition that a session was shown: a repeated load returns the same bytes even
if the tool has changed. A load and its event are one transaction.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from catalog import cache, preferences
from catalog.cache import CachedGroup, CachedMember, CachedTool
from catalog.models import ToolState
from sessions_app.ledger.writer import ExpansionRow, LedgerCursor, write_event
from sessions_app.models import AgentSession, EventKind, Mode, SessionState, Strategy
from sessions_app.scripts import signatures
from sessions_app.scripts.signatures import Language
from sessions_app.sessions import surface
from sessions_app.sessions.scope import Ambiguous, NotAvailable, scope_of_session
from sessions_app.sessions.snapshots import Pin, surface_of
from sessions_app.sessions.surface import SessionContext
from toolcrib.lib.errors import Conflict, Invalid, ToolcribError
from toolcrib.lib.json_codec import canonical, join_items, join_members
from toolcrib.lib.redaction.redactor import redact_text
from toolcrib.lib.token_counter import count

MAX_NAMES = 10_000
CONFIRM_TOKENS = 20_000  # a whole group above this asks first
LARGEST_NAMES = 20  # named in that question
NAMES_IN_EVENT = 20  # of a refused load
ADDED = "added"  # how a session in full mode got a tool that is newer than the session
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
    is_injected: bool = False  # the tools array of the session has them
    signatures: str | None = None  # typed functions, instead of schemas
    error: dict[str, Any] | None = None
    newly_loaded: list[str] = field(default_factory=list)
    loads_version: int = 0  # of the session, afterwards
    refusal: ToolcribError | None = None  # to be raised once it is recorded

    @property
    def size(self) -> int:
        """Return about how many characters the response has."""
        return 200 + sum(map(len, self.schemas or ())) + len(self.signatures or "")

    def as_json(self) -> str:
        names = ("group_id", "expanded", "tool_names", "remaining", "unknown", "error")
        members = {name: canonical(getattr(self, name)) for name in names}
        members["schemas"] = "null" if self.schemas is None else join_items(self.schemas)
        if self.signatures is not None:
            members["signatures"] = canonical(self.signatures)
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


def check_budget(budget: int | None, spent: int, cost: int) -> None:
    """Raise Conflict if definitions of `cost` tokens exceed what is left of the budget."""
    if budget is not None and cost and spent + cost > budget:
        raise Conflict(
            f"This needs {cost:,} tokens of definitions; "
            f"{max(budget - spent, 0):,} of {budget:,} are free.",
            hint="Ask for fewer tools, by name, or for a larger budget.",
            code="over_budget",
        )


class SessionLoads:
    """The loaded tools of a session: read once, changed by loads, written in one transaction."""

    def __init__(self, context: SessionContext) -> None:
        self.context = context
        self.newer = surface.newer_definitions(context)
        with connection.wrap_database_errors:
            rows = LedgerCursor(connection).read_expansions(context.session_pk)
        self._rows = {row.group_id: row for row in rows}
        self._pins: dict[str, dict[str, Pin]] = {
            row.group_id: json.loads(row.pins) for row in self._rows.values()
        }
        self.tokens_loaded = context.tokens_loaded
        self._unwritten: list[tuple[ExpansionRow | None, EventKind, dict[str, Any]]] = []
        self._shown: list[tuple[int, Pin]] = []  # tools shown in full without a load
        self.shown_tokens = 0  # of these; written with the event of whoever showed them
        self.ambiguous: dict[str, list[str]] = {}  # names in `load_by_name`, and their tools
        self.version = context.loads_version  # once `write` has written everything

    @property
    def pins(self) -> dict[str, Pin]:
        """Return the pins of all loaded tools, by name, with the definitions last shown."""
        return surface.with_newer(surface.first_pins(self._pins.values()), self.newer)

    @property
    def detailed(self) -> dict[str, int]:
        """Return the definitions that were shown in full of tools that are not loaded."""
        others = self.newer.keys() - self.pins.keys() - self.context.surface.pins.keys()
        return {name: self.newer[name]["definition"] for name in others}

    @property
    def shown_definitions(self) -> dict[str, int | None]:
        """Return the definition of each tool that the session was last shown, by name."""
        initial = surface.with_newer(self.context.surface.pins, self.newer)
        pins = initial | self.pins
        return {name: pin["definition"] for name, pin in pins.items()} | self.detailed

    @property
    def is_changed(self) -> bool:
        """Return whether something that authorizations cache is to be written."""
        context = self.context
        before = context.loads_version, context.tokens_loaded
        return (self.version, self.tokens_loaded) != before

    def load(
        self,
        group_id: str,
        names: Sequence[str] | None,
        *,
        how: str = "load",
        confirmed: bool = True,
        as_signatures: Language | None = None,
    ) -> LoadResult:
        """Load all tools of a group (`names` is None) or those named.

        With `as_signatures`, an agent that runs scripts gets functions instead of schemas.

        Not `confirmed`, a group of many tokens is not loaded: the result asks for a confirmation.
        A load beyond the budget changes nothing; `refusal` says so, to be raised by the caller.
        """
        check_name_count(names or ())
        group = self._find_group(group_id)
        if group is None:
            return self._refuse(LoadResult(group_id, error=self._unknown_group(group_id)), names)
        known = self._rows.get(group_id)
        position = len(self._rows) + 1
        row = known or ExpansionRow(self.context.session_pk, group_id, [], None, "{}", position)
        others = {other: pins for other, pins in self._pins.items() if other != group_id}
        load = _GroupLoad(self.context, group, row, self._pins.get(group_id, {}), others)
        load.given = self.newer.keys() | self.context.surface.pins.keys()
        if names is None and not confirmed and (question := load.ask_for_confirmation()):
            return self._refuse(LoadResult(group_id, error=question), names)
        result = load.load_all() if names is None else load.load_names(names)
        if result.error is not None:
            return self._refuse(result, names)
        if how == ADDED:  # full mode has no budget
            load.cost = 0
        try:
            check_budget(self.context.agent.budget, self.tokens_loaded, load.cost)
        except Conflict as refusal:
            refused = LoadResult(group_id, error={"code": refusal.code}, refusal=refusal)
            return self._refuse(refused, names)
        if as_signatures is not None and self.context.agent.code_mode:
            shown = surface.with_newer(load.pins, self.newer)
            result.signatures = self._signatures(result.tool_names, shown, as_signatures)
        self._apply(load, result, how)
        result.is_injected = self.context.strategy == Strategy.INJECT
        if result.is_injected or result.signatures is not None:
            result.schemas = None
        return result

    def _signatures(
        self, names: Sequence[str], shown: Mapping[str, Pin], language: Language
    ) -> str:
        known = signatures.names_of(self.context.scope).by_public_name
        # A tool that is no longer offered has no name in scripts.
        tools = [
            known[name].as_defined(shown[name]["definition"]) for name in names if name in known
        ]
        return signatures.render(tools, language)

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
                if candidates := scope.candidates(name):
                    self.ambiguous[name] = candidates
        results = [self.load(group_id, some, how=how) for group_id, some in by_group.items()]
        for result in results:
            if result.refusal is not None:  # all or none
                raise result.refusal
        return results, unknown

    def show(self, tools: Iterable[CachedTool]) -> dict[str, Pin]:
        """Return what the session is shown of tools in full, and keep it for the next time.

        Counts towards the budget what was never given before; raises Conflict beyond it.
        """
        pins = self._all_pins()
        shown: dict[str, Pin] = {}
        already_shown, cost = len(self._shown), 0
        for tool in tools:
            pin = self._known_pin(tool, pins)
            if pin is None:
                pin = surface.pin_of(tool)
                cost += cache.cached_definition(pin["definition"]).tokens
                self._shown.append((tool.tool_id, pin))
                self.newer[tool.name] = {name: pin[name] for name in ("definition", "override")}
            shown[tool.name] = pin
        check_budget(self.context.agent.budget, self.tokens_loaded, cost)
        self.tokens_loaded += cost
        self.shown_tokens += cost
        self.version += len(self._shown) - already_shown
        return shown

    def pin_as_shown(self, tool: CachedTool) -> Pin:
        """Return what the session was shown of a tool, or else its current definition."""
        return self._known_pin(tool, self._all_pins()) or surface.pin_of(tool)

    def _all_pins(self) -> dict[str, Pin]:
        return surface.with_newer(self.context.surface.pins, self.newer) | self.pins

    def _known_pin(self, tool: CachedTool, pins: Mapping[str, Pin]) -> Pin | None:
        if tool.name in pins:
            return pins[tool.name]
        return surface.pin_of(tool) | self.newer[tool.name] if tool.name in self.newer else None

    def sort_by(self, names: Sequence[str]) -> None:
        """Put the loaded tools in this order; others follow as they are."""
        order = {name: position for position, name in enumerate(names)}
        if not order:
            return
        last = len(order)
        pins = self.pins
        ranked = sorted(pins, key=lambda name: (order.get(name, last), pins[name]["seq"], name))
        ranks = {name: rank for rank, name in enumerate(ranked, 1)}
        for group_pins in self._pins.values():
            for name, pin in group_pins.items():
                pin["seq"] = ranks[name]
        for row in self._rows.values():
            row.pins = json.dumps(self._pins[row.group_id])

    def write(self, cursor: LedgerCursor) -> None:
        for row, kind, event in self._unwritten:
            if row is not None:
                cursor.save_expansion(row)
            write_event(cursor, self.context.session_pk, kind, **event)
        for tool_id, pin in self._shown:
            values = pin["definition"], pin["override"]
            cursor.set_shown_definition(self.context.session_pk, tool_id, *values)

    def _refuse(self, result: LoadResult, names: Sequence[str] | None) -> LoadResult:
        """Record a load that is answered by an error."""
        assert result.error is not None  # noqa: S101 - only such results are refused
        some = [name[:100] for name in names or ()][:NAMES_IN_EVENT]
        details = {"request": "load", "code": result.error["code"], "names": some}
        event = {"group_id": redact_text(result.group_id)[:80], "details": details}
        self._unwritten.append((None, EventKind.REFUSED, event))
        return result

    def _apply(self, load: "_GroupLoad", result: LoadResult, how: str) -> None:
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
        answered = result if result.signatures is None else replace(result, schemas=None)
        event = {
            "tokens": count(answered.as_json()) if is_counted else 0,  # also for inject
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
        self._unwritten.append((row, EventKind.LOADED, event))
        result.loads_version = self.version

    def _find_group(self, group_id: str) -> CachedGroup | None:
        """Find a group by the id in the session's catalog; it may have been renamed since."""
        scope = self.context.scope
        if group_id in scope.by_id:
            return scope.by_id[group_id]
        key = self.context.surface.keys.get(group_id)
        group = next((group for group in scope.groups if group.pk == key), None)
        if group is None and group_id in self._rows and self._is_deleted(group_id):
            # What was loaded of a deleted group stays loadable: the model has it already.
            return CachedGroup(0, group_id, "", "", 0, ())
        return group

    def _is_deleted(self, group_id: str) -> bool:
        key = self.context.surface.keys.get(group_id)
        return key is not None and key not in cache.current().by_pk

    def _unknown_group(self, group_id: str) -> dict[str, str]:
        if self._is_deleted(group_id):
            return {
                "code": "group_deleted",
                "message": f"{group_id} was deleted after this session had opened.",
                "hint": "Use another group, or open a new session for the current catalog.",
            }
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
        self.given: Collection[str] = ()  # tools whose definitions the session has already
        self.cost = 0  # tokens of the newly loaded definitions
        self._before = row.names, row.listed, len(pins)

    @property
    def is_changed(self) -> bool:
        return (self.row.names, self.row.listed, len(self.pins)) != self._before

    def ask_for_confirmation(self) -> dict[str, Any] | None:
        """Return the question before a load of many tokens; None if it needs no confirmation."""
        if self.row.listed is not None:
            return None
        tokens = {
            name: member.tool.tokens or 0
            for name, member in self.offered.items()
            if name not in self.pins
        }
        total = sum(tokens.values())
        if total <= CONFIRM_TOKENS:
            return None
        largest = sorted(tokens, key=lambda name: (-tokens[name], name))[:LARGEST_NAMES]
        sizes = ", ".join(f"{name} ({tokens[name]:,})" for name in largest)
        rest = len(tokens) - len(largest)
        return {
            "code": "confirm_load",
            "message": f"All of {self.row.group_id} is {total:,} tokens. The largest: {sizes}"
            + (f", and {rest:,} more." if rest else "."),
            "hint": "Load what you need by tool_names, or find it with search_tools. "
            "To load everything, repeat with confirm: true.",
            "tokens": total,
            "largest": [{"name": name, "tokens": tokens[name]} for name in largest],
            "rest": rest,
        }

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
        matches = self.group.offered_by_other_name.get(name, [])
        if not matches and name in self.group.line.by_short_name:
            matches = [self.group.line.by_short_name[name]]
        matches = matches or self._loaded_by_bare_name(name)
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
        # What the catalog printed of it, after words that its group's names shared then.
        endings = f"_{bare_name}", f"-{bare_name}"
        loaded = [name for name in self.pins if bare_name and name.endswith(endings)]
        return loaded if len(loaded) == 1 else []

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
        if name not in self.given:
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


def write_refusal(
    cursor: LedgerCursor, session: int, request: str, code: str, **details: object
) -> None:
    """Record a request that was answered by an error, other than a call."""
    refused = {"request": request, "code": code, **details}
    write_event(cursor, session, EventKind.REFUSED, details=refused)


def preload(session: AgentSession, names: Sequence[str]) -> str:
    """Load tools by name from any group, and return the response."""
    try:
        return _preload(session, names)
    except Conflict as error:
        if error.code == "over_budget":
            with connection.wrap_database_errors:
                cursor = LedgerCursor(connection)
                some = [name[:100] for name in names][:NAMES_IN_EVENT]
                write_refusal(cursor, session.pk, "preload", error.code, names=some)
        raise


@transaction.atomic
def _preload(session: AgentSession, names: Sequence[str]) -> str:
    loads = SessionLoads(surface.context_of(lock_session(session)))
    results, unknown = loads.load_by_name(names, how="preload")
    write_loads(loads)
    schemas = [schema for result in results for schema in result.schemas or []]
    is_injected = session.strategy == Strategy.INJECT
    return join_members(
        {
            "preloaded": canonical([name for result in results for name in result.tool_names]),
            "unknown": canonical(unknown),
            "ambiguous": canonical(loads.ambiguous),
            "schemas": "null" if is_injected else join_items(schemas),
        }
    )


def add_new_tools(session: AgentSession) -> bool:
    """Load what came into the scope of a session in full mode; return whether there was any.

    Such a session has no search, so it learns of a new tool only by its tool list.
    """
    if session.mode != Mode.FULL or current_state(session) != SessionState.OPEN:
        return False
    known = surface_of(session.snapshot).pins.keys() | surface.pins_of(session).keys()
    if all(tool.name in known for tool in scope_of_session(session).offered):
        return False
    with transaction.atomic():
        loads = SessionLoads(surface.context_of(lock_session(session)))
        known = loads.context.surface.pins.keys() | loads.pins.keys()
        new = [tool.name for tool in loads.context.scope.offered if tool.name not in known]
        loads.load_by_name(new, how=ADDED)
        write_loads(loads)
    return bool(new)


# --- State and stats ------------------------------------------------------------------------------


def export_state(session: AgentSession) -> dict[str, Any]:
    pins = surface.pins_of(session)
    return {
        "strategy": session.strategy,
        "expanded_groups": {row.group_id: row.names for row in session.expansions.all()},
        "load_order": sorted(pins, key=lambda name: (pins[name]["seq"], name)),
    }


def token_ledger(session: AgentSession) -> dict[str, Any]:
    figures = session.token_figures
    return {
        "all_schemas": figures.baseline,
        "delivered": figures.sent,
        "given": figures.given,
        "saved": figures.saved,
        "saved_percent": figures.saved_percent,
        "by": {
            "catalog": figures.catalog,
            "search": figures.searches,
            "load": figures.definitions,
            "call": figures.results,
        },
    }


def stats(session: AgentSession, *, with_names: bool = True) -> dict[str, Any]:
    """Return the statistics of a session; the names are those of all its tools."""
    scope = scope_of_session(session)
    shown = surface_of(session.snapshot).pins.keys() | surface.pins_of(session).keys()
    loaded = [name for name in shown if (tool := scope.tools.get(name)) and tool.offered]
    return {
        "total_registered": len(scope.offered),
        "loaded": len(loaded),
        "deferred": len(scope.offered) - len(loaded),
        "deferred_mode": session.mode == "deferred",
        "auto_deferred": session.auto_deferred,
        "threshold": (
            session.agent.tool_threshold
            if session.tool_threshold is None
            else session.tool_threshold
        ),
        **({"tool_names": sorted(tool.name for tool in scope.offered)} if with_names else {}),
        "tokens": token_ledger(session),
    }
