"""The event loop stays responsive, however much a server sends and whatever it contains.

Work is counted rather than timed where possible: a clock that advances with the work done makes
the result independent of the machine. The other tests compare CPU times of the loop's thread.
"""

import asyncio
import gc
import json
import time
import zlib
from asyncio import events
from contextlib import suppress
from types import SimpleNamespace

import pytest

from servers.connections.connection import connect
from servers.connections.streams import parse, parse_large
from servers.errors import UpstreamError
from servers.transports import http as upstream_http
from servers.transports import response_body, stdio
from servers.transports.buffers import CHUNK_BYTES, YIELD_AFTER, ChunkBuffer
from servers.transports.request_trace import RequestTrace
from tests.support.upstreams.answers import large_notification
from tests.support.upstreams.running import http_spec, running_http, stdio_spec
from tests.support.waiting import scaled

NOTICE = json.dumps(large_notification()).encode()
MIB = 1024 * 1024


@pytest.fixture
def step_costs(monkeypatch):
    """The CPU time of each step of the event loop, in seconds, without garbage collection."""
    costs = []
    run_handle = events.Handle._run

    def measure(handle):
        started = time.thread_time()
        run_handle(handle)
        costs.append(time.thread_time() - started)

    monkeypatch.setattr(events.Handle, "_run", measure)
    gc.collect()
    gc.disable()
    yield costs
    gc.enable()


class Work:
    """Units of work done in each step of the event loop, and a clock that they advance."""

    def __init__(self, units_per_yield):
        self.total = 0
        self.steps = []
        self.clock = SimpleNamespace(monotonic=lambda: self.total * YIELD_AFTER / units_per_yield)

    def count_steps(self, monkeypatch):
        run_handle = events.Handle._run

        def count(handle):
            before = self.total
            run_handle(handle)
            self.steps.append(self.total - before)

        monkeypatch.setattr(events.Handle, "_run", count)


@pytest.fixture
def inflated(monkeypatch):
    """The bytes that were decompressed; a chunk takes as long as a step may."""
    work = Work(CHUNK_BYTES)

    class Inflate:
        def __init__(self, wbits):
            self._inner = zlib.decompressobj(wbits=wbits)

        def decompress(self, data, max_length):
            output = self._inner.decompress(data, max_length)
            work.total += len(output)
            return output

        @property
        def unconsumed_tail(self):
            return self._inner.unconsumed_tail

    counted = SimpleNamespace(decompressobj=Inflate, error=zlib.error)
    monkeypatch.setattr(response_body, "zlib", counted)
    monkeypatch.setattr(response_body, "time", work.clock)
    work.count_steps(monkeypatch)
    return work


@pytest.fixture
def lines_read(monkeypatch):
    """The lines that were read from a program; a thousand take as long as a step may."""
    work = Work(1000)
    add = stdio.StdioProcess._add

    def count(process, line, data):
        work.total += 1
        add(process, line, data)

    monkeypatch.setattr(stdio.StdioProcess, "_add", count)
    monkeypatch.setattr(stdio, "time", work.clock)
    work.count_steps(monkeypatch)
    return work


def run(scenario):
    async def in_time():
        async with asyncio.timeout(scaled(50)):
            return await scenario()

    return asyncio.run(in_time())


def parse_cost():
    """The CPU time for parsing a large notification in one step."""
    started = time.thread_time()
    json.loads(NOTICE)
    return time.thread_time() - started


def test_a_large_notification_from_a_program_is_not_parsed_on_the_loop(step_costs):
    async def scenario():
        spec = stdio_spec("raw_stdio", "--do", "large_notice", "--at", "list")
        async with connect(spec) as connection:
            step_costs.clear()
            return await connection.list_tools()

    assert len(run(scenario).tools) == 1
    assert max(step_costs) < parse_cost() / 3


def test_a_large_notification_of_a_subscription_is_not_read_at_all(step_costs):
    async def scenario():
        changed = asyncio.Event()
        spec = http_spec(f"{url}/large-listen")
        async with connect(spec, on_list_changed=changed.set) as connection:
            step_costs.clear()
            listening = asyncio.create_task(connection.listen())
            await changed.wait()  # the subscription ended and was renewed
            assert not listening.done()
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening

    with running_http("raw_http") as url:
        run(scenario)
    assert max(step_costs) < parse_cost() / 3


