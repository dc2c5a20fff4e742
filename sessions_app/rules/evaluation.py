"""Evaluation of rules: argument conditions, and which rules concern a tool. Pure.

A rule is compiled once. What does not depend on the call (agent, tool, server, groups,
annotations) is checked once for each tool; a call then evaluates origin and argument conditions of
the rules that remain. What depends on the past (flow, first use) is left to the transaction that
accepts the call: see `agent_rules`.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any

import re2

ANY_SEGMENT = "*"  # stands for every element of an array and every member of an object
ABSENT = object()
TRUE_IF_ABSENT = {"missing", "ne", "not_in"}
ANNOTATION_DEFAULTS = {
    "readOnlyHint": False,
    "destructiveHint": True,
    "idempotentHint": False,
    "openWorldHint": True,
}
MAX_PATTERN_MEMORY = 1 << 20
MAX_PROGRAM_SIZE = 1_000  # the time of a search grows with it

Test = Callable[[Any], bool]


class ConditionError(Exception):
    """A condition cannot be evaluated for the value that was sent."""


@dataclass(frozen=True)
class Decision:
    """What a rule decided about a call."""

    effect: str  # allow, hold or deny
    rule_id: int
    rule_name: str
    reason: str
    approver: str  # of a held call: operator or caller


# --- Conditions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Condition:
    """A test of the values at one path of the arguments."""

    segments: tuple[str, ...]
    # Whether one of the values passes; raises ConditionError if none does and one has no result.
    holds: Test


def parse_pointer(pointer: str) -> tuple[str, ...]:
    """Split a JSON pointer (RFC 6901). Raises ValueError."""
    if not pointer:
        return ()
    if not pointer.startswith("/"):
        raise ValueError('a path starts with "/", for example /repository/owner')
    if re.search(r"~(?![01])", pointer):
        raise ValueError('"~" is written ~0 in a path, and "/" inside a name ~1')
    return tuple(
        segment.replace("~1", "/").replace("~0", "~") for segment in pointer[1:].split("/")
    )


def _step(value: Any, segment: str) -> Any:
    if isinstance(value, dict):
        return value.get(segment, ABSENT)
    if isinstance(value, list) and segment.isdecimal() and segment.isascii():
        is_index = segment == "0" or segment[0] != "0"
        if is_index and len(segment) < 10 and int(segment) < len(value):
            return value[int(segment)]
    return ABSENT


def _descend(value: Any, segments: Sequence[str]) -> Any:
    for segment in segments:
        value = _step(value, segment)
        if value is ABSENT:
            break
    return value


def expand(value: Any, segments: Sequence[str]) -> Iterator[Any]:
    """Yield the value, or ABSENT, at every place that a path with wildcards stands for."""
    if not segments:
        yield value
        return
    segment, rest = segments[0], segments[1:]
    if segment == ANY_SEGMENT:
        places: Collection[Any] = ()
        if isinstance(value, dict):
            places = value.values()
        elif isinstance(value, list):
            places = value
        if not places:
            yield ABSENT
        for place in places:
            yield from expand(place, rest)
        return
    found = _step(value, segment)
    if found is ABSENT:
        yield ABSENT
    else:
        yield from expand(found, rest)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def equal(one: Any, other: Any) -> bool:
    """Compare JSON values: 1 equals 1.0, and true does not equal 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if is_number(one) or is_number(other):
        return is_number(one) and is_number(other) and one == other
    return type(one) is type(other) and bool(one == other)


def compile_pattern(pattern: str) -> Any:
    """Compile a regular expression with RE2, which takes linear time. Raises ValueError."""
    options = re2.Options()
    options.max_mem = MAX_PATTERN_MEMORY
    options.never_capture = True
    options.log_errors = False
    try:
        compiled = re2.compile(pattern.encode(), options)
    except re2.error as error:
        message = error.args[0]
        reason = message.decode(errors="replace") if isinstance(message, bytes) else str(message)
        raise ValueError(f"not a regular expression of RE2: {reason}") from None
    if compiled.programsize > MAX_PROGRAM_SIZE:
        raise ValueError("the regular expression repeats too much")
    return compiled


