"""uvicorn's HTTP protocol with timeouts for request headers and for unread responses.

uvicorn waits forever for incomplete headers and for a client to read a response. Here headers must
arrive within `BODY_TIMEOUT`, and a client that reads nothing for that long is disconnected. Request
bodies are timed by their reader (`toolcrib.asgi`).
"""

import asyncio
from typing import Any

from django.conf import settings
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class TimeoutHttpProtocol(HttpToolsProtocol):
    _header_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        if self._read_timer is not None:
            self._read_timer.cancel()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._start_header_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_header_timer()
        super().on_headers_complete()

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

    def on_response_complete(self) -> None:
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
