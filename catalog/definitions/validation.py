"""JSON Schema validation of arguments and results, with an LRU cache of compiled schemas. Pure.

Patterns run on a linear-time engine, which skips those it cannot compile (findings.py warns).
"""

from itertools import islice
from typing import TYPE_CHECKING, Any

import jsonschema_rs

from catalog.definitions.json_schema import (
    refuse_reference,
    unenforceable_patterns,
    walk,
    without_patterns,
)
from catalog.definitions.schema_cost import max_comparisons_per_value
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.redaction.names import is_secret_name
from toolcrib.lib.redaction.redactor import redact

if TYPE_CHECKING:
    from catalog.cache import CachedDefinition

MAX_PATTERN_BYTES = 1 << 20
MAX_PROBLEMS = 10
MAX_EXAMPLES = 10  # of arguments of a tool
# Values × subschemas up to which all errors are collected. The library builds every error, with
# one reason per anyOf branch, before it returns the first: for 400 values that match none of 1,900
# branches that takes 8 s and 1.3 GB.
MAX_FULL_REPORT = 5_000
MAX_VALUE_LENGTH = 80
# Comparisons per validation: about 50 ms, during which the event loop is blocked.
MAX_COMPARISONS = 1_000_000
CHARACTERS_PER_VALUE = 200  # matching this much text costs as much as one more value


class Validator:
    def __init__(self, schema: dict[str, Any]) -> None:
        skipped = frozenset(unenforceable_patterns(schema))
        self._size = sum(1 for _ in walk(schema))
        self._comparisons_per_value = max_comparisons_per_value(schema)
        try:
            self._compiled = _compile(without_patterns(schema, skipped) if skipped else schema)
        except (ValueError, jsonschema_rs.ReferencingError):
            # RE2 accepted a pattern that this engine rejects: enforce none.
            self._compiled = _compile(without_patterns(schema))

    def can_check(self, value: object) -> bool:
        """Return whether validating the value takes at most about 50 ms."""
        limit = MAX_COMPARISONS // self._comparisons_per_value
        return _count_values(value, limit + 1, CHARACTERS_PER_VALUE) <= limit

    def problems(self, value: object) -> list[str]:
        """Return a line per error; only the first for a large value in a large schema."""
        if self._compiled.is_valid(value):
            return []
        count = _count_values(value, MAX_FULL_REPORT // self._size + 1)
        if self._size * count > MAX_FULL_REPORT:
            try:
                self._compiled.validate(value)
            except jsonschema_rs.ValidationError as first:
                return [_line(first)]
        return [_line(error) for error in islice(self._compiled.iter_errors(value), MAX_PROBLEMS)]


def _count_values(value: object, limit: int, characters_per_value: int = 0) -> int:
    """Count nested values up to `limit`; long strings count as several if a length is given."""
    count, stack = 0, [value]
    while stack and count < limit:
        count += 1
        node = stack.pop()
        if characters_per_value and isinstance(node, str):
            count += len(node) // characters_per_value
        if isinstance(node, dict | list):
            children = node.values() if isinstance(node, dict) else node
            stack.extend(islice(children, limit))
    return count


def _compile(schema: dict[str, Any]) -> Any:
    return jsonschema_rs.validator_for(
        schema,
        retriever=refuse_reference,
        validate_formats=False,
        pattern_options=jsonschema_rs.RegexOptions(size_limit=MAX_PATTERN_BYTES),
    )


def _line(error: Any) -> str:
    where = ".".join(str(part) for part in error.instance_path) or "arguments"
    if any(is_secret_name(str(part)) for part in error.instance_path):
        return f"{where}: the value does not match the schema (value redacted)"
    message = _shorten(str(error.message), 300)  # it quotes the value
    if isinstance(error.instance, dict | list):
        quotes_value = message.startswith(("{", "["))  # in full, secrets included
        if quotes_value and redact(error.instance) != error.instance:
            message = "the value does not match the schema"
        return f"{where}: {message}"
    try:
        sent = canonical(error.instance)
    except ValueError:
        sent = str(error.instance)
    return f"{where}: {message} (sent: {_shorten(sent, MAX_VALUE_LENGTH)})"


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "…"


def fitting_examples(definition: "CachedDefinition", own: object) -> list[dict[str, Any]]:
    """Return example arguments that fit a definition: an admin's own, or else the definition's.

    A definition may have changed since the examples were given.
    """
    examples = own or definition.tool.get("input_examples")
    if not isinstance(examples, list | tuple) or not examples:
        return []
    validator = validators.get(definition, "input")
    return [
        example
        for example in examples[:MAX_EXAMPLES]
        if isinstance(example, dict)
        and validator is not None
        and validator.can_check(example)
        and not validator.problems(example)
    ]


class Validators:
    """LRU cache of compiled schemas, by the definition's digest and `input` or `output`."""

    def __init__(self, max_size: int = 4096) -> None:
        self._max_size = max_size
        self._compiled: dict[tuple[str, str], Validator | None] = {}

    def has(self, definition: "CachedDefinition", which: str) -> bool:
        """Return whether the schema is compiled; compiling a hostile schema takes 0.3 s."""
        return (definition.sha256, which) in self._compiled

    def get(self, definition: "CachedDefinition", which: str) -> Validator | None:
        """Return the validator of a definition; None if it has no output schema."""
        key = (definition.sha256, which)
        try:
            validator = self._compiled.pop(key)
        except KeyError:
            is_input = which == "input"
            schema = definition.input_schema if is_input else definition.output_schema
            validator = None if schema is None else Validator(schema)
        self._compiled[key] = validator
        while len(self._compiled) > self._max_size:
            self._compiled.pop(next(iter(self._compiled)), None)
        return validator


validators = Validators()
