"""Templates for `sessions_app.agents.snippets`, in the syntax of `str.format`.

The values must already be quoted as literals of the snippet's language. No template names a model:
providers end them, and no test here would notice.
"""

CURL = """\
export TOOLCRIB_KEY={key}
TOOLCRIB={address}

post() {{
  curl -sS "$TOOLCRIB$1" -H "Authorization: Bearer $TOOLCRIB_KEY" \\
    -H 'Content-Type: application/json' -d "$2"
  echo
}}

# Open a session. Its catalog.text belongs in the system prompt.
SESSION=$(post /sessions '{{}}' | grep -oE 'ses_[0-9a-f]{{32}}' | head -n 1)

# Search for a tool, load its schema, call it.
post "/sessions/$SESSION/search" {search}
post "/sessions/$SESSION/load" {load}
post "/sessions/$SESSION/call" {call}
post "/sessions/$SESSION/close" '{{}}'
"""

CURL_CALL = """\
export TOOLCRIB_KEY={key}
TOOLCRIB={address}
HEADERS=(-H "Authorization: Bearer $TOOLCRIB_KEY" -H 'Content-Type: application/json')

SESSION=$(curl -sS "$TOOLCRIB/sessions" "${{HEADERS[@]}}" -d '{{}}' \\
  | grep -oE 'ses_[0-9a-f]{{32}}' | head -n 1)
curl -sS "$TOOLCRIB/sessions/$SESSION/call" "${{HEADERS[@]}}" -d {call}
"""

PLAIN_PYTHON = """\
import json
import os
import urllib.request

TOOLCRIB = {address}
KEY = os.environ.get("TOOLCRIB_KEY", {key})


def post(path, body):
    request = urllib.request.Request(
        TOOLCRIB + path,
        data=json.dumps(body).encode(),
        headers={{"Authorization": f"Bearer {{KEY}}", "Content-Type": "application/json"}},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


session = post("/sessions", {{}})
print(session["catalog"]["text"])  # belongs in the system prompt
path = "/sessions/" + session["id"]

matches = post(path + "/search", {search})
loaded = post(path + "/load", {load})
result = post(path + "/call", {call})
print(result["content"])
post(path + "/close", {{}})
"""

PYTHON = """\
import os

from toolcrib_client import Toolcrib

with Toolcrib({base}, os.environ.get("TOOLCRIB_KEY", {key})) as crib:
    session = crib.open()
    print(session.text)  # belongs in the system prompt

    matches = crib.search(session.id, query={query})
    loaded = crib.load(session.id, {group}, [{tool}])
    result = crib.call(session.id, {tool}, {arguments})
    print(result.content)
    crib.close(session.id)
"""

ANTHROPIC = """\
import os

import anthropic

from toolcrib_client import AgentLoop, Toolcrib

model = anthropic.Anthropic()  # reads ANTHROPIC_API_KEY
messages = [{{"role": "user", "content": {question}}}]

with (
    Toolcrib({base}, os.environ.get("TOOLCRIB_KEY", {key})) as crib,
    AgentLoop(crib, "anthropic", max_iterations=10) as loop,
):
    for _ in loop.turns():
        reply = model.messages.create(
            model=os.environ["MODEL"],
            max_tokens=4096,
            system=loop.system,
            tools=loop.tools,
            messages=messages,
        )
        if not loop.take(reply, messages):
            print(reply.content[-1].text)
            break
"""

OPENAI = """\
import os

import openai

from toolcrib_client import AgentLoop, Toolcrib

model = openai.OpenAI()  # reads OPENAI_API_KEY
items = [{{"role": "user", "content": {question}}}]

with (
    Toolcrib({base}, os.environ.get("TOOLCRIB_KEY", {key})) as crib,
    AgentLoop(crib, "openai-responses", max_iterations=10) as loop,
):
    for _ in loop.turns():
        reply = model.responses.create(
            model=os.environ["MODEL"],
            instructions=loop.system,
            tools=loop.tools,
            input=items,
        )
        if not loop.take(reply, items):
            print(reply.output_text)
            break
"""

OPENAI_AGENTS = """\
import asyncio
import os

from agents import Agent, Runner
from agents.mcp import MCPServerStreamableHttp

KEY = os.environ.get("TOOLCRIB_KEY", {key})
TOOLCRIB = {{"url": {mcp}, "headers": {{"Authorization": f"Bearer {{KEY}}"}}}}


async def main():
    async with MCPServerStreamableHttp(TOOLCRIB, client_session_timeout_seconds=60) as toolcrib:
        agent = Agent("Assistant", model=os.environ["MODEL"], mcp_servers=[toolcrib])
        result = await Runner.run(agent, {question})
        print(result.final_output)


asyncio.run(main())
"""

