"""Call metrics per server, on pages and in the API."""

import asyncio
import socket

import pytest

from servers.connections import calls as upstream_calls
from servers.connections import metrics
from tests.support.factories import make_program, make_server
from tests.support.people import make_person
from tests.support.upstream_calls import call_target, call_tool, run_scenario, wait_until
from toolcrib.lib.roles import Role
from toolcrib.pages.about import facts

pytestmark = pytest.mark.django_db(transaction=True)


def capacity_fact() -> str:
    """Return the fact about server capacity on the about page."""
    return next(
        fact.value for part in facts() for fact in part.facts if fact.label == "Server capacity"
    )


def test_running_queued_and_rejected_calls_of_a_server_are_counted(settings, client, operator):
    settings.CALLS_QUEUED = 2
    server = make_program("raw_calls", slug="raw", concurrency=2)
    client.force_login(operator)

    async def scenario():
        def call() -> "asyncio.Task[object]":
            wait = upstream_calls.call(call_target(server, concurrency=2), "hang", {}, timeout=30)
            return asyncio.create_task(wait)

        snapshots = [metrics.server_metrics(server)]
        calls = []
        for number in range(1, 5):
            calls.append(call())
            await wait_until(lambda n=number: counted() == n, "the call runs or is queued")
            if number == 1:
                await wait_until(
                    lambda: metrics.server_metrics(server).connection == "ready", "connected"
                )
            snapshots.append(metrics.server_metrics(server))
        assert (await call()).code == "busy"
        snapshots.append(metrics.server_metrics(server))
        listed = await asyncio.to_thread(metrics.all_server_metrics)
        about = await asyncio.to_thread(capacity_fact)
        page = await asyncio.to_thread(client.get, f"/servers/{server.slug}")
        for task in calls:
            task.cancel()
        await asyncio.wait(calls)
        return snapshots, listed, about, page.content.decode(), metrics.server_metrics(server)

    def counted() -> int:
        now = metrics.server_metrics(server)
        return now.in_flight + now.waiting

    snapshots, listed, about, page, after = run_scenario(scenario)
    numbers = [(each.in_flight, each.waiting, each.refused) for each in snapshots]
    assert numbers == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (2, 1, 0), (2, 2, 0), (2, 2, 1)]
    assert [each.sentence for each in snapshots] == [
        "",
        "",
        "All 2 slots in use: the next call is queued.",
        "All 2 slots in use, 1 call queued.",
        *["All 2 slots in use, 2 calls queued (maximum): further calls are rejected."] * 2,
    ]
    assert [each.connection for each in snapshots] == ["none", *["ready"] * 5]
    assert listed == [snapshots[-1]]
    assert about == "1 server delays or rejects calls; see GET /api/v1/health"
    assert "2 calls queued (maximum)" in page
    assert "2 of 2, 2 queued, 1 rejected since start" in " ".join(page.split())
    assert (after.in_flight, after.waiting, after.sentence) == (0, 0, "")
    assert metrics.all_server_metrics() == []
    assert capacity_fact() == "no server delays or rejects calls"


def test_an_open_circuit_is_reported_with_the_time_of_the_next_try():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = make_server(url=f"http://127.0.0.1:{port}/mcp")

    async def scenario():
        for _ in range(4):
            await call_tool(server, "say")
        return metrics.server_metrics(server)

    snapshot = run_scenario(scenario)
    assert snapshot.connection == "pausing"
    assert 1 <= snapshot.retry_in <= 8
    assert snapshot.sentence.endswith(f"retry in {snapshot.retry_in} s.")


def test_operators_see_the_log_of_a_running_program(client, operator):
    viewer = make_person("vera@example.org", Role.VIEWER)
    server = make_program("raw_stdio", "--do", "stderr_flood", slug="raw")

    async def scenario():
        await call_tool(server, "say")
        await wait_until(lambda: "the last line" in metrics.read_log(server), "the log is read")
        pages = []
        for person in (operator, viewer):
            await asyncio.to_thread(client.force_login, person)
            page = await asyncio.to_thread(client.get, f"/servers/{server.slug}")
            pages.append(page.content.decode())
        return metrics.read_log(server), pages

    log, (shown, hidden) = run_scenario(scenario)
    assert "the last line" in log.splitlines()[-1]
    assert len(log) < 4_000  # of a flood
    assert "Newest lines on stderr" in shown
    assert "the last line" in shown
    assert "the last line" not in hidden
    assert metrics.read_log(server) == ""
