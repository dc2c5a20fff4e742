"""TypeScript declarations of tools: one namespace for each server, its tools as functions."""

import json
import re
from collections.abc import Sequence

from sessions_app.scripts.shapes import (
    Array,
    Literals,
    Map,
    Object,
    Reference,
    Scalar,
    Shape,
    ShapeReader,
    Union,
    parameters,
    shorten,
)
from sessions_app.scripts.tool_names import ScriptTool

TYPES = {
    "any": "unknown",
    "string": "string",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
}
WORD = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*\Z")
MAX_DESCRIPTION, MAX_FIELD = 400, 120
GLOBALS = (
    "declare const input: any;\n"
    "declare function extract(value: unknown, type: unknown): Promise<any>;\n"
    "declare class ToolError extends Error {}\n"
    "declare class PermissionError extends Error {}\n"
    "declare class TimeoutError extends Error {}\n"
)


def namespace(name: str, tools: Sequence[ScriptTool], *, docs: bool) -> str:
    """Return the namespace of one server; with `docs`, also the descriptions."""
    body = "".join(tool_declaration(tool, docs=docs) for tool in tools)
    return f"declare namespace {name} {{\n{body}}}\n"


def tool_declaration(tool: ScriptTool, *, docs: bool) -> str:
    """Return the function of a tool, after the interfaces that it uses."""
    inputs, objects = parameters(tool.input_schema, f"{tool.function}_In")
    interfaces = _interfaces(objects, docs)
    result = "any"
    if tool.output_schema is not None:
        reader = ShapeReader(tool.output_schema, f"{tool.function}_Out")
        result = _type(reader.read(), docs)
        interfaces += _interfaces(reader.objects, docs)
    mark = "" if any(one.is_required for one in inputs.fields) else "?"
    comment = _comment(shorten(tool.description, MAX_DESCRIPTION), "  ") if docs else ""
    parameter = f"input{mark}: {_object(inputs, docs)}"
    return f"{interfaces}{comment}  function {tool.function}({parameter}): Promise<{result}>;\n"


def _interfaces(objects: dict[str, Object], docs: bool) -> str:
    return "".join(
        f"  interface {name} {_object(shape, docs)}\n" for name, shape in objects.items()
    )


def _type(shape: Shape, docs: bool) -> str:
    match shape:
        case Scalar(kind):
            return TYPES[kind]
        case Literals(values):
            return " | ".join(map(json.dumps, values))
        case Union(variants):
            return " | ".join(dict.fromkeys(_type(variant, docs) for variant in variants))
        case Array(items):
            return f"Array<{_type(items, docs)}>"
        case Map(values):
            return f"Record<string, {_type(values, docs)}>"
        case Reference(name):
            return name
        case Object():
            return _object(shape, docs)
    return "unknown"


def _object(shape: Object, docs: bool) -> str:
    parts = []
    for one in shape.fields:
        name = one.name if WORD.match(one.name) else json.dumps(one.name)
        mark = "" if one.is_required else "?"
        comment = _comment(shorten(one.description, MAX_FIELD)) if docs else ""
        parts.append(f"{comment.strip()} {name}{mark}: {_type(one.shape, docs)}".strip())
    if shape.is_open:
        parts.append("[more: string]: unknown")
    return "{ " + "; ".join(parts) + " }" if parts else "{}"


def _comment(text: str, indent: str = "") -> str:
    text = text.replace("*/", "* /")
    return f"{indent}/** {text} */\n" if text else ""
