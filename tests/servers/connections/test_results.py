"""Invalid results: the call fails with a message, and the connection stays open."""

import asyncio

import pytest

from servers.connections import calls as upstream_calls
from tests.support.upstream_calls import (
    HTTP_CLIENTS,
    TRANSPORTS,
    call_tool,
    in_flight,
    run_scenario,
    running_upstream,
    wait_until,
)

pytestmark = pytest.mark.django_db(transaction=True)

DEEP = '{"content": [], "structuredContent": ' + "[" * 50_000 + "]" * 50_000 + "}"
INVALID = {
    "an array": "[]",
    "a text": '"done"',
    "null": "null",
    "no content": "{}",
    "content that is an object": '{"content": {}}',
    "content of texts": '{"content": ["words"]}',
    "too many items": '{"content": [' + ",".join(['{"type": "text"}'] * 1001) + "]}",
    "an odd isError": '{"content": [], "isError": "yes"}',
    "a _meta that is not an object": '{"content": [], "_meta": [1]}',
    "an unknown kind": '{"content": [], "resultType": "task"}',
    "NaN": '{"content": [], "structuredContent": {"x": NaN}}',
    "infinity": '{"content": [], "structuredContent": {"x": -Infinity}}',
    "a number that overflows": '{"content": [], "structuredContent": {"x": 1e999}}',
    "5,000 digits": '{"content": [], "structuredContent": {"x": ' + "7" * 5000 + "}}",
    "a lone surrogate": '{"content": [], "structuredContent": {"x": "\\ud800"}}',
    "a duplicate key": '{"content": [], "structuredContent": {"x": 1, "x": 2}}',
    "a nested duplicate key": '{"content": [{"type": "text", "a": {"b": 1, "b": 2}}]}',
    "two contents": '{"content": [], "content": [{"type": "text"}]}',
    "depth": DEEP,
}


@pytest.mark.parametrize("how", [*TRANSPORTS, "http sse", "http sdk sse"])
def test_an_invalid_result_fails_with_a_message_that_the_tool_ran(how):
    async def scenario():
        events = {"sse": True} if how.endswith("sse") else {}
        for what, text in INVALID.items():
            outcome = await call_tool(server, "say", result=text, **events)
            assert (outcome.state, outcome.code) == ("failed", "result_invalid"), what
            assert outcome.message.startswith("The tool ran, but"), what
            assert outcome.content is None, what
        ok = await call_tool(server, "say", result='{"content": []}')
        assert ok.state == "succeeded"
        owner = next(iter(upstream_calls.current_pool().owners.values()))
        assert owner.failures == 0

    with running_upstream(how.removesuffix(" sse")) as server:
        run_scenario(scenario)


def test_large_integers_are_passed_unchanged():
    async def scenario():
        text = '{"content": [], "structuredContent": {"x": 12345678901234567890123}}'
        assert (await call_tool(server, "say", result=text)).structured == {
            "x": 12345678901234567890123
        }

    with running_upstream("stdio") as server:
        run_scenario(scenario)


@pytest.mark.parametrize("how", [*TRANSPORTS, "http sse", "http sdk sse"])
def test_a_result_over_the_limit_names_the_limit_and_the_next_call_works(how, settings):
    cap = settings.MAX_MESSAGE_BYTES = settings.MAX_RESULT_BYTES = 1024 * 1024

    async def scenario():
        events = {"sse": True} if how.endswith("sse") else {}
        for megabytes in (50, 2, 2, 2):  # more often than the circuit threshold
            outcome = await call_tool(server, "big", bytes=megabytes * cap, **events)
            assert (outcome.state, outcome.code) == ("failed", "result_too_large")
            assert "more than 1 MiB" in outcome.message
            after = await call_tool(server, "say", result='{"content": []}')
            assert after.state == "succeeded", after
        fits = await call_tool(server, "big", bytes=cap - 1000, **events)
        assert fits.state == "succeeded"
        assert cap - 1000 < fits.size <= cap

    with running_upstream(how.removesuffix(" sse")) as server:
        run_scenario(scenario)


