"""HTTP response bodies: size limits, decompression, event stream parsing and error mapping."""

import asyncio
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass

import httpx2
from django.conf import settings

from servers.errors import ParkedError, UpstreamError, not_mcp_error, tls_error
from servers.transports.buffers import CHUNK_BYTES, YIELD_AFTER, ChunkBuffer
from servers.transports.request_trace import (
    RequestTrace,
    TooLarge,
    parse_off_loop,
    record_error,
)
from toolcrib.lib.protocols.jsonrpc import BOM, limit_depth

SLICE_BYTES = 16 * 1024  # processed at once
Decoder = Callable[[bytes], Iterable[bytes]]


class BodyError(httpx2.SSEError, httpx2.StreamError):
    """Stops reading a body. With both bases the SDK fails this one request and no other."""

    def __init__(self, error: UpstreamError) -> None:
        httpx2.SSEError.__init__(self, error.message)
        self.error = error


@dataclass(eq=False)
class CappedBody(httpx2.AsyncByteStream):
    """A body with a size limit, in total or per event. `trace` examines the response to a call."""

    response: httpx2.Response
    decoder: Decoder
    per_event: bool
    limit: int
    trace: RequestTrace | None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, tail, body = 0, b"", list[bytes]()
        events = EventParser(self.limit)
        try:
            async for raw in self.response.stream:  # type: ignore[union-attr]
                async for chunk in decode_in_slices(raw, self.decoder):
                    if not size and not self.per_event:
                        chunk = chunk.removeprefix(BOM)
                    size += len(chunk)
                    if self.per_event:
                        size, tail = _bytes_since_last_event(size, tail, chunk)
                    if size > self.limit:
                        what = "an event" if self.per_event else "a response"
                        raise TooLarge(f"server sent {what}", self.limit)
                    if self.trace is not None and self.per_event:
                        for name, data in events.feed(chunk):
                            if data and name == "message":
                                await self.trace.examine(data)
                    elif self.trace is not None:
                        body.append(chunk)
                    yield chunk
            if self.trace is not None and body:
                await self.trace.examine(b"".join(body))
        except UpstreamError as error:
            record_error(error)
            raise BodyError(error) from None
        except (httpx2.TransportError, OSError) as error:
            # The response began: what is not HTTP is the rest of it.
            is_cut = isinstance(error, httpx2.RemoteProtocolError)
            lost = _incomplete_error() if is_cut else connection_error(error)
            record_error(lost)
            raise BodyError(lost) from None

    async def aclose(self) -> None:
        await self.response.aclose()


@dataclass(eq=False)
class ShallowBody(httpx2.AsyncByteStream):
    """The body of a tool list, without what is nested too deeply for the SDK's parser."""

    body: CappedBody

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pending: list[bytes] = []
        async for chunk in self.body:
            end = chunk.rfind(b"\n") + 1 if self.body.per_event else 0
            if end:
                yield await parse_off_loop(limit_depth, b"".join([*pending, chunk[:end]]))
                pending, chunk = [], chunk[end:]
            pending.append(chunk)
        yield await parse_off_loop(limit_depth, b"".join(pending))

    async def aclose(self) -> None:
        await self.body.aclose()


def _bytes_since_last_event(size: int, tail: bytes, chunk: bytes) -> tuple[int, bytes]:
    """Return the size of the current event so far, and the end of the chunk for the next call."""
    data = tail + chunk
    separators = (b"\n\n", b"\r\n\r\n", b"\r\r")
    end = max(
        (at + len(separator) for separator in separators if (at := data.rfind(separator)) >= 0),
        default=-1,
    )
    if end >= 0:
        size = len(data) - end
    return size, data[-3:] if end < 0 else data[max(end, len(data) - 3) :]


