"""Judge a JSON Schema that a server sent, before anything compiles or shows it. Pure.

Bounds come first and are cheap, so that no schema can exhaust the stack, the clock or memory of
what runs after them. References are never fetched.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any
from urllib.parse import unquote

import jsonschema_rs
import re2

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 2_000
MAX_EXPANDED = 10_000
MAX_SAFE_INTEGER = 2**53
MAX_PATTERNS = 50
MAX_PATTERN = 500
MAX_PATTERN_KEPT = 20_000
DIALECT = re.compile(
    r"https?://json-schema\.org/(draft/2020-12|draft/2019-09|draft-07|draft-06)/schema#?"
)
MAPS_OF_SCHEMAS = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
)
LISTS_OF_SCHEMAS = ("prefixItems", "allOf", "anyOf", "oneOf", "items")
SCHEMAS = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "contentSchema",
)
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
HEADER_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Sent as Mcp-Param-…, so they would reach nobody as themselves; no honest tool asks for them.
CREDENTIAL_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie"})
Path = tuple[str, ...]


class InvalidSchema(ValueError):
    """Carries the reason, in words an admin can pass on to the server's author."""


def check_schema(schema: object, *, what: str = "inputSchema") -> dict[str, Any]:
    """Return the schema if it is bounded, self-contained and valid; else raise BadSchema."""
    if not isinstance(schema, dict):
        raise InvalidSchema(f"{what} must be an object, not {_kind(schema)}")
    _check_depth(schema, what)
    subschemas = list(walk(schema))
    if len(subschemas) > MAX_SUBSCHEMAS:
        raise InvalidSchema(f"{what} has {len(subschemas)} subschemas; the cap is {MAX_SUBSCHEMAS}")
    for _, sub in subschemas:
        _check_dialect(sub, what)
        _check_numbers(sub, what)
        if len(str(sub.get("pattern", ""))) > MAX_PATTERN_KEPT:
            raise InvalidSchema(f"{what} has a pattern of over {MAX_PATTERN_KEPT:,} characters")
    _check_references(schema, subschemas, what)
    try:
        jsonschema_rs.meta.validate(schema)
        # Without its patterns, which would be compiled at whatever cost.
        jsonschema_rs.validator_for(
            without_patterns(schema), retriever=refuse_reference, validate_formats=False
        )
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        message = str(getattr(error, "message", "") or error).splitlines()[0][:200]
        raise InvalidSchema(f"{what} is not valid JSON Schema: {message}") from error
    return schema


def check_input_schema(schema: object) -> None:
    """Hold an input schema to what arguments are: an object; and check its header marks."""
    checked = check_schema(schema)
    if checked.get("type") != "object":
        raise InvalidSchema('inputSchema must have "type": "object", since arguments are an object')
    _check_headers(checked)


def unenforceable_patterns(schema: dict[str, Any]) -> list[str]:
    """Return patterns that no linear-time engine runs; validation skips them."""
    seen: set[str] = set()
    for _, sub in walk(schema):
        patterns = [sub.get("pattern"), *_mapping(sub.get("patternProperties"))]
        seen |= {pattern for pattern in patterns if isinstance(pattern, str)}
    # Beyond the caps a pattern counts as one that cannot be run, without trying.
    judged = sorted(seen, key=lambda pattern: (len(pattern), pattern))
    return [
        pattern
        for at, pattern in enumerate(judged)
        if at >= MAX_PATTERNS or len(pattern) > MAX_PATTERN or not _compiles(pattern)
    ]


def walk(schema: object, path: Path | None = ()) -> Iterator[tuple[Path | None, dict[str, Any]]]:
    """Yield every subschema with its chain of property names, or None off that chain."""
    stack: list[tuple[Path | None, object]] = [(path, schema)]
    while stack:
        here, node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield here, node
        for key in MAPS_OF_SCHEMAS:
            for name, sub in _mapping(node.get(key)).items():
                chained = here is not None and key == "properties"
                stack.append(((*here, name) if chained and here is not None else None, sub))
        for key in LISTS_OF_SCHEMAS:
            value = node.get(key)
            if isinstance(value, list):
                stack.extend((None, sub) for sub in value)
        stack.extend((None, node[key]) for key in SCHEMAS if key in node)


def without_patterns(node: Any, which: Collection[str] | None = None) -> Any:
    """Copy a schema without these patterns, or without any. Depth is bounded before."""
    if isinstance(node, list):
        return [without_patterns(item, which) for item in node]
    if not isinstance(node, dict):
        return node
    made: dict[str, Any] = {}
    for key, value in node.items():
        if key == "patternProperties" and isinstance(value, dict):
            made[key] = _kept_properties(value, which)
        elif not (key == "pattern" and isinstance(value, str) and _dropped(value, which)):
            made[key] = without_patterns(value, which)
    return made


def _kept_properties(patterns: dict[str, Any], which: Collection[str] | None) -> dict[str, Any]:
    if which is None:  # to be looked at, not run: any name will do
        return {str(at): without_patterns(sub) for at, sub in enumerate(patterns.values())}
    return {
        pattern: without_patterns(sub, which)
        for pattern, sub in patterns.items()
        if pattern not in which
    }