def test_the_meta_of_a_result_counts_in_its_size(settings):
    settings.MAX_RESULT_BYTES = 1000
    result = '{"content": [], "_meta": {"x": "%s"}}'

    async def scenario():
        assert (await call_tool(server, "say", result=result % ("y" * 900))).state == "succeeded"
        outcome = await call_tool(server, "say", result=result % ("y" * 1000))
        assert (outcome.state, outcome.code) == ("failed", "result_too_large")

    with running_upstream("stdio") as server:
        run_scenario(scenario)


def test_a_result_too_large_on_a_shared_pipe_is_reported_to_its_own_call():
    async def scenario():
        other = asyncio.create_task(call_tool(server, "hang"))
        await wait_until(lambda: in_flight(server.pk) == 1, "the call is out")
        big = await call_tool(server, "big", bytes=12_000_000)
        assert (big.state, big.code) == ("failed", "result_too_large")
        assert (await other).state == "unknown"

    with running_upstream("stdio") as server:
        run_scenario(scenario)


LINES = {
    "a byte order mark": ("\ufeff" + '{"jsonrpc": "2.0", "id": ID, "result": {"content": []}}', ""),
    "the id as a text": ('{"jsonrpc": "2.0", "id": "ID", "result": {"content": []}}', ""),
    "garbage after it": (
        '{"jsonrpc": "2.0", "id": ID, "result": {"content": []}} and more',
        "result_invalid",
    ),
    "two messages in a line": (
        '{"jsonrpc": "2.0", "id": ID, "result": {"content": []}}'
        '{"jsonrpc": "2.0", "id": ID, "result": {"content": [{}]}}',
        "result_invalid",
    ),
    "no version": ('{"id": ID, "result": {"content": []}}', "result_invalid"),
    "half a message": ('{"jsonrpc": "2.0", "id": ID, "result": {"con', "result_invalid"),
}


@pytest.mark.parametrize("how", TRANSPORTS)
def test_unusual_framing_is_parsed_or_rejected_and_the_connection_stays_open(how):
    async def scenario():
        for what, (line, code) in LINES.items():
            outcome = await call_tool(server, "line", line=line)
            assert outcome.code == code, (what, outcome)
        assert (await call_tool(server, "say", result='{"content": []}')).state == "succeeded"
        assert len(upstream_calls.current_pool().owners) == 1
        assert next(iter(upstream_calls.current_pool().owners.values())).failures == 0

    with running_upstream(how) as server:
        run_scenario(scenario)


UNMATCHED = [
    f'{{"jsonrpc": "2.0", "id": {odd}, "result": {{"content": []}}}}'
    for odd in ("999", "null", "1.0", '"x"', "true")
]


def test_unmatched_responses_are_dropped_and_a_flood_of_them_closes_the_connection():
    good = '{"jsonrpc": "2.0", "id": ID, "result": {"content": []}}'

    async def scenario():
        few = "\n".join([*UNMATCHED, good, good])  # the second repeats an id
        assert (await call_tool(server, "line", line=few)).state == "succeeded"
        first = next(iter(upstream_calls.current_pool().owners.values())).ready.result()
        assert not first.closed.is_set()
        flood = "\n".join(UNMATCHED * 21)
        outcome = await call_tool(server, "line", line=flood)
        assert outcome.state == "unknown"
        assert "more than 100 responses that match no request" in outcome.message
        assert first.closed.is_set()
        assert (await call_tool(server, "line", line=good)).state == "succeeded"

    with running_upstream("stdio") as server:
        run_scenario(scenario)


@pytest.mark.parametrize("line", UNMATCHED)
@pytest.mark.parametrize("how", HTTP_CLIENTS)
def test_over_http_a_response_with_the_id_of_another_request_is_invalid(line, how):
    async def scenario():
        outcome = await call_tool(server, "line", line=line)
        assert (outcome.state, outcome.code) == ("failed", "result_invalid")

    with running_upstream(how) as server:
        run_scenario(scenario)
