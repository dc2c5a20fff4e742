"""An agent in the shape of Anthropic's Messages API, whole.

    TOOLCRIB_URL=http://localhost:8000 TOOLCRIB_KEY=tcb_… \
        PYTHONPATH=clients/python/src .venv/bin/python docs/examples/anthropic_loop.py

The agent needs the demo server's group, `mcp:demo`. The model is scripted and needs no network: put
`anthropic.Anthropic()` in its place for a real one, and nothing else changes.
"""

import os
from typing import Any

from scripted_model import ScriptedModel

from toolcrib_client import AgentLoop, Toolcrib

url, key = os.environ["TOOLCRIB_URL"], os.environ["TOOLCRIB_KEY"]
model = ScriptedModel()
llm = {"model": os.environ.get("MODEL", "scripted"), "max_tokens": 1024}
talk: list[Any] = [{"role": "user", "content": "What is 100 °C in Fahrenheit?"}]

with Toolcrib(url, key) as crib, AgentLoop(crib, "anthropic") as loop:
    for _ in loop.turns():
        reply = model.messages.create(system=loop.system, tools=loop.tools, messages=talk, **llm)
        if not loop.take(reply, talk):
            break

print(reply.content[0].text)
