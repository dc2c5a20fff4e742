"""A running installation for the tests of this folder."""

import asyncio
import json
import sys

import pytest
from mcp import Client

from tests.support.installation import ROOT, Installation
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def toolcrib(tmp_path_factory):
    with Installation(tmp_path_factory.mktemp("installation")) as running:
        yield running


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """An installation with the demo server and an agent, and the agent's key."""
    folder = tmp_path_factory.mktemp("demo")
    file = folder / "mcp.json"
    program = {"command": sys.executable, "args": ["-m", "servers.demo"], "cwd": str(ROOT)}
    file.write_text(json.dumps({"mcpServers": {"demo": program}}))
    with Installation(folder / "data") as toolcrib:
        done = toolcrib.command("import_servers", str(file), "--allow-stdio", "--wait", "--json")
        assert done.returncode == 0, done.stderr
        made = toolcrib.command("create_agent", "scout", "--group", "mcp:demo", "--json")
        assert made.returncode == 0, made.stderr
        yield toolcrib, json.loads(made.stdout)["key"]


def ask(url, tool, **arguments):
    """Call a tool of an upstream directly, as somebody else's client."""

    async def call():
        async with Client(url, read_timeout_seconds=60) as client:
            result = await client.call_tool(tool, arguments)
            assert not result.is_error, result
            return result

    return asyncio.run(call())


def register(toolcrib, slug, url, **more):
    """Register a server and wait for its first sync."""
    status, body = toolcrib.api(
        "POST", "/servers", {"name": slug, "slug": slug, "transport": "http", "url": url, **more}
    )
    assert status == 201, body
    wait_for(lambda: synced(toolcrib, slug), 30, what=f"{slug} is synced")


def synced(toolcrib, slug):
    return toolcrib.api("GET", f"/servers/{slug}")[1]["last_synced_at"]


def runs(toolcrib, slug):
    return toolcrib.api("GET", f"/servers/{slug}/sync-runs?limit=100")[1]["items"]
