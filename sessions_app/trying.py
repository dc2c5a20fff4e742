"""Prepare the trial of a tool: a skeleton of its arguments, and whether to ask twice. Pure."""

from collections.abc import Mapping

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
