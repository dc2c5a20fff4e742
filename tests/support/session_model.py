"""What a session should be, in a few dictionaries: the model that the product is held against.

Written from the rules of sessions, not from the code: names are sets, a definition is a number
that grows with every change, and nothing here touches a database.
"""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any


@dataclass
class World:
    """Groups, tools and what became of them."""

    groups: dict[str, list[str]] = field(default_factory=dict)  # public names, in order
    own: dict[str, str] = field(default_factory=dict)  # the bare name of each tool
    version: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)

    def is_offered(self, name: str) -> bool:
        return name not in self.gone and name not in self.held

    def offered_in(self, group: str) -> list[str]:
        return [name for name in self.groups[group] if self.is_offered(name)]


@dataclass
class Row:
    """One group as a session has it: None means all of it."""

    names: set[str] | None = field(default_factory=set)
    listed: set[str] | None = None  # what "all" was when it was first said
    pins: dict[str, int] = field(default_factory=dict)  # the version that was shown


@dataclass
class Loaded:
    """What a load should answer. `code` is empty where it succeeds."""

    code: str = ""
    names: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)
    remaining: int = 0
    fresh: set[str] = field(default_factory=set)


class OverBudget(Exception):
    pass


class ModelSession:
    def __init__(
        self, world: World, scope: list[str], strategy: str, at_once: set[str], budget: int
    ) -> None:
        self.world, self.scope, self.strategy, self.budget = world, scope, strategy, budget
        self.open = True
        self.base = {group: set(world.offered_in(group)) for group in scope}
        self.at_once = {name: world.version[name] for name in at_once}
        self.rows: dict[str, Row] = {}
        self.changed: dict[str, int] = {}  # versions that `definition_changed` answers gave
        self.spent = 0
        self.memory: dict[Any, Any] = {}  # answers that must stay as they were

    def fork(self) -> "ModelSession":
        child = ModelSession(self.world, list(self.scope), self.strategy, set(), self.budget)
        for name in ("base", "at_once", "rows", "changed", "spent", "memory"):
            setattr(child, name, deepcopy(getattr(self, name)))
        return child

    # --- What is in scope -------------------------------------------------------------------------

    @property
    def items(self) -> list[str]:
        return list(
            dict.fromkeys(name for group in self.scope for name in self.world.groups[group])
        )

    def offered(self) -> set[str]:
        return {name for name in self.items if self.world.is_offered(name)}

    def lookup(self, name: str) -> str | None:
        """The one tool of this name, public or bare; of several, the one that is offered."""
        if name in self.items:
            return name
        found = [item for item in self.items if self.world.own[item] == name]
        found = [item for item in found if self.world.is_offered(item)] or found
        return found[0] if len(found) == 1 else None

    def home(self, name: str) -> str:
        return next(group for group in self.scope if name in self.world.groups[group])

    def pinned(self, name: str) -> int | None:
        """The version the session was last shown."""
        if name in self.changed:
            return self.changed[name]
        for row in self.rows.values():
            if name in row.pins:
                return row.pins[name]
        return self.at_once.get(name)

    def loaded(self) -> set[str]:
        return {name for row in self.rows.values() for name in row.pins} | set(self.at_once)

    # --- Loading ----------------------------------------------------------------------------------

    def load(self, group: str, names: list[str] | None) -> Loaded:
        """Load, or leave everything as it was."""
        if group not in self.scope:
            return Loaded("unknown_group")
        row = deepcopy(self.rows.get(group, Row()))
        before = set(row.pins)
        told = self._whole(row, group) if names is None else self._some(row, group, names)
        if told.code:
            return told
        elsewhere = {
            name for other, kept in self.rows.items() if other != group for name in kept.pins
        }
        told.fresh = set(row.pins) - before - elsewhere
        cost = sum(self.world.tokens[name] for name in told.fresh)
        if cost and self.spent + cost > self.budget:
            raise OverBudget
        self.spent += cost
        self.rows[group] = row
        return told

    def _whole(self, row: Row, group: str) -> Loaded:
        if row.listed is None:
            offered = self.world.offered_in(group)
            self._pin(row, offered)
            row.listed = set(offered)
        row.names = None
        return Loaded(names=set(row.listed))

    def _some(self, row: Row, group: str, names: list[str]) -> Loaded:
        found = {name: self._resolve(row, group, name) for name in dict.fromkeys(names)}
        unknown = [name for name, tool in found.items() if tool is None]
        chosen = [tool for tool in found.values() if tool is not None]
        if unknown and not chosen:
            return Loaded("not available", unknown=unknown)
        self._pin(row, chosen)
        offered = set(self.world.offered_in(group))
        base = self.base.get(group) or offered
        if row.names is not None and not set(chosen) <= row.names:
            together = row.names | set(chosen)
            if together >= offered or together >= base:
                row.names, row.listed = None, together
            else:
                row.names = together
        remaining = 0 if row.names is None else len(base - row.names)
        return Loaded(names=set(chosen), unknown=unknown, remaining=remaining)

    def _resolve(self, row: Row, group: str, name: str) -> str | None:
        offered = self.world.offered_in(group)
        if name in row.pins or name in offered:
            return name
        found = [tool for tool in offered if self.world.own[tool] == name]
        if not found:
            found = [tool for tool in row.pins if self.world.own[tool] == name][:1]
        return found[0] if len(found) == 1 else None

    def _pin(self, row: Row, names: list[str]) -> None:
        for name in names:
            elsewhere = [other.pins[name] for other in self.rows.values() if name in other.pins]
            row.pins.setdefault(name, [*elsewhere, self.world.version[name]][0])

    def load_anywhere(self, names: list[str]) -> tuple[set[str], list[str], set[str]]:
        """Load by name: each where it is first found. All of it happens, or nothing does."""
        by_group: dict[str, list[str]] = {}
        unknown = []
        for name in dict.fromkeys(names):
            tool = self.lookup(name)
            if tool is None or not self.world.is_offered(tool):
                unknown.append(name)
            else:
                by_group.setdefault(self.home(tool), []).append(tool)
        kept = deepcopy((self.rows, self.spent))
        done: set[str] = set()
        fresh: set[str] = set()
        try:
            for group, some in by_group.items():
                told = self.load(group, some)
                done |= told.names
                fresh |= told.fresh
        except OverBudget:
            self.rows, self.spent = kept
            raise
        return done, unknown, fresh

    def state(self) -> dict[str, set[str] | None]:
        return {group: row.names for group, row in self.rows.items()}
