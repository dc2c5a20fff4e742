"""Form of a tool trial: argument skeleton, form fields and confirmation, from the schema. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Prefilled values of required arguments, by type.
EMPTY_VALUES = {"string": "", "integer": 0, "number": 0, "boolean": False, "null": None}


def confirmation_reason(annotations: Mapping[str, object]) -> str:
    """Return why a call needs confirmation; empty for a tool annotated as read-only."""
    if annotations.get("destructiveHint") is True:
        return "The server reports that this tool may delete or overwrite data."
    if annotations.get("readOnlyHint") is not True:
        return "The server does not report this tool as read-only."
    return ""


MAX_FIELDS = 40  # per form; further arguments are available as JSON only
KINDS = {"string": "text", "integer": "integer", "number": "number", "boolean": "choice"}


@dataclass(frozen=True)
class Field:
    """A form field for one scalar argument. `options` are JSON values."""

    name: str
    kind: str
    help: str
    required: bool
    options: Sequence[str] = ()


def form_fields(schema: Mapping[str, object]) -> list[Field]:
    """Return fields for the scalar arguments: text, numbers, booleans and enums."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return []
    names = required if isinstance(required, list) else []
    candidates = [_field(name, body, name in names) for name, body in properties.items()]
    return [field for field in candidates if field is not None][:MAX_FIELDS]


def _field(name: str, body: object, required: bool) -> Field | None:
    # A name that is not printable cannot be a label; its argument is available as JSON only.
    if not isinstance(body, dict) or not name.isprintable():
        return None
    kind, choices = body.get("type"), body.get("enum")
    description = body.get("description")
    help_text = description if isinstance(description, str) else ""
    if isinstance(choices, list) and 0 < len(choices) <= MAX_FIELDS:
        return Field(name, "choice", help_text, required, tuple(map(json.dumps, choices)))
    if not isinstance(kind, str) or kind not in KINDS:
        return None
    options = ("true", "false") if kind == "boolean" else ()
    return Field(name, KINDS[kind], help_text, required, options)
