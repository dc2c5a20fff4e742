"""Pydantic AI: its MCPToolset."""
# mypy: ignore-errors

from driver import run, serve
from pydantic_ai.mcp import MCPToolset


async def main(url, headers):
    async with MCPToolset(url, headers=headers) as toolset:

        async def list_tools():
            return [tool.name for tool in await toolset.list_tools()]

        async def call(name, arguments, count):
            return await toolset.direct_call_tool(name, arguments)

        await serve(list_tools, call)


run(main)
