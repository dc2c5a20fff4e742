"""Open requests and event streams of the MCP endpoint: limit per key, cancellation, notifications.

A stream may stay open for hours. It ends when its key is revoked (dispatch/key_revocation.py) or
when Toolcrib stops.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from django.conf import settings
from django.db.models import Q, QuerySet

from catalog import cache
from catalog.models import Revision
from sessions_app.dispatch import key_revocation
from sessions_app.dispatch.authorization import Caller
from sessions_app.ledger import writer as ledger_writer
from sessions_app.mcp.feature_list import Versions, versions_of
from sessions_app.mcp.resource_watch import Watches
from sessions_app.mcp.tool_calls import LIST_CHANGED, PING_SECONDS, start_stream, stream_event
from sessions_app.models import AgentSession, McpConnection, Mode, SessionState, Strategy
from sessions_app.sessions import loading
from sessions_app.sessions.scope import scope_of_agent, scope_of_session
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.protocols.asgi import Message, Receive, Send

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
    """The GET stream of a handshake connection: reports changes of its lists and resources."""

    def __init__(self, connection_id: str, url_session_id: str, caller: Caller) -> None:
        self.connection_id, self.url_session_id = connection_id, url_session_id
        self.watches = Watches(caller, self.report_update)
        self.versions: Versions | None = None
        self.revision = -1  # of the catalog that these are of
        self._pending: dict[str, None] = {}  # messages, each once
        self.list_version = 0  # of the session's loads, as the client knows it
        self.tools_revision = 0  # of the catalog in which new tools were looked for
        self.changed = asyncio.Event()
        self.closed = asyncio.Event()

    def notify(self, message: str) -> None:
        self._pending[message] = None
        self.changed.set()

    def report_update(self, uri: str) -> None:
        method, params = "notifications/resources/updated", {"uri": uri}
        self.notify(canonical({"jsonrpc": "2.0", "method": method, "params": params}))

    def compare(self, versions: Versions) -> None:
        """Report changes of the lists of prompts and resources."""
        before, self.versions = self.versions, versions
        for name in ("prompts", "resources"):
            if before is not None and getattr(before, name) != getattr(versions, name):
                method = f"notifications/{name}/list_changed"
                self.notify(canonical({"jsonrpc": "2.0", "method": method}))

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
                pending, self._pending = self._pending, {}
                data = b"".join(map(stream_event, pending)) or b": ping\r\n\r\n"
                changed.cancel()
                self.changed.clear()
        finally:
            await self.watches.close()
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
        self, connection_id: str, url_session_id: str, caller: Caller
    ) -> AsyncIterator[NotificationStream]:
        """Open the stream of a connection, which replaces an earlier one."""
        stream = NotificationStream(connection_id, url_session_id, caller)
        await self._compare([stream], _list_versions)
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
        """Notify streams whose session has loaded tools, in whichever process, or got new ones."""
        if streams := list(self.notifications.values()):
            await self._compare(streams, _grown_versions)

    async def _compare(
        self,
        streams: list[NotificationStream],
        read: Callable[[list[NotificationStream]], dict[str, int]],
    ) -> None:
        versions = await ledger_writer.run_off_loop(read, streams)
        features = await ledger_writer.run_off_loop(_feature_versions, streams)
        for stream in streams:
            if (found := features.get(stream.connection_id)) is not None:
                stream.compare(found[0])
                stream.watches.set(found[1])
            version = versions.get(stream.url_session_id or stream.connection_id, 0)
            if version > stream.list_version and stream.connection_id in self.notifications:
                stream.notify(LIST_CHANGED)
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


def _grown_versions(streams: list[NotificationStream]) -> dict[str, int]:
    """Return the versions after sessions in full mode got the tools of a new revision."""
    revision = cache.current().revision
    behind = [stream for stream in streams if stream.tools_revision != revision]
    own, in_urls = _session_ids(behind)
    sessions = AgentSession.objects.with_catalog().filter(mode=Mode.FULL, state=SessionState.OPEN)
    for rows in (
        sessions.filter(pk__in=_sessions_of(own)) if own else (),
        sessions.filter(session_id__in=in_urls) if in_urls else (),
    ):
        for session in rows:
            loading.add_new_tools(session)
    for stream in behind:
        stream.tools_revision = revision
    return _list_versions(streams)


def _sessions_of(connection_ids: list[str]) -> QuerySet[McpConnection, Any]:
    return McpConnection.objects.filter(connection_id__in=connection_ids).values("session")


def _session_ids(streams: list[NotificationStream]) -> tuple[list[str], list[str]]:
    """Return the connections that have a session of their own, and the sessions in URLs."""
    own = [stream.connection_id for stream in streams if not stream.url_session_id]
    return own, [stream.url_session_id for stream in streams if stream.url_session_id]


def _list_versions(streams: list[NotificationStream]) -> dict[str, int]:
    """Return the versions of loads that are added to tool lists, by session or connection id."""
    own, in_urls = _session_ids(streams)
    versions: dict[str, int] = {}
    if own:
        connections = McpConnection.objects.filter(connection_id__in=own)
        growing = connections.filter(
            Q(session__strategy=Strategy.INJECT) | Q(session__mode=Mode.FULL)
        )
        versions |= dict(growing.values_list("connection_id", "session__loads_version"))
    if in_urls:
        growing_sessions = AgentSession.objects.filter(
            Q(strategy=Strategy.INJECT) | Q(mode=Mode.FULL), session_id__in=in_urls
        )
        versions |= dict(growing_sessions.values_list("session_id", "loads_version"))
    return versions


def _feature_versions(
    streams: list[NotificationStream],
) -> dict[str, tuple[Versions, list[str]]]:
    """Return versions of the other lists, and subscribed resources, by connection id."""
    ids = [stream.connection_id for stream in streams]
    rows = McpConnection.objects.filter(connection_id__in=ids)
    revision, by_id = Revision.current(), {stream.connection_id: stream for stream in streams}
    found = {}
    for row in rows.select_related("key__agent", "session__agent"):
        stream = by_id[row.connection_id]
        versions = stream.versions if stream.revision == revision else None
        if versions is None and row.key.agent is not None:
            scope = scope_of_session(row.session) if row.session else scope_of_agent(row.key.agent)
            versions, stream.revision = versions_of(scope), revision
        if versions is not None:
            found[row.connection_id] = versions, json.loads(row.subscriptions)
    return found
