"""Fuzz tests of the HTTP/1.1 client: any bytes, in any chunks, over a connection without a socket.

A response is returned as it was sent or fails; nothing waits forever, and no request receives
bytes that belong to another.
"""

import asyncio
from contextlib import suppress
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.errors import UpstreamError
from servers.transports import http as upstream_http
from servers.transports.http1 import HttpConnection, HttpConnectionPool

URL = httpx2.URL("http://192.0.2.1/mcp")


class FakeTransport:
    """A transport whose peer is the test."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class FakePeer:
    """A pool whose connections lead to this object."""

    def __init__(self) -> None:
        upstream = upstream_http.Upstream(None, None, {}, None, upstream_http.resolve)  # type: ignore[arg-type]
        self.pool = HttpConnectionPool(upstream, URL)
        self.pool._connect = self.connect  # type: ignore[method-assign]
        self.connections: list[HttpConnection] = []

    async def connect(self) -> HttpConnection:
        connection = HttpConnection()
        connection.connection_made(FakeTransport())  # type: ignore[arg-type]
        self.connections.append(connection)
        self.pool._all.add(connection)
        return connection

    async def exchange(self, chunks: list[bytes], *, closes: bool) -> tuple[int, bytes]:
        """Send a request, receive these chunks, and return status and body."""
        task = asyncio.create_task(self._request())
        await settle()
        connection = self.connections[-1]
        for chunk in chunks:
            if not connection.closed:
                connection.data_received(chunk)
            await settle()
        if closes and not connection.closed:
            connection.eof_received()
            connection.connection_lost(None)
        elif connection.closed:
            connection.connection_lost(None)  # as the event loop does after an abort
        await settle()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            raise AssertionError("The request still waits.")
        return task.result()

    async def _request(self) -> tuple[int, bytes]:
        response = await self.pool.post(b"{}", {}, None)
        try:
            body = b""
            while chunk := await self.pool.read_chunk(response):
                body += chunk
        except UpstreamError:
            self.pool.drop(response)
            raise
        self.pool.release(response)
        return response.status, body


async def settle() -> None:
    """Run everything that is ready."""
    for _ in range(5):
        await asyncio.sleep(0)


def split(draw: Any, data: bytes) -> list[bytes]:
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=8).map(sorted))
    bounds = [0, *cuts, len(data)]
    return [data[a:b] for a, b in pairwise(bounds) if b > a]


@st.composite
def responses(draw: Any, framings: tuple[str, ...] = ("length", "chunked", "close")) -> Any:
    """Return a valid response: its bytes, status, body and framing."""
    status = draw(st.sampled_from([200, 201, 400, 404, 500]))
    body = draw(st.binary(max_size=200))
    framing = draw(st.sampled_from(framings))
    interim = b"HTTP/1.1 103 Early\r\nLink: <x>\r\n\r\n" * draw(st.integers(0, 2))
    head = b"HTTP/1.1 %d Some Words\r\nX-Other: a b\r\n" % status
    if framing == "length":
        rest = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    elif framing == "chunked":
        parts = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in split(draw, body))
        rest = b"Transfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % parts
    else:
        rest = b"\r\n" + body
    return interim + head + rest, status, body, framing


@st.composite
def chunked_responses(draw: Any) -> Any:
    raw, status, body, framing = draw(responses())
    return split(draw, raw), status, body, framing


@given(chunked_responses())
def test_a_valid_response_is_returned_as_sent_however_it_is_split(sent):
    chunks, status, body, framing = sent

    async def scenario():
        peer = FakePeer()
        assert await peer.exchange(chunks, closes=framing == "close") == (status, body)
        assert len(peer.pool._idle) == (framing != "close")

    asyncio.run(scenario())


@st.composite
def damaged_responses(draw: Any) -> list[bytes]:
    """Return a response with bytes replaced, inserted or removed, in chunks; or any bytes."""
    raw = bytearray(draw(st.one_of(responses().map(lambda sent: sent[0]), st.binary(max_size=300))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        raw[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return split(draw, bytes(raw[: draw(st.integers(0, len(raw)))]))


@given(damaged_responses())
def test_a_damaged_response_ends_with_a_response_or_an_error_and_nothing_waits(chunks):
    async def scenario():
        peer = FakePeer()
        with suppress(UpstreamError):
            status, _ = await peer.exchange(chunks, closes=True)
            assert 200 <= status < 1000
        assert all(connection.closed for connection in peer.pool._idle)

    asyncio.run(scenario())


FORGED = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"


@st.composite
def followed_responses(draw: Any) -> Any:
    """Return a response with a length or chunks, and unsolicited bytes behind it, in chunks."""
    raw, status, body, _ = draw(responses(("length", "chunked")))
    extra = draw(st.one_of(st.just(FORGED), st.binary(min_size=1, max_size=50)))
    return split(draw, raw + extra), status, body


@given(followed_responses(), responses(("length", "chunked")))
def test_unsolicited_bytes_never_reach_the_next_request(first, second):
    chunks, status, body = first
    raw, next_status, next_body, _ = second

    async def scenario():
        peer = FakePeer()
        assert await peer.exchange(chunks, closes=False) == (status, body)
        assert await peer.exchange([raw], closes=False) == (next_status, next_body)

    asyncio.run(scenario())


@given(responses(("length", "chunked")), st.integers(1, len(FORGED) - 1))
def test_a_second_response_that_begins_with_the_first_never_reaches_the_next_request(first, cut):
    """Its rest arrives when the next request has been sent."""
    raw, status, body, _ = first

    async def scenario():
        peer = FakePeer()
        assert await peer.exchange([raw + FORGED[:cut]], closes=False) == (status, body)
        rest = [FORGED[cut:]] if peer.pool._idle else []
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ntrue"
        assert await peer.exchange([*rest, answer], closes=False) == (200, b"true")

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [99 * 1024, 120 * 1024])
def test_headers_are_limited_in_size(size):
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: %b\r\n\r\n" % (b"y" * (size - 100))

    async def scenario():
        return await FakePeer().exchange(
            [head[at : at + 5000] for at in range(0, len(head), 5000)], closes=False
        )

    if size > 100 * 1024:
        with pytest.raises(UpstreamError, match="headers of more than"):
            asyncio.run(scenario())
    else:
        assert asyncio.run(scenario()) == (200, b"")


@pytest.mark.parametrize("count", [upstream_http.MAX_INTERIM, upstream_http.MAX_INTERIM + 1])
def test_interim_responses_are_limited_in_number(count):
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

    async def scenario():
        return await FakePeer().exchange([*[interim] * count, final], closes=False)

    if count > upstream_http.MAX_INTERIM:
        with pytest.raises(UpstreamError, match="interim responses"):
            asyncio.run(scenario())
    else:
        assert asyncio.run(scenario()) == (200, b"{}")
