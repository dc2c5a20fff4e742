"""List, load and call with the first generation of the SDK, in its own environment."""
# mypy: ignore-errors

import asyncio
import json
import sys

from mcp import ClientSession, types
from mcp.client.streamable_http import streamablehttp_client


async def main(url: str, key: str) -> None:
    changes = []

    async def handle(message) -> None:
        if isinstance(getattr(message, "root", None), types.ToolListChangedNotification):
            changes.append(1)

    headers = {"Authorization": f"Bearer {key}"}
    async with (
        streamablehttp_client(url, headers=headers) as (read, write, _),
        ClientSession(read, write, message_handler=handle) as session,
    ):
        hello = await session.initialize()
        before = await session.list_tools()
        selection = {"group_id": "mcp:weather", "tool_names": ["get_forecast"]}
        await session.call_tool("load_tools", selection)
        after = await session.list_tools()
        result = await session.call_tool("weather__get_forecast", {"city": "Oslo"})
    report = {
        "version": hello.protocolVersion,
        "before": [tool.name for tool in before.tools],
        "after": [tool.name for tool in after.tools],
        "changes": len(changes),
        "answer": result.structuredContent,
    }
    sys.stdout.write(json.dumps(report))


asyncio.run(main(*sys.argv[1:]))
