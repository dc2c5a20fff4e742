"""However much a server sends, and of what, others on the event loop get their turn.

What a step costs is measured in CPU time of the loop's thread, and held against what the work
would cost in one piece, so that neither a busy nor a slow machine matters.
"""

import asyncio
import json
import time
from asyncio import events
from contextlib import suppress

import pytest

from servers.connections.connection import UpstreamError, connect
from servers.connections.streams import parse, parse_large
from servers.transports import http as upstream_http
from servers.transports.buffers import PIECE, ChunkBuffer
from servers.transports.request_trace import RequestTrace
from tests.support.upstreams.answers import large_notice
from tests.support.upstreams.running import http_spec, running_http, stdio_spec

NOTICE = json.dumps(large_notice()).encode()


class Steps:
    """What each step of the loop cost, in seconds of its thread's CPU time."""

    def __init__(self):
        self.costs = []

    @property
    def worst(self):
        return max(self.costs)

    @property
    def total(self):
        return sum(self.costs)


@pytest.fixture
def steps(monkeypatch):
    found = Steps()
    run = events.Handle._run

    def measured(handle):
        began = time.thread_time()
        run(handle)
        found.costs.append(time.thread_time() - began)

    monkeypatch.setattr(events.Handle, "_run", measured)
    return found


def run(scenario):
    async def in_time():
        async with asyncio.timeout(50):
            return await scenario()

    return asyncio.run(in_time())


def whole_cost():
    """What it costs to read a large notification in one piece."""
    began = time.thread_time()
    json.loads(NOTICE)
    return time.thread_time() - began


def test_a_large_notification_of_a_program_is_not_worked_through_on_the_loop(steps):
    async def scenario():
        spec = stdio_spec("raw_stdio", "--do", "large_notice", "--at", "list")
        async with connect(spec) as connection:
            steps.costs.clear()
            return await connection.list_tools()

    assert len(run(scenario).tools) == 1
    assert steps.worst < whole_cost() / 3


def test_a_large_notification_of_a_subscription_is_not_read_at_all(steps):
    async def scenario():
        changed = asyncio.Event()
        async with connect(http_spec(f"{url}/large-listen"), on_list_changed=changed.set) as found:
            steps.costs.clear()
            listening = asyncio.create_task(found.listen())
            await changed.wait()  # the subscription ended, and was renewed
            assert not listening.done()
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening

    with running_http("raw_http") as url:
        run(scenario)
    assert steps.worst < whole_cost() / 3


@pytest.mark.parametrize("path", ["list/gzip-bomb", "bomb-call"])
def test_a_bomb_is_unpacked_in_turns(steps, path):
    async def scenario():
        async with connect(http_spec(f"{url}/{path}")) as connection:
            steps.costs.clear()
            calling = connection.call_tool("ping", {}, RequestTrace(call=True))
            asking = calling if path == "bomb-call" else connection.list_tools()
            with pytest.raises(UpstreamError):
                await asking
            calling.close()

    with running_http("raw_http") as url:
        run(scenario)
    assert steps.worst < steps.total / 3


def test_lines_without_anything_in_them_are_passed_over_in_turns(steps):
    async def scenario():
        spec = stdio_spec("raw_stdio", "--do", "empty_lines", "--at", "list")
        async with connect(spec) as connection:
            steps.costs.clear()
            return await connection.list_tools()

    assert len(run(scenario).tools) == 1
    assert steps.worst < steps.total / 3


# --- What is left of large messages -----------------------------------------------------------

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
def test_large_answers_are_read_as_small_ones_are(message):
    raw = json.dumps(message).encode()
    assert parse_large(raw) == parse(raw)


def test_of_what_is_large_and_no_answer_only_the_head_is_passed_on():
    ask = {"jsonrpc": "2.0", "id": 3, "method": "sampling/createMessage", "params": {"a": BIG}}
    (found,) = parse_large(json.dumps(ask).encode())
    assert (found.id, found.method, found.params) == (3, "sampling/createMessage", None)
    (found,) = parse_large(NOTICE)
    assert (found.method, found.params) == ("notifications/message", None)


@pytest.mark.parametrize(
    ("method", "headers", "opening", "listens"),
    [
        ("GET", {"mcp-session-id": "1"}, True, True),
        ("GET", {"mcp-session-id": "1", "last-event-id": "9"}, True, True),
        ("GET", {"mcp-session-id": "1", "last-event-id": "9"}, False, False),
        ("GET", {}, True, False),  # of the transport of 2024: answers come on it
        ("POST", {"mcp-method": "subscriptions/listen"}, False, True),
        ("POST", {"mcp-method": "tools/list"}, False, False),
        ("POST", {"mcp-session-id": "1"}, True, False),
    ],
)
def test_streams_that_are_only_listened_to_are_known(method, headers, opening, listens):
    request = upstream_http.httpx2.Request(method, "http://localhost/mcp", headers=headers)
    assert upstream_http._listens(request, RequestTrace(opening=opening)) is listens


@pytest.mark.parametrize("size", [1, 7, PIECE - 1, PIECE, 3 * PIECE + 5])
def test_pieces_are_put_together_in_order(size):
    whole = b"data: " + bytes(range(256)) * 1000 + b"\r"
    pieces = ChunkBuffer()
    for _ in range(2):  # and begin anew
        for at in range(0, len(whole), size):
            pieces.add(whole[at : at + size])
        assert pieces.size == len(whole)
        assert pieces.head(1) == b"d"
        assert pieces.take(6, b"\r") == whole[6:-1]
    assert pieces.take() == b""