@pytest.mark.parametrize("path", ["list/gzip-bomb", "bomb-call"])
def test_a_compression_bomb_is_inflated_in_small_steps(inflated, settings, path):
    async def scenario():
        async with connect(http_spec(f"{url}/{path}")) as connection:
            call = connection.call_tool("ping", {}, RequestTrace(is_call=True))
            request = call if path == "bomb-call" else connection.list_tools()
            with pytest.raises(UpstreamError):
                await request
            call.close()

    with running_http("raw_http") as url:
        run(scenario)
    assert settings.MAX_MESSAGE_BYTES < inflated.total < settings.MAX_MESSAGE_BYTES + MIB
    assert max(inflated.steps) <= 5 * CHUNK_BYTES  # of 160


def test_a_flood_of_empty_lines_is_skipped_in_small_steps(lines_read):
    async def scenario():
        spec = stdio_spec("raw_stdio", "--do", "empty_lines", "--at", "list")
        async with connect(spec) as connection:
            return await connection.list_tools()

    assert len(run(scenario).tools) == 1
    assert lines_read.total > 128 * 1024
    assert max(lines_read.steps) <= 2100  # the end of one read and the start of the next


# --- Large messages ---------------------------------------------------------------------------

BIG = "x" * 300_000


@pytest.mark.parametrize(
    "message",
    [
        {"jsonrpc": "2.0", "id": 7, "result": {"content": [BIG], "odd": None}},
        {"jsonrpc": "2.0", "id": "7", "result": {"content": BIG}},
        {"jsonrpc": "2.0", "id": 7, "error": {"code": 1, "message": BIG}},
        {"jsonrpc": "2.0", "id": 7, "result": [BIG]},
        {"jsonrpc": "2.0", "id": 1.5, "result": {"a": BIG}},
        {"jsonrpc": "1.0", "id": 7, "result": {"a": BIG}},
        {"id": 7, "result": {"a": BIG}},
        [BIG],
    ],
)
def test_large_responses_are_parsed_like_small_ones(message):
    raw = json.dumps(message).encode()
    assert parse_large(raw) == parse(raw)


def test_only_the_head_of_a_large_request_or_notification_is_passed_on():
    request = {"jsonrpc": "2.0", "id": 3, "method": "sampling/createMessage", "params": {"a": BIG}}
    (message,) = parse_large(json.dumps(request).encode())
    assert (message.id, message.method, message.params) == (3, "sampling/createMessage", None)
    (message,) = parse_large(NOTICE)
    assert (message.method, message.params) == ("notifications/message", None)


@pytest.mark.parametrize(
    ("method", "headers", "opening", "listen_only"),
    [
        ("GET", {"mcp-session-id": "1"}, True, True),
        ("GET", {"mcp-session-id": "1", "last-event-id": "9"}, True, True),
        ("GET", {"mcp-session-id": "1", "last-event-id": "9"}, False, False),
        ("GET", {}, True, False),  # the HTTP+SSE transport: carries responses too
        ("POST", {"mcp-method": "subscriptions/listen"}, False, True),
        ("POST", {"mcp-method": "tools/list"}, False, False),
        ("POST", {"mcp-session-id": "1"}, True, False),
    ],
)
def test_streams_that_carry_notifications_only_are_recognized(
    method, headers, opening, listen_only
):
    request = upstream_http.httpx2.Request(method, "http://localhost/mcp", headers=headers)
    trace = RequestTrace(opening=opening)
    assert upstream_http._is_listen_only(request, trace) is listen_only


@pytest.mark.parametrize("size", [1, 7, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 5])
def test_chunks_are_joined_in_order(size):
    content = b"data: " + bytes(range(256)) * 1000 + b"\r"
    buffer = ChunkBuffer()
    for _ in range(2):  # the buffer can be used again
        for start in range(0, len(content), size):
            buffer.add(content[start : start + size])
        assert buffer.size == len(content)
        assert buffer.head(1) == b"d"
        assert buffer.pop_all(6, b"\r") == content[6:-1]
    assert buffer.pop_all() == b""
