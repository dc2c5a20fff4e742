"""The texts behind sessions_app.snippets, with places for address, key and example. Pure.

Words in braces are filled in; each is already written for the language it stands in.
"""

CURL = """\
export TOOLCRIB_KEY={key}
TOOLCRIB={address}

ask() {{
  curl -sS "$TOOLCRIB$1" -H "Authorization: Bearer $TOOLCRIB_KEY" \\
    -H 'Content-Type: application/json' -d "$2"
  echo
}}

# Open a session. Its catalog.text belongs in the system prompt.
SESSION=$(ask /sessions '{{}}' | grep -oE 'ses_[0-9a-f]{{32}}' | head -n 1)

# Find a tool, load its schema, call it.
ask "/sessions/$SESSION/search" {search}
ask "/sessions/$SESSION/load" {load}
ask "/sessions/$SESSION/call" {call}
ask "/sessions/$SESSION/close" '{{}}'
"""

PLAIN_PYTHON = """\
import json
import os
import urllib.request

TOOLCRIB = {address}
KEY = os.environ.get("TOOLCRIB_KEY", {key})


def ask(path, body):
    request = urllib.request.Request(
        TOOLCRIB + path,
        data=json.dumps(body).encode(),
        headers={{"Authorization": f"Bearer {{KEY}}", "Content-Type": "application/json"}},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


session = ask("/sessions", {{}})
print(session["catalog"]["text"])  # belongs in the system prompt
here = "/sessions/" + session["id"]

found = ask(here + "/search", {search})
loaded = ask(here + "/load", {load})
result = ask(here + "/call", {call})
print(result["content"])
ask(here + "/close", {{}})
"""

PYTHON = """\
import os

from toolcrib.client import Toolcrib

with Toolcrib({base}, os.environ.get("TOOLCRIB_KEY", {key})) as crib:
    session = crib.open()
    print(session.text)  # belongs in the system prompt

    found = crib.search(session.id, query={query})
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
    asked = {{"messages": [{{"role": "user", "content": {question}}}]}}
    answer = await agent.ainvoke(asked)
    print(answer["messages"][-1].content)


asyncio.run(main())
"""
