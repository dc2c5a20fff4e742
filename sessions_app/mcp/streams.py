"""Requests to the MCP endpoint while they are answered: how many, and when they must end.

A stream may stay open for hours. It ends when its key is revoked (revoking.py), and when
Toolcrib stops.
"""

import asyncio

from django.conf import settings

from sessions_app.dispatch import key_revocation
from toolcrib.lib.asgi import Application, Message, Receive, Scope, Send
from toolcrib.lib.errors import ToolcribError


class TooManyStreams(ToolcribError):
    code = "too_many_streams"
    status = 429


class LiveRequest:
    """One request being answered, in a task that can be ended from outside."""

    def __init__(self, key: int, *, stream: bool) -> None:
        self.key = key
        self.stream = stream
        self.task: asyncio.Task[None] | None = None
        self.cut: ToolcribError | None = None
        self._began = self._ended = False

    async def serve(self, app: Application, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the SDK answer. A request that is cut is still ended as HTTP wants it."""

        async def watched(message: Message) -> None:
            self._began = True
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._ended = True
            await send(message)

        async def answer() -> None:
            await app(scope, receive, watched)

        if self.cut is not None:
            raise self.cut
        self.task = asyncio.create_task(answer())
        try:
            await asyncio.wait({self.task})
        except asyncio.CancelledError:
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=1)
            raise
        if not self.task.cancelled():
            self.task.result()
        if self.cut is not None and not self._began:
            raise self.cut
        if self._began and not self._ended:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def end(self, why: ToolcribError) -> None:
        self.cut = self.cut or why
        if self.task is not None:
            self.task.cancel()


class Streams:
    """All that is open in this process."""

    def __init__(self) -> None:
        self.live: set[LiveRequest] = set()

    def enter(self, key: int, *, stream: bool) -> LiveRequest:
        """Count a request; refuse a stream beyond those that a key may have open."""
        open_now = sum(live.stream and live.key == key for live in self.live)
        if stream and open_now >= settings.MAX_STREAMS:
            raise TooManyStreams(
                f"This key has {open_now} streams open, the cap.",
                hint="Close one. TOOLCRIB_MAX_STREAMS sets the cap.",
                details={"retry_after": 30},
            )
        live = LiveRequest(key, stream=stream)
        self.live.add(live)
        key_revocation.register(live)
        return live

    def leave(self, live: LiveRequest) -> None:
        self.live.discard(live)
        key_revocation.unregister(live)

    async def close(self, within: float) -> None:
        """End every stream, so that stopping need not wait for them."""
        stopping = ToolcribError("Toolcrib is stopping.", hint="Try again.", status=503)
        tasks = {live.task for live in self.live if live.stream and live.task}
        if tasks:
            await asyncio.wait(tasks, timeout=within)  # those that end by themselves
        for live in list(self.live):
            if live.stream:
                live.end(stopping)
