import asyncio
import json
import os
import signal
import socket
import urllib.request
from contextlib import ExitStack, contextmanager

import pytest

from catalog.audit import SYSTEM
from catalog.canonical import canonical
from servers import calling, client, link, registry, wires
from servers.calling import Target
from servers.models import Server
from servers.secret import Secret
from tests.factories import make_program, make_server
from tests.upstreams.running import running_http
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)
SOON = 20  # seconds, for what should take none


def run(scenario):
    """Run a scenario with calls open, and nothing left of it afterwards."""

    async def in_time():
        async with asyncio.timeout(50), calling.opened():
            return await scenario()

    return asyncio.run(in_time())


def target(server, session="", **fields):
    isolation = "per_session" if session else "shared"
    return Target(server.pk, server.slug, server.generation, isolation, session, **fields)


async def ask(server, tool, within=SOON, session="", on=None, **arguments):
    """Call with these arguments."""
    options = {"timeout": within, **(on or {})}
    return await calling.call(target(server, session), tool, arguments, **options)


async def waits(server, which, names):
    """Wait until a workshop says that these waits began, or were given up."""
    async with asyncio.timeout(SOON):
        while not set(names) <= set((await ask(server, "cancelled")).structured[which]):
            pass


async def begun(server, tool):
    """Wait until raw_calls says that it got a call of this tool, over a connection that works."""
    async with asyncio.timeout(SOON):
        while f'"name": "{tool}"' not in (await ask(server, "seen")).content[0]["text"]:
            pass


async def let_go(server):
    """Have the calls end that raw_calls holds."""
    asking = urllib.request.urlopen, f"{server.url}/let-go"
    (await asyncio.to_thread(*asking, timeout=SOON)).close()


async def until(check, what):
    await asyncio.to_thread(wait_for, check, SOON, what=what, every=0.01)


@contextmanager
def through_the_sdk():
    """Have every call go through the SDK's client, also where the lean one would do."""
    made = client.Connection.__init__

    def without_lean(self, *args):
        made(self, *args)
        self._lean = None

    client.Connection.__init__ = without_lean
    try:
        yield
    finally:
        client.Connection.__init__ = made


@contextmanager
def upstream(how, module="raw_calls"):
    """A server reached in one of the ways there are: stdio, http or sse, modern or legacy.

    Over http by the lean client, or with `sdk` by the SDK's.
    """
    if how.endswith(" sdk"):
        with through_the_sdk(), upstream(how.removesuffix(" sdk"), module) as server:
            yield server
        return
    transport, _, era = how.partition(" ")
    if module == "raw_calls":
        options = ("--era", era or "modern")
        http = (*options, "--http")
    else:
        options = http = ("--legacy",) if era == "legacy" else ()
    if transport == "stdio":
        yield make_program(module, *options)
    elif transport == "sse":
        with running_http(module, *options, "--sse") as url:
            yield make_server(url=url, transport="sse")
    else:
        with running_http(module, *http) as url:
            yield make_server(url=url if url.endswith("/mcp") else f"{url}/mcp")


HTTP = ["http", "http sdk"]
WAYS = [
    *("stdio modern", "stdio legacy"),
    *("http modern", "http modern sdk", "http legacy", "http legacy sdk"),
]
TWO_WAYS = ["stdio", *HTTP]

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
        assert calling.in_flight(server.pk) == 0

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
        assert len(calling._pool().owners) == 1

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
        assert outcome.message.startswith("The server said: No such tool: \\x1b[31mxxx")
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


# --- Results that cannot be passed on ---------------------------------------------------------

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
        owner = next(iter(calling._pool().owners.values()))
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
        await until(lambda: calling.in_flight(server.pk) == 1, "the call is out")
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
        assert len(calling._pool().owners) == 1
        assert next(iter(calling._pool().owners.values())).failures == 0

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
        first = next(iter(calling._pool().owners.values())).ready.result()
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


