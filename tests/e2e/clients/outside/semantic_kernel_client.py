"""Semantic Kernel: the functions of a plugin."""
# mypy: ignore-errors

from driver import run, serve
from semantic_kernel import Kernel
from semantic_kernel.connectors.mcp import MCPStreamableHttpPlugin
from semantic_kernel.functions import KernelArguments


async def main(url, headers):
    options = {"headers": headers, "load_prompts": False}
    async with MCPStreamableHttpPlugin("toolcrib", url, **options) as plugin:
        kernel = Kernel()
        functions = kernel.add_plugin(plugin)

        async def list_tools():
            return list(functions.functions)

        async def call(name, arguments, count):
            result = await functions[name].invoke(kernel, KernelArguments(**arguments))
            return [{"type": type(item).__name__, "text": str(item)} for item in result.value]

        await serve(list_tools, call)


run(main)
