"""An agent in the shape of OpenAI's chat completions, with rules of its own about tools.

    TOOLCRIB_URL=http://localhost:8000 TOOLCRIB_KEY=tcb_… \
        PYTHONPATH=clients/python/src .venv/bin/python docs/examples/openai_loop.py

The agent needs the demo server's group, `mcp:demo`. The model is scripted and needs no network: put
`openai.OpenAI()` in its place for a real one, and nothing else changes. `state.json` keeps what was
loaded: run it again and the agent goes on with that.
"""

import json
import os
from pathlib import Path
from typing import Any

from scripted_model import ScriptedModel

from toolcrib_client import AgentLoop, ToolCall, Toolcrib, ToolResult


def before(call: ToolCall) -> str | None:
    """See the real tool and its arguments; words refuse the call."""
    return "Nothing is to be deleted." if "delete" in call.name else None


def after(call: ToolCall, result: ToolResult) -> None:
    print(f"{call.name} {json.dumps(call.arguments)}: {'failed' if result.is_error else 'ok'}")


model = ScriptedModel()
kept = Path("state.json")
options: Any = {"resume": json.loads(kept.read_text())} if kept.exists() else {}

with (
    Toolcrib(os.environ["TOOLCRIB_URL"], os.environ["TOOLCRIB_KEY"]) as crib,
    AgentLoop(
        crib,
        "openai",
        max_iterations=5,
        require_servers=["demo"],
        before=before,
        after=after,
        on_tools_expanded=lambda names: print("loaded", *names),
        **options,
    ) as loop,
):
    messages: list[object] = [
        {"role": "system", "content": loop.system},
        {"role": "user", "content": "What is 100 °C in Fahrenheit?"},
    ]
    for _ in loop.turns():
        reply = model.chat.completions.create(model="scripted", tools=loop.tools, messages=messages)
        if not loop.take(reply, messages):
            print(reply.choices[0].message.content)
            break
    kept.write_text(json.dumps(loop.export()))
