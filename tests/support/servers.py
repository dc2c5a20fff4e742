"""Register and sync upstream servers through the API, and call them directly."""

import asyncio

from mcp import Client

from tests.support.waiting import wait_for


def call_upstream(url, tool, **arguments):
    """Call a tool of an upstream server directly, without Toolcrib."""

    async def call():
        async with Client(url, read_timeout_seconds=60) as client:
            result = await client.call_tool(tool, arguments)
            assert not result.is_error, result
            return result

    return asyncio.run(call())


def register(toolcrib, slug, url, **fields):
    """Register a server and wait for its first sync."""
    status, body = toolcrib.api(
        "POST", "/servers", {"name": slug, "slug": slug, "transport": "http", "url": url, **fields}
    )
    assert status == 201, body
    wait_for(lambda: last_synced_at(toolcrib, slug), 30, what=f"{slug} is synced")


def last_synced_at(toolcrib, slug):
    return toolcrib.api("GET", f"/servers/{slug}")[1]["last_synced_at"]


def list_sync_runs(toolcrib, slug):
    return toolcrib.api("GET", f"/servers/{slug}/sync-runs?limit=100")[1]["items"]
