"""Stay connected with the first generation of the Python SDK, and call when told to."""
# mypy: ignore-errors

import asyncio
import json
import sys

from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client

CALL = {"name": "weather__get_forecast", "arguments": {"city": "Oslo"}}


def report(value) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def main(url: str, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        streamablehttp_client(url, headers=headers) as (read, write, _),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        selection = {"group_id": "mcp:weather", "tool_names": ["get_forecast"]}
        await session.call_tool("load_tools", selection)
        report("ready")
        while await asyncio.to_thread(sys.stdin.readline):
            result = await session.call_tool("deferred_tool_call", CALL)
            report(result.structuredContent)


asyncio.run(main(*sys.argv[1:]))
