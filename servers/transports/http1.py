"""A lean HTTP/1.1 client for one server: kept connections, one write a request, no frameworks.

Addresses are checked when connecting, as in network.py, by the same code; headers and bodies are
counted as they arrive. It says exactly when a request may have reached the server. What it does
not do (redirects, cookies, HTTP/2, proxies), callers leave to network.py.
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
from servers.transports.http import KEEPALIVE, GuardedBackend, Upstream
from servers.transports.request_trace import RequestTrace
from servers.transports.response_body import connection_error
from servers.transports.ssrf import allowed_networks

logger = logging.getLogger(__name__)

MAX_HEAD = 100 * 1024  # bytes of headers
# Many servers close a connection after 5 s; one that is closed as we send costs a call its answer.
REUSED_WITHIN = 3.0
DRAINS_WITHIN = 1.0  # seconds for an answer's stream to end after the answer
HELD = 1024 * 1024  # bytes that wait to be looked at, before the server is made to wait
FIXED = {b"accept": b"application/json, text/event-stream", b"content-type": b"application/json"}
QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)


@dataclass
class Response:
    """What comes back: status and headers at once, then pieces of the body as they arrive."""

    status: int
    headers: dict[str, str]
    line: "HttpConnection" = field(repr=False)

    @property
    def kind(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def piece(self) -> bytes:
        """Return the next piece of the body, nothing at its end."""
        return await self.line.piece()


class HttpConnection(asyncio.Protocol):
    """One connection, with one request at a time on it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.lost: BaseException | None = None
        self.closed = False
        self.used = time.monotonic()
        self._socket: socket.socket | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._head = self._status = 0
        self._headers: dict[str, str] = {}
        self._ready = False  # the headers are complete
        self.asked = False  # a request was sent
        self.done = False  # the body is complete, too
        self._kept = False  # the server keeps the connection
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._waiter: asyncio.Future[None] | None = None

    # --- What the loop tells ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not one by class
        self._socket = transport.get_extra_info("socket")
        if self._socket is not None:
            for option in KEEPALIVE:
                self._socket.setsockopt(*option)

    def data_received(self, data: bytes) -> None:
        if not self.asked or self.done:
            self.close()  # what nobody asked for must not be taken for the next answer
            return
        if not self._ready:
            self._head += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._lose(httpx2.RemoteProtocolError("another protocol"))
        except httptools.HttpParserError as error:
            self._lose(httpx2.RemoteProtocolError(f"illegal: {error}"))
        if not self._ready and self._head > MAX_HEAD:
            self._lose(httpx2.RemoteProtocolError("headers too long"))

    def eof_received(self) -> None:
        if self._ready and not self.done:
            # Without a length or chunks, the end of the connection is that of the body.
            unmeasured = not {"content-length", "transfer-encoding"} & self._headers.keys()
            if unmeasured:
                self.done = True

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if not self.done:
            self._lose(error or httpx2.RemoteProtocolError("broke off"))
        self._wake()

    # --- What the parser tells ----------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._ready:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_message_begin(self) -> None:
        if self.done:  # a second answer, in the same stroke: it is nobody's
            self._kept = False

    def on_headers_complete(self) -> None:
        if self._ready:
            return
        self._status = self._parser.get_status_code()
        if self._status >= 200:
            self._ready = True
        else:
            self._headers = {}
        self._wake()

    def on_body(self, body: bytes) -> None:
        if self.done:
            return
        self._pieces.append(body)
        self._held += len(body)
        if self._held > HELD and self.transport is not None:
            self.transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self._ready and not self.done:
            self.done = True
            self._kept = self._parser.should_keep_alive()
            self._wake()

    # --- What the caller does -----------------------------------------------------------------

    async def ask(self, request: bytes, seen: RequestTrace | None) -> Response:
        """Send a request and return its answer's head."""
        assert self.transport is not None  # noqa: S101 - connected
        if seen is not None:
            seen.sent = True
        self.asked = True
        self.transport.write(request)
        if self._socket is not None and QUICKACK is not None:
            # A server that sends head and body apart may wait for an acknowledgement between.
            self._socket.setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)
        while not self._ready:
            await self._news()
        return Response(self._status, self._headers, self)

    async def piece(self) -> bytes:
        while not self._pieces and not self.done:
            await self._news()
        if not self._pieces:
            return b""
        found = b"".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
        self._pieces.clear()
        if self._held > HELD and self.transport is not None:
            self.transport.resume_reading()
        self._held = 0
        return found

    async def _news(self) -> None:
        if self.lost is not None:
            raise self.lost
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _lose(self, error: BaseException) -> None:
        self.lost = self.lost or error
        self.close()
        self._wake()

    def close(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    @property
    def reusable(self) -> bool:
        return self.done and self._kept and not self.closed

    @property
    def quiet(self) -> bool:
        """Tell whether nothing came since the last answer, not even a goodbye not yet read."""
        if self.closed or self._socket is None:
            return not self.closed
        looking = select.poll()
        looking.register(self._socket.fileno(), select.POLLIN)
        return not looking.poll(0)

    def renew(self) -> None:
        """Make ready for another request."""
        self.used = time.monotonic()
        self._begin()


class HttpConnectionPool:
    """The connections to one server. Lives on one loop, within `client.connect`."""

    def __init__(self, upstream: Upstream, url: httpx2.URL) -> None:
        self.url = url
        self._host = url.host
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls: ssl.SSLContext | None = upstream.tls if url.scheme == "https" else None
        self._target = url.raw_path
        self._guard = GuardedBackend(upstream.resolver, allowed_networks())
        fixed = {b"host": url.netloc, **FIXED, **upstream.headers}
        self._fixed = b"".join(b"%b: %b\r\n" % pair for pair in fixed.items())
        self._idle: list[HttpConnection] = []
        self._all: set[HttpConnection] = set()
        self._shut = False

    async def post(
        self, body: bytes, headers: Mapping[str, str], seen: RequestTrace | None
    ) -> Response:
        """Send a message; `seen` is told when the server may have got it. Raises UpstreamError."""
        request = b"POST %b HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n%b" % (
            self._target, self._fixed, _lines(headers), len(body), body,
        )  # fmt: skip
        line = self._take() or await self._connect()
        try:
            return await line.ask(request, seen)
        except asyncio.CancelledError:
            self._drop(line)
            raise
        except (httpx2.HTTPError, OSError) as error:
            self._drop(line)
            raise connection_error(error) from None

    async def piece(self, response: Response) -> bytes:
        try:
            return await response.piece()
        except (httpx2.HTTPError, OSError) as error:
            raise connection_error(error) from None

    def release(self, response: Response) -> None:
        """Be done with a response, read to its end or not: its stream may be about to end."""
        line = response.line
        if line.reusable:
            line.renew()
            self._idle.append(line)
        elif line.done or line.closed or self._shut:
            self._drop(line)
        else:
            task = asyncio.ensure_future(self._drain(response))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _drain(self, response: Response) -> None:
        try:
            async with asyncio.timeout(DRAINS_WITHIN):
                while await response.piece():
                    pass
        except (TimeoutError, httpx2.HTTPError, OSError):
            response.line.close()
        except BaseException:
            response.line.close()
            raise
        self.release(response)

    def drop(self, response: Response) -> None:
        """Hang up: nobody wants the rest."""
        self._drop(response.line)

    def close(self) -> None:
        self._shut = True
        for line in list(self._all):
            line.close()
        self._all.clear()
        self._idle.clear()

    def _drop(self, line: HttpConnection) -> None:
        line.close()
        self._all.discard(line)

    def _take(self) -> HttpConnection | None:
        while self._idle:
            line = self._idle.pop()
            if time.monotonic() - line.used < REUSED_WITHIN and line.quiet:
                return line
            self._drop(line)
        return None

    async def _connect(self) -> HttpConnection:
        if self._shut:
            raise UpstreamError("The connection was closed here.", code="closed", hint="Try again.")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + settings.CONNECT_TIMEOUT
        try:
            addresses = await self._guard.checked(self._host, self._port, deadline)
        except UpstreamError:
            raise
        except Exception as error:  # noqa: BLE001 - of the resolver, in httpcore's words
            raise connection_error(httpx2.ConnectTimeout(str(error))) from None
        problem: Exception = httpx2.ConnectError("no address")
        for index, address in enumerate(addresses):
            share = (deadline - loop.time()) / (len(addresses) - index)
            try:
                async with asyncio.timeout(max(share, 0.05)):
                    _, line = await loop.create_connection(
                        HttpConnection,
                        str(address),
                        self._port,
                        ssl=self._tls,
                        server_hostname=self._host if self._tls else None,
                    )
            except TimeoutError:
                problem = httpx2.ConnectTimeout("connecting")
            except OSError as error:  # of TLS too
                problem = httpx2.ConnectError("refused")
                problem.__cause__ = error
            else:
                self._all.add(line)
                return line
        raise connection_error(problem)


def _lines(headers: Mapping[str, str]) -> bytes:
    found = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")
    if found.count(b"\n") != len(headers) or b"\0" in found or found.count(b"\r") != len(headers):
        raise connection_error(httpx2.LocalProtocolError("a header is not one line"))
    return found
