"""The first generation of the Python SDK."""
# mypy: ignore-errors

from driver import run, serve
from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client


async def main(url, headers):
    async with (
        streamablehttp_client(url, headers=headers) as (read, write, _),
        ClientSession(read, write) as session,
    ):
        await session.initialize()

        async def list_tools():
            return [tool.name for tool in (await session.list_tools()).tools]

        async def call(name, arguments, count):
            return await session.call_tool(name, arguments, progress_callback=count)

        await serve(list_tools, call)


run(main)
