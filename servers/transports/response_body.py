"""Bodies of HTTP responses: counted, decoded and examined as they arrive, and cut at the cap."""

import asyncio
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Protocol

import httpx2
from django.conf import settings

from servers.errors import UpstreamError, not_mcp_error, tls_error
from servers.transports.buffers import PIECE, TURN, ChunkBuffer
from servers.transports.jsonrpc import BOM
from servers.transports.request_trace import RequestTrace, TooLarge, trace_error

SLICE = 16 * 1024  # bytes that are worked through at once


class BodyError(httpx2.SSEError, httpx2.StreamError):
    """Ends the reading of a body. Both bases: the SDK then fails that one request, and only it."""

    def __init__(self, fault: UpstreamError) -> None:
        httpx2.SSEError.__init__(self, fault.message)
        self.fault = fault


class CappedBody(httpx2.AsyncByteStream):
    """A body that stops at the cap: in total, or for event streams per event.

    The answer to a call is examined by `seen` before the SDK gets the end of it.
    """

    def __init__(
        self,
        response: httpx2.Response,
        *,
        decoder: "Decoder",
        per_event: bool,
        cap: int,
        seen: RequestTrace | None = None,
    ) -> None:
        self._response = response
        self._decoder = decoder
        self._per_event = per_event
        self._cap = cap
        self._seen = seen

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        tail = b""
        heard = EventParser(self._cap) if self._per_event else WholeBody()
        try:
            async for raw in self._response.stream:  # type: ignore[union-attr]
                async for chunk in unpacked(raw, self._decoder):
                    if not size and not self._per_event:
                        chunk = chunk.removeprefix(BOM)
                    size += len(chunk)
                    if self._per_event:
                        size, tail = _since_last_event(size, tail, chunk)
                    if size > self._cap:
                        what = "an event" if self._per_event else "a response"
                        raise TooLarge(f"server sent {what}", self._cap)
                    if self._seen is not None:
                        for name, data in heard.feed(chunk):
                            if data and name == "message":
                                await self._seen.examine(data)
                    yield chunk
            if self._seen is not None and (whole := heard.rest()):
                await self._seen.examine(whole)
        except UpstreamError as fault:
            trace_error(fault)
            raise BodyError(fault) from None
        except (httpx2.TransportError, OSError, zlib.error) as error:
            lost = body_error(error)
            trace_error(lost)
            raise BodyError(lost) from None

    async def aclose(self) -> None:
        await self._response.aclose()


def _since_last_event(size: int, tail: bytes, chunk: bytes) -> tuple[int, bytes]:
    """Return how many bytes the current event has, and what to remember of the chunk's end."""
    seen = tail + chunk
    marks = (b"\n\n", b"\r\n\r\n", b"\r\r")
    end = max((at + len(mark) for mark in marks if (at := seen.rfind(mark)) >= 0), default=-1)
    if end >= 0:
        size = len(seen) - end
    return size, seen[-3:] if end < 0 else seen[max(end, len(seen) - 3) :]


class Decoder(Protocol):
    def __call__(self, raw: bytes) -> Iterable[bytes]: ...


def decoder(encoding: str) -> Decoder:
    """Return what undoes a content encoding, a bounded piece at a time. We ask for none."""
    if encoding in ("", "identity"):
        return lambda raw: (raw,)
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise UpstreamError("The server compressed its answer although it was asked not to.")
    inflate = zlib.decompressobj(wbits=47)  # gzip and zlib headers alike

    def decode(raw: bytes) -> Iterable[bytes]:
        # A little at a time: what was not consumed is copied for every piece that comes out.
        for at in range(0, len(raw), 4096):
            some = raw[at : at + 4096]
            while some:
                yield inflate.decompress(some, PIECE)
                some = inflate.unconsumed_tail

    return decode


