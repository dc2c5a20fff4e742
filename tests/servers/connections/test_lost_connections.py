"""Servers that crash, lose their session or stop reading after a call was sent."""

import asyncio
import json
from contextlib import ExitStack

import pytest

from servers.connections import calls as upstream_calls
from servers.connections import connection_state, streams
from tests.support.upstream_calls import (
    HTTP_CLIENTS,
    SHORT_TIMEOUT,
    call_tool,
    in_flight,
    release_held_calls,
    run_scenario,
    running_upstream,
    wait_until,
    wait_until_received,
)

pytestmark = pytest.mark.django_db(transaction=True)

# --- Lost answers -----------------------------------------------------------------------------


def test_a_program_that_exits_leaves_the_outcome_unknown_and_restarts_without_the_call():
    async def scenario():
        outcome = await call_tool(server, "die")
        assert (outcome.state, outcome.code) == ("unknown", "crashed")
        assert outcome.message.endswith("Whether the tool ran is not known.")
        received = json.loads((await call_tool(server, "seen")).content[0]["text"])
        assert "die" not in [each.get("params", {}).get("name") for each in received]

    with running_upstream("stdio") as server:
        run_scenario(scenario)


@pytest.mark.parametrize("how", HTTP_CLIENTS)
def test_an_incomplete_http_response_leaves_the_outcome_unknown_and_is_not_retried(how):
    async def scenario():
        outcome = await call_tool(server, "cut")
        assert (outcome.state, outcome.code) == ("unknown", "closed")
        received = json.loads((await call_tool(server, "seen")).content[0]["text"])
        assert [
            each["params"]["name"] for each in received if "arguments" in each.get("params", {})
        ] == ["cut", "seen"]

    with running_upstream(how) as server:
        run_scenario(scenario)


@pytest.mark.parametrize(
    ("status", "state", "code"),
    [
        (401, "failed", "auth"),
        (400, "failed", "http_status"),
        (429, "failed", "http_status"),
        (503, "failed", "http_status"),
        (500, "unknown", "http_status"),
        (504, "unknown", "http_status"),
    ],
)
@pytest.mark.parametrize("how", [*HTTP_CLIENTS, "sse"])
def test_the_http_status_decides_whether_the_tool_may_have_run(status, state, code, how):
    async def scenario():
        outcome = await call_tool(server, "status", status=status, body="secret body")
        assert (outcome.state, outcome.code) == (state, code)
        assert "secret body" not in outcome.message

    with running_upstream(how) as server:
        run_scenario(scenario)


@pytest.mark.parametrize("how", HTTP_CLIENTS)
def test_a_call_that_cannot_be_sent_reveals_that_the_server_is_gone(how):
    async def scenario():
        assert (await call_tool(server, "seen")).state == "succeeded"
        owner = upstream_calls.current_pool().owners[server.pk, ""]
        connection = owner.ready.result()
        stop.close()
        outcome = await call_tool(server, "say", result='{"content": []}')
        assert (outcome.state, outcome.code) == ("not_sent", "refused")
        assert connection.closed.is_set()
        await wait_until(lambda: owner.failures > 0, "the owner reconnects")

    with ExitStack() as stop:
        server = stop.enter_context(running_upstream(how))
        run_scenario(scenario)


@pytest.mark.parametrize("how", HTTP_CLIENTS)
def test_a_lost_session_fails_only_the_call_that_reveals_it(how):
    async def scenario():
        assert (await call_tool(server, "seen")).state == "succeeded"
        lost = await call_tool(server, "forget")
        assert (lost.state, lost.code) == ("unknown", "closed")
        after = await asyncio.gather(
            *(call_tool(server, "say", result='{"content": []}') for _ in "123")
        )
        assert {outcome.state for outcome in after} == {"succeeded"}

    with running_upstream(how.replace("http", "http legacy")) as server:
        run_scenario(scenario)


@pytest.mark.parametrize("how", HTTP_CLIENTS)
def test_running_calls_succeed_when_another_call_reveals_a_lost_session(how):
    async def scenario():
        held = asyncio.create_task(call_tool(server, "held"))
        await wait_until_received(server, "held")
        first = upstream_calls.current_pool().owners[server.pk, ""].ready.result()
        lost = await call_tool(server, "forget")
        assert (lost.state, lost.code) == ("unknown", "closed")
        assert not first.closed.is_set()
        after = asyncio.create_task(call_tool(server, "say", result='{"content": []}'))
        await wait_until(lambda: in_flight(server.pk) == 2, "the next call is on its way")
        await release_held_calls(server)
        assert (await held).content == [{"type": "text", "text": "held"}]
        assert (await after).state == "succeeded"
        assert first.closed.is_set()

    with running_upstream(how.replace("http", "http legacy")) as server:
        run_scenario(scenario)


@pytest.mark.parametrize("how", HTTP_CLIENTS)
def test_an_endless_call_delays_the_next_connection_only_until_the_drain_timeout(how, monkeypatch):
    monkeypatch.setattr(connection_state, "DRAIN_TIMEOUT", 0.3)

    async def scenario():
        held = asyncio.create_task(call_tool(server, "held"))
        await wait_until_received(server, "held")
        assert (await call_tool(server, "forget")).state == "unknown"
        assert (await call_tool(server, "say", result='{"content": []}')).state == "succeeded"
        assert (await held).state == "unknown"

    with running_upstream(how.replace("http", "http legacy")) as server:
        run_scenario(scenario)


def only_connection(server):
    return upstream_calls.current_pool().owners[server.pk, ""].ready.result()


