"""LangChain: the tools that langchain-mcp-adapters loads over one session."""
# mypy: ignore-errors

from driver import run, serve
from langchain_mcp_adapters.callbacks import Callbacks
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_mcp_adapters.tools import load_mcp_tools


async def main(url, headers):
    steps = None

    async def count(*step):
        if steps is not None:
            await steps(*step)

    server = {"transport": "streamable_http", "url": url, "headers": headers}
    client = MultiServerMCPClient({"toolcrib": server}, callbacks=Callbacks(on_progress=count))
    async with client.session("toolcrib") as session:
        loaded = await load_mcp_tools(session, callbacks=client.callbacks, server_name="toolcrib")
        tools = {tool.name: tool for tool in loaded}

        async def list_tools():
            return list(tools)

        async def call(name, arguments, counter):
            nonlocal steps
            steps = counter
            use = {"type": "tool_call", "id": "use-1", "name": name, "args": arguments}
            return await tools[name].ainvoke(use)

        await serve(list_tools, call)


run(main)
