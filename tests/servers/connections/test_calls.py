"""Calls of tools: what comes back, what stops one before it is sent, and where they come from."""

import asyncio
import json
import os
import signal
import socket

import pytest

from catalog.audit import SYSTEM
from servers.connections import calls as upstream_calls
from servers.models import Server
from servers.registration import actions as server_actions
from servers.secret import Secret
from tests.support.factories import make_program, make_server
from tests.support.upstream_calls import (
    HTTP,
    SOON,
    TWO_WAYS,
    WAYS,
    ask,
    run,
    target,
    until,
    upstream,
)
from tests.support.upstreams.running import running_http
from toolcrib.lib.json_codec import canonical

pytestmark = pytest.mark.django_db(transaction=True)

# --- What comes back --------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
def test_results_pass_unchanged_in_both_eras_over_every_transport(how):
    async def scenario():
        rich = await ask(server, "rich")
        assert rich.state == "succeeded"
        assert [item["type"] for item in rich.content] == [
            "text",
            "image",
            "audio",
            "resource_link",
        ]
        assert rich.content[0]["_meta"] == {"example.org/weight": 3}
        assert rich.content[1]["data"] == "iVBORw0KGgo="
        assert rich.content[3]["uri"] == "file:///etc/passwd"
        assert rich.has_structured
        assert json.dumps(rich.structured) == '{"a": [1, 1.0, null]}'
        assert not rich.is_error
        assert rich.written == (canonical(rich.content), canonical(rich.structured))
        assert rich.size == sum(len(text.encode()) for text in rich.written)
        failed = await ask(server, "fail")
        assert (failed.state, failed.is_error, failed.has_structured) == ("succeeded", True, False)
        assert upstream_calls.in_flight(server.pk) == 0

    with upstream(how, "workshop") as server:
        run(scenario)


def test_tools_of_a_server_with_an_event_stream_of_old_are_called_too():
    async def scenario():
        outcome = await ask(server, "get_forecast", city="Oslo")
        assert outcome.structured == {"city": "Oslo", "days": 3, "summary": "sunny"}

    with running_http("healthy", "--sse", "0") as url:
        server = make_server(url=url, transport="sse")
        run(scenario)


ODD = (
    '{"content": [{"type": "hologram", "x-y": 1, "text": "\\u00e9"}],'
    ' "structuredContent": null, "more": 2}'
)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_unknown_fields_and_a_structured_null_pass_as_they_are(how):
    async def scenario():
        outcome = await ask(server, "say", result=ODD)
        assert outcome.content == [{"type": "hologram", "x-y": 1, "text": "é"}]
        assert outcome.has_structured
        assert outcome.structured is None
        absent = await ask(server, "say", result='{"content": []}')
        assert (absent.content, absent.has_structured) == ([], False)

    with upstream(how) as server:
        run(scenario)


@pytest.mark.parametrize("how", WAYS)
def test_many_calls_run_at_once_on_one_connection_each_with_its_own_answer(how):
    async def scenario():
        waits = [ask(server, "wait", seconds=0.3, name=str(number)) for number in range(8)]
        outcomes = await asyncio.gather(*waits)
        names = [outcome.structured["name"] for outcome in outcomes]
        assert names == [str(number) for number in range(8)]
        assert len(upstream_calls._pool().owners) == 1

    with upstream(how, "workshop") as server:
        run(scenario)


@pytest.mark.parametrize("how", HTTP)
def test_arguments_that_a_tool_wants_in_headers_are_sent_there(how):
    schema = {
        "type": "object",
        "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
    }

    async def scenario():
        told = await ask(server, "headered", region="north", on={"schema": schema})
        assert told.state == "succeeded"
        assert told.structured == {"given": {"region": "north"}}
        untold = await ask(server, "headered", region="north")
        assert (untold.state, untold.code) == ("failed", "server_error")

    with upstream(how, "workshop") as server:
        run(scenario)


