"""Haystack: the tools of an MCPToolset, which are functions that block."""
# mypy: ignore-errors

import asyncio

from driver import run, serve
from haystack_integrations.tools.mcp import MCPToolset, StreamableHttpServerInfo


async def main(url, headers):
    toolset = MCPToolset(StreamableHttpServerInfo(url=url, headers=headers), eager_connect=True)
    tools = {tool.name: tool for tool in toolset}

    async def list_tools():
        return list(tools)

    async def call(name, arguments, count):
        return await asyncio.to_thread(lambda: tools[name].invoke(**arguments))

    await serve(list_tools, call)


run(main)