async def unpacked(raw: bytes, decode: Decoder) -> AsyncIterator[bytes]:
    """Yield what a piece of a body comes to, a little at a time.

    However much a megabyte unpacks to, or however many lines are in it, others on the loop get
    their turn meanwhile.
    """
    began = time.monotonic()
    for chunk in decode(raw):
        for at in range(0, len(chunk), SLICE):
            yield chunk[at : at + SLICE]
            if time.monotonic() - began > TURN:
                await asyncio.sleep(0)
                began = time.monotonic()


class WholeBody:
    """Keeps all of a body, to be looked at when it is complete."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterable[tuple[str, bytes]]:
        self._chunks.append(chunk)
        return ()

    def rest(self) -> bytes:
        return b"".join(self._chunks)


class EventParser:
    """Parses an event stream into names and data, as chunks arrive.

    Caps events too, since a count of bytes takes a bare carriage return for a line's end.
    """

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._line = ChunkBuffer()  # of one that has not ended
        self._name, self._data, self._held = "message", list[bytes](), 0
        self.last_id = ""  # where a stream of the handshake era can be taken up again
        self.retry = 1.0  # and after how many seconds

    def feed(self, chunk: bytes) -> Iterator[tuple[str, bytes]]:
        """Yield what the chunk completes."""
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            self._add(chunk[start:end])
            start = end + 1
            if self._take():
                continue
            name, data = self._name, self._data
            self._name, self._data, self._held = "message", [], 0
            if data:
                yield name, b"\n".join(data)
        if start < len(chunk):
            self._add(chunk[start:])

    def _add(self, piece: bytes) -> None:
        self._line.add(piece)
        if self._line.size + self._held > self._cap:
            raise TooLarge("server sent an event", self._cap)

    def _take(self) -> bool:
        """Heed a line that has ended; False if it is empty, which ends the event."""
        if not self._line.size:
            return False
        head = self._line.head(6)
        if head.startswith(b"data:"):  # the only field that may be large
            self._keep(self._line.take(6 if head.endswith(b" ") else 5, b"\r"))
            return True
        line = self._line.take(end=b"\r")
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._keep(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"id" and value.isascii() and b"\0" not in value:
            self.last_id = value.decode()
        elif field == b"retry" and value.isdigit() and len(value) < 9:
            self.retry = int(value) / 1000
        return bool(line)

    def _keep(self, value: bytes) -> None:
        self._data.append(value)
        self._held += len(value) + 32  # of Python's own

    def rest(self) -> bytes:
        return b""


def body_error(error: BaseException) -> UpstreamError:
    """Say why an answer that had begun has no end."""
    if isinstance(error, httpx2.RemoteProtocolError | zlib.error):
        return UpstreamError("The server broke off or garbled its answer.", code="closed")
    return connection_error(error)


def connection_error(error: BaseException) -> UpstreamError:
    """Say in a sentence why a connection failed. Never the error's own text: it may quote us."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    for cause in causes:
        if isinstance(cause, UpstreamError):
            return cause
        if isinstance(cause, ssl.SSLError):
            return tls_error(cause)
    if isinstance(error, httpx2.ConnectTimeout):
        return UpstreamError(
            f"The server did not accept a connection within {settings.CONNECT_TIMEOUT} s.",
            code="timeout",
            hint="Check the host and port, and that no firewall is between.",
        )
    if isinstance(error, httpx2.ConnectError):
        return UpstreamError(
            "The server refused the connection.",
            code="refused",
            hint="Check that it is running, and the host and port.",
        )
    if isinstance(error, httpx2.RemoteProtocolError) and "too long" in str(error):
        return UpstreamError(
            "The server sent headers of more than 100 KiB.", code="too_large", parked=True
        )
    if isinstance(error, httpx2.LocalProtocolError):
        return UpstreamError(
            "A header of this server cannot be sent over HTTP.",
            code="protocol",
            hint="Header names and values must be plain text on one line.",
            parked=True,
        )
    if isinstance(error, httpx2.RemoteProtocolError | zlib.error):
        return (
            not_mcp_error("something that is not HTTP")
            if "illegal" in str(error)
            else UpstreamError("The server broke off or garbled its answer.", code="closed")
        )
    return UpstreamError("The connection to the server was lost.", code="closed")
