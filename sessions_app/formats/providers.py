"""Tools arrays in each provider's format. No I/O.

Some providers reject valid JSON Schema, and one such tool makes the whole request fail. For those
the unsupported keywords move from the schema to its description. Toolcrib still validates
arguments against the server's schema.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema_rs

from catalog.rendering import described_with_examples
from toolcrib.lib.json_codec import canonical

ToolObject = dict[str, Any]
OPENAI_MAX_DESCRIPTION = 1024  # characters, in chat completions
PROPERTY_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
# Keywords rejected at the root of a schema; nested schemas may have them.
UNSUPPORTED_AT_ROOT = {
    "anthropic": ("oneOf", "anyOf", "allOf"),
    "openai": ("oneOf", "anyOf", "allOf", "enum", "not"),
}
REMOVED_KEYWORDS_PREFIX = "Arguments must also fit this JSON Schema: "


def relax_schema(schema: dict[str, Any], provider: str) -> dict[str, Any]:
    """Return a schema the provider accepts; the description lists the removed keywords."""
    removed = {key: schema[key] for key in UNSUPPORTED_AT_ROOT[provider] if key in schema}
    relaxed = {key: value for key, value in schema.items() if key not in removed}
    if provider == "anthropic":
        relaxed, removed_properties = _remove_unsupported_names(relaxed)
        removed |= removed_properties
        if not _drop_dialect(relaxed):
            removed = {key: value for key, value in schema.items() if key != "$schema"}
            relaxed = {"type": "object"}
    if removed:
        original = schema.get("description")
        prefix = f"{original}\n" if isinstance(original, str) else ""
        relaxed["description"] = f"{prefix}{REMOVED_KEYWORDS_PREFIX}{canonical(removed)}"
    return relaxed


def _remove_unsupported_names(schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a schema by property name: what the provider accepts, and the rest."""
    value = schema.get("properties")
    properties = value if isinstance(value, dict) else {}
    unsupported = {
        name: sub for name, sub in properties.items() if not PROPERTY_NAME.fullmatch(name)
    }
    if not unsupported:
        return schema, {}
    value = schema.get("required")
    required = value if isinstance(value, list) else []
    relaxed = {
        **schema,
        "properties": {name: sub for name, sub in properties.items() if name not in unsupported},
        "required": [name for name in required if name not in unsupported],
    }
    # It would forbid the removed properties.
    relaxed.pop("additionalProperties", None)
    removed: dict[str, Any] = {"properties": unsupported}
    if names := [name for name in required if name in unsupported]:
        removed["required"] = names
    return relaxed, removed


def _drop_dialect(schema: dict[str, Any]) -> bool:
    """Remove `$schema` in place. Return whether the schema is valid in 2020-12 without it."""
    if "$schema" not in schema:
        return True
    del schema["$schema"]
    return bool(jsonschema_rs.meta.is_valid(schema))


def _tool(tool: ToolObject, **fields: Any) -> ToolObject:
    return {"name": tool["name"], "description": described_with_examples(tool), **fields}


def anthropic(tool: ToolObject) -> ToolObject:
    schema = relax_schema(tool["parameters"], "anthropic")
    fields = {"name": tool["name"], "description": tool["description"], "input_schema": schema}
    examples = tool.get("input_examples")
    return fields | {"input_examples": examples} if examples else fields


def _openai(tool: ToolObject) -> ToolObject:
    parameters = relax_schema(tool["parameters"], "openai")
    description = described_with_examples(tool)
    if len(description) > OPENAI_MAX_DESCRIPTION:
        # Move the excess to the schema's description, which has no such limit.
        cut = OPENAI_MAX_DESCRIPTION - 1
        original = parameters.get("description")
        suffix = f"\n{original}" if isinstance(original, str) else ""
        parameters = {**parameters, "description": f"…{description[cut:]}{suffix}"}
        description = description[:cut] + "…"
    function = {"name": tool["name"], "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def openai_responses(tool: ToolObject) -> ToolObject:
    # Strict mode rejects most schemas of MCP servers.
    parameters = relax_schema(tool["parameters"], "openai")
    return {"type": "function", **_tool(tool, parameters=parameters, strict=False)}


def _gemini(tool: ToolObject) -> ToolObject:
    name = tool["name"]
    # Gemini rejects a leading digit or dash. The client removes the "_" from calls.
    safe_name = name if name[:1].isalpha() or name[:1] == "_" else f"_{name}"
    return _tool(tool, parametersJsonSchema=tool["parameters"]) | {"name": safe_name}


CONVERTERS: dict[str, Callable[[ToolObject], ToolObject]] = {
    "json": lambda tool: tool,
    "anthropic": anthropic,
    "openai": _openai,
    "openai-responses": openai_responses,
    "gemini": _gemini,
    "mcp": lambda tool: _tool(tool, inputSchema=tool["parameters"]),
}


def convert_tools(format_: str, tools: Sequence[ToolObject]) -> list[ToolObject]:
    """Return the tools array in a provider's format."""
    converted = [CONVERTERS[format_](tool) for tool in tools]
    if format_ == "gemini":
        # The JavaScript SDK reads only camel case; the Python SDK reads both.
        return [{"functionDeclarations": converted}] if converted else []
    return converted
