"""Results that cannot be passed on: the call fails with a sentence, and the connection goes on."""

import asyncio

import pytest

from servers.connections import calls as upstream_calls
from tests.support.upstream_calls import HTTP, TWO_WAYS, ask, run, until, upstream

pytestmark = pytest.mark.django_db(transaction=True)

DEEP = '{"content": [], "structuredContent": ' + "[" * 50_000 + "]" * 50_000 + "}"
UNUSABLE = {
    "an array": "[]",
    "a text": '"done"',
    "null": "null",
    "no content": "{}",
    "content that is an object": '{"content": {}}',
    "content of texts": '{"content": ["words"]}',
    "too many items": '{"content": [' + ",".join(['{"type": "text"}'] * 1001) + "]}",
    "an odd isError": '{"content": [], "isError": "yes"}',
    "an unknown kind": '{"content": [], "resultType": "task"}',
    "NaN": '{"content": [], "structuredContent": {"x": NaN}}',
    "infinity": '{"content": [], "structuredContent": {"x": -Infinity}}',
    "a number that overflows": '{"content": [], "structuredContent": {"x": 1e999}}',
    "5,000 digits": '{"content": [], "structuredContent": {"x": ' + "7" * 5000 + "}}",
    "half a character": '{"content": [], "structuredContent": {"x": "\\ud800"}}',
    "a key twice": '{"content": [], "structuredContent": {"x": 1, "x": 2}}',
    "a key twice, far down": '{"content": [{"type": "text", "a": {"b": 1, "b": 2}}]}',
    "two contents": '{"content": [], "content": [{"type": "text"}]}',
    "depth": DEEP,
}


@pytest.mark.parametrize("how", [*TWO_WAYS, "http sse", "http sdk sse"])
def test_results_that_cannot_be_passed_on_fail_saying_that_the_tool_ran(how):
    async def scenario():
        events = {"sse": True} if how.endswith("sse") else {}
        for what, text in UNUSABLE.items():
            outcome = await ask(server, "say", result=text, **events)
            assert (outcome.state, outcome.code) == ("failed", "result_invalid"), what
            assert outcome.message.startswith("The tool ran, but"), what
            assert outcome.content is None, what
        ok = await ask(server, "say", result='{"content": []}')
        assert ok.state == "succeeded"
        owner = next(iter(upstream_calls._pool().owners.values()))
        assert owner.failures == 0

    with upstream(how.removesuffix(" sse")) as server:
        run(scenario)


def test_large_integers_pass_as_they_are():
    async def scenario():
        text = '{"content": [], "structuredContent": {"x": 12345678901234567890123}}'
        assert (await ask(server, "say", result=text)).structured == {"x": 12345678901234567890123}

    with upstream("stdio") as server:
        run(scenario)


@pytest.mark.parametrize("how", [*TWO_WAYS, "http sse", "http sdk sse"])
def test_a_result_over_the_cap_names_the_cap_and_the_next_call_works(how, settings):
    cap = settings.MAX_MESSAGE_BYTES = settings.MAX_RESULT_BYTES = 1024 * 1024

    async def scenario():
        events = {"sse": True} if how.endswith("sse") else {}
        for megabytes in (50, 2, 2, 2):  # more often than a breaker forgives
            outcome = await ask(server, "big", bytes=megabytes * cap, **events)
            assert (outcome.state, outcome.code) == ("failed", "result_too_large")
            assert "more than 1 MiB" in outcome.message
            after = await ask(server, "say", result='{"content": []}')
            assert after.state == "succeeded", after
        fits = await ask(server, "big", bytes=cap - 1000, **events)
        assert fits.state == "succeeded"
        assert cap - 1000 < fits.size <= cap

    with upstream(how.removesuffix(" sse")) as server:
        run(scenario)


def test_a_result_too_large_on_a_shared_pipe_is_told_to_the_call_it_answers():
    async def scenario():
        other = asyncio.create_task(ask(server, "hang"))
        await until(lambda: upstream_calls.in_flight(server.pk) == 1, "the call is out")
        big = await ask(server, "big", bytes=12_000_000)
        assert (big.state, big.code) == ("failed", "result_too_large")
        assert (await other).state == "unknown"

    with upstream("stdio") as server:
        run(scenario)


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


@pytest.mark.parametrize("how", TWO_WAYS)
def test_odd_framing_is_read_or_refused_and_the_connection_goes_on(how):
    async def scenario():
        for what, (line, code) in LINES.items():
            outcome = await ask(server, "line", line=line)
            assert outcome.code == code, (what, outcome)
        assert (await ask(server, "say", result='{"content": []}')).state == "succeeded"
        assert len(upstream_calls._pool().owners) == 1
        assert next(iter(upstream_calls._pool().owners.values())).failures == 0

    with upstream(how) as server:
        run(scenario)


STRAYS = [
    f'{{"jsonrpc": "2.0", "id": {odd}, "result": {{"content": []}}}}'
    for odd in ("999", "null", "1.0", '"x"', "true")
]


def test_answers_that_nobody_asked_for_are_dropped_and_a_flood_of_them_ends_the_connection():
    good = '{"jsonrpc": "2.0", "id": ID, "result": {"content": []}}'

    async def scenario():
        few = "\n".join([*STRAYS, good, good])  # the second of them reuses an id
        assert (await ask(server, "line", line=few)).state == "succeeded"
        first = next(iter(upstream_calls._pool().owners.values())).ready.result()
        assert not first.closed.is_set()
        flood = "\n".join(STRAYS * 21)
        outcome = await ask(server, "line", line=flood)
        assert outcome.state == "unknown"
        assert "more than 100 answers to nothing" in outcome.message
        assert first.closed.is_set()
        assert (await ask(server, "line", line=good)).state == "succeeded"

    with upstream("stdio") as server:
        run(scenario)


@pytest.mark.parametrize("line", STRAYS)
@pytest.mark.parametrize("how", HTTP)
def test_over_http_an_answer_with_another_id_is_no_answer(line, how):
    async def scenario():
        outcome = await ask(server, "line", line=line)
        assert (outcome.state, outcome.code) == ("failed", "result_invalid")

    with upstream(how) as server:
        run(scenario)