@pytest.mark.parametrize("era", ["modern", "legacy"])
def test_over_http_sse_a_rejected_message_does_not_affect_other_calls(era):
    async def scenario():
        held = asyncio.create_task(call_tool(server, "held"))
        await wait_until_received(server, "held")
        first = only_connection(server)
        refused = await call_tool(server, "status", status=429)
        assert (refused.state, refused.code) == ("failed", "http_status")
        await release_held_calls(server)
        assert (await held).content == [{"type": "text", "text": "held"}]
        assert only_connection(server) is first
        assert not first.closed.is_set()

    with running_upstream(f"sse {era}") as server:
        run_scenario(scenario)


def test_over_http_sse_a_lost_stream_is_reopened():
    async def scenario():
        await call_tool(server, "seen")
        first = only_connection(server)
        lost = await call_tool(server, "status", status=404)
        assert (lost.state, lost.code) == ("failed", "http_status")
        assert first.closed.is_set()
        assert (await call_tool(server, "say", result='{"content": []}')).state == "succeeded"

    with running_upstream("sse") as server:
        run_scenario(scenario)


# --- Servers that do not accept messages ------------------------------------------------------


@pytest.mark.parametrize("post", ["late", "never"])
def test_a_post_that_is_not_answered_while_its_tool_runs_blocks_nothing(post, monkeypatch):
    monkeypatch.setattr(streams, "SEND_TIMEOUT", 0.1)

    async def scenario():
        held = asyncio.create_task(call_tool(server, "held", post=post))
        await wait_until_received(server, "held")
        first = only_connection(server)
        for _ in range(3):
            late = await call_tool(
                server, "later", seconds=0.2, post="late"
            )  # longer than the timeout
            assert late.state == "succeeded"
        refused = await call_tool(server, "status", status=400, seconds=0.3)
        assert (refused.state, refused.code) == ("failed", "http_status")
        await release_held_calls(server)
        assert (await held).content == [{"type": "text", "text": "held"}]
        assert only_connection(server) is first
        assert not first.closed.is_set()

    with running_upstream("sse") as server:
        run_scenario(scenario)


def test_over_http_sse_a_server_that_accepts_no_messages_is_reconnected(monkeypatch):
    monkeypatch.setattr(streams, "SEND_TIMEOUT", 0.2)
    monkeypatch.setattr(upstream_calls, "LATE_GRACE", 0.1)

    async def scenario():
        await call_tool(server, "seen")
        owner = upstream_calls.current_pool().owners[server.pk, ""]
        other = asyncio.create_task(call_tool(server, "held"))
        await wait_until_received(server, "held")
        assert (await call_tool(server, "deaf", within=0.2)).state == "timed_out"
        await wait_until(lambda: owner.failures == 1, "the connection is lost")
        assert owner.last_error.message == "The server did not accept a message within 0.2 s."
        assert (await other).state == "unknown"
        assert (await call_tool(server, "say", result='{"content": []}')).state == "succeeded"

    with running_upstream("sse") as server:
        run_scenario(scenario)


BIG = "x" * 1_000_000  # more than a pipe holds


def test_a_program_that_stops_reading_is_restarted_and_a_partly_sent_call_runs_once(
    monkeypatch,
):
    monkeypatch.setattr(streams, "SEND_TIMEOUT", 0.2)
    monkeypatch.setattr(upstream_calls, "LATE_GRACE", 0.1)

    async def scenario():
        assert (await call_tool(server, "deaf")).state == "succeeded"
        owner = upstream_calls.current_pool().owners[server.pk, ""]
        complete = await call_tool(
            server, "say", within=0.3, result='{"content": []}', mark="complete"
        )
        assert complete.state == "timed_out"  # all of it is in the pipe
        partial = asyncio.create_task(call_tool(server, "say", result='{"content": []}', mark=BIG))
        await wait_until(lambda: in_flight(server.pk) == 1, "the call is out")
        queued = await call_tool(server, "say", result='{"content": []}', mark="queued")
        assert [(await partial).state, queued.state] == ["succeeded", "succeeded"]
        assert owner.last_error.message == "The server did not accept a message within 0.2 s."
        received = json.loads((await call_tool(server, "seen")).content[0]["text"])
        arguments = [each["params"].get("arguments", {}) for each in received if "params" in each]
        assert sorted(each["mark"] for each in arguments if "mark" in each) == ["queued", BIG]

    with running_upstream("stdio") as server:
        run_scenario(scenario)


def test_a_program_that_does_not_read_while_its_tool_runs_is_waited_for(monkeypatch, tmp_path):
    checks = []
    may_block = streams._StreamBridge._may_block

    def recorded(bridge, message):
        blocks = may_block(bridge, message)
        if (message.params or {}).get("name") == "say":
            checks.append(blocks)
        return blocks

    monkeypatch.setattr(streams._StreamBridge, "_may_block", recorded)
    monkeypatch.setattr(streams, "SEND_TIMEOUT", 0.05)
    end, deaf = tmp_path / "end", tmp_path / "end.deaf"

    async def scenario():
        await call_tool(server, "seen")
        first = only_connection(server)
        busy = asyncio.create_task(call_tool(server, "deaf", until=str(end)))
        await wait_until(deaf.exists, "the program reads no more")
        after = asyncio.create_task(call_tool(server, "say", result='{"content": []}', mark=BIG))
        await wait_until(lambda: len(checks) > 3, "the send timeout was extended")
        # From here on only the machine's speed decides how long sending takes.
        monkeypatch.setattr(streams, "SEND_TIMEOUT", SHORT_TIMEOUT)
        end.touch()
        assert [(await busy).state, (await after).state] == ["succeeded", "succeeded"]
        assert only_connection(server) is first
        assert not first.closed.is_set()

    with running_upstream("stdio") as server:
        run_scenario(scenario)