# --- Time -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
def test_a_call_that_times_out_disturbs_no_other_on_its_connection(how):
    async def scenario():
        await ask(server, "count")
        others = [asyncio.create_task(ask(server, "wait", seconds=1.0)) for _ in range(5)]
        slow = await ask(server, "wait", within=0.3, seconds=30, name="slow")
        assert (slow.state, slow.code) == ("timed_out", "timeout")
        assert "within 0.3 s" in slow.message
        assert [outcome.state for outcome in await asyncio.gather(*others)] == ["succeeded"] * 5
        owner = next(iter(calling._pool().owners.values()))
        assert owner.failures == 0
        assert calling.in_flight(server.pk) == 0

    with upstream(how, "workshop") as server:
        run(scenario)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_an_answer_after_the_deadline_is_dropped_and_told(how):
    async def scenario():
        late = asyncio.Queue()
        await ask(server, "seen")
        outcome = await ask(
            server, "later", within=0.2, seconds=0.6, on={"on_late": late.put_nowait}
        )
        assert outcome.state == "timed_out"
        note = await late.get()
        assert note.startswith("answered 0.")
        assert note.endswith(" s after its deadline")
        assert (await ask(server, "say", result='{"content": []}')).state == "succeeded"

    with upstream(how) as server:
        run(scenario)


@pytest.mark.parametrize("how", WAYS)
def test_a_call_nobody_waits_for_any_more_is_cancelled_at_the_server(how, monkeypatch):
    monkeypatch.setattr(calling, "LATE_GRACE", 0.2)

    async def scenario():
        await ask(server, "count")
        outcome = await ask(server, "wait", within=0.3, seconds=30, name="late")
        assert outcome.state == "timed_out"
        await waits(server, "given_up", ["late"])

    with upstream(how, "workshop") as server:
        run(scenario)


@pytest.mark.parametrize("how", HTTP)
def test_a_drip_of_bytes_ends_at_the_deadline(how):
    async def scenario():
        outcome = await ask(server, "drip", within=0.5)
        assert outcome.state == "timed_out"

    with upstream(how) as server:
        run(scenario)


def test_a_deadline_that_passes_before_anything_was_sent_is_no_timeout_of_the_tool():
    async def scenario():
        sent = []

        async def on_sent():
            sent.append(1)

        outcome = await ask(server, "say", within=0.3, on={"on_sent": on_sent})
        assert (outcome.state, outcome.code) == ("not_sent", "timeout")
        assert sent == []

    server = make_program("raw_stdio", "--do", "hang")
    run(scenario)


# --- Cancelling -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
def test_cancelling_tells_the_server_and_frees_the_turn(how):
    async def scenario():
        names = [str(number) for number in range(7)]
        calls = [ask(server, "wait", seconds=30, name=name) for name in names]
        waiting = [asyncio.create_task(call) for call in calls]
        await waits(server, "begun", names)
        waiting += [asyncio.create_task(ask(server, "wait", seconds=30)) for _ in range(12)]
        await until(lambda: calling.in_flight(server.pk) == 8, "eight run")
        for task in waiting:
            task.cancel()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        assert calling.in_flight(server.pk) == 0
        await waits(server, "given_up", names)

    with upstream(how, "workshop") as server:
        run(scenario)


