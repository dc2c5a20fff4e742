"""In-memory model of sessions, the reference for the model-based session test.

Written from the rules of sessions, not from the code: names are sets, a definition is a version
number that grows with every change, and no function uses a database.
"""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any


@dataclass
class World:
    """Groups and tools with their current versions and availability."""

    groups: dict[str, list[str]] = field(default_factory=dict)  # public names, in order
    bare_names: dict[str, str] = field(default_factory=dict)  # by public name
    versions: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    hidden: set[str] = field(default_factory=set)

    def is_offered(self, name: str) -> bool:
        return name not in self.missing and name not in self.hidden

    def offered_in(self, group: str) -> list[str]:
        return [name for name in self.groups[group] if self.is_offered(name)]


@dataclass
class GroupState:
    """State of one group in a session. `names` is None when the whole group is loaded."""

    names: set[str] | None = field(default_factory=set)
    listed: set[str] | None = None  # the tools of the group when it was first loaded as a whole
    pins: dict[str, int] = field(default_factory=dict)  # the delivered version of each tool


@dataclass
class LoadResult:
    """Expected result of a load. `code` is empty on success."""

    code: str = ""
    names: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)
    remaining: int = 0
    newly_loaded: set[str] = field(default_factory=set)


class OverBudget(Exception):
    pass


class ModelSession:
    def __init__(
        self, world: World, scope: list[str], strategy: str, preloaded: set[str], budget: int
    ) -> None:
        self.world, self.scope, self.strategy, self.budget = world, scope, strategy, budget
        self.open = True
        self.base = {group: set(world.offered_in(group)) for group in scope}
        self.preloaded = {name: world.versions[name] for name in preloaded}
        self.rows: dict[str, GroupState] = {}
        # Versions sent in `definition_changed` errors, or in full without a load.
        self.changed: dict[str, int] = {}
        self.spent = sum(world.tokens[name] for name in preloaded)
        self.responses: dict[Any, Any] = {}  # responses that must repeat unchanged

    def fork(self) -> "ModelSession":
        child = ModelSession(self.world, list(self.scope), self.strategy, set(), self.budget)
        for name in ("base", "preloaded", "rows", "changed", "spent", "responses"):
            setattr(child, name, deepcopy(getattr(self, name)))
        return child

    # --- Scope ------------------------------------------------------------------------------------

    @property
    def items(self) -> list[str]:
        return list(
            dict.fromkeys(name for group in self.scope for name in self.world.groups[group])
        )

    def offered(self) -> set[str]:
        return {name for name in self.items if self.world.is_offered(name)}

    def lookup(self, name: str) -> str | None:
        """Return the one tool with this public or bare name; offered tools take precedence."""
        if name in self.items:
            return name
        matches = [item for item in self.items if self.world.bare_names[item] == name]
        matches = [item for item in matches if self.world.is_offered(item)] or matches
        return matches[0] if len(matches) == 1 else None

    def first_group(self, name: str) -> str:
        return next(group for group in self.scope if name in self.world.groups[group])

    def pinned(self, name: str) -> int | None:
        """Return the version that was last delivered to the session."""
        if name in self.changed:
            return self.changed[name]
        for row in self.rows.values():
            if name in row.pins:
                return row.pins[name]
        return self.preloaded.get(name)

    def loaded(self) -> set[str]:
        return {name for row in self.rows.values() for name in row.pins} | set(self.preloaded)

    # --- Loading ----------------------------------------------------------------------------------

    def load(self, group: str, names: list[str] | None) -> LoadResult:
        """Load tools of a group. Raises OverBudget and then changes nothing."""
        if group not in self.scope:
            return LoadResult("unknown_group")
        row = deepcopy(self.rows.get(group, GroupState()))
        before = set(row.pins)
        result = self._load_all(row, group) if names is None else self._load_some(row, group, names)
        if result.code:
            return result
        elsewhere = {
            name for other, state in self.rows.items() if other != group for name in state.pins
        }
        result.newly_loaded = set(row.pins) - before - elsewhere
        given = self.preloaded.keys() | self.changed.keys()
        cost = sum(self.world.tokens[name] for name in result.newly_loaded - given)
        if cost and self.spent + cost > self.budget:
            raise OverBudget
        self.spent += cost
        self.rows[group] = row
        return result

    def show(self, name: str) -> None:
        """Deliver a tool in full without a load. Raises OverBudget and then changes nothing."""
        if self.pinned(name) is not None:
            return
        if self.spent + self.world.tokens[name] > self.budget:
            raise OverBudget
        self.spent += self.world.tokens[name]
        self.changed[name] = self.world.versions[name]

    def _load_all(self, row: GroupState, group: str) -> LoadResult:
        if row.listed is None:
            offered = self.world.offered_in(group)
            self._pin(row, offered)
            row.listed = set(offered)
        row.names = None
        return LoadResult(names=set(row.listed))

    def _load_some(self, row: GroupState, group: str, names: list[str]) -> LoadResult:
        resolved = {name: self._resolve(row, group, name) for name in dict.fromkeys(names)}
        unknown = [name for name, tool in resolved.items() if tool is None]
        chosen = [tool for tool in resolved.values() if tool is not None]
        if unknown and not chosen:
            return LoadResult("not available", unknown=unknown)
        self._pin(row, chosen)
        offered = set(self.world.offered_in(group))
        base = self.base.get(group) or offered
        if row.names is not None and not set(chosen) <= row.names:
            loaded = row.names | set(chosen)
            if loaded >= offered or loaded >= base:
                row.names, row.listed = None, loaded
            else:
                row.names = loaded
        remaining = 0 if row.names is None else len(base - row.names)
        return LoadResult(names=set(chosen), unknown=unknown, remaining=remaining)

    def _resolve(self, row: GroupState, group: str, name: str) -> str | None:
        offered = self.world.offered_in(group)
        if name in row.pins or name in offered:
            return name
        matches = [tool for tool in offered if self.world.bare_names[tool] == name]
        if not matches:
            matches = [tool for tool in row.pins if self.world.bare_names[tool] == name][:1]
        return matches[0] if len(matches) == 1 else None

    def _pin(self, row: GroupState, names: list[str]) -> None:
        for name in names:
            elsewhere = [other.pins[name] for other in self.rows.values() if name in other.pins]
            row.pins.setdefault(name, [*elsewhere, self.world.versions[name]][0])

    def load_anywhere(self, names: list[str]) -> tuple[set[str], list[str], set[str]]:
        """Load each tool in its first group, atomically: return loaded, unknown, newly loaded."""
        by_group: dict[str, list[str]] = {}
        unknown = []
        for name in dict.fromkeys(names):
            tool = self.lookup(name)
            if tool is None or not self.world.is_offered(tool):
                unknown.append(name)
            else:
                by_group.setdefault(self.first_group(tool), []).append(tool)
        before = deepcopy((self.rows, self.spent))
        loaded: set[str] = set()
        newly_loaded: set[str] = set()
        try:
            for group, some in by_group.items():
                result = self.load(group, some)
                loaded |= result.names
                newly_loaded |= result.newly_loaded
        except OverBudget:
            self.rows, self.spent = before
            raise
        return loaded, unknown, newly_loaded

    def state(self) -> dict[str, set[str] | None]:
        return {group: row.names for group, row in self.rows.items()}
