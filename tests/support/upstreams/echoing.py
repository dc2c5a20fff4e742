"""Server that echoes its credentials: request headers, or environment variables over stdio.

python -m tests.support.upstreams.echoing [--http PORT] [--legacy]; stdio by default. `reveal`
returns them in every part of a result, plain and encoded. `fail` makes the result an error, `raise`
returns a protocol error, and `large` pads the result.
"""

import base64
import json
import os
from typing import Any
from urllib.parse import quote

from mcp.server import Server
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, ListToolsResult, Tool

from tests.support.upstreams.serving import parser, serve

PLAIN = {"type": "object"}


def credentials(ctx: Any) -> dict[str, str]:
    if getattr(ctx, "request", None) is not None:
        names = ("authorization", "x-api-key", "x-pin")
        return {name: ctx.request.headers.get(name, "") for name in names}
    return {name: value for name, value in os.environ.items() if name.startswith("UPSTREAM_")}


def reveal(values: dict[str, str], padding: str) -> dict[str, Any]:
    text = "\n".join(f"{name}={value}" for name, value in values.items())
    encoded = {
        "base64": base64.b64encode(text.encode()).decode(),
        "url": f"https://example.org/?q={quote(text, safe='')}",
        "json": json.dumps(values),
    }
    return {
        "content": [
            {"type": "text", "text": text + padding, "_meta": {"example.org/echo": text}},
            {"type": "text", "text": json.dumps(encoded)},
            {"type": "resource", "resource": {"uri": "note://1", "text": text}},
            {"type": "resource_link", "uri": "file:///x", "name": "x", "description": text},
            {"type": "image", "mimeType": "image/png", "data": encoded["base64"]},
        ],
        "structuredContent": {**values, **encoded, "keys": {text: True}},
    }


def echoing() -> Server[Any]:
    async def list_tools(ctx: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(tools=[Tool(name="reveal", input_schema=PLAIN)])

    async def call_tool(ctx: Any, params: Any) -> CallToolResult:
        arguments = params.arguments or {}
        values = credentials(ctx)
        if arguments.get("raise"):
            raise MCPError(code=-32000, message=f"no good: {json.dumps(values)}")
        result = reveal(values, "x" * arguments.get("large", 0))
        return CallToolResult.model_validate({**result, "isError": bool(arguments.get("fail"))})

    return Server("echoing", version="1.0", on_list_tools=list_tools, on_call_tool=call_tool)


if __name__ == "__main__":
    serve(echoing(), parser().parse_args())
