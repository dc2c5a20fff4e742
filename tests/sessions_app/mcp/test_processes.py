"""MCP clients with handshake versions, whose requests reach several web processes."""

import asyncio
from contextlib import AsyncExitStack

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from sessions_app.dispatch import authorization
from sessions_app.ledger import writer as ledger_writer
from sessions_app.mcp import sessions as mcp_sessions
from sessions_app.mcp.endpoint import Endpoint
from sessions_app.models import AgentSession
from tests.support.agent_client import add_tools, make_agent_client


@pytest.mark.django_db(transaction=True)
def test_each_request_of_a_handshake_client_may_reach_another_process():
    """Two endpoints answer in turn; what a process caches is cleared between two requests."""
    add_tools("github", "create_issue", "list_issues")
    scout = make_agent_client("scout", mode="deferred", strategy="inject")
    processes = [Endpoint(), Endpoint()]
    turns = 0

    async def balanced(scope, receive, send):
        nonlocal turns
        turns += 1
        authorization.clear()
        mcp_sessions.clear_caches()
        await processes[turns % 2](scope, receive, send)

    async def work():
        headers = {"Authorization": f"Bearer {scout.key}"}
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(ledger_writer.run_writer())
            for process in processes:
                await stack.enter_async_context(process.run())
            http = await stack.enter_async_context(
                httpx2.AsyncClient(headers=headers, transport=httpx2.ASGITransport(app=balanced))
            )
            transport = streamable_http_client("http://localhost/mcp", http_client=http)
            client = await stack.enter_async_context(Client(transport, mode="legacy", cache=None))
            before = await client.list_tools()
            loaded = await client.call_tool("load_tools", {"group_id": "mcp:github"})
            assert "github__create_issue" in loaded.content[0].text
            wrong = await client.call_tool("github__create_issue", {})
            assert wrong.is_error
            assert '"what"' in wrong.content[0].text
            after = await client.list_tools()
            return [[tool.name for tool in listed.tools] for listed in (before, after)]

    before, after = asyncio.run(work())
    assert set(after) - set(before) == {"github__create_issue", "github__list_issues"}
    session = AgentSession.objects.get()
    kinds = [event.kind for event in session.events.all()]
    assert kinds == ["opened", "catalog", "loaded", "refused", "catalog", "closed"]
    assert turns >= 6
