"""MCP clients of the tests: the SDK's client of either era, with an agent's key."""

import itertools
import json
from contextlib import asynccontextmanager

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import Implementation, ToolListChangedNotification

from tests.support.agents import make_agent

MODERN, LEGACY = "2026-07-28", "2025-11-25"
_numbers = itertools.count(1)


def another(toolcrib, **settings):
    """Create an agent with a name of its own."""
    return make_agent(toolcrib, f"agent-{next(_numbers)}", **settings)


class Heard:
    """What a client was told without asking."""

    def __init__(self) -> None:
        self.changes = 0

    async def __call__(self, message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            self.changes += 1


@asynccontextmanager
async def connected(agent, *, mode="auto", path="", heard=None, headers=None):
    """The SDK's client with an agent's key, at /mcp + path."""
    given = {"Authorization": f"Bearer {agent.key}", **(headers or {})}
    async with httpx2.AsyncClient(headers=given, timeout=60, trust_env=False) as http:
        transport = streamable_http_client(f"{agent.url}/mcp{path}", http_client=http)
        async with Client(
            transport,
            mode=mode,
            cache=None,
            message_handler=heard,
            client_info=Implementation(name="scripted", version="3.1"),
        ) as client:
            yield client


def text_of(result):
    return "\n".join(part.text for part in result.content if part.type == "text")


async def told(client, tool, **arguments):
    """What a meta-tool answers, as the JSON in its one text."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, text_of(result)
    (part,) = result.content
    return json.loads(part.text)


def names(listed):
    return [tool.name for tool in listed.tools]
