"""AutoGen: its McpWorkbench."""
# mypy: ignore-errors

from autogen_core import CancellationToken
from autogen_ext.tools.mcp import McpWorkbench, StreamableHttpServerParams
from driver import run, serve


async def main(url, headers):
    async with McpWorkbench(StreamableHttpServerParams(url=url, headers=headers)) as workbench:

        async def list_tools():
            return [tool["name"] for tool in await workbench.list_tools()]

        async def call(name, arguments, count):
            return await workbench.call_tool(name, arguments, CancellationToken())

        await serve(list_tools, call)


run(main)
