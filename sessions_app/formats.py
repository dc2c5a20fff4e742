"""The tools array and the catalog in each provider's own format. Pure."""

from collections.abc import Callable, Sequence
from typing import Any

ToolObject = dict[str, Any]


def _anthropic(tool: ToolObject) -> ToolObject:
    return {
        "name": tool["name"],
        "description": tool["description"],
        "input_schema": tool["parameters"],
    }


def _openai(tool: ToolObject) -> ToolObject:
    function = {key: tool[key] for key in ("name", "description", "parameters")}
    return {"type": "function", "function": function}


def _openai_responses(tool: ToolObject) -> ToolObject:
    return {"type": "function", **{key: tool[key] for key in ("name", "description", "parameters")}}


def _gemini(tool: ToolObject) -> ToolObject:
    return {
        "name": tool["name"],
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
    "anthropic": _anthropic,
    "openai": _openai,
    "openai-responses": _openai_responses,
    "gemini": _gemini,
    "mcp": _mcp,
}


def tools_in(format_: str, tools: Sequence[ToolObject]) -> list[ToolObject]:
    """Return the tools array as a provider takes it."""
    shaped = [SHAPES[format_](tool) for tool in tools]
    if format_ == "gemini":
        return [{"function_declarations": shaped}] if shaped else []
    return shaped
