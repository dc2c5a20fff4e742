"""Templates for `sessions_app.agents.snippets`, in the syntax of `str.format`.

The values must already be quoted as literals of the snippet's language.
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

from toolcrib.client import Toolcrib

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

from toolcrib.client import AgentLoop, Toolcrib

model = anthropic.Anthropic()  # reads ANTHROPIC_API_KEY
messages = [{{"role": "user", "content": {question}}}]

with (
    Toolcrib({base}, os.environ.get("TOOLCRIB_KEY", {key})) as crib,
    AgentLoop(crib, "anthropic", max_iterations=10) as loop,
):
    for _ in loop.turns():
        reply = model.messages.create(
            model="claude-sonnet-4-5",
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

from toolcrib.client import AgentLoop, Toolcrib

model = openai.OpenAI()  # reads OPENAI_API_KEY
items = [{{"role": "user", "content": {question}}}]

with (
    Toolcrib({base}, os.environ.get("TOOLCRIB_KEY", {key})) as crib,
    AgentLoop(crib, "openai-responses", max_iterations=10) as loop,
):
    for _ in loop.turns():
        reply = model.responses.create(
            model="gpt-5.4", instructions=loop.system, tools=loop.tools, input=items
        )
        if not loop.take(reply, items):
            print(reply.output_text)
            break
"""

LANGCHAIN = """\
import asyncio
import os

from langchain.agents import create_agent
from langchain_mcp_adapters.client import MultiServerMCPClient

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
    agent = create_agent("anthropic:claude-sonnet-4-5", await client.get_tools())
    messages = [{{"role": "user", "content": {question}}}]
    result = await agent.ainvoke({{"messages": messages}})
    print(result["messages"][-1].content)


asyncio.run(main())
"""
