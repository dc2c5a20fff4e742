"""List, load and call with fastmcp's client, in its own environment."""
# mypy: ignore-errors

import asyncio
import json
import sys

sys.path.pop(0)  # this folder: its file names shadow packages

from fastmcp import Client
from fastmcp.client.transports import StreamableHttpTransport


async def main(url: str, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    async with Client(StreamableHttpTransport(url, headers=headers)) as client:
        before = await client.list_tools()
        selection = {"group_id": "mcp:weather", "tool_names": ["get_forecast"]}
        loaded = await client.call_tool("load_tools", selection)
        call = {"tool_name": "weather__get_forecast", "arguments": {"city": "Oslo"}}
        result = await client.call_tool("deferred_tool_call", call)
        after = await client.list_tools()
    report = {
        "before": [tool.name for tool in before],
        "after": [tool.name for tool in after],
        "loaded": json.loads(loaded.content[0].text)["tool_names"],
        "answer": result.structured_content,
    }
    sys.stdout.write(json.dumps(report))


asyncio.run(main(*sys.argv[1:]))