def decoder(encoding: str) -> Decoder:
    """Return the decoder of an encoding; some servers compress unasked. Its chunks are bounded."""
    if encoding in ("", "identity"):
        return lambda raw: (raw,)
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise UpstreamError("The server used a content encoding that was not requested.")
    inflate = zlib.decompressobj(wbits=47)  # gzip and zlib headers alike

    def decode(raw: bytes) -> Iterable[bytes]:
        # Small inputs: zlib copies the unconsumed rest for every chunk of output.
        for start in range(0, len(raw), 4096):
            data = raw[start : start + 4096]
            while data:
                try:
                    chunk = inflate.decompress(data, CHUNK_BYTES)
                except zlib.error:
                    raise _incomplete_error() from None
                yield chunk
                data = inflate.unconsumed_tail

    return decode


async def decode_in_slices(raw: bytes, decode: Decoder) -> AsyncIterator[bytes]:
    """Yield small slices, returning to the loop in between: 1 MB may expand to 1 GB."""
    started = time.monotonic()
    for chunk in decode(raw):
        for start in range(0, len(chunk), SLICE_BYTES):
            yield chunk[start : start + SLICE_BYTES]
            if time.monotonic() - started > YIELD_AFTER:
                await asyncio.sleep(0)
                started = time.monotonic()


class EventParser:
    """Incremental parser of event streams (SSE), which limits the size of an event too."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._line = ChunkBuffer()  # the current, incomplete line
        self._name, self._data, self._data_size = "message", list[bytes](), 0
        self.last_id = ""  # where a stream of the legacy protocol can be resumed
        self.retry = 1.0  # seconds to wait before resuming

    def feed(self, chunk: bytes) -> Iterator[tuple[str, bytes]]:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            self._add(chunk[start:end])
            start = end + 1
            if self._process_line():
                continue
            name, data = self._name, self._data
            self._name, self._data, self._data_size = "message", [], 0
            if data:
                yield name, b"\n".join(data)
        if start < len(chunk):
            self._add(chunk[start:])

    def _add(self, data: bytes) -> None:
        self._line.add(data)
        if self._line.size + self._data_size > self._limit:
            raise TooLarge("server sent an event", self._limit)

    def _process_line(self) -> bool:
        """Process a complete line; return False for an empty line, which ends the event."""
        if not self._line.size:
            return False
        head = self._line.head(6)
        if head.startswith(b"data:"):  # the only field that may be large
            self._append_data(self._line.pop_all(6 if head.endswith(b" ") else 5, b"\r"))
            return True
        line = self._line.pop_all(strip=b"\r")
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._append_data(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"id" and value.isascii() and b"\0" not in value:
            self.last_id = value.decode()
        elif field == b"retry" and value.isdigit() and len(value) < 9:
            self.retry = int(value) / 1000
        return bool(line)

    def _append_data(self, value: bytes) -> None:
        self._data.append(value)
        self._data_size += len(value) + 32  # overhead of a bytes object


def wrong_content_error(content_type: str) -> UpstreamError:
    return not_mcp_error("HTML" if "html" in content_type else "something that is not MCP")


def connection_error(error: BaseException) -> UpstreamError:
    """Return the error for a failed connection. Never quotes `error`: it may contain secrets."""
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
            hint="Check the host, the port and any firewall in between.",
        )
    if isinstance(error, httpx2.ConnectError):
        return UpstreamError(
            "The server refused the connection.",
            code="refused",
            hint="Check that it is running, and the host and port.",
        )
    if isinstance(error, httpx2.RemoteProtocolError):
        if "too long" in str(error):
            message = "The server sent headers of more than 100 KiB."
            return ParkedError(message, code="too_large")
        if "interim" in str(error):
            message = "The server sent interim responses (1xx) without end."
            return ParkedError(message, code="protocol", hint="Report this to its operator.")
        is_illegal = "illegal" in str(error)
        return not_mcp_error("something that is not HTTP") if is_illegal else _incomplete_error()
    if isinstance(error, httpx2.LocalProtocolError):
        return ParkedError(
            "A header of this server cannot be sent over HTTP.",
            code="protocol",
            hint="Header names and values must be plain text on one line.",
        )
    return UpstreamError("The connection to the server was lost.", code="closed")


def _incomplete_error() -> UpstreamError:
    return UpstreamError("The server sent an incomplete or corrupted response.", code="closed")
