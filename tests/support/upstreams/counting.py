"""Server that appends a line to a journal file for every tool call it executes.

python -m tests.support.upstreams.counting --journal FILE [--http PORT] [--legacy]; stdio by
default. The file outlives the process, so tests can compare it with the ledger of the caller.
"""

import os
from pathlib import Path
from typing import Any

import anyio
from mcp.server import Server
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

from tests.support.upstreams.serving import parser, serve

TEXT = {"type": "string"}
TOOLS = [
    Tool(
        name="stamp",
        description="Stamp a paper and return its number.",
        input_schema={"type": "object", "properties": {"paper": TEXT}, "required": ["paper"]},
    ),
    Tool(
        name="wait",
        description="Wait for some seconds.",
        input_schema={
            "type": "object",
            "properties": {"name": TEXT, "seconds": {"type": "number"}},
            "required": ["name", "seconds"],
        },
    ),
    Tool(
        name="queue",
        description="Wait until somebody opens the gate.",
        input_schema={"type": "object", "properties": {"name": TEXT}},
    ),
    Tool(name="open_gate", description="Open the gate.", input_schema={"type": "object"}),
    Tool(
        name="count",
        description="Count the calls of this process.",
        input_schema={"type": "object"},
    ),
]


def counting(journal: Path) -> Server[Any]:
    calls = 0
    gate = anyio.Event()
    # One write per line: lines of two processes do not mix.
    descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def record(*words: str) -> None:
        os.write(descriptor, " ".join(words).encode() + b"\n")

    async def list_tools(ctx: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(tools=TOOLS)

    async def call_tool(ctx: Any, params: Any) -> CallToolResult:
        nonlocal calls
        arguments = params.arguments or {}
        name = str(arguments.get("paper") or arguments.get("name") or "")
        calls += 1
        record(params.name, name)
        try:
            if params.name == "wait":
                await anyio.sleep(arguments["seconds"])
            elif params.name == "queue":
                await gate.wait()
            elif params.name == "open_gate":
                gate.set()
        except anyio.get_cancelled_exc_class():
            record("cancelled", name)
            raise
        return CallToolResult(
            content=[TextContent(type="text", text=f"{params.name} {name}".strip())],
            structured_content={"count": calls, "pid": os.getpid()},
        )

    return Server("counting", version="1.0", on_list_tools=list_tools, on_call_tool=call_tool)


if __name__ == "__main__":
    options = parser()
    options.add_argument("--journal", type=Path, required=True)
    chosen = options.parse_args()
    serve(counting(chosen.journal), chosen)
