"""Microsoft Agent Framework: the functions of an MCPStreamableHTTPTool."""
# mypy: ignore-errors

from agent_framework import MCPStreamableHTTPTool
from driver import run, serve


async def main(url, headers):
    options = {"static_headers": headers, "load_prompts": False}
    async with MCPStreamableHTTPTool("toolcrib", url, **options) as toolcrib:

        async def list_tools():
            return [function.name for function in toolcrib.functions]

        async def call(name, arguments, count):
            (function,) = [each for each in toolcrib.functions if each.name == name]
            return await function.invoke(arguments=arguments)

        await serve(list_tools, call)


run(main)