def compile_condition(path: str, op: str, value: Any = None) -> Condition:
    """Compile a condition. Raises ValueError for an invalid path, operator or value."""
    segments = parse_pointer(path)
    if op not in OPERATORS:
        raise ValueError(f"the operator is one of {', '.join(OPERATORS)}")
    test = OPERATORS[op](path, op, value)
    if_absent = op in TRUE_IF_ABSENT

    def holds_for_member(arguments: Any) -> bool:  # the most frequent kind of path
        value = arguments.get(name, ABSENT)
        return if_absent if value is ABSENT else test(value)

    def holds_at_path(arguments: Any) -> bool:
        value = _descend(arguments, segments)
        return if_absent if value is ABSENT else test(value)

    def holds_at_one_of(arguments: Any) -> bool:
        error: ConditionError | None = None
        for value in expand(arguments, segments):
            try:
                if if_absent if value is ABSENT else test(value):
                    return True
            except ConditionError as raised:
                error = raised
        if error is not None:
            raise error
        return False

    if ANY_SEGMENT in segments:
        return Condition(segments, holds_at_one_of)
    if len(segments) != 1:
        return Condition(segments, holds_at_path)
    name = segments[0]
    return Condition(segments, holds_for_member)


def _equality(path: str, op: str, value: Any) -> Test:
    wanted = op == "eq"
    if isinstance(value, str):  # the most frequent kind
        return lambda sent: (sent == value) is wanted
    return lambda sent: equal(sent, value) is wanted


def _membership(path: str, op: str, value: Any) -> Test:
    if not isinstance(value, list):
        raise ValueError(f"{op} needs a list of values")
    wanted = op == "in"
    if all(isinstance(item, str) for item in value):
        texts = frozenset(value)
        return lambda sent: (isinstance(sent, str) and sent in texts) is wanted
    return lambda sent: any(equal(sent, item) for item in value) is wanted


def _order(path: str, op: str, value: Any) -> Test:
    if not is_number(value) and not isinstance(value, str):
        raise ValueError(f"{op} needs a number or a text")
    kind, fits = ("a text", _is_text) if isinstance(value, str) else ("a number", is_number)
    compare: Callable[[Any], bool] = {
        "lt": lambda sent: sent < value,
        "le": lambda sent: sent <= value,
        "gt": lambda sent: sent > value,
        "ge": lambda sent: sent >= value,
    }[op]

    def test(sent: Any) -> bool:
        if not fits(sent):
            raise _wrong_type(path, op, sent, kind)
        return compare(sent)

    return test


def _contains(path: str, op: str, value: Any) -> Test:
    def test(sent: Any) -> bool:
        if isinstance(sent, list):
            return any(equal(item, value) for item in sent)
        if isinstance(sent, str) and isinstance(value, str):
            return value in sent
        raise _wrong_type(path, op, sent, "a text or a list" if _is_text(value) else "a list")

    return test


def _starts_with(path: str, op: str, value: Any) -> Test:
    if not isinstance(value, str):
        raise ValueError(f"{op} needs a text")

    def test(sent: Any) -> bool:
        if not isinstance(sent, str):
            raise _wrong_type(path, op, sent, "a text")
        return sent.startswith(value)

    return test


def _matches(path: str, op: str, value: Any) -> Test:
    if not isinstance(value, str):
        raise ValueError(f"{op} needs a regular expression")
    search = compile_pattern(value).search

    def test(sent: Any) -> bool:
        if not isinstance(sent, str):
            raise _wrong_type(path, op, sent, "a text")
        return search(sent.encode()) is not None

    return test


def _presence(path: str, op: str, value: Any) -> Test:
    if value is not None:
        raise ValueError(f"{op} takes no value")
    wanted = op == "exists"
    return lambda sent: wanted


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _wrong_type(path: str, op: str, sent: Any, kind: str) -> ConditionError:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a boolean",
        type(None): "null",
    }
    found = names.get(type(sent), "a number")
    return ConditionError(f"{path or 'the arguments'} is {found}, and {op} needs {kind}")


OPERATORS: Mapping[str, Callable[[str, str, Any], Test]] = {
    "eq": _equality,
    "ne": _equality,
    "in": _membership,
    "not_in": _membership,
    "lt": _order,
    "le": _order,
    "gt": _order,
    "ge": _order,
    "contains": _contains,
    "starts_with": _starts_with,
    "matches": _matches,
    "exists": _presence,
    "missing": _presence,
}


