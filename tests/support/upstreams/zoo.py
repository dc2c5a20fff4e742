"""A server with the strangest tools that are still sound, and hundreds of ordinary ones.

python -m tests.support.upstreams.zoo [--tools N] [--http PORT]; stdio by default. Every tool
answers with the name it was called by and what it was given.
"""

import json
from typing import Any

from mcp.server import Server
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

from bench.fleet import arguments_for, made_up
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
# The server's own name, its schema, arguments that fit.
STRANGE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
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


def definitions(ordinary: int) -> list[dict[str, Any]]:
    strange = [
        {"name": name, "description": f"Strange: {name}.", "inputSchema": schema}
        for name, schema, _ in STRANGE
    ]
    strange[1]["description"] = LONG_TEXT
    made = made_up(20, ordinary) if ordinary else {}
    return strange + [
        {**tool, "name": f"{slug}.{tool['name']}"} for slug, tools in made.items() for tool in tools
    ]


def fitting(definition: dict[str, Any]) -> dict[str, Any]:
    """Arguments that a definition of the zoo takes."""
    known = {name: arguments for name, _, arguments in STRANGE}
    name = definition["name"]
    return known[name] if name in known else arguments_for(definition["inputSchema"])


def zoo(ordinary: int) -> Server[Any]:
    tools = [Tool.model_validate(one) for one in definitions(ordinary)]

    async def list_tools(ctx: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(tools=tools)

    async def call_tool(ctx: Any, params: Any) -> CallToolResult:
        told = json.dumps({"tool": params.name, "given": params.arguments or {}})
        return CallToolResult(content=[TextContent(type="text", text=told)])

    return Server("zoo", version="1.0", on_list_tools=list_tools, on_call_tool=call_tool)


if __name__ == "__main__":
    arguments = parser()
    arguments.add_argument("--tools", type=int, default=0)
    options = arguments.parse_args()
    serve(zoo(options.tools), options)