def _dropped(pattern: str, which: Collection[str] | None) -> bool:
    return which is None or pattern in which


def required_names(schema: dict[str, Any]) -> set[str]:
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return {name for name in names if isinstance(name, str)}


def _check_depth(schema: object, what: str) -> None:
    level, layer = 0, [schema]
    while layer:
        level += 1
        if level > MAX_DEPTH:
            raise InvalidSchema(f"{what} is nested deeper than {MAX_DEPTH} levels")
        below: list[object] = []
        for node in layer:
            if isinstance(node, dict):
                below.extend(node.values())
            elif isinstance(node, list):
                below.extend(node)
        layer = [node for node in below if isinstance(node, dict | list)]


def _check_dialect(schema: dict[str, Any], what: str) -> None:
    if "$schema" in schema:
        dialect = schema["$schema"]
        if not isinstance(dialect, str) or not DIALECT.fullmatch(dialect):
            raise InvalidSchema(f"{what} is in an unsupported dialect: {str(dialect)[:80]!r}")


def _check_numbers(sub: dict[str, Any], what: str) -> None:
    for key in COUNTS:
        value = sub.get(key)
        if isinstance(value, int | float) and value > MAX_SAFE_INTEGER:
            raise InvalidSchema(
                f"{what} has a {key} over {MAX_SAFE_INTEGER}, which no value can have"
            )


def _check_references(
    root: dict[str, Any], subschemas: list[tuple[Path | None, dict[str, Any]]], what: str
) -> None:
    anchors = anchors_of(sub for _, sub in subschemas)
    targets: dict[int, list[object]] = {}
    for _, sub in subschemas:
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if key in sub:
                target = resolve(root, anchors, sub[key])
                if target is None:
                    raise InvalidSchema(
                        f"{what} refers to {str(sub[key])[:80]!r}, which is not in it; "
                        "references are never fetched"
                    )
                targets.setdefault(id(sub), []).append(target)
    try:
        size = _expanded(root, targets, {}, set())
    except RecursionError as error:
        raise InvalidSchema(f"{what} chains its references too deep") from error
    if size > MAX_EXPANDED:
        raise InvalidSchema(f"{what} expands to more than {MAX_EXPANDED} schemas by its references")


def anchors_of(subschemas: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        sub[key]: sub
        for sub in subschemas
        for key in ("$anchor", "$dynamicAnchor")
        if isinstance(sub.get(key), str)
    }


def resolve(root: dict[str, Any], anchors: dict[str, dict[str, Any]], ref: object) -> object:
    """Return what a reference within a schema stands for, None where it is not in it."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    if ref == "#":
        return root
    if not ref.startswith("#/"):
        return anchors.get(ref[1:])
    node: object = root
    for part in ref[2:].split("/"):
        part = _unescape(part)
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list) and INDEX.fullmatch(part) and int(part) < len(node):
            node = node[int(part)]
        else:
            return None
    return node


def _unescape(part: str) -> str:
    return unquote(part).replace("~1", "/").replace("~0", "~")


def _expanded(
    node: object, targets: dict[int, list[object]], known: dict[int, int], open_: set[int]
) -> int:
    """Count subschemas with references followed; a cycle counts once. Depth is bounded before."""
    if not isinstance(node, dict | list):
        return 0
    if id(node) in known:
        return known[id(node)]
    if id(node) in open_:
        return 1
    open_.add(id(node))
    below = list(node.values() if isinstance(node, dict) else node) + targets.get(id(node), [])
    total = 1 if isinstance(node, dict) else 0
    for child in below:
        total += _expanded(child, targets, known, open_)
        if total > MAX_EXPANDED:
            break
    open_.discard(id(node))
    known[id(node)] = total
    return total


def _check_headers(schema: dict[str, Any]) -> None:
    seen: set[str] = set()
    for path, sub in walk(schema):
        if "x-mcp-header" not in sub:
            continue
        header = sub["x-mcp-header"]
        where = ".".join(path) if path else ""
        if not path:
            raise InvalidSchema("x-mcp-header stands where no argument is")
        if not isinstance(header, str) or not HEADER_TOKEN.fullmatch(header):
            raise InvalidSchema(f"x-mcp-header of {where!r} is not a header name")
        if header.lower() in CREDENTIAL_HEADERS:
            raise InvalidSchema(f"x-mcp-header of {where!r} names a header for credentials")
        if sub.get("type") not in ("string", "integer", "boolean"):
            raise InvalidSchema(f"x-mcp-header of {where!r} needs a string, integer or boolean")
        if header.lower() in seen:
            raise InvalidSchema(f"x-mcp-header {header!r} stands twice")
        seen.add(header.lower())


def _compiles(pattern: str) -> bool:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20
    try:
        re2.compile(pattern, options)
    except re2.error:
        return False
    return True


def refuse_reference(uri: str) -> Any:
    raise ValueError(f"references are never fetched: {uri[:80]}")


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _kind(value: object) -> str:
    if value is None:
        return "missing or null"
    return {"bool": "true or false", "list": "a list", "str": "a string"}.get(
        type(value).__name__, "a number"
    )
