"""Fixtures: an agent whose calls a rule holds, and the parts that execute them."""

import asyncio
import json
from typing import Any

import pytest

from servers.connections import calls as upstream_calls
from sessions_app.held_calls.execution import Executor
from sessions_app.ledger import writer as ledger_writer
from sessions_app.sessions import endpoint
from tests.sessions_app.rules.test_dispatch import add_rule
from tests.sessions_app.sessions.test_endpoint import BODY, Web, agent, in_database
from tests.support.asgi_requests import AsgiResponse, bearer_headers, exchange, make_scope
from tests.support.waiting import scaled

__all__ = ["agent", "in_database"]


class NoCommits:
    """A database in which no commit is noticed: the executor is run by hand."""

    changes = 0

    async def wait(self, seen: int, least: float, most: float) -> int:
        await asyncio.sleep(3600)
        return 0


class Crib(Web):
    """The endpoint, and one executor of approved calls."""

    def __init__(self, key: str, session: str) -> None:
        super().__init__(key, session, cached=True)
        self.executor = Executor(NoCommits())

    async def check(self, call_id: str, wait: float = 0, key: str | None = None) -> AsgiResponse:
        query = f"wait={wait:g}" if wait else ""
        scope = make_scope(
            "GET", f"/api/v1/calls/{call_id}", bearer_headers(key or self.key, b"", {})
        )
        scope["query_string"] = query.encode()
        found = endpoint.find_operation(scope)
        assert found is not None

        async def app(*args: Any) -> None:
            await endpoint.serve(*found, *args)

        return await exchange(app, scope, b"", self.left)

    async def execute(self) -> None:
        """Execute what was approved, and wait for the results."""
        await self.executor.run_once()
        await self.executor.drain()


@pytest.fixture
def rule(agent):
    return add_rule("Ask first", effect="hold", reason="It changes data.", tools=["raw__*"])


@pytest.fixture
def run(agent, rule):
    """Run a scenario with everything that the lifespan starts."""

    def run(scenario: Any, **opened: Any) -> Any:
        session = agent.open(**opened).id

        async def inside() -> Any:
            async with (
                asyncio.timeout(scaled(60)),
                ledger_writer.run_writer(),
                upstream_calls.call_pool(),
            ):
                return await scenario(Crib(agent.key, session))

        return asyncio.run(inside())

    return run


def said(text: str) -> dict[str, Any]:
    """Return the body of a call to which the server answers with this text."""
    result = {"content": [{"type": "text", "text": text}], "resultType": "complete"}
    return {"tool_name": "raw__say", "arguments": {"result": json.dumps(result)}}


__all__ += ["BODY", "said"]
