"""Agno: the functions of its MCPTools."""
# mypy: ignore-errors

from agno.tools.mcp import MCPTools, StreamableHTTPClientParams
from driver import run, serve


async def main(url, headers):
    server = StreamableHTTPClientParams(url=url, headers=headers)
    async with MCPTools(transport="streamable-http", server_params=server) as tools:

        async def list_tools():
            return list(tools.functions)

        async def call(name, arguments, count):
            return await tools.functions[name].entrypoint(**arguments)

        await serve(list_tools, call)


run(main)
