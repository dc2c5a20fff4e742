"""Open requests and streams of the MCP endpoint: limit per key, cancellation.

A stream may stay open for hours. It ends when its key is revoked (dispatch/key_revocation.py) or
when Toolcrib stops.
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
    """One request that is being answered, in a task that can be cancelled."""

    def __init__(self, key: int, *, stream: bool) -> None:
        self.key = key
        self.stream = stream
        self.task: asyncio.Task[None] | None = None
        self.end_reason: ToolcribError | None = None
        self._started = self._finished = False

    async def serve(self, app: Application, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the SDK's handler. A response that is cut off is completed as HTTP requires."""

        async def tracking_send(message: Message) -> None:
            self._started = True
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._finished = True
            await send(message)

        async def handle() -> None:
            await app(scope, receive, tracking_send)

        if self.end_reason is not None:
            raise self.end_reason
        self.task = asyncio.create_task(handle())
        try:
            await asyncio.wait({self.task})
        except asyncio.CancelledError:
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=1)
            raise
        if not self.task.cancelled():
            self.task.result()
        if self.end_reason is not None and not self._started:
            raise self.end_reason
        if self._started and not self._finished:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def end(self, reason: ToolcribError) -> None:
        self.end_reason = self.end_reason or reason
        if self.task is not None:
            self.task.cancel()


class Streams:
    """All open requests of this process."""

    def __init__(self) -> None:
        self.requests: set[LiveRequest] = set()

    def register(self, key: int, *, stream: bool) -> LiveRequest:
        """Register a request; raise if the key has too many open streams."""
        open_streams = sum(request.stream and request.key == key for request in self.requests)
        if stream and open_streams >= settings.MAX_STREAMS:
            raise TooManyStreams(
                f"This key has reached the limit of {open_streams} open streams.",
                hint="Close a stream. TOOLCRIB_MAX_STREAMS sets the limit.",
                details={"retry_after": 30},
            )
        request = LiveRequest(key, stream=stream)
        self.requests.add(request)
        key_revocation.register(request)
        return request

    def unregister(self, request: LiveRequest) -> None:
        self.requests.discard(request)
        key_revocation.unregister(request)

    async def close_all(self, grace_seconds: float) -> None:
        """Wait for streams to end, then cancel those that are still open."""
        stopping = ToolcribError("Toolcrib is stopping.", hint="Try again.", status=503)
        tasks = {request.task for request in self.requests if request.stream and request.task}
        if tasks:
            await asyncio.wait(tasks, timeout=grace_seconds)
        for request in list(self.requests):
            if request.stream:
                request.end(stopping)
