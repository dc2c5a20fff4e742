"""Check arguments and results against a definition's schemas, and say what is wrong. Pure.

Patterns run on a linear-time engine; those it cannot run are skipped (schemas.py flags them).
"""

from itertools import islice
from typing import Any

import jsonschema_rs

from catalog.definitions.json_schema import (
    refuse_reference,
    unenforceable_patterns,
    walk,
    without_patterns,
)
from catalog.definitions.schema_cost import max_comparisons_per_value
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.redaction import SECRET_NAME, redact

PATTERN_BYTES = 1 << 20
MOST_PROBLEMS = 10
# Values × subschemas up to which all problems are looked for. Each may be one, with as many
# reasons as an anyOf has branches, and all are made before the first is seen: of a list of 400
# values that fit none of 1,900 branches, in 8 s and 1.3 GB.
LOOKED_AT = 5_000
LONGEST_VALUE = 80
# Comparisons that may be made for one value: 50 ms, in which nothing else runs. A text costs a
# pattern as much as another value for each so many characters.
MOST_CHECKS, LONG_TEXT = 1_000_000, 200


class Validator:
    """A compiled schema."""

    def __init__(self, schema: dict[str, Any]) -> None:
        skipped = frozenset(unenforceable_patterns(schema))
        self._size = sum(1 for _ in walk(schema))
        self._breadth = max_comparisons_per_value(schema)
        try:
            self._compiled = _compile(without_patterns(schema, skipped) if skipped else schema)
        except (ValueError, jsonschema_rs.ReferencingError):
            # A pattern that passed for runnable is not: none of them is then.
            self._compiled = _compile(without_patterns(schema))

    def can_check(self, value: object) -> bool:
        """Tell whether a value can be held to the schema within a few hundredths of a second."""
        most = MOST_CHECKS // self._breadth
        return _values(value, most + 1, LONG_TEXT) <= most

    def problems(self, value: object) -> list[str]:
        """Return one line for each thing that is wrong: where, what was sent, which rule.

        Of what is large in a large schema, the first.
        """
        if self._compiled.is_valid(value):
            return []
        if self._size * _values(value, LOOKED_AT // self._size + 1) > LOOKED_AT:
            try:
                self._compiled.validate(value)
            except jsonschema_rs.ValidationError as first:
                return [_line(first)]
        found = []
        for error in self._compiled.iter_errors(value):
            found.append(_line(error))
            if len(found) == MOST_PROBLEMS:
                break
        return found


def _values(value: object, most: int, long_text: int = 0) -> int:
    """Count the values in a value, up to so many; a long text, if told so, as several."""
    count, stack = 0, [value]
    while stack and count < most:
        count += 1
        node = stack.pop()
        if long_text and isinstance(node, str):
            count += len(node) // long_text
        if isinstance(node, dict | list):
            inner = node.values() if isinstance(node, dict) else node
            stack.extend(islice(inner, most))
    return count


def _compile(schema: dict[str, Any]) -> Any:
    return jsonschema_rs.validator_for(
        schema,
        retriever=refuse_reference,
        validate_formats=False,
        pattern_options=jsonschema_rs.RegexOptions(size_limit=PATTERN_BYTES),
    )


def _line(error: Any) -> str:
    where = ".".join(str(part) for part in error.instance_path) or "arguments"
    if any(SECRET_NAME.search(str(part)) for part in error.instance_path):
        return f"{where}: the value does not fit the schema (it is not repeated here)"
    message = str(error.message)
    if len(message) > 300:  # the value itself stands in it
        message = message[:300] + "…"
    if isinstance(error.instance, dict | list):
        quoted = message.startswith(("{", "["))  # the value whole, what is secret in it too
        if quoted and redact(error.instance) != error.instance:
            message = "the value does not fit the schema"
        return f"{where}: {message}"
    try:
        sent = canonical(error.instance)
    except ValueError:
        sent = str(error.instance)
    shown = sent if len(sent) <= LONGEST_VALUE else sent[:LONGEST_VALUE] + "…"
    return f"{where}: {message} (sent: {shown})"


class Validators:
    """Compiled schemas by what they were compiled from; the least used are dropped."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._kept: dict[tuple[str, str], Validator] = {}

    def has(self, sha256: str, which: str) -> bool:
        """Whether it is compiled already: that of a hostile schema takes a third of a second."""
        return (sha256, which) in self._kept

    def of(self, sha256: str, which: str, schema: dict[str, Any]) -> Validator:
        found = self._kept.pop((sha256, which), None) or Validator(schema)
        self._kept[sha256, which] = found
        while len(self._kept) > self._most:
            self._kept.pop(next(iter(self._kept)), None)
        return found


validators = Validators()
