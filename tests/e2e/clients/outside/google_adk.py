"""Google ADK: the tools of an McpToolset, run as its agents run them."""
# mypy: ignore-errors

from driver import run, serve
from google.adk.agents import LlmAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.sessions import InMemorySessionService
from google.adk.tools.mcp_tool import McpToolset, StreamableHTTPConnectionParams
from google.adk.tools.tool_context import ToolContext


async def main(url, headers):
    steps = None

    async def count(*step, **named):
        if steps is not None:
            await steps(*step)

    connection = StreamableHTTPConnectionParams(url=url, headers=headers)
    toolset = McpToolset(connection_params=connection, progress_callback=count)
    service = InMemorySessionService()
    session = await service.create_session(app_name="app", user_id="user")
    agent = LlmAgent(name="assistant", model="scripted", tools=[toolset])
    context = InvocationContext(
        invocation_id="i", agent=agent, session=session, session_service=service
    )
    tools = {tool.name: tool for tool in await toolset.get_tools()}

    async def list_tools():
        return list(tools)

    async def call(name, arguments, counter):
        nonlocal steps
        steps = counter
        return await tools[name].run_async(args=arguments, tool_context=ToolContext(context))

    await serve(list_tools, call)


run(main)
