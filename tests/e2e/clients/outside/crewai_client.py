"""CrewAI: the tools of its MCPServerAdapter, which are functions that block."""
# mypy: ignore-errors

import asyncio

from crewai_tools import MCPServerAdapter
from driver import run, serve


async def main(url, headers):
    server = {"url": url, "transport": "streamable-http", "headers": headers}
    with MCPServerAdapter(server) as found:
        tools = {tool.name: tool for tool in found}

        async def list_tools():
            return list(tools)

        async def call(name, arguments, count):
            return await asyncio.to_thread(lambda: tools[name].run(**arguments))

        await serve(list_tools, call)


run(main)
