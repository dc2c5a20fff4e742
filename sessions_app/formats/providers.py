"""A tools array in each provider's own format. Pure.

Some providers refuse schemas that are sound JSON Schema, and with one tool the whole request. For
those the schema is loosened where they refuse it, and what it no longer says stands in words in
its description. Nothing is lost by it: Toolcrib holds arguments to the schema as the server
wrote it, and a mistake comes back with that schema.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema_rs

from toolcrib.lib.json_codec import canonical

ToolObject = dict[str, Any]
OPENAI_DESCRIPTION = 1024  # characters of a function's description in chat completions
PROPERTY = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
# At the root of a schema; below it they are taken.
REFUSED_AT_ROOT = {
    "anthropic": ("oneOf", "anyOf", "allOf"),
    "openai": ("oneOf", "anyOf", "allOf", "enum", "not"),
}
REST = "Arguments must also fit this JSON Schema: "


def loosened(schema: dict[str, Any], provider: str) -> dict[str, Any]:
    """Return a schema the provider takes; what it does not take is said in the description."""
    rest = {key: schema[key] for key in REFUSED_AT_ROOT[provider] if key in schema}
    made = {key: value for key, value in schema.items() if key not in rest}
    if provider == "anthropic":
        made, odd = _without_odd_names(made)
        rest |= odd
        if not _is_current(made):
            rest = {key: value for key, value in schema.items() if key != "$schema"}
            made = {"type": "object"}
    if rest:
        said = f"{schema['description']}\n" if isinstance(schema.get("description"), str) else ""
        made["description"] = f"{said}{REST}{canonical(rest)}"
    return made


def _without_odd_names(schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    properties = schema.get("properties")
    named = properties if isinstance(properties, dict) else {}
    odd = {name: sub for name, sub in named.items() if not PROPERTY.fullmatch(name)}
    if not odd:
        return schema, {}
    kept = {name: sub for name, sub in named.items() if name not in odd}
    required = schema.get("required")
    asked = required if isinstance(required, list) else []
    made = {**schema, "properties": kept, "required": [name for name in asked if name not in odd]}
    # The names left out would be refused by it.
    made.pop("additionalProperties", None)
    rest: dict[str, Any] = {"properties": odd}
    if needed := [name for name in asked if name in odd]:
        rest["required"] = needed
    return made, rest


def _is_current(schema: dict[str, Any]) -> bool:
    """Tell whether a schema of an older dialect is one of 2020-12 as well, and say so."""
    if "$schema" not in schema:
        return True
    del schema["$schema"]  # a copy of ours
    return bool(jsonschema_rs.meta.is_valid(schema))


def anthropic(tool: ToolObject) -> ToolObject:
    return {
        "name": tool["name"],
        "description": tool["description"],
        "input_schema": loosened(tool["parameters"], "anthropic"),
    }


def _openai(tool: ToolObject) -> ToolObject:
    parameters = loosened(tool["parameters"], "openai")
    description = tool["description"]
    if len(description) > OPENAI_DESCRIPTION:
        # The end is what the schema's own description begins with, which has no such limit.
        cut = OPENAI_DESCRIPTION - 1
        own = parameters.get("description")
        said = f"\n{own}" if isinstance(own, str) else ""
        parameters = {**parameters, "description": f"…{description[cut:]}{said}"}
        description = description[:cut] + "…"
    function = {"name": tool["name"], "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def openai_responses(tool: ToolObject) -> ToolObject:
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool["description"],
        "parameters": loosened(tool["parameters"], "openai"),
        "strict": False,  # schemas are the servers' own, which hardly any strict mode takes
    }


def _gemini(tool: ToolObject) -> ToolObject:
    name = tool["name"]
    return {
        # It takes no digit or dash first; what reads its calls takes the line off again.
        "name": name if name[:1].isalpha() or name[:1] == "_" else f"_{name}",
        "description": tool["description"],
        "parameters_json_schema": tool["parameters"],
    }


def _mcp(tool: ToolObject) -> ToolObject:
    return {
        "name": tool["name"],
        "description": tool["description"],
        "inputSchema": tool["parameters"],
    }


SHAPES: dict[str, Callable[[ToolObject], ToolObject]] = {
    "json": lambda tool: tool,
    "anthropic": anthropic,
    "openai": _openai,
    "openai-responses": openai_responses,
    "gemini": _gemini,
    "mcp": _mcp,
}


def tools_in(format_: str, tools: Sequence[ToolObject]) -> list[ToolObject]:
    """Return the tools array as a provider takes it."""
    shaped = [SHAPES[format_](tool) for tool in tools]
    if format_ == "gemini":
        return [{"function_declarations": shaped}] if shaped else []
    return shaped
