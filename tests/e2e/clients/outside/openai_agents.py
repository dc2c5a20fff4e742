"""OpenAI Agents SDK: its MCP server object."""
# mypy: ignore-errors

from agents.mcp import MCPServerStreamableHttp
from driver import run, serve


async def main(url, headers):
    options = {"client_session_timeout_seconds": 300}
    async with MCPServerStreamableHttp({"url": url, "headers": headers}, **options) as server:

        async def list_tools():
            return [tool.name for tool in await server.list_tools()]

        async def call(name, arguments, count):
            return await server.call_tool(name, arguments)

        await serve(list_tools, call)


run(main)
