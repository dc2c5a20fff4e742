"""MCP clients for tests: the SDK's client in either protocol era, with an agent's key."""

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


def make_unique_agent(toolcrib, **settings):
    """Create an agent with a new name."""
    return make_agent(toolcrib, f"agent-{next(_numbers)}", **settings)


class NotificationCounter:
    """Message handler that counts tool list notifications."""

    def __init__(self) -> None:
        self.tool_list_changes = 0

    async def __call__(self, message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            self.tool_list_changes += 1


@asynccontextmanager
async def connected_client(agent, *, mode="auto", path="", message_handler=None, headers=None):
    """Connect the SDK's client with an agent's key, at /mcp + path."""
    all_headers = {"Authorization": f"Bearer {agent.key}", **(headers or {})}
    async with httpx2.AsyncClient(headers=all_headers, timeout=60, trust_env=False) as http:
        transport = streamable_http_client(f"{agent.url}/mcp{path}", http_client=http)
        async with Client(
            transport,
            mode=mode,
            cache=None,
            message_handler=message_handler,
            client_info=Implementation(name="scripted", version="3.1"),
        ) as client:
            yield client


def result_text(result):
    return "\n".join(part.text for part in result.content if part.type == "text")


async def call_meta_tool(client, tool, **arguments):
    """Call a meta-tool and return the JSON in its text content."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result_text(result)
    (part,) = result.content
    return json.loads(part.text)


def tool_names(result):
    return [tool.name for tool in result.tools]
