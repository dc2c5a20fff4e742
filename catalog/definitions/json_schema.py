"""Checks of untrusted JSON Schemas before they are compiled or displayed. Pure.

Cheap size limits come first, so that no schema can exhaust the stack, CPU time or memory of later
steps. Remote references are never fetched.
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
MAX_PATTERN_LENGTH = 500  # longer patterns are not enforced
MAX_STORED_PATTERN = 20_000  # schemas with a longer pattern are rejected
DEFAULT_DIALECT = "https://json-schema.org/draft/2020-12/schema"
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
BRANCHES = ("allOf", "anyOf", "oneOf")
LISTS_OF_SCHEMAS = ("prefixItems", *BRANCHES, "items")
CONDITIONALS = ("not", "if", "then", "else")
ANY_PROPERTY = ("additionalProperties", "unevaluatedProperties", "propertyNames")
ANY_ITEM = ("items", "additionalItems", "unevaluatedItems", "contains")
SCHEMAS = (*ANY_ITEM, *ANY_PROPERTY, *CONDITIONALS, "contentSchema")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
ARRAY_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
HEADER_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Arguments are sent as Mcp-Param-… headers, so these would have no effect; no honest tool
# declares them.
CREDENTIAL_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie"})
Path = tuple[str, ...]


class InvalidSchema(ValueError):
    """A schema is invalid. The message is suitable for the author of the server."""


def check_schema(schema: object, *, field: str = "inputSchema") -> dict[str, Any]:
    """Return the schema if it is bounded, self-contained and valid; else raise InvalidSchema."""
    if not isinstance(schema, dict):
        raise InvalidSchema(f"{field} must be an object, not {_kind(schema)}")
    if deeper_than(schema, MAX_DEPTH):
        raise InvalidSchema(f"{field} is nested deeper than {MAX_DEPTH} levels")
    subschemas = list(walk(schema))
    if len(subschemas) > MAX_SUBSCHEMAS:
        raise InvalidSchema(
            f"{field} has {len(subschemas)} subschemas; the limit is {MAX_SUBSCHEMAS}"
        )
    for _, sub in subschemas:
        _check_keywords(sub, field)
    _check_references(schema, subschemas, field)
    try:
        jsonschema_rs.meta.validate(schema)
        # Without patterns: compiling them has no cost limit.
        jsonschema_rs.validator_for(
            without_patterns(schema), retriever=refuse_reference, validate_formats=False
        )
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        message = str(getattr(error, "message", "") or error).splitlines()[0][:200]
        raise InvalidSchema(f"{field} is not valid JSON Schema: {message}") from error
    return schema


def check_input_schema(schema: object) -> None:
    """Check that an input schema describes an object, and check its `x-mcp-header` marks."""
    checked = check_schema(schema)
    if checked.get("type") != "object":
        raise InvalidSchema('inputSchema must have "type": "object", since arguments are an object')
    _check_headers(checked)


def unenforceable_patterns(schema: dict[str, Any]) -> list[str]:
    """Return the patterns that RE2 cannot compile or that exceed a limit; validation skips them."""
    patterns: set[str] = set()
    for _, sub in walk(schema):
        candidates = [sub.get("pattern"), *_mapping(sub.get("patternProperties"))]
        patterns |= {pattern for pattern in candidates if isinstance(pattern, str)}
    shortest_first = sorted(patterns, key=lambda pattern: (len(pattern), pattern))
    return [
        pattern
        for i, pattern in enumerate(shortest_first)
        if i >= MAX_PATTERNS or len(pattern) > MAX_PATTERN_LENGTH or not _compiles(pattern)
    ]


def walk(schema: object) -> Iterator[tuple[Path | None, dict[str, Any]]]:
    """Yield every subschema with its path of property names, or None if it is not a property."""
    stack: list[tuple[Path | None, object]] = [((), schema)]
    while stack:
        path, node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield path, node
        for key in MAPS_OF_SCHEMAS:
            for name, sub in _mapping(node.get(key)).items():
                is_property = key == "properties"
                stack.append(((*path, name) if is_property and path is not None else None, sub))
        for key in LISTS_OF_SCHEMAS:
            if isinstance(node.get(key), list):
                stack.extend((None, sub) for sub in node[key])
        stack.extend((None, node[key]) for key in SCHEMAS if key in node)


def without_patterns(node: Any, which: Collection[str] | None = None) -> Any:
    """Copy a schema without the given patterns, or without all. Depth was checked before."""
    if isinstance(node, list):
        return [without_patterns(item, which) for item in node]
    if not isinstance(node, dict):
        return node
    copy: dict[str, Any] = {}
    for key, value in node.items():
        is_pattern = key == "pattern" and isinstance(value, str)
        if key == "patternProperties" and isinstance(value, dict):
            copy[key] = _filter_pattern_properties(value, which)
        elif not is_pattern or (which is not None and value not in which):
            copy[key] = without_patterns(value, which)
    return copy


def _filter_pattern_properties(
    patterns: dict[str, Any], which: Collection[str] | None
) -> dict[str, Any]:
    if which is None:  # only the subschemas matter, so any harmless pattern will do
        return {str(i): without_patterns(sub) for i, sub in enumerate(patterns.values())}
    return {
        pattern: without_patterns(sub, which)
        for pattern, sub in patterns.items()
        if pattern not in which
    }


def required_names(schema: dict[str, Any]) -> set[str]:
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return {name for name in names if isinstance(name, str)}


def deeper_than(value: dict[str, Any], limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit + 1):
        if not level:
            return False
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
    return True


def _check_keywords(sub: dict[str, Any], field: str) -> None:
    if not DIALECT.fullmatch(str(sub.get("$schema", DEFAULT_DIALECT))):
        raise InvalidSchema(f"{field} uses an unsupported dialect: {str(sub['$schema'])[:80]!r}")
    if len(str(sub.get("pattern", ""))) > MAX_STORED_PATTERN:
        raise InvalidSchema(f"{field} has a pattern of over {MAX_STORED_PATTERN:,} characters")
    for key in COUNTS:
        value = sub.get(key)
        if isinstance(value, int | float) and value > MAX_SAFE_INTEGER:
            raise InvalidSchema(f"{field} has a {key} over the limit of {MAX_SAFE_INTEGER}")


def _check_references(
    root: dict[str, Any], subschemas: list[tuple[Path | None, dict[str, Any]]], field: str
) -> None:
    anchors = collect_anchors(sub for _, sub in subschemas)
    targets: dict[int, list[object]] = {}
    for _, sub in subschemas:
        for key in REFERENCES:
            if key in sub:
                target = resolve(root, anchors, sub[key])
                if target is None:
                    raise InvalidSchema(
                        f"{field} refers to {str(sub[key])[:80]!r}, which it does not contain; "
                        "remote references are never fetched"
                    )
                targets.setdefault(id(sub), []).append(target)
    try:
        size = _expanded_size(root, targets, {}, set())
    except RecursionError as error:
        raise InvalidSchema(f"{field} has references nested too deep") from error
    if size > MAX_EXPANDED:
        raise InvalidSchema(
            f"{field} has over {MAX_EXPANDED} subschemas once its references are expanded"
        )


def collect_anchors(subschemas: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        sub[key]: sub
        for sub in subschemas
        for key in ("$anchor", "$dynamicAnchor")
        if isinstance(sub.get(key), str)
    }


def resolve(root: dict[str, Any], anchors: dict[str, dict[str, Any]], ref: object) -> object:
    """Return the target of a local reference, or None if the schema does not contain it."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    if ref == "#":
        return root
    if not ref.startswith("#/"):
        return anchors.get(ref[1:])
    node: object = root
    for part in ref[2:].split("/"):
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list) and ARRAY_INDEX.fullmatch(part) and int(part) < len(node):
            node = node[int(part)]
        else:
            return None
    return node


