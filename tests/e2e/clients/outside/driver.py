"""Let a test drive a client program: commands on stdin, answers on stdout, as lines of JSON.

Runs in the client's own environment, so it needs the standard library only. A command is
{"id", "do": "list"}, {"id", "do": "call", "name", "arguments"} or {"do": "cancel", "id"}; an answer
has the id and the tools, the result of the call, or the exception as `failure`.
"""

import asyncio
import base64
import dataclasses
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

ListTools = Callable[[], Awaitable[list[str]]]
CallTool = Callable[..., Awaitable[object]]


def report(value: object) -> None:
    sys.stdout.write(json.dumps(value, default=str) + "\n")
    sys.stdout.flush()


def settings() -> tuple[str, dict[str, str]]:
    """Return the URL and the headers that the program was started with."""
    url, key = sys.argv[1:3]
    return url, {"Authorization": f"Bearer {key}"}


def describe(value: Any) -> Any:
    """Return what a client made of a result, in JSON; of unknown objects the type and text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "model_dump"):
        return describe(value.model_dump())
    if dataclasses.is_dataclass(value):
        return describe(
            {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        )
    if hasattr(value, "to_dict"):
        return describe(value.to_dict())
    return {"type": type(value).__name__, "text": str(value)}


async def serve(list_tools: ListTools, call_tool: CallTool) -> None:
    """Answer commands until the standard input ends.

    `call_tool` gets a name, arguments and a callback for the steps of its progress.
    """
    report("ready")
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(command: dict[str, Any]) -> None:
        steps: list[object] = []

        async def count(*step: object, **named: object) -> None:
            steps.append(step or named)

        body: dict[str, Any]
        try:
            if command["do"] == "list":
                body = {"tools": await list_tools()}
            else:
                arguments = command.get("arguments", {})
                body = {"result": describe(await call_tool(command["name"], arguments, count))}
        except asyncio.CancelledError:
            body = {"cancelled": True}
        except BaseException as error:  # noqa: BLE001 - some clients raise groups, for the test to judge
            body = {"failure": f"{type(error).__name__}: {error}"[:2_000]}
        report({"id": command["id"], "steps": len(steps), **body})

    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        if command["do"] == "cancel":
            running[command["id"]].cancel()
        else:
            running[command["id"]] = asyncio.create_task(answer(command))


def run(main: Callable[..., Awaitable[None]]) -> None:
    """Run a program: `main` gets the URL and the headers."""
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(main(*settings()))  # type: ignore[arg-type]
