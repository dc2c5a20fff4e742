"""Open requests and event streams of the MCP endpoint: limit per key, cancellation, notifications.

A stream may stay open for hours. It ends when its key is revoked (dispatch/key_revocation.py) or
when Toolcrib stops.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager

from django.conf import settings

from sessions_app.dispatch import key_revocation
from sessions_app.ledger import writer as ledger_writer
from sessions_app.mcp.tool_calls import LIST_CHANGED, PING_SECONDS, start_stream, stream_event
from sessions_app.models import AgentSession, McpConnection, Strategy
from toolcrib.lib.asgi import Message, Receive, Send
from toolcrib.lib.errors import ToolcribError

POLL_SECONDS = 1.0


class LiveRequest:
    """One request that is being answered, in a task that can be cancelled."""

    def __init__(self, key: int, *, stream: bool) -> None:
        self.key = key
        self.stream = stream
        self.task: asyncio.Task[None] | None = None
        self.end_reason: ToolcribError | None = None
        self.sent_bytes = 0
        self._started = self._finished = False

    def track(self, send: Send) -> Send:

        async def tracking_send(message: Message) -> None:
            self._started = True
            self.sent_bytes += len(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._finished = True
            await send(message)

        return tracking_send

    async def run(self, serving: Awaitable[None], send: Send) -> None:
        """Await the answer. A response that is cut off is completed as HTTP requires."""
        self.task = asyncio.ensure_future(serving)
        if self.end_reason is not None:
            self.task.cancel()
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


class NotificationStream:
    """The GET stream of a handshake connection: reports that its tool list changed."""

    def __init__(self, connection_id: str, url_session_id: str) -> None:
        self.connection_id, self.url_session_id = connection_id, url_session_id
        self.list_version = 0  # of the session's loads, as the client knows it
        self.changed = asyncio.Event()
        self.closed = asyncio.Event()

    async def serve(self, receive: Receive, send: Send) -> None:
        await start_stream(send, {b"mcp-session-id": self.connection_id.encode()})
        ends = {asyncio.ensure_future(end) for end in (_disconnected(receive), self.closed.wait())}
        data = b": open\r\n\r\n"
        try:
            while not any(end.done() for end in ends):
                await send({"type": "http.response.body", "body": data, "more_body": True})
                changed = asyncio.ensure_future(self.changed.wait())
                await asyncio.wait(
                    {*ends, changed}, timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                data = stream_event(LIST_CHANGED) if changed.done() else b": ping\r\n\r\n"
                changed.cancel()
                self.changed.clear()
        finally:
            for end in ends:
                end.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Streams:
    def __init__(self) -> None:
        self.requests: set[LiveRequest] = set()
        self.notifications: dict[str, NotificationStream] = {}  # by connection id

    @contextmanager
    def register(self, key: int, *, stream: bool) -> Iterator[LiveRequest]:
        """Register a request for the duration of the block; raise if there are too many streams."""
        open_streams = sum(request.stream and request.key == key for request in self.requests)
        if stream and open_streams >= settings.MAX_STREAMS:
            raise ToolcribError(
                f"This key has reached the limit of {open_streams} open streams.",
                hint="Close a stream. TOOLCRIB_MAX_STREAMS sets the limit.",
                code="too_many_streams",
                status=429,
                details={"retry_after": 30},
            )
        request = LiveRequest(key, stream=stream)
        self.requests.add(request)
        key_revocation.running.add(request)
        try:
            yield request
        finally:
            self.requests.discard(request)
            key_revocation.running.discard(request)

    @asynccontextmanager
    async def notifications_of(
        self, connection_id: str, url_session_id: str
    ) -> AsyncIterator[NotificationStream]:
        """Open the stream of a connection, which replaces an earlier one."""
        stream = NotificationStream(connection_id, url_session_id)
        await self._compare([stream])
        if (earlier := self.notifications.pop(connection_id, None)) is not None:
            earlier.closed.set()
        self.notifications[connection_id] = stream
        try:
            yield stream
        finally:
            if self.notifications.get(connection_id) is stream:
                del self.notifications[connection_id]

    def set_known(self, connection_id: str, list_version: int) -> None:
        """Note that the client of a connection knows about this version of its tool list."""
        if (stream := self.notifications.get(connection_id)) is not None:
            stream.list_version = max(stream.list_version, list_version)

    async def compare_lists(self) -> None:
        """Notify streams whose session has loaded tools, in whichever process."""
        if streams := list(self.notifications.values()):
            await self._compare(streams)

    async def _compare(self, streams: list[NotificationStream]) -> None:
        versions = await ledger_writer.run_off_loop(_list_versions, streams)
        for stream in streams:
            version = versions.get(stream.url_session_id or stream.connection_id, 0)
            if version > stream.list_version and stream.connection_id in self.notifications:
                stream.changed.set()
            stream.list_version = max(stream.list_version, version)

    async def close_all(self, grace_seconds: float) -> None:
        """Wait for streams to end, then cancel those that are still open."""
        stopping = ToolcribError("Toolcrib is stopping.", hint="Try again.", status=503)
        for stream in self.notifications.values():
            stream.closed.set()
        tasks = {request.task for request in self.requests if request.stream and request.task}
        if tasks:
            await asyncio.wait(tasks, timeout=grace_seconds)
        for request in list(self.requests):
            if request.stream:
                request.end(stopping)


def _list_versions(streams: list[NotificationStream]) -> dict[str, int]:
    """Return the versions of loads that are added to tool lists, by session or connection id."""
    own = [stream.connection_id for stream in streams if not stream.url_session_id]
    in_urls = [stream.url_session_id for stream in streams if stream.url_session_id]
    versions: dict[str, int] = {}
    if own:
        connections = McpConnection.objects.filter(connection_id__in=own)
        injecting = connections.filter(session__strategy=Strategy.INJECT)
        versions |= dict(injecting.values_list("connection_id", "session__loads_version"))
    if in_urls:
        sessions = AgentSession.objects.filter(session_id__in=in_urls, strategy=Strategy.INJECT)
        versions |= dict(sessions.values_list("session_id", "loads_version"))
    return versions