def _expanded_size(
    node: object, targets: dict[int, list[object]], sizes: dict[int, int], visiting: set[int]
) -> int:
    """Count subschemas with references expanded; a cycle counts once. Depth was checked before."""
    if not isinstance(node, dict | list):
        return 0
    if id(node) in sizes:
        return sizes[id(node)]
    if id(node) in visiting:
        return 1
    visiting.add(id(node))
    children = list(node.values() if isinstance(node, dict) else node) + targets.get(id(node), [])
    size = 1 if isinstance(node, dict) else 0
    for child in children:
        size += _expanded_size(child, targets, sizes, visiting)
        if size > MAX_EXPANDED:
            break
    visiting.discard(id(node))
    sizes[id(node)] = size
    return size


def _check_headers(schema: dict[str, Any]) -> None:
    seen: set[str] = set()
    for path, sub in walk(schema):
        if "x-mcp-header" not in sub:
            continue
        header = sub["x-mcp-header"]
        if not path:
            raise InvalidSchema("x-mcp-header is only allowed on arguments")
        where = ".".join(path)
        if not isinstance(header, str) or not HEADER_TOKEN.fullmatch(header):
            raise InvalidSchema(f"x-mcp-header of {where!r} is not a valid header name")
        if header.lower() in CREDENTIAL_HEADERS:
            raise InvalidSchema(f"x-mcp-header of {where!r} is a credential header")
        if sub.get("type") not in ("string", "integer", "boolean"):
            raise InvalidSchema(
                f"x-mcp-header of {where!r} requires the type string, integer or boolean"
            )
        if header.lower() in seen:
            raise InvalidSchema(f"x-mcp-header {header!r} is used twice")
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
    """Reject a remote reference; passed to the validator as its retriever."""
    raise ValueError(f"remote references are never fetched: {uri[:80]}")


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _kind(value: object) -> str:
    if value is None:
        return "missing or null"
    kinds = {"bool": "true or false", "list": "a list", "str": "a string"}
    return kinds.get(type(value).__name__, "a number")