AI_SDK = """\
import {{ createMCPClient }} from "@ai-sdk/mcp";
import {{ openai }} from "@ai-sdk/openai";
import {{ generateText, isStepCount }} from "ai";

const key = process.env.TOOLCRIB_KEY ?? {key};
const toolcrib = await createMCPClient({{
  transport: {{
    type: "http",
    url: {mcp},
    headers: {{ Authorization: `Bearer ${{key}}` }},
  }},
}});
try {{
  const {{ text }} = await generateText({{
    model: openai(process.env.MODEL),
    tools: await toolcrib.tools(),
    stopWhen: isStepCount(10),
    prompt: {question},
  }});
  console.log(text);
}} finally {{
  await toolcrib.close();
}}
"""

PYDANTIC_AI = """\
import os

from pydantic_ai import Agent
from pydantic_ai.mcp import MCPToolset

KEY = os.environ.get("TOOLCRIB_KEY", {key})

toolcrib = MCPToolset(
    {mcp},
    headers={{"Authorization": f"Bearer {{KEY}}"}},
    include_instructions=True,
)
agent = Agent(os.environ["MODEL"], toolsets=[toolcrib])
print(agent.run_sync({question}).output)
"""

LANGCHAIN = """\
import asyncio
import os

from langchain.agents import create_agent
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_mcp_adapters.tools import load_mcp_tools

KEY = os.environ.get("TOOLCRIB_KEY", {key})


async def main():
    client = MultiServerMCPClient(
        {{
            "toolcrib": {{
                "transport": "streamable_http",
                "url": {mcp},
                "headers": {{"Authorization": f"Bearer {{KEY}}"}},
            }}
        }}
    )
    # One session for the whole run: client.get_tools() would open one for each call.
    async with client.session("toolcrib") as session:
        agent = create_agent(os.environ["MODEL"], await load_mcp_tools(session))
        messages = [{{"role": "user", "content": {question}}}]
        result = await agent.ainvoke({{"messages": messages}})
        print(result["messages"][-1].content)


asyncio.run(main())
"""

LLAMA_INDEX = """\
import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai import OpenAI
from llama_index.tools.mcp import BasicMCPClient, McpToolSpec

KEY = os.environ.get("TOOLCRIB_KEY", {key})


async def main():
    toolcrib = BasicMCPClient(
        {mcp}, headers={{"Authorization": f"Bearer {{KEY}}"}}
    )
    tools = await McpToolSpec(toolcrib).to_tool_list_async()
    agent = FunctionAgent(tools=tools, llm=OpenAI(os.environ["MODEL"]))
    print(await agent.run({question}))


asyncio.run(main())
"""

GOOGLE_ADK = """\
import asyncio
import os

from google.adk.agents import LlmAgent
from google.adk.runners import InMemoryRunner
from google.adk.tools.mcp_tool import McpToolset, StreamableHTTPConnectionParams

KEY = os.environ.get("TOOLCRIB_KEY", {key})


async def main():
    connection = StreamableHTTPConnectionParams(
        url={mcp}, headers={{"Authorization": f"Bearer {{KEY}}"}}
    )
    toolcrib = McpToolset(connection_params=connection)
    agent = LlmAgent(name="assistant", model=os.environ["MODEL"], tools=[toolcrib])
    async with InMemoryRunner(agent) as runner:
        await runner.run_debug({question})


asyncio.run(main())
"""

SEMANTIC_KERNEL = """\
import asyncio
import os

from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.connectors.mcp import MCPStreamableHttpPlugin

KEY = os.environ.get("TOOLCRIB_KEY", {key})


async def main():
    async with MCPStreamableHttpPlugin(
        "toolcrib",
        {mcp},
        headers={{"Authorization": f"Bearer {{KEY}}"}},
        load_prompts=False,
    ) as toolcrib:
        agent = ChatCompletionAgent(
            name="Assistant",
            service=OpenAIChatCompletion(os.environ["MODEL"]),
            plugins=[toolcrib],
        )
        print(await agent.get_response({question}))


asyncio.run(main())
"""

AGENT_FRAMEWORK = """\
import asyncio
import os

from agent_framework import Agent, MCPStreamableHTTPTool
from agent_framework.openai import OpenAIChatClient

KEY = os.environ.get("TOOLCRIB_KEY", {key})


async def main():
    async with MCPStreamableHTTPTool(
        "toolcrib",
        {mcp},
        static_headers={{"Authorization": f"Bearer {{KEY}}"}},
        load_prompts=False,
    ) as toolcrib:
        agent = Agent(OpenAIChatClient(os.environ["MODEL"]), tools=toolcrib)
        print(await agent.run({question}))


asyncio.run(main())
"""

CREWAI = """\
import os

from crewai import Agent, Crew, Task
from crewai_tools import MCPServerAdapter

KEY = os.environ.get("TOOLCRIB_KEY", {key})
TOOLCRIB = {{
    "transport": "streamable-http",
    "url": {mcp},
    "headers": {{"Authorization": f"Bearer {{KEY}}"}},
}}

with MCPServerAdapter(TOOLCRIB) as tools:
    agent = Agent(
        role="Assistant",
        goal="Answer with the help of tools",
        backstory="You find tools and use them.",
        llm=os.environ["MODEL"],
        tools=tools,
    )
    task = Task(
        description={question}, expected_output="An answer", agent=agent
    )
    print(Crew(agents=[agent], tasks=[task]).kickoff())
"""
