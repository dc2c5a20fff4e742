"""HTTP/1.1 client connection pool for one server: keep-alive, one write per request.

Addresses are checked at connection time by the code in http.py; headers and bodies are limited as
they arrive. Reports exactly when a request may have reached the server. Redirects, cookies, HTTP/2
and proxies are not supported: callers use http.py for them.
"""

import asyncio
import logging
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import httptools
import httpx2
from django.conf import settings

from servers.errors import UpstreamError
from servers.transports.http import (
    KEEPALIVE,
    MAX_INTERIM,
    GuardedBackend,
    Upstream,
    too_many_interim_responses,
)
from servers.transports.request_trace import RequestTrace
from servers.transports.response_body import connection_error
from servers.transports.ssrf import allowed_networks
from toolcrib.lib.protocols.asgi import content_type_of

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 100 * 1024  # status line and headers, with all interim responses
# Many servers close idle connections after 5 s. A request sent at that moment loses its response.
MAX_IDLE = 3.0  # seconds
DRAIN_TIMEOUT = 1.0  # seconds for a stream to end after the response
SHORT_BODY = 64 * 1024  # bytes
MAX_BUFFERED = 1024 * 1024  # unread bytes above which the socket is not read
FIXED_HEADERS = {
    b"accept": b"application/json, text/event-stream",
    b"content-type": b"application/json",
}
QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)


@dataclass
class Response:
    """A response: status and headers at once, the body in chunks as they arrive."""

    status: int
    headers: dict[str, str]
    connection: "HttpConnection" = field(repr=False)

    @property
    def content_type(self) -> str:
        return content_type_of(self.headers)

    @property
    def is_plain_json(self) -> bool:
        """Tell whether the body is one JSON text as it is sent."""
        return self.content_type == "application/json" and "content-encoding" not in self.headers