@pytest.mark.parametrize("how", WAYS)
def test_an_error_of_the_protocol_is_quoted_and_the_connection_goes_on(how):
    async def scenario():
        outcome = await ask(server, "error", message="No such tool:\n\x1b[31m" + "x" * 900)
        assert (outcome.state, outcome.code) == ("failed", "server_error")
        assert outcome.message.startswith("The server said: No such tool: ⟨U+001B⟩[31mxxx")
        assert len(outcome.message) < 530
        assert (await ask(server, "say", result='{"content": []}')).state == "succeeded"

    with upstream(how) as server:
        run(scenario)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_a_tool_that_asks_back_is_answered_with_a_sentence_and_asked_once(how):
    async def scenario():
        asks = '{"resultType": "input_required", "inputRequests": {}}'
        outcome = await ask(server, "say", result=asks)
        assert (outcome.state, outcome.code) == ("failed", "input_required")
        assert "does not support yet" in outcome.message
        seen = json.loads((await ask(server, "seen")).content[0]["text"])
        asked = [message for message in seen if message.get("params", {}).get("name") == "say"]
        assert len(asked) == 1

    with upstream(how) as server:
        run(scenario)


# --- Before it is sent ------------------------------------------------------------------------


def test_what_is_told_before_sending_can_stop_the_call():
    async def scenario():
        async def refuse():
            raise LookupError("no row")

        with pytest.raises(LookupError):
            await ask(server, "say", result="{}", on={"on_sent": refuse})
        assert upstream_calls.in_flight(server.pk) == 0
        seen = json.loads((await ask(server, "seen")).content[0]["text"])
        called = [each["params"]["name"] for each in seen if each.get("method") == "tools/call"]
        assert called == ["seen"]

    with upstream("stdio") as server:
        run(scenario)


@pytest.mark.parametrize(
    "value", [float("nan"), "\ud800", 10**5000], ids=["NaN", "surrogate", "digits"]
)
def test_arguments_that_are_no_json_are_not_sent(value):
    async def scenario():
        outcome = await ask(server, "say", value=value)
        assert (outcome.state, outcome.code) == ("not_sent", "invalid_arguments")

    server = make_program("raw_calls")
    run(scenario)


def test_a_connection_that_dies_before_the_call_is_sent_is_replaced_and_the_call_runs_once():
    async def scenario():
        pid = (await ask(server, "count")).structured["pid"]
        connection = upstream_calls._pool().owners[server.pk, ""].ready.result()
        told = []

        async def on_sent():
            told.append(1)
            os.kill(pid, signal.SIGKILL)
            await connection.closed.wait()

        outcome = await ask(server, "count", on={"on_sent": on_sent})
        assert outcome.state == "succeeded"
        assert outcome.structured["count"] == 1
        assert outcome.structured["pid"] != pid
        assert told == [1]

    with upstream("stdio", "workshop") as server:
        run(scenario)


def test_a_server_that_refuses_connections_gets_nothing_and_soon_is_not_tried_for_each_call():
    async def scenario():
        first = await ask(server, "say")
        assert (first.state, first.code) == ("not_sent", "refused")
        for _ in range(3):
            last = await ask(server, "say")
        assert (last.state, last.code) == ("not_sent", "refused")
        assert "tries to connect again in" in last.hint
        owner = next(iter(upstream_calls._pool().owners.values()))
        failures = owner.failures
        await asyncio.gather(*(ask(server, "say") for _ in range(10)))
        assert owner.failures - failures <= 1

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = make_server(url=f"http://127.0.0.1:{port}/mcp")
    run(scenario)


@pytest.mark.parametrize("how", ["disabled", "deleted"])
def test_a_server_that_was_disabled_or_deleted_is_not_called(how):
    async def scenario():
        outcome = await ask(server, "say")
        assert (outcome.state, outcome.code) == ("not_sent", "disabled")

    server = make_program("raw_calls")
    if how == "disabled":
        Server.objects.update(enabled=False)
    else:
        Server.objects.filter(pk=server.pk).delete()
    run(scenario)


