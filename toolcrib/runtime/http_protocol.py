"""HTTP as uvicorn speaks it, with an end to waiting: a request's head has 30 seconds to arrive,
and some of the answer must be taken every 30 seconds.

uvicorn waits for ever for a head that was begun, and for a caller to read what it was sent. What
comes after the head is timed by whoever reads the body.
"""

import asyncio
from typing import Any

from django.conf import settings
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class TimeoutHttpProtocol(HttpToolsProtocol):
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def _wait(self) -> None:
        self._stop_waiting()
        self._late = self.loop.call_later(settings.BODY_TIMEOUT, self._give_up)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unread is None and self.transport.get_write_buffer_size():
            self._look_again(self.transport.get_write_buffer_size())

    def _look_again(self, left: int) -> None:
        self._unread = self.loop.call_later(settings.BODY_TIMEOUT, self._look, left)

    def _look(self, before: int) -> None:
        """Hang up on who took nothing of what waits for them since the last look."""
        self._unread = None
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self.transport.abort()
        elif left:
            self._look_again(left)