# --- Rules --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """The tool that a rule is asked about."""

    names: frozenset[str]  # public and original ones
    server: str
    groups: frozenset[int]
    annotations: Mapping[str, bool]


def effective_annotations(sent: object) -> dict[str, bool]:
    """Return a tool's annotations with MCP's defaults.

    A read-only tool is not destructive unless it says so: the hint has no meaning for it.
    """
    given = sent if isinstance(sent, dict) else {}
    known = {key: value for key in ANNOTATION_DEFAULTS if isinstance(value := given.get(key), bool)}
    defaults = ANNOTATION_DEFAULTS
    if known.get("readOnlyHint"):
        defaults = {**defaults, "destructiveHint": False}
    return {**defaults, **known}


@dataclass(frozen=True)
class CompiledRule:
    """A rule, ready to be evaluated."""

    pk: int
    name: str
    effect: str
    reason: str
    approver: str
    agents: frozenset[int] = frozenset()
    tools: tuple["re.Pattern[str]", ...] = ()
    not_tools: tuple["re.Pattern[str]", ...] = ()
    servers: frozenset[str] = frozenset()
    not_servers: frozenset[str] = frozenset()
    groups: frozenset[int] = frozenset()
    annotations: Mapping[str, bool] = field(default_factory=dict)
    origin: str = ""  # empty: any
    first_use: bool = False
    conditions: tuple[Condition, ...] = ()
    after: tuple[str, ...] = ()
    after_scope: str = "session"
    broken: str = ""  # why it could not be compiled
    tests: tuple[Test, ...] = field(init=False)  # of the conditions

    def __post_init__(self) -> None:
        tests = tuple(condition.holds for condition in self.conditions)
        object.__setattr__(self, "tests", tests)

    @property
    def needs_history(self) -> bool:
        return self.first_use or bool(self.after)

    def concerns_agent(self, agent: int | None) -> bool:
        return not self.agents or agent in self.agents

    def concerns_tool(self, subject: Subject) -> bool:
        """Return whether the parts of the match that do not depend on the call fit."""
        return (
            (not self.servers or subject.server in self.servers)
            and subject.server not in self.not_servers
            and (not self.groups or not self.groups.isdisjoint(subject.groups))
            and (not self.tools or _any_matches(self.tools, subject.names))
            and not _any_matches(self.not_tools, subject.names)
            and all(subject.annotations[key] is wanted for key, wanted in self.annotations.items())
        )


@dataclass(frozen=True, slots=True)
class Match:
    """A rule that matches a call, as far as the call alone shows."""

    rule: CompiledRule
    error: str = ""  # why a condition could not be evaluated: the call is held

    @property
    def effect(self) -> str:
        return "hold" if self.error else self.rule.effect

    @property
    def is_final(self) -> bool:
        """Return whether the rule decides without history. A hold may be lifted by a grant."""
        return self.effect != "hold" and not self.rule.needs_history

    @property
    def decision(self) -> Decision:
        rule = self.rule
        if self.error:
            reason = f"The rule could not be evaluated: {self.error}."
            return Decision("hold", rule.pk, rule.name, reason, "operator")
        return Decision(rule.effect, rule.pk, rule.name, rule.reason, rule.approver)


def match_rules(
    rules: Sequence[CompiledRule], arguments: Mapping[str, Any], origin: str
) -> list[Match]:
    """Return the rules that match a call, in order, up to the first that decides alone."""
    matches: list[Match] = []
    for rule in rules:
        if rule.origin and rule.origin != origin:
            continue
        error = rule.broken
        try:
            for holds in rule.tests:
                if not holds(arguments):
                    break
            else:
                matches.append(Match(rule, error))
                if matches[-1].is_final:
                    break
        except ConditionError as raised:
            matches.append(Match(rule, str(raised)))
    return matches


def compile_globs(patterns: Sequence[str]) -> tuple["re.Pattern[str]", ...]:
    return tuple(re.compile(translate(pattern)) for pattern in patterns)


def _any_matches(patterns: Sequence["re.Pattern[str]"], names: Collection[str]) -> bool:
    return any(pattern.match(name) for pattern in patterns for name in names)