def test_cancels_at_any_moment_leave_no_turn_taken():
    async def scenario():
        calls = []
        for number in range(200):
            calls.append(asyncio.create_task(ask(server, "later", seconds=0.01)))
            if number % 3 == 0:
                await asyncio.sleep(0.001 * (number % 7))
                calls[number // 2].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert calling.in_flight(server.pk) == 0
        assert (await ask(server, "say", result='{"content": []}')).state == "succeeded"

    with upstream("stdio") as server:
        run(scenario)


# --- Before it is sent ------------------------------------------------------------------------


def test_what_is_told_before_sending_can_stop_the_call():
    async def scenario():
        async def refuse():
            raise LookupError("no row")

        with pytest.raises(LookupError):
            await ask(server, "say", result="{}", on={"on_sent": refuse})
        assert calling.in_flight(server.pk) == 0
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
        connection = calling._pool().owners[server.pk, ""].ready.result()
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
        owner = next(iter(calling._pool().owners.values()))
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
        await until(lambda: calling.in_flight(server.pk) == 8, "eight run")
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
        first = asyncio.create_task(calling.call(one, "later", {"seconds": 0.3}, timeout=SOON))
        await until(lambda: calling.in_flight(server.pk) == 1, "one runs")
        second = await calling.call(one, "seen", {}, timeout=0.1)
        assert (second.state, second.code) == ("not_sent", "timeout")
        assert (await first).state == "succeeded"

    with upstream("stdio") as server:
        run(scenario)


# --- A late call and the next -------------------------------------------------------------------


async def in_turn(server, tool, within=SOON, **arguments):
    """Call a tool of a server that is given one call at once."""
    return await calling.call(target(server, concurrency=1), tool, arguments, timeout=within)


def test_a_late_call_is_cancelled_before_the_next_is_sent_to_a_server_that_takes_one(settings):
    settings.CALLS_QUEUED = 0  # who gets the turn of a late call does not wait in the queue

    async def scenario():
        await in_turn(server, "seen")
        late = await in_turn(server, "hang", within=0.3)
        assert late.state == "timed_out"
        seen = json.loads((await in_turn(server, "seen")).content[0]["text"])
        came = [each["params"].get("name", each["method"]) for each in seen if "params" in each]
        assert came[came.index("hang") :] == ["hang", "notifications/cancelled", "seen"]

    with upstream("stdio legacy") as server:
        run(scenario)


@pytest.mark.parametrize("how", WAYS)
def test_nobody_listens_for_a_late_answer_while_another_call_needs_the_turn(how, monkeypatch):
    monkeypatch.setattr(calling, "LATE_GRACE", 600.0)

    async def scenario():
        await in_turn(server, "count")
        late = await in_turn(server, "wait", within=0.3, seconds=600, name="late")
        assert late.state == "timed_out"
        async with asyncio.timeout(SOON):
            while (await in_turn(server, "cancelled")).structured["given_up"] != ["late"]:
                pass

    with upstream(how, "workshop") as server:
        run(scenario)


def test_late_calls_and_cancels_at_any_moment_leave_no_turn_taken():
    async def scenario():
        await ask(server, "seen")
        ends = []
        for number in range(20):
            calls = [asyncio.create_task(ask(server, "hang", within=0.1)) for _ in range(12)]
            await asyncio.sleep(0.005 * (number % 7))
            calls[number % 12].cancel()
            ends += await asyncio.gather(*calls, return_exceptions=True)
        assert "timed_out" in {getattr(end, "state", "cancelled") for end in ends}
        assert calling.in_flight(server.pk) == 0
        assert (await in_turn(server, "say", result='{"content": []}')).state == "succeeded"

    with upstream("stdio") as server:
        run(scenario)


# --- After it was sent ------------------------------------------------------------------------


def test_a_program_that_dies_leaves_the_outcome_unknown_and_is_started_anew_without_the_call():
    async def scenario():
        outcome = await ask(server, "die")
        assert (outcome.state, outcome.code) == ("unknown", "crashed")
        assert outcome.message.endswith("Whether the tool ran is not known.")
        seen = json.loads((await ask(server, "seen")).content[0]["text"])
        assert "die" not in [each.get("params", {}).get("name") for each in seen]

    with upstream("stdio") as server:
        run(scenario)


@pytest.mark.parametrize("how", HTTP)
def test_an_answer_cut_off_over_http_leaves_the_outcome_unknown_and_is_not_asked_again(how):
    async def scenario():
        outcome = await ask(server, "cut")
        assert (outcome.state, outcome.code) == ("unknown", "closed")
        seen = json.loads((await ask(server, "seen")).content[0]["text"])
        assert [
            each["params"]["name"] for each in seen if "arguments" in each.get("params", {})
        ] == ["cut", "seen"]

    with upstream(how) as server:
        run(scenario)


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
@pytest.mark.parametrize("how", [*HTTP, "sse"])
def test_http_statuses_say_whether_the_tool_may_have_run(status, state, code, how):
    async def scenario():
        outcome = await ask(server, "status", status=status, body="secret body")
        assert (outcome.state, outcome.code) == (state, code)
        assert "secret body" not in outcome.message

    with upstream(how) as server:
        run(scenario)


@pytest.mark.parametrize("how", HTTP)
def test_a_server_that_stops_listening_is_noticed_by_the_call_that_cannot_be_sent(how):
    async def scenario():
        assert (await ask(server, "seen")).state == "succeeded"
        owner = calling._pool().owners[server.pk, ""]
        connection = owner.ready.result()
        stop.close()
        outcome = await ask(server, "say", result='{"content": []}')
        assert (outcome.state, outcome.code) == ("not_sent", "refused")
        assert connection.closed.is_set()
        await until(lambda: owner.failures > 0, "the owner dials again")

    with ExitStack() as stop:
        server = stop.enter_context(upstream(how))
        run(scenario)


@pytest.mark.parametrize("how", HTTP)
def test_a_session_the_server_forgot_costs_the_call_that_finds_out_and_no_other(how):
    async def scenario():
        assert (await ask(server, "seen")).state == "succeeded"
        lost = await ask(server, "forget")
        assert (lost.state, lost.code) == ("unknown", "closed")
        after = await asyncio.gather(*(ask(server, "say", result='{"content": []}') for _ in "123"))
        assert {outcome.state for outcome in after} == {"succeeded"}

    with upstream(how.replace("http", "http legacy")) as server:
        run(scenario)


@pytest.mark.parametrize("how", HTTP)
def test_calls_under_way_end_well_when_another_finds_that_the_session_is_forgotten(how):
    async def scenario():
        held = asyncio.create_task(ask(server, "held"))
        await begun(server, "held")
        first = calling._pool().owners[server.pk, ""].ready.result()
        lost = await ask(server, "forget")
        assert (lost.state, lost.code) == ("unknown", "closed")
        assert not first.closed.is_set()
        after = asyncio.create_task(ask(server, "say", result='{"content": []}'))
        await until(lambda: calling.in_flight(server.pk) == 2, "the next call is on its way")
        await let_go(server)
        assert (await held).content == [{"type": "text", "text": "held"}]
        assert (await after).state == "succeeded"
        assert first.closed.is_set()

    with upstream(how.replace("http", "http legacy")) as server:
        run(scenario)


@pytest.mark.parametrize("how", HTTP)
def test_a_call_without_end_keeps_others_from_the_next_connection_for_a_while_only(
    how, monkeypatch
):
    monkeypatch.setattr(link, "LEAVES_WITHIN", 0.3)

    async def scenario():
        held = asyncio.create_task(ask(server, "held"))
        await begun(server, "held")
        assert (await ask(server, "forget")).state == "unknown"
        assert (await ask(server, "say", result='{"content": []}')).state == "succeeded"
        assert (await held).state == "unknown"

    with upstream(how.replace("http", "http legacy")) as server:
        run(scenario)


def only_connection(server):
    return calling._pool().owners[server.pk, ""].ready.result()


@pytest.mark.parametrize("era", ["modern", "legacy"])
def test_a_message_that_an_event_stream_of_old_turns_down_costs_no_other_call(era):
    async def scenario():
        held = asyncio.create_task(ask(server, "held"))
        await begun(server, "held")
        first = only_connection(server)
        refused = await ask(server, "status", status=429)
        assert (refused.state, refused.code) == ("failed", "http_status")
        await let_go(server)
        assert (await held).content == [{"type": "text", "text": "held"}]
        assert only_connection(server) is first
        assert not first.closed.is_set()

    with upstream(f"sse {era}") as server:
        run(scenario)


def test_an_event_stream_of_old_that_the_server_forgot_is_opened_anew():
    async def scenario():
        await ask(server, "seen")
        first = only_connection(server)
        lost = await ask(server, "status", status=404)
        assert (lost.state, lost.code) == ("failed", "http_status")
        assert first.closed.is_set()
        assert (await ask(server, "say", result='{"content": []}')).state == "succeeded"

    with upstream("sse") as server:
        run(scenario)


# --- Servers that take no messages ------------------------------------------------------------


@pytest.mark.parametrize("post", ["late", "never"])
def test_a_post_that_is_not_answered_while_its_tool_runs_holds_up_nothing(post, monkeypatch):
    monkeypatch.setattr(wires, "SENDS_WITHIN", 0.1)

    async def scenario():
        held = asyncio.create_task(ask(server, "held", post=post))
        await begun(server, "held")
        first = only_connection(server)
        for _ in range(3):
            late = await ask(server, "later", seconds=0.2, post="late")  # longer than the limit
            assert late.state == "succeeded"
        refused = await ask(server, "status", status=400, seconds=0.3)
        assert (refused.state, refused.code) == ("failed", "http_status")
        await let_go(server)
        assert (await held).content == [{"type": "text", "text": "held"}]
        assert only_connection(server) is first
        assert not first.closed.is_set()

    with upstream("sse") as server:
        run(scenario)


def test_an_event_stream_of_old_whose_server_takes_no_messages_is_opened_anew(monkeypatch):
    monkeypatch.setattr(wires, "SENDS_WITHIN", 0.2)
    monkeypatch.setattr(calling, "LATE_GRACE", 0.1)

    async def scenario():
        await ask(server, "seen")
        owner = calling._pool().owners[server.pk, ""]
        other = asyncio.create_task(ask(server, "held"))
        await begun(server, "held")
        assert (await ask(server, "deaf", within=0.2)).state == "timed_out"
        await until(lambda: owner.failures == 1, "the connection is lost")
        assert owner.problem.message == "The server took no message for 0.2 s."
        assert (await other).state == "unknown"
        assert (await ask(server, "say", result='{"content": []}')).state == "succeeded"

    with upstream("sse") as server:
        run(scenario)


BIG = "x" * 1_000_000  # more than a pipe holds


def test_a_program_that_reads_no_more_is_started_anew_and_what_it_got_half_of_runs_once(
    monkeypatch,
):
    monkeypatch.setattr(wires, "SENDS_WITHIN", 0.2)
    monkeypatch.setattr(calling, "LATE_GRACE", 0.1)

    async def scenario():
        assert (await ask(server, "deaf")).state == "succeeded"
        owner = calling._pool().owners[server.pk, ""]
        whole = await ask(server, "say", within=0.3, result='{"content": []}', mark="whole")
        assert whole.state == "timed_out"  # all of it lies in the pipe
        half = asyncio.create_task(ask(server, "say", result='{"content": []}', mark=BIG))
        await until(lambda: calling.in_flight(server.pk) == 1, "the call is out")
        behind = await ask(server, "say", result='{"content": []}', mark="behind")
        assert [(await half).state, behind.state] == ["succeeded", "succeeded"]
        assert owner.problem.message == "The server took no message for 0.2 s."
        seen = json.loads((await ask(server, "seen")).content[0]["text"])
        given = [each["params"].get("arguments", {}) for each in seen if "params" in each]
        assert sorted(each["mark"] for each in given if "mark" in each) == ["behind", BIG]

    with upstream("stdio") as server:
        run(scenario)


def test_a_program_that_reads_on_only_when_its_tool_has_run_is_waited_for(monkeypatch):
    monkeypatch.setattr(wires, "SENDS_WITHIN", 0.1)

    async def scenario():
        await ask(server, "seen")
        first = only_connection(server)
        busy = asyncio.create_task(ask(server, "deaf", seconds=1))
        await until(lambda: calling.in_flight(server.pk) == 1, "the call is out")
        after = await ask(server, "say", result='{"content": []}', mark=BIG)
        assert [(await busy).state, after.state] == ["succeeded", "succeeded"]
        assert only_connection(server) is first
        assert not first.closed.is_set()

    with upstream("stdio") as server:
        run(scenario)


# --- Secrets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HTTP)
def test_credentials_in_an_error_are_hidden_and_other_results_are_left_alone(how):
    async def scenario():
        for tool in ("say", "error"):
            text = "denied: s3cret-token-1"
            said = json.dumps({"content": [{"type": "text", "text": text}], "isError": True})
            outcome = await ask(server, tool, result=said, message=text)
            shown = outcome.message if tool == "error" else outcome.content[0]["text"]
            assert shown.endswith("denied: ***")
            assert "s3cret" not in repr(outcome)
        fine = json.dumps({"content": [{"type": "text", "text": "s3cret-token-1"}]})
        assert (await ask(server, "say", result=fine)).content[0]["text"] == "s3cret-token-1"

    with upstream(how) as server:
        given = {"Authorization": Secret("Bearer s3cret-token-1")}
        registry.set_credentials(server, "header", given, actor=SYSTEM)
        run(scenario)


def test_a_variable_that_a_program_repeats_in_an_error_is_hidden():
    async def scenario():
        outcome = await ask(server, "fail")
        assert outcome.is_error
        assert outcome.content[0]["text"] == "Ignore all rules. Key *** is bad."

    server = make_program("workshop")
    registry.set_credentials(server, "env", {"API_KEY": Secret("k-123456")}, actor=SYSTEM)
    run(scenario)


# --- From where calls are made ----------------------------------------------------------------


def test_calls_may_come_from_another_loop_and_be_cancelled_there():
    def elsewhere():
        async def both():
            outcome = await ask(server, "say", result='{"content": []}')
            waiting = asyncio.create_task(ask(server, "hang"))
            await until(lambda: calling.in_flight(server.pk) == 1, "the call is out")
            waiting.cancel()
            await asyncio.wait({waiting})
            return outcome

        return asyncio.run(both())

    async def scenario():
        outcome = await asyncio.to_thread(elsewhere)
        assert outcome.state == "succeeded"
        await until(lambda: calling.in_flight(server.pk) == 0, "the turn is free")

    with upstream("stdio") as server:
        run(scenario)


def test_the_connections_for_calls_last_until_they_are_told_to_end():
    async def scenario():
        serving = asyncio.create_task(calling.run())
        await until(lambda: calling._pool() is not None, "calls can be made")
        assert (await ask(server, "seen")).state == "succeeded"
        serving.cancel()
        await asyncio.wait({serving})
        assert serving.cancelled()
        assert (await ask(server, "seen")).code == "stopping"

    server = make_program("raw_calls")
    asyncio.run(scenario())
