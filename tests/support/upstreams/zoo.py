"""Server with unusual but valid tools, and hundreds of ordinary ones.

python -m tests.support.upstreams.zoo [--tools N] [--http PORT]; stdio by default. Every tool
returns its name and its arguments.
"""

import json
from typing import Any

from mcp.server import Server
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

from bench.fleet import arguments_for, generate_servers
from tests.support.upstreams.serving import parser, serve

TEXT = {"type": "string"}
TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "label": TEXT,
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["label"],
        }
    },
}
NESTED: dict[str, Any] = {"type": "string", "maxLength": 9}
for _level in range(12):
    NESTED = {"type": "object", "properties": {"in": NESTED}, "required": ["in"]}
DEEP: Any = "x"
for _level in range(12):
    DEEP = {"in": DEEP}
EITHER = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "name": TEXT},
    "anyOf": [{"required": ["id"]}, {"required": ["name"]}],
}
DRAFT_7 = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"pair": {"type": "array", "items": [TEXT, {"type": "integer"}]}},
    "definitions": {"unused": TEXT},
}
NAMES_7 = {"$schema": "http://json-schema.org/draft-07/schema#", **EITHER, "anyOf": [True]}
ODD = {
    "type": "object",
    "description": "How to filter.",
    "properties": {"full name": TEXT, "$filter": TEXT, "größe": {"type": "number"}, "plain": TEXT},
    "required": ["full name", "plain"],
    "additionalProperties": False,
}
MIXED = {
    "type": "object",
    "properties": {
        "when": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        "how": {"oneOf": [{"const": "fast"}, {"enum": ["slow", 2, None, True]}]},
        "any": True,
        "tags": {"type": "array", "prefixItems": [TEXT], "items": {"type": ["string", "null"]}},
    },
    "patternProperties": {"^x-": TEXT},
    "not": {"required": ["never"]},
    "allOf": [{"if": {"required": ["when"]}, "then": {"required": ["how"]}}],
}
# Original name, schema, valid arguments.
UNUSUAL_TOOLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("files.read.v2", TREE, {"root": {"label": "a", "children": [{"label": "b"}]}}),
    ("files_read_v2", {"type": "object"}, {"anything": [1, None]}),
    ("files-read/v2", {"type": "object", "properties": {}}, {}),
    ("größe_ändern", EITHER, {"id": 3}),
    ("天気を調べる", ODD, {"full name": "Ada", "plain": "x"}),
    ("nested", NESTED, DEEP),
    ("draft_7", DRAFT_7, {"pair": ["a", 1]}),
    ("names_7", NAMES_7, {"name": "a"}),
    ("mixed", MIXED, {"how": "fast", "x-y": "z", "when": None}),
    ("a" * 70, {"type": "object"}, {}),
    ("a" * 70 + "b", {"type": "object"}, {}),
    ("search_tools", {"type": "object"}, {}),
]
LONG_TEXT = "Says a great deal about itself. " * 100


def tool_definitions(ordinary: int) -> list[dict[str, Any]]:
    unusual = [
        {"name": name, "description": f"Strange: {name}.", "inputSchema": schema}
        for name, schema, _ in UNUSUAL_TOOLS
    ]
    unusual[1]["description"] = LONG_TEXT
    servers = generate_servers(20, ordinary) if ordinary else {}
    return unusual + [
        {**tool, "name": f"{slug}.{tool['name']}"}
        for slug, tools in servers.items()
        for tool in tools
    ]


def example_arguments(definition: dict[str, Any]) -> dict[str, Any]:
    """Return valid arguments for a definition of this server."""
    examples = {name: arguments for name, _, arguments in UNUSUAL_TOOLS}
    name = definition["name"]
    return examples[name] if name in examples else arguments_for(definition["inputSchema"])


def zoo(ordinary: int) -> Server[Any]:
    tools = [Tool.model_validate(definition) for definition in tool_definitions(ordinary)]

    async def list_tools(ctx: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(tools=tools)

    async def call_tool(ctx: Any, params: Any) -> CallToolResult:
        text = json.dumps({"tool": params.name, "given": params.arguments or {}})
        return CallToolResult(content=[TextContent(type="text", text=text)])

    return Server("zoo", version="1.0", on_list_tools=list_tools, on_call_tool=call_tool)


if __name__ == "__main__":
    arguments = parser()
    arguments.add_argument("--tools", type=int, default=0)
    options = arguments.parse_args()
    serve(zoo(options.tools), options)
