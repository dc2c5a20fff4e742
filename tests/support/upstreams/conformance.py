"""Server with the tools that the MCP conformance suite calls by name.

python -m tests.support.upstreams.conformance [--http PORT] [--legacy]; stdio by default.
"""

from typing import Any

import anyio
from mcp.server import Server
from mcp_types import CallToolResult, ListToolsResult, Tool

from tests.support.upstreams.rich import PIXEL
from tests.support.upstreams.serving import parser, serve

TEXT = {"type": "text", "text": "This is a simple text response for testing."}
IMAGE = {"type": "image", "data": PIXEL, "mimeType": "image/png"}
AUDIO = {"type": "audio", "data": "UklGRiQAAABXQVZF", "mimeType": "audio/wav"}
RESOURCE = {
    "type": "resource",
    "resource": {
        "uri": "test://embedded-resource",
        "mimeType": "text/plain",
        "text": "This is an embedded resource content.",
    },
}
CONTENT: dict[str, list[dict[str, Any]]] = {
    "test_simple_text": [TEXT],
    "test_image_content": [IMAGE],
    "test_audio_content": [AUDIO],
    "test_embedded_resource": [RESOURCE],
    "test_multiple_content_types": [TEXT, IMAGE, RESOURCE],
    "test_error_handling": [{"type": "text", "text": "This tool always answers with an error."}],
    "test_tool_with_progress": [TEXT],
}
HEADERED = {
    "type": "object",
    "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
    "required": ["region"],
}
PLAIN = {"type": "object", "additionalProperties": False}


def conformance() -> Server[Any]:
    async def list_tools(ctx: Any, params: Any) -> ListToolsResult:
        plain = [
            Tool(name=name, description=f"Do what {name} says.", input_schema=PLAIN)
            for name in CONTENT
        ]
        headered = Tool(name="test_header", description="Give a region.", input_schema=HEADERED)
        return ListToolsResult(tools=[*plain, headered])

    async def call_tool(ctx: Any, params: Any) -> CallToolResult:
        if params.name == "test_tool_with_progress":
            for step, message in enumerate(("begun", "halfway", "done")):
                await ctx.session.report_progress(step * 50.0, 100.0, message)
                await anyio.sleep(0.02)
        content = CONTENT.get(params.name, [TEXT])
        result = {"content": content, "isError": params.name == "test_error_handling"}
        return CallToolResult.model_validate(result)

    return Server("conformance", version="1.0", on_list_tools=list_tools, on_call_tool=call_tool)


if __name__ == "__main__":
    serve(conformance(), parser().parse_args())
