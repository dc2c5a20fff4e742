"""Strands Agents: its MCPClient."""
# mypy: ignore-errors

import asyncio

from driver import run, serve
from strands.tools.mcp import MCPClient


async def main(url, headers):
    steps, loop = None, asyncio.get_running_loop()

    async def count(*step):
        if steps is not None:
            asyncio.run_coroutine_threadsafe(steps(*step), loop)

    with MCPClient(url=url, headers=headers, progress_callback=count) as client:

        async def list_tools():
            return [tool.tool_name for tool in client.list_tools_sync()]

        async def call(name, arguments, counter):
            nonlocal steps
            steps = counter
            return await client.call_tool_async("use-1", name, arguments)

        await serve(list_tools, call)


run(main)
