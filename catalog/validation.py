"""Check arguments and results against a definition's schemas, and say what is wrong. Pure.

Patterns run on a linear-time engine; those it cannot run are skipped (schemas.py flags them).
"""

from typing import Any

import jsonschema_rs

from catalog.canonical import canonical
from catalog.masking import SECRET_NAME, redacted
from catalog.schemas import refuse_reference, unenforceable_patterns, without_patterns

PATTERN_BYTES = 1 << 20
MOST_PROBLEMS = 10
LONGEST_VALUE = 80


class Validator:
    """A compiled schema."""

    def __init__(self, schema: dict[str, Any]) -> None:
        skipped = frozenset(unenforceable_patterns(schema))
        try:
            self._compiled = _compile(without_patterns(schema, skipped) if skipped else schema)
        except (ValueError, jsonschema_rs.ReferencingError):
            # A pattern that passed for runnable is not: none of them is then.
            self._compiled = _compile(without_patterns(schema))

    def problems(self, value: object) -> list[str]:
        """Return one line for each thing that is wrong: where, what was sent, which rule."""
        if self._compiled.is_valid(value):
            return []
        found = []
        for error in self._compiled.iter_errors(value):
            found.append(_line(error))
            if len(found) == MOST_PROBLEMS:
                break
        return found


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
        if quoted and redacted(error.instance) != error.instance:
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

    def of(self, sha256: str, which: str, schema: dict[str, Any]) -> Validator:
        found = self._kept.pop((sha256, which), None) or Validator(schema)
        self._kept[sha256, which] = found
        while len(self._kept) > self._most:
            self._kept.pop(next(iter(self._kept)), None)
        return found


validators = Validators()
