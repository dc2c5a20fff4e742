"""Parsing and validation of tool objects from servers. Pure.

Each tool is parsed on its own, so a malformed tool never affects the others.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from catalog.definitions.json_schema import (
    InvalidSchema,
    check_input_schema,
    check_schema,
    deeper_than,
)
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.protocols.jsonrpc import MAX_DEPTH, TOO_DEEP
from toolcrib.lib.text import escape_hidden, remove_hidden

MAX_NAME = 128
TOO_DEEP_REASON = f"it is nested deeper than {MAX_DEPTH} levels"
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
TEXT_FIELDS = frozenset({"title", "description", "$comment"})
DATA_FIELDS = frozenset({"const", "default", "enum", "examples", "_meta", "icons"})
MAP_FIELDS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
OBJECT_FIELDS = ("annotations", "_meta", "execution")


@dataclass(frozen=True)
class RemoteTool:
    """One valid tool, with the canonical bytes that identify its definition."""

    name: str
    body: str  # canonical JSON of the whole tool object
    sha256: str
    tool: dict[str, Any]


@dataclass(frozen=True)
class Rejection:
    """One invalid tool. `name` is truncated and printable."""

    name: str
    reason: str
    storable: bool  # the name is valid and unique, so the tool can be listed as rejected


class Rejected(ValueError):
    """A tool object is invalid; the message is the reason."""


def read_tools(
    items: Iterable[object], max_bytes: int, max_description: int, known: Collection[str] = ()
) -> tuple[list[RemoteTool], list[Rejection]]:
    """Parse each item, the first of each name; those whose digest is `known` are valid already."""
    tools: dict[str, RemoteTool] = {}
    rejected: list[tuple[object, str]] = []
    for item in items:
        try:
            tool = read_tool(item, max_bytes, max_description, known)
            if tool.name in tools:
                raise Rejected("duplicate name; the first tool with this name is used")
            tools[tool.name] = tool
        except Rejected as error:
            name = item.get("name") if isinstance(item, dict) else None
            rejected.append((name, str(error)))
    return list(tools.values()), list(_rejections(rejected, set(tools)))


def _rejections(rejected: Iterable[tuple[object, str]], taken: set[str]) -> Iterator[Rejection]:
    """Mark the first rejection of each valid, unused name as storable."""
    for name, reason in rejected:
        storable = (
            isinstance(name, str)
            and 0 < len(name) <= MAX_NAME
            and not CONTROL_CHARACTERS.search(name)
            and name not in taken
        )
        if storable:
            taken.add(str(name))
        yield Rejection(printable_name(name), escape_hidden(reason), storable)


def read_tool(
    item: object, max_bytes: int, max_description: int, known: Collection[str] = ()
) -> RemoteTool:
    if not isinstance(item, dict):
        raise Rejected("not an object")
    name = _name(item.get("name"))
    description = item.get("description")
    if description is not None and not isinstance(description, str):
        raise Rejected("description is not a string")
    if description and len(description.encode("utf-8", "surrogatepass")) > max_description:
        raise Rejected(f"description is over {max_description // 1024} KB")
    if not isinstance(item.get("title", ""), str | None):
        raise Rejected("title is not a string")
    for key in OBJECT_FIELDS:
        if not isinstance(item.get(key, {}), dict | None):
            raise Rejected(f"{key} is not an object")
    body, sha256 = _canonical_body(item, max_bytes)
    if sha256 not in known:
        try:
            check_input_schema(item.get("inputSchema"))
            if item.get("outputSchema") is not None:
                check_schema(item["outputSchema"], field="outputSchema")
        except InvalidSchema as error:
            raise Rejected(str(error)) from error
    return RemoteTool(name, body, sha256, item)


def search_text(tool: dict[str, Any]) -> str:
    """Return the searchable text: name, title, description, parameter names and descriptions."""
    parts = [tool.get("name"), tool.get("title"), tool.get("description")]
    parts += parameter_texts(tool.get("inputSchema"), depth=3)
    return "\n".join(part for part in parts if isinstance(part, str) and part)


def without_hidden(tool: dict[str, Any], body: str) -> dict[str, Any] | None:
    """Return the tool without hidden characters in its texts; None if it has none.

    Names and values that an agent has to send back stay as they are. `body` is canonical, so
    control characters are escaped in it.
    """
    if body.isascii() and "\\u00" not in body and "\x7f" not in body:
        return None
    cleaned: dict[str, Any] = _clean(tool)
    return cleaned if cleaned != tool else None


def _clean(value: Any, *, is_map: bool = False) -> Any:
    """Clean texts in a tool or schema. In a map, keys are names of parameters or definitions."""
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if not isinstance(value, dict):
        return value
    cleaned: dict[str, Any] = {}
    for key, item in value.items():
        if is_map:
            cleaned[key] = _clean(item)
        elif key in TEXT_FIELDS and isinstance(item, str):
            cleaned[key] = remove_hidden(item)
        else:
            cleaned[key] = item if key in DATA_FIELDS else _clean(item, is_map=key in MAP_FIELDS)
    return cleaned


def printable_name(value: object) -> str:
    """Render an untrusted name on one short line."""
    if not isinstance(value, str):
        return f"({type(value).__name__})" if value is not None else "(no name)"
    text = escape_hidden(value[:MAX_NAME])
    return (text or "(empty)") + ("…" if len(value) > MAX_NAME else "")


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise Rejected("it has no name")
    if len(name) > MAX_NAME:
        raise Rejected(f"name is {len(name)} characters long; the limit is {MAX_NAME}")
    if CONTROL_CHARACTERS.search(name):
        raise Rejected("name contains control characters")
    return name


def _canonical_body(item: dict[str, Any], max_bytes: int) -> tuple[str, str]:
    if deeper_than(item, MAX_DEPTH):
        raise Rejected(TOO_DEEP_REASON)
    try:
        body = canonical(item)
        size = len(body.encode())
    except UnicodeEncodeError as error:
        raise Rejected("it contains invalid Unicode") from error
    except (ValueError, TypeError) as error:
        raise Rejected("it contains a number that JSON cannot represent") from error
    if TOO_DEEP in body:
        raise Rejected(TOO_DEEP_REASON)
    if size > max_bytes:
        raise Rejected(f"definition is {size // 1024} KB; the limit is {max_bytes // 1024} KB")
    return body, digest(body)


def parameter_texts(schema: object, *, depth: int) -> Sequence[str]:
    """Return the names and descriptions of parameters, nested ones up to `depth` levels."""
    if depth == 0 or not isinstance(schema, dict):
        return []
    texts: list[str] = []
    properties = schema.get("properties")
    for name, sub in properties.items() if isinstance(properties, dict) else ():
        texts.append(name)
        if isinstance(sub, dict):
            if isinstance(sub.get("description"), str):
                texts.append(sub["description"])
            texts += parameter_texts(sub, depth=depth - 1)
            texts += parameter_texts(sub.get("items"), depth=depth - 1)
    return texts
