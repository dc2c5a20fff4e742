"""mcp-use: a session of its MCPClient."""
# mypy: ignore-errors

from driver import run, serve
from mcp_use import MCPClient


async def main(url, headers):
    client = MCPClient({"mcpServers": {"toolcrib": {"url": url, "headers": headers}}})
    session = await client.create_session("toolcrib")

    async def list_tools():
        return [tool.name for tool in await session.list_tools()]

    async def call(name, arguments, count):
        return await session.call_tool(name, arguments)

    await serve(list_tools, call)


run(main)
