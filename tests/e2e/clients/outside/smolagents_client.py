"""smolagents: the tools of its MCPClient, which are functions that block."""
# mypy: ignore-errors

import asyncio

from driver import run, serve
from smolagents import MCPClient


async def main(url, headers):
    server = {"url": url, "transport": "streamable-http", "headers": headers}
    with MCPClient(server, structured_output=True) as found:
        tools = {tool.name: tool for tool in found}

        async def list_tools():
            return list(tools)

        async def call(name, arguments, count):
            return await asyncio.to_thread(lambda: tools[name](**arguments))

        await serve(list_tools, call)


run(main)