class HttpConnection(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.error: BaseException | None = None
        self.closed = False
        self.last_used = time.monotonic()
        self._socket: socket.socket | None = None
        self._reset_request()

    def _reset_request(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._head_size = self._status = self._interim = 0
        self._headers: dict[str, str] = {}
        self._headers_complete = False
        self.request_sent = False
        self.complete = False  # the response, including its body
        self._keep_alive = False
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has another base class
        self._socket = transport.get_extra_info("socket")
        if self._socket is not None:
            for option in KEEPALIVE:
                self._socket.setsockopt(*option)

    def data_received(self, data: bytes) -> None:
        if not self.request_sent or self.complete:
            self.close()  # unsolicited data must not be taken for the next response
            return
        if not self._headers_complete:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(httpx2.RemoteProtocolError("another protocol"))
        except httptools.HttpParserError as error:
            self._fail(httpx2.RemoteProtocolError(f"illegal: {error}"))
        if not self._headers_complete and self._head_size > MAX_HEAD_BYTES:
            self._fail(httpx2.RemoteProtocolError("headers too long"))

    def eof_received(self) -> None:
        if self._headers_complete and not self.complete:
            # Without a length or chunks, the end of the connection ends the body.
            until_eof = not {"content-length", "transfer-encoding"} & self._headers.keys()
            if until_eof:
                self.complete = True

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if not self.complete:
            self._fail(error or httpx2.RemoteProtocolError("incomplete"))
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headers_complete:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_message_begin(self) -> None:
        if self.complete:  # a second response in the same read matches no request
            self._keep_alive = False

    def on_headers_complete(self) -> None:
        if self._headers_complete:
            return
        self._status = self._parser.get_status_code()
        if self._status >= 200:
            self._headers_complete = True
        else:
            self._headers = {}
            self._interim += 1
            if self._interim > MAX_INTERIM:
                self._fail(too_many_interim_responses())
        # A short body that follows the headers is worth waiting for: one wakeup instead of two.
        length = self._headers.get("content-length", "")
        if not length.isdigit() or not 0 < int(length) <= SHORT_BODY:
            self._wake()

    def on_body(self, body: bytes) -> None:
        if self.complete:
            return
        self._chunks.append(body)
        self._buffered += len(body)
        if self._buffered > MAX_BUFFERED and self.transport is not None:
            self.transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self._headers_complete and not self.complete:
            self.complete = True
            self._keep_alive = self._parser.should_keep_alive()
            self._wake()

    async def send(self, request: bytes, trace: RequestTrace | None) -> Response:
        """Send a request and return its response once the headers are complete."""
        assert self.transport is not None  # noqa: S101 - connected
        if trace is not None:
            trace.sent = True
        self.request_sent = True
        self.transport.write(request)
        if self._socket is not None and QUICKACK is not None:
            # A server that sends headers and body separately may wait for an ACK in between.
            self._socket.setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)
        while not self._headers_complete:
            await self._wait_for_data()
        return Response(self._status, self._headers, self)

    async def read_chunk(self) -> bytes:
        """Return the next chunk of the body, empty at its end."""
        while not self._chunks and not self.complete:
            await self._wait_for_data()
        if not self._chunks:
            return b""
        data = b"".join(self._chunks) if len(self._chunks) > 1 else self._chunks[0]
        self._chunks.clear()
        if self._buffered > MAX_BUFFERED and self.transport is not None:
            self.transport.resume_reading()
        self._buffered = 0
        return data

    async def _wait_for_data(self) -> None:
        if self.error is not None:
            raise self.error
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.close()
        self._wake()

    def close(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    @property
    def is_reusable(self) -> bool:
        return self.complete and self._keep_alive and not self.closed

    @property
    def has_no_input(self) -> bool:
        """Tell whether nothing arrived since the last response, not even an unread EOF."""
        if self.closed or self._socket is None:
            return not self.closed
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return not poll.poll(0)

    def reset(self) -> None:
        self.last_used = time.monotonic()
        self._reset_request()


class HttpConnectionPool:
    """The connections to one server. Bound to one event loop, inside `connection.connect`."""

    def __init__(self, upstream: Upstream, url: httpx2.URL) -> None:
        self.url = url
        self._host = url.host
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls: ssl.SSLContext | None = upstream.tls if url.scheme == "https" else None
        self._target = url.raw_path
        self._backend = GuardedBackend(upstream.resolver, allowed_networks())
        fixed = {b"host": url.netloc, **FIXED_HEADERS, **upstream.headers}
        self._fixed_headers = b"".join(b"%b: %b\r\n" % pair for pair in fixed.items())
        self._idle: list[HttpConnection] = []
        self._all: set[HttpConnection] = set()
        self._closed = False

    async def post(
        self, body: bytes, headers: Mapping[str, str], trace: RequestTrace | None
    ) -> Response:
        """Send a message; set `trace.sent` once the server may have it. Raises UpstreamError."""
        request = b"POST %b HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n%b" % (
            self._target, self._fixed_headers, _format_headers(headers), len(body), body,
        )  # fmt: skip
        connection = self._pop_idle() or await self._connect()
        try:
            return await connection.send(request, trace)
        except asyncio.CancelledError:
            self._drop(connection)
            raise
        except (httpx2.HTTPError, OSError) as error:
            self._drop(connection)
            raise connection_error(error) from None

    async def read_chunk(self, response: Response) -> bytes:
        try:
            return await response.connection.read_chunk()
        except (httpx2.HTTPError, OSError) as error:
            raise connection_error(error) from None

    def release(self, response: Response) -> None:
        """Return the connection to the pool, after reading the rest of the body if needed."""
        connection = response.connection
        if connection.is_reusable:
            connection.reset()
            self._idle.append(connection)
        elif connection.complete or connection.closed or self._closed:
            self._drop(connection)
        else:
            task = asyncio.ensure_future(self._drain(response))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _drain(self, response: Response) -> None:
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT):
                while await response.connection.read_chunk():
                    pass
        except (TimeoutError, httpx2.HTTPError, OSError):
            response.connection.close()
        except BaseException:
            response.connection.close()
            raise
        self.release(response)

    def drop(self, response: Response) -> None:
        """Close the connection; the rest of the response is not needed."""
        self._drop(response.connection)

    def close(self) -> None:
        self._closed = True
        for connection in list(self._all):
            connection.close()
        self._all.clear()
        self._idle.clear()

    def _drop(self, connection: HttpConnection) -> None:
        connection.close()
        self._all.discard(connection)

    def _pop_idle(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if time.monotonic() - connection.last_used < MAX_IDLE and connection.has_no_input:
                return connection
            self._drop(connection)
        return None

    async def _connect(self) -> HttpConnection:
        if self._closed:
            raise UpstreamError("Toolcrib closed the connection.", code="closed", hint="Try again.")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + settings.CONNECT_TIMEOUT
        addresses = await self._backend.resolve_checked(self._host, self._port, deadline)
        last_error: Exception = httpx2.ConnectError("no address")
        for index, address in enumerate(addresses):
            share = (deadline - loop.time()) / (len(addresses) - index)
            try:
                async with asyncio.timeout(max(share, 0.05)):
                    _, connection = await loop.create_connection(
                        HttpConnection,
                        str(address),
                        self._port,
                        ssl=self._tls,
                        server_hostname=self._host if self._tls else None,
                    )
            except TimeoutError:
                last_error = httpx2.ConnectTimeout("connecting")
            except OSError as error:  # includes TLS errors
                last_error = httpx2.ConnectError("refused")
                last_error.__cause__ = error
            else:
                self._all.add(connection)
                return connection
        raise connection_error(last_error)


def _format_headers(headers: Mapping[str, str]) -> bytes:
    text = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")
    if text.count(b"\n") != len(headers) or b"\0" in text or text.count(b"\r") != len(headers):
        raise connection_error(httpx2.LocalProtocolError("a header is not one line"))
    return text
