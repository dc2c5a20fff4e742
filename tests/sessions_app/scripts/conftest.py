"""Fixtures: an agent that may run scripts over two servers, and the parts that run them."""

import asyncio
import json
from typing import Any

import pytest

from catalog import cache
from catalog.approvals.actions import approve
from catalog.audit import Actor
from catalog.models import Tool
from servers.connections import calls as upstream_calls
from servers.models import Server
from sessions_app.agents import rate_limits
from sessions_app.dispatch import authorization
from sessions_app.held_calls.execution import Executor
from sessions_app.ledger import writer as ledger_writer
from sessions_app.scripts import runner
from sessions_app.scripts.runner import Continuer
from sessions_app.sessions import endpoint
from tests.sessions_app.held_calls.conftest import NoCommits
from tests.sessions_app.sessions.test_endpoint import SAY, Web
from tests.support.agent_client import make_agent_client
from tests.support.asgi_requests import AsgiResponse, bearer_headers, exchange, make_scope
from tests.support.factories import ingest_tools, make_program, tool_object
from tests.support.waiting import scaled


def result(text: str = "", structured: Any = None, **more: Any) -> str:
    """Return a result, as JSON, that the tool `say` gives back."""
    body: dict[str, Any] = {"content": [{"type": "text", "text": text}], "resultType": "complete"}
    return json.dumps(body | ({"structuredContent": structured} if structured else {}) | more)


def add_parameter() -> None:
    """Change the tool `raw__say`, and approve that: it requires one more argument."""
    properties = {"result": {"type": "string"}, "new": {"type": "string"}}
    changed = SAY | {"properties": properties, "required": ["result", "new"]}
    server = Server.objects.get(slug="raw")
    say = tool_object("say", inputSchema=changed)
    ingest_tools(server, say, tool_object("later"), tool_object("seen"))
    approve(Tool.objects.get(server=server, name="say"), actor=Actor.command("tests"))


class ScriptWeb(Web):
    """The endpoint, an executor of approved calls, and what continues scripts."""

    def __init__(self, key: str, session: str) -> None:
        super().__init__(key, session, cached=True)
        self.executor, self.continuer = Executor(NoCommits()), Continuer(NoCommits())

    async def script(self, code: str, **body: Any) -> dict[str, Any]:
        response = await self.post("scripts", {"code": code, **body})
        answer: dict[str, Any] = response.json
        return answer

    async def get_run(self, run_id: str, wait: float = 0, key: str | None = None) -> AsgiResponse:
        scope = make_scope(
            "GET", f"/api/v1/scripts/{run_id}", bearer_headers(key or self.key, b"", {})
        )
        scope["query_string"] = f"wait={wait:g}".encode() if wait else b""
        found = endpoint.find_operation(scope)
        assert found is not None

        async def app(*args: Any) -> None:
            await endpoint.serve(*found, *args)

        return await exchange(app, scope, b"", self.left)

    async def execute(self) -> None:
        """Execute what was approved, and continue the scripts that waited for it."""
        await self.executor.run_once()
        await self.executor.drain()
        await self.continuer.run_once()
        await runner.drain()


@pytest.fixture
def agent(transactional_db):
    for slug in ("raw", "desk"):
        ingest_tools(
            make_program("raw_calls", slug=slug),
            tool_object("say", inputSchema=SAY),
            tool_object("later"),
            tool_object("seen"),
        )
    cache.clear()
    authorization.clear()
    rate_limits.clear()
    yield make_agent_client("scout", mode="deferred", code_mode=True)
    authorization.clear()


@pytest.fixture
def run(agent):
    """Run a scenario with everything that the lifespan starts."""

    def run(scenario: Any, **opened: Any) -> Any:
        session = agent.open(**opened).id

        async def inside() -> Any:
            async with (
                asyncio.timeout(scaled(60)),
                ledger_writer.run_writer(),
                upstream_calls.call_pool(),
            ):
                try:
                    return await scenario(ScriptWeb(agent.key, session))
                finally:
                    await runner.stop()

        return asyncio.run(inside())

    return run


@pytest.fixture
def script(run):
    """Run one script and return the answer to its request."""

    def script(code: str, **body: Any) -> dict[str, Any]:
        async def scenario(web: ScriptWeb) -> dict[str, Any]:
            return await web.script(code, **body)

        answer: dict[str, Any] = run(scenario)
        return answer

    return script
