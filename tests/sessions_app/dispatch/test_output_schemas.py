"""Output schemas of a hostile server: none of them blocks the event loop."""

import asyncio
import socket
import threading
from contextlib import nullcontext
from typing import Any

import pytest

from catalog import cache
from catalog.definitions import validation
from servers.connections import calls as upstream_calls
from sessions_app.dispatch import authorization
from sessions_app.ledger import writer as ledger_writer
from sessions_app.models import Call
from tests.sessions_app.sessions.test_endpoint import Web
from tests.support.agent_client import make_agent_client
from tests.support.factories import ingest_tools, make_server, tool_object
from tests.support.upstream_calls import without_direct_caller
from tests.support.upstreams.scripted import ReceivedRequest, ScriptedServer, full_response
from tests.support.waiting import scaled

# Catastrophic backtracking: Python's `re`, which the SDK's client uses on the event loop, would
# need about 2^60 steps.
PATTERN = "^(a+)+$"
RESULT = '{"content": [], "structuredContent": {"word": "%s!"}, "resultType": "complete"}' % (
    "a" * 60
)


async def evil(asked: ReceivedRequest) -> bool:
    await asked.write(full_response(asked.result(RESULT)))
    return True


@pytest.mark.parametrize("era", ["modern", "legacy"])
@pytest.mark.parametrize("client", ["direct", "sdk"])
@pytest.mark.django_db(transaction=True)
def test_a_pattern_with_catastrophic_backtracking_is_validated_at_once(client, era, monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))
    server = make_server(url=f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", slug="evil")
    word = {"type": "object", "properties": {"word": {"type": "string", "pattern": PATTERN}}}
    ingest_tools(server, tool_object("ping", outputSchema=word))
    cache.clear()
    authorization.clear()
    agent = make_agent_client("scout", mode="deferred")
    upstream = ScriptedServer(listener, evil, era=era)
    web = Web(agent.key, agent.open().id, cached=True)
    compiled: list[threading.Thread] = []

    class RecordingValidator(validation.Validator):
        def __init__(self, schema: Any) -> None:
            compiled.append(threading.current_thread())
            super().__init__(schema)

    async def scenario() -> list[Any]:
        async with (
            asyncio.timeout(scaled(30)),
            upstream.serving(),
            ledger_writer.run_writer(),
            upstream_calls.call_pool(),
        ):
            body = {"tool_name": "evil__ping", "arguments": {}}
            return [await web.call(body) for _ in range(3)]

    monkeypatch.setattr(validation, "Validator", RecordingValidator)
    monkeypatch.setattr(validation.validators, "_compiled", {})
    with without_direct_caller() if client == "sdk" else nullcontext():
        answers = asyncio.run(scenario())
    assert [answer.code for answer in answers] == ["output_invalid"] * 3
    assert "does not match" in answers[0].json["content"][0]["text"]
    assert set(Call.objects.values_list("state", flat=True)) == {"failed"}
    assert len(upstream.calls) == 3
    assert len(compiled) == 2  # input and output, once
    assert threading.main_thread() not in compiled, "schemas must be compiled off the event loop"
    authorization.clear()
