"""What MCP clients are shown of Toolcrib: the meta-tools described, tools and results in shape.

Pure. The definitions and the answers are those of the other ways in; this only dresses them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from catalog import rendering
from catalog.rendering import GroupLine

Object = dict[str, Any]

INSTRUCTIONS = (
    "Where search_tools is listed, there are more tools than the list shows: find one with it, "
    "read schemas with load_tools or get_tool_details, and run it with deferred_tool_call or by "
    "its own name. A call that cannot be made comes back with what is wrong and, where the "
    "arguments are, with the tool's schema."
)
LONGEST_DESCRIPTION = 2_000  # bytes; clients cut there
READING = {"readOnlyHint": True, "idempotentHint": True, "openWorldHint": False}
ANNOTATIONS: Mapping[str, Object] = {
    "search_tools": {"title": "Search tools", **READING},
    "load_tools": {"title": "Load tools", **READING},
    "get_tool_details": {"title": "Read a tool's definition", **READING},
    # It runs whatever tool it is told to.
    "deferred_tool_call": {
        "title": "Run a tool",
        "readOnlyHint": False,
        "destructiveHint": True,
        "idempotentHint": False,
        "openWorldHint": True,
    },
}
SHOWN = ("title", "outputSchema", "annotations")  # of a server's definition, besides the usual


def meta_tool(tool: Object, groups: Sequence[GroupLine]) -> Object:
    """A meta-tool as it is listed; the search says what is behind it."""
    said = tool["description"]
    if tool["name"] == "search_tools" and groups:
        head = f"{said} Behind it:\n"
        said = head + rendering.behind(groups, LONGEST_DESCRIPTION - len(head.encode()))
    return {
        "name": tool["name"],
        "title": ANNOTATIONS[tool["name"]]["title"],
        "description": said,
        "inputSchema": tool["parameters"],
        "annotations": ANNOTATIONS[tool["name"]],
    }


def plain_tool(tool: Object, definition: Mapping[str, Any]) -> Object:
    """A tool of a server or of the agent's own, as the session was shown it."""
    more = {key: definition[key] for key in SHOWN if definition.get(key) is not None}
    return {**bare_tool(tool), **more}


def bare_tool(tool: Object) -> Object:
    """A tool with nothing that a protocol version might not know."""
    return {
        "name": tool["name"],
        "description": tool["description"],
        "inputSchema": tool["parameters"],
    }


def said(text: str, *, is_error: bool = False) -> Object:
    """A result of one text."""
    return {"content": [{"type": "text", "text": text}], "isError": is_error}


def called(answer: str) -> Object:
    """A call's answer, as dispatch gives it: what the server sent, unchanged."""
    told = json.loads(answer)
    result = {"content": told["content"], "isError": told["is_error"]}
    if told["structured_content"] is not None:
        result["structuredContent"] = told["structured_content"]
    return result


def misfit(name: str, problems: Sequence[str], schema: object) -> Object:
    """Arguments that a meta-tool does not take, with what it takes."""
    listed = "\n".join(f"- {problem}" for problem in problems)
    return said(
        f"The arguments for {name} do not match its schema:\n{listed}\n\n"
        f"Input schema of {name}:\n{json.dumps(schema, ensure_ascii=False, sort_keys=True)}\n\n"
        "Correct the arguments and call again.",
        is_error=True,
    )
