"""FastMCP's client."""
# mypy: ignore-errors

from driver import run, serve
from fastmcp import Client
from fastmcp.client.transports import StreamableHttpTransport


async def main(url, headers):
    async with Client(StreamableHttpTransport(url, headers=headers)) as client:

        async def list_tools():
            return [tool.name for tool in await client.list_tools()]

        async def call(name, arguments, count):
            options = {"progress_handler": count, "raise_on_error": False}
            return await client.call_tool(name, arguments, **options)

        await serve(list_tools, call)


run(main)
