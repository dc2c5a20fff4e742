"""LlamaIndex: the tools of an McpToolSpec."""
# mypy: ignore-errors

from driver import run, serve
from llama_index.tools.mcp import BasicMCPClient, McpToolSpec


async def main(url, headers):
    client = BasicMCPClient(url, headers=headers)
    tools = {tool.metadata.name: tool for tool in await McpToolSpec(client).to_tool_list_async()}

    async def list_tools():
        return list(tools)

    async def call(name, arguments, count):
        output = await tools[name].acall(**arguments)
        return {"blocks": output.blocks, "is_error": output.is_error, "raw": output.raw_output}

    await serve(list_tools, call)


run(main)