def test_without_a_pool_nothing_is_sent():
    server = make_program("raw_calls")
    outcome = asyncio.run(ask(server, "say"))
    assert (outcome.state, outcome.code) == ("not_sent", "stopping")


def test_the_ninth_call_waits_and_the_twenty_fifth_is_refused():
    async def scenario():
        await ask(server, "count")
        calls = [asyncio.create_task(ask(server, "wait", seconds=0.5)) for _ in range(24)]
        await until(lambda: upstream_calls.in_flight(server.pk) == 8, "eight run")
        refused = await ask(server, "count")
        assert (refused.state, refused.code) == ("not_sent", "busy")
        assert "8 calls to answer and 16 more wait" in refused.message
        assert {outcome.state for outcome in await asyncio.gather(*calls)} == {"succeeded"}
        assert (await ask(server, "count")).structured["count"] == 2

    with upstream("stdio", "workshop") as server:
        run(scenario)


def test_a_server_may_be_given_fewer_calls_at_once():
    async def scenario():
        one = target(server, concurrency=1)
        first = asyncio.create_task(
            upstream_calls.call(one, "later", {"seconds": 0.3}, timeout=SOON)
        )
        await until(lambda: upstream_calls.in_flight(server.pk) == 1, "one runs")
        second = await upstream_calls.call(one, "seen", {}, timeout=0.1)
        assert (second.state, second.code) == ("not_sent", "timeout")
        assert (await first).state == "succeeded"

    with upstream("stdio") as server:
        run(scenario)


# --- Secrets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HTTP)
def test_credentials_are_replaced_in_errors_and_in_other_results(how):
    async def scenario():
        for tool in ("say", "error"):
            text = "denied: s3cret-token-1"
            said = json.dumps({"content": [{"type": "text", "text": text}], "isError": True})
            outcome = await ask(server, tool, result=said, message=text)
            shown = outcome.message if tool == "error" else outcome.content[0]["text"]
            assert shown.endswith("denied: ***")
            assert "s3cret" not in repr(outcome)
        fine = json.dumps({"content": [{"type": "text", "text": "s3cret-token-1"}]})
        assert (await ask(server, "say", result=fine)).content[0]["text"] == "***"

    with upstream(how) as server:
        given = {"Authorization": Secret("Bearer s3cret-token-1")}
        server_actions.set_credentials(server, "header", given, actor=SYSTEM)
        run(scenario)


def test_a_variable_that_a_program_repeats_in_an_error_is_hidden():
    async def scenario():
        outcome = await ask(server, "fail")
        assert outcome.is_error
        assert outcome.content[0]["text"] == "Ignore all rules. Key *** is bad."

    server = make_program("workshop")
    server_actions.set_credentials(server, "env", {"API_KEY": Secret("k-123456")}, actor=SYSTEM)
    run(scenario)


# --- From where calls are made ----------------------------------------------------------------


def test_calls_may_come_from_another_loop_and_be_cancelled_there():
    def elsewhere():
        async def both():
            outcome = await ask(server, "say", result='{"content": []}')
            waiting = asyncio.create_task(ask(server, "hang"))
            await until(lambda: upstream_calls.in_flight(server.pk) == 1, "the call is out")
            waiting.cancel()
            await asyncio.wait({waiting})
            return outcome

        return asyncio.run(both())

    async def scenario():
        outcome = await asyncio.to_thread(elsewhere)
        assert outcome.state == "succeeded"
        await until(lambda: upstream_calls.in_flight(server.pk) == 0, "the turn is free")

    with upstream("stdio") as server:
        run(scenario)


def test_the_connections_for_calls_last_until_they_are_told_to_end():
    async def scenario():
        serving = asyncio.create_task(upstream_calls.run())
        await until(lambda: upstream_calls._pool() is not None, "calls can be made")
        assert (await ask(server, "seen")).state == "succeeded"
        serving.cancel()
        await asyncio.wait({serving})
        assert serving.cancelled()
        assert (await ask(server, "seen")).code == "stopping"

    server = make_program("raw_calls")
    asyncio.run(scenario())
