"""What an operator is told of how busy servers are."""

import asyncio
import socket

import pytest

from servers.connections import calls as upstream_calls
from servers.connections import metrics
from tests.support.factories import make_program, make_server
from tests.support.upstream_calls import ask, run, target, until
from toolcrib.pages.about import facts

pytestmark = pytest.mark.django_db(transaction=True)


def told() -> str:
    """The fact about calls on the page for reports."""
    return next(fact.value for part in facts() for fact in part.facts if fact.label == "Calls")


def test_turns_queue_and_refusals_of_a_server_are_told(settings, client, operator):
    settings.CALLS_QUEUED = 2
    server = make_program("raw_calls", slug="raw", concurrency=2)
    client.force_login(operator)

    async def scenario():
        def call() -> "asyncio.Task[object]":
            wait = upstream_calls.call(target(server, concurrency=2), "hang", {}, timeout=30)
            return asyncio.create_task(wait)

        seen = [metrics.server_metrics(server)]
        calls = []
        for number in range(1, 5):
            calls.append(call())
            await until(lambda n=number: counted() == n, "the call is in or waits")
            if number == 1:
                await until(
                    lambda: metrics.server_metrics(server).connection == "ready", "connected"
                )
            seen.append(metrics.server_metrics(server))
        assert (await call()).code == "busy"
        seen.append(metrics.server_metrics(server))
        listed = await asyncio.to_thread(metrics.all_server_metrics)
        about = await asyncio.to_thread(told)
        page = await asyncio.to_thread(client.get, f"/servers/{server.slug}")
        for task in calls:
            task.cancel()
        await asyncio.wait(calls)
        return seen, listed, about, page.content.decode(), metrics.server_metrics(server)

    def counted() -> int:
        now = metrics.server_metrics(server)
        return now.in_flight + now.waiting

    seen, listed, about, page, after = run(scenario)
    numbers = [(gauge.in_flight, gauge.waiting, gauge.refused) for gauge in seen]
    assert numbers == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (2, 1, 0), (2, 2, 0), (2, 2, 1)]
    assert [gauge.sentence for gauge in seen] == [
        "",
        "",
        "All 2 of its slots are taken: the next call waits.",
        "All 2 of its slots are taken, and 1 call waits.",
        *["All 2 of its slots are taken and 2 calls wait, the most that may: more are refused."]
        * 2,
    ]
    assert [gauge.connection for gauge in seen] == ["none", *["ready"] * 5]
    assert listed == [seen[-1]]
    assert about == "1 server holds them up; GET /api/v1/health says which"
    assert "2 calls wait, the most that may" in page
    assert "2 of 2 slots taken, 2 waiting, 1 refused" in page
    assert (after.in_flight, after.waiting, after.sentence) == (0, 0, "")
    assert metrics.all_server_metrics() == []
    assert told() == "no server holds them up"


def test_an_open_breaker_is_told_with_the_time_of_the_next_try():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = make_server(url=f"http://127.0.0.1:{port}/mcp")

    async def scenario():
        for _ in range(4):
            await ask(server, "say")
        return metrics.server_metrics(server)

    gauge = run(scenario)
    assert gauge.connection == "pausing"
    assert 1 <= gauge.retry_in <= 8
    assert gauge.sentence.endswith(f"Toolcrib tries again in {gauge.retry_in} s.")
