"""Prepare the trial of a tool: its arguments as a skeleton and as fields, and whether to ask twice.

Pure.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEPTH = 4
EMPTY = {
    "string": "",
    "integer": 0,
    "number": 0,
    "boolean": False,
    "null": None,
}


def skeleton(schema: object, depth: int = 0) -> dict[str, object]:
    """Return an object with the required arguments of a schema, each with the plainest value."""
    if not isinstance(schema, Mapping) or depth >= DEPTH:
        return {}
    properties, required = schema.get("properties"), schema.get("required")
    known = properties if isinstance(properties, Mapping) else {}
    names = required if isinstance(required, list) else []
    return {
        name: _plainest(known.get(name), depth) for name in names[:100] if isinstance(name, str)
    }


def _plainest(schema: object, depth: int) -> object:
    if not isinstance(schema, Mapping):
        return ""
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum"):
        if isinstance(choices := schema.get(key), list) and choices:
            return choices[0]
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(key), list) and choices and depth < DEPTH:
            return _plainest(choices[0], depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((one for one in kind if one != "null"), None)
    if kind == "array":
        return []
    if kind == "object" or "properties" in schema:
        return skeleton(schema, depth + 1)
    return EMPTY.get(str(kind), "")


def why_ask_twice(annotations: Mapping[str, object]) -> str:
    """Say why a call needs a second press; empty for a tool that claims to change nothing."""
    if annotations.get("destructiveHint") is True:
        return "The server says that this tool may delete or overwrite."
    if annotations.get("readOnlyHint") is not True:
        return "The server does not say that this tool changes nothing."
    return ""


# --- Fields -------------------------------------------------------------------------------------

FIELDS = 40  # of a form; more are left to the JSON
KINDS = {"string": "text", "integer": "integer", "number": "number", "boolean": "choice"}


@dataclass(frozen=True)
class Field:
    """One simple argument as a field of a form. `options` are JSON texts."""

    name: str
    kind: str
    help: str
    required: bool
    options: Sequence[str] = ()


def fields(schema: Mapping[str, object]) -> list[Field]:
    """List the arguments that a form can ask for: texts, numbers, yes or no, and choices."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return []
    needed = required if isinstance(required, list) else []
    found = [_field(name, body, name in needed) for name, body in properties.items()]
    return [one for one in found if one is not None][:FIELDS]


def _field(name: str, body: object, required: bool) -> Field | None:
    # A name that cannot be shown as it is cannot be typed either; the JSON takes it.
    if not isinstance(body, dict) or not name.isprintable():
        return None
    kind, choices = body.get("type"), body.get("enum")
    said = body.get("description")
    words = said if isinstance(said, str) else ""
    if isinstance(choices, list) and 0 < len(choices) <= FIELDS:
        return Field(name, "choice", words, required, tuple(map(json.dumps, choices)))
    if not isinstance(kind, str) or kind not in KINDS:
        return None
    options = ("true", "false") if kind == "boolean" else ()
    return Field(name, KINDS[kind], words, required, options)
