"""Server with every content type, a tool that violates its output schema, and one that changes.

python -m tests.support.upstreams.rich [--http PORT] [--legacy]; stdio by default.
"""

from typing import Any

from mcp.server import Server
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

from tests.support.upstreams.serving import parser, serve

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
CONTENT: list[dict[str, Any]] = [
    {
        "type": "text",
        "text": "Übersicht – 概要 \u202e<b>not markup</b>",
        "annotations": {"audience": ["user"], "priority": 0.5},
        "_meta": {"example.org/weight": 3},
    },
    {"type": "image", "data": PIXEL, "mimeType": "image/png"},
    {"type": "audio", "data": "UklGRiQAAABXQVZF", "mimeType": "audio/wav"},
    {
        "type": "resource_link",
        "uri": "file:///srv/report.pdf",
        "name": "report.pdf",
        "title": "Report",
        "description": "Of last year.",
        "mimeType": "application/pdf",
        "size": 1234,
    },
    {
        "type": "resource",
        "resource": {"uri": "note://1", "mimeType": "text/plain", "text": "A note."},
    },
    {
        "type": "resource",
        "resource": {"uri": "blob://1", "mimeType": "application/zip", "blob": "UEsDBA=="},
    },
]
STRUCTURED: dict[str, Any] = {
    "rows": [{"name": "a", "size": 1}, {"name": "b", "size": 2.5, "parent": None}],
    "total": 2,
    "more": False,
}
FAILURE = "There is no such city: 'Atlantis'."
WEIGHT = {
    "type": "object",
    "properties": {"kilograms": {"type": "number"}},
    "required": ["kilograms"],
}
LENGTH = {"type": "number", "description": "In metres."}
MEASURE = {"type": "object", "properties": {"length": LENGTH}, "required": ["length"]}
STRICTER = {
    "type": "object",
    "properties": {"length": LENGTH, "unit": {"type": "string", "enum": ["m", "ft"]}},
    "required": ["length", "unit"],
}
PLAIN = {"type": "object"}


def rich() -> Server[Any]:
    changed = False

    async def list_tools(ctx: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(
            tools=[
                Tool(name="show_all", description="Show everything.", input_schema=PLAIN),
                Tool(name="fail", description="Fail with words.", input_schema=PLAIN),
                Tool(name="weigh", description="Weigh.", input_schema=PLAIN, output_schema=WEIGHT),
                Tool(
                    name="measure",
                    description="Measure a length.",
                    input_schema=STRICTER if changed else MEASURE,
                ),
                Tool(name="change", description="Change `measure`.", input_schema=PLAIN),
            ]
        )

    async def call_tool(ctx: Any, params: Any) -> CallToolResult:
        nonlocal changed
        arguments = params.arguments or {}
        match params.name:
            case "show_all":
                return CallToolResult.model_validate(
                    {"content": CONTENT, "structuredContent": STRUCTURED}
                )
            case "weigh":
                return text_result("Weighed.", structured_content=arguments.get("answer"))
            case "measure":
                return text_result("Measured.", structured_content={"given": arguments})
            case "change":
                changed = bool(arguments.get("to", True))
                return text_result("Changed.")
        return text_result(FAILURE, is_error=True)

    return Server("rich", version="1.0", on_list_tools=list_tools, on_call_tool=call_tool)


def text_result(text: str, **fields: Any) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], **fields)


if __name__ == "__main__":
    serve(rich(), parser().parse_args())
