"""One installation for the folder, with servers of both eras behind it, and clients of MCP."""

import json
from contextlib import asynccontextmanager

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import Implementation, ToolListChangedNotification

from tests.e2e.live.conftest import register
from tests.support.agents import make_agent, register_stdio
from tests.support.installation import Installation
from tests.support.upstreams.running import running_http

MODERN, LEGACY = "2026-07-28", "2025-11-25"


@pytest.fixture(scope="package")
def toolcrib(tmp_path_factory):
    """Toolcrib before three servers: `fixtures` of the newer era, `old` and `weather`."""
    with (
        Installation(
            tmp_path_factory.mktemp("mcp"),
            {"TOOLCRIB_BODY_TIMEOUT": "2", "TOOLCRIB_MAX_STREAMS": "4"},
        ) as running,
        running_http("conformance") as fixtures,
        running_http("workshop") as workshop,
    ):
        register(running, "fixtures", fixtures)
        register(running, "workshop", workshop)
        register_stdio(running, "old", "conformance", "--legacy")
        register_stdio(running, "weather", "healthy")
        yield running


_made = 0


@pytest.fixture
def agent(toolcrib):
    """An agent whose tools are behind the meta-tools, with a key of its own."""
    global _made
    _made += 1
    return make_agent(toolcrib, f"agent-{_made}", mode="deferred")


def another(toolcrib, **settings):
    global _made
    _made += 1
    return make_agent(toolcrib, f"agent-{_made}", **settings)


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
