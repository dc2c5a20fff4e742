"""uvicorn's HTTP protocol with timeouts for headers and unread responses, and connection limits.

uvicorn waits forever for incomplete headers and for a client to read a response. Here headers must
arrive within `BODY_TIMEOUT`, and a client that reads nothing for that long is disconnected. Request
bodies are timed by their reader (`toolcrib.asgi`). The head of a response is sent together with
what follows it at once: a client that gets them apart wakes up twice.

A connection waits while it has no complete request. Waiting connections that never carried an
authenticated request are limited per address and in total; above a limit the oldest of them is
closed, so that a new client always gets in and idle ones of strangers cannot starve agents. The
rest of the total is reserved for known clients.
"""

import asyncio
import logging
import resource
from functools import lru_cache
from typing import Any, cast

from django.conf import settings
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from toolcrib.http.client_address import is_trusted_proxy, limited_address

logger = logging.getLogger(__name__)

MAX_OPEN_FILES = 65_536  # to raise the soft limit to; more is of no use
INTERIM = b"HTTP/1.1 100 "  # not the head of the response
REFUSED = b"Toolcrib has too many connections. Retry in a moment.\n"
REFUSED_RESPONSE = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nretry-after: 2\r\nconnection: close\r\n\r\n%b" % (len(REFUSED), REFUSED)
)


class ClientState:
    """What the application found out about a connection."""

    __slots__ = ("is_known",)

    def __init__(self) -> None:
        self.is_known = False  # it carried an authenticated request


class ConnectionLimits:
    """The open connections of one process."""

    def __init__(self, total: int, per_address: int) -> None:
        self.total, self.per_address = total, per_address
        self.strangers = max(total * 2 // 3, 1)  # waiting, from all addresses
        self._open: set[TimeoutHttpProtocol] = set()
        # Insertion order is the order in which they began to wait.
        self._idle: dict[TimeoutHttpProtocol, None] = {}  # known clients between two requests
        self._waiting: dict[str, dict[TimeoutHttpProtocol, None]] = {}  # strangers by address
        self._waiting_count = 0

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: "TimeoutHttpProtocol") -> bool:
        """Add a new connection, and close another one if needed. Return False to refuse it."""
        self._open.add(connection)
        self.wait(connection)
        own = self._waiting[connection.address]
        while len(own) > self.per_address and not is_trusted_proxy(connection.address):
            self._drop(next(iter(own)))
        while self._waiting_count > self.strangers or len(self._open) > self.total:
            oldest = self._oldest()
            if oldest is connection:
                self.leave(connection)
                logger.warning("Refused a connection: all %d are in use", self.total)
                return False
            self._drop(oldest)
        return True

    def _oldest(self) -> "TimeoutHttpProtocol":
        """Return the connection to close: of the address that has most, or a known idle one."""
        busiest = max(self._waiting.values(), key=len)  # contains the new connection
        if len(busiest) == 1 and self._idle and self._waiting_count <= self.strangers:
            return next(iter(self._idle))
        return next(iter(busiest))

    def _drop(self, connection: "TimeoutHttpProtocol") -> None:
        logger.warning("Closed an idle connection of %s: too many connections", connection.address)
        self.leave(connection)
        connection.drop()

    def wait(self, connection: "TimeoutHttpProtocol") -> None:
        """Note that a connection waits for a request."""
        if connection not in self._open:
            return
        if connection.state.is_known:
            self._idle[connection] = None
        elif connection not in (waiting := self._waiting.setdefault(connection.address, {})):
            waiting[connection] = None
            self._waiting_count += 1

    def work(self, connection: "TimeoutHttpProtocol") -> None:
        """Note that a connection has a complete request, which is being answered."""
        if connection.state.is_known:
            self._idle.pop(connection, None)
        waiting = self._waiting.get(connection.address)
        if waiting is not None and connection in waiting:
            del waiting[connection]
            self._waiting_count -= 1
            if not waiting:
                del self._waiting[connection.address]

    def leave(self, connection: "TimeoutHttpProtocol") -> None:
        """Note that a connection is closed."""
        self.work(connection)
        self._open.discard(connection)


@lru_cache(maxsize=1)
def client_connections() -> ConnectionLimits:
    """Return the limits of this process; a quarter of its descriptors is left for other uses."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    total = min(settings.MAX_SOCKETS, descriptors * 3 // 4)
    return ConnectionLimits(total, settings.SOCKETS_PER_ADDRESS)


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files to the hard one, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ResponseTransport:
    """The transport of one response, whose head waits for the body, at most for a turn of the loop.

    It has what uvicorn uses of a transport to respond.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._has_head = False
        self._head = b""  # not sent yet

    def write(self, data: bytes) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif self._has_head or data.startswith(INTERIM):
            self._transport.write(data)
        else:
            self._has_head, self._head = True, data
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._head and not self._transport.is_closing():
            self.write(b"")

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class TimeoutHttpProtocol(HttpToolsProtocol):
    _header_timer: asyncio.TimerHandle | None = None
    _has_begun = False  # a request, in the data that is being parsed; its headers are incomplete
    _read_timer: asyncio.TimerHandle | None = None
    address = ""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.state = ClientState()
        self.address = limited_address(self.client[0]) if self.client else ""
        self._limits = client_connections()
        if self._limits.admit(self):
            self._start_header_timer()
        else:
            transport.write(REFUSED_RESPONSE)
            transport.close()

    def drop(self) -> None:
        """Disconnect, because there are too many connections."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.leave(self)
        self._stop_header_timer()
        if self._read_timer is not None:
            self._read_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_begun = False
        super().data_received(data)
        if self._has_begun:  # a request, of which more headers are to come
            self._start_header_timer()

    def on_message_begin(self) -> None:
        self._has_begun = True
        super().on_message_begin()
        self.scope["state"]["client"] = self.state

    def on_headers_complete(self) -> None:
        self._has_begun = False
        self._stop_header_timer()
        super().on_headers_complete()
        if self.cycle is not None:  # not for an upgrade, which is refused
            transport = ResponseTransport(self.transport, self.loop)
            self.cycle.transport = cast(asyncio.Transport, transport)

    def _start_header_timer(self) -> None:
        self._stop_header_timer()
        self._header_timer = self.loop.call_later(settings.BODY_TIMEOUT, self._close_late)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.cycle.response_complete:
            self._limits.work(self)

    def on_response_complete(self) -> None:
        if not self.pipeline:  # otherwise the next request has arrived
            self._limits.wait(self)
        super().on_response_complete()
        if self._read_timer is None and self.transport.get_write_buffer_size():
            self._start_read_timer(self.transport.get_write_buffer_size())

    def _start_read_timer(self, unread: int) -> None:
        self._read_timer = self.loop.call_later(
            settings.BODY_TIMEOUT, self._check_read_progress, unread
        )

    def _check_read_progress(self, before: int) -> None:
        """Disconnect a client that read nothing since the last check."""
        self._read_timer = None
        unread = self.transport.get_write_buffer_size()
        if unread >= before:
            self.transport.abort()
        elif unread:
            self._start_read_timer(unread)
