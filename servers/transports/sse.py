"""The HTTP+SSE transport of 2024: messages arrive on one long GET, and leave as POSTs.

Ours rather than the SDK's, which caps an event at 1 MiB, keeps a failed POST to itself until
the caller times out, and waits for ever when the endpoint event names another origin.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from django.conf import settings

from servers.errors import UpstreamError, not_mcp_error
from servers.transports.http import MAX_REDIRECTS, Upstream, joined, origin
from servers.transports.request_trace import RequestTrace, current_trace
from servers.transports.response_body import BodyError, EventParser


class EventStream:
    """One open stream. `messages` and `send` are its wire."""

    side_by_side = True  # some servers hold a POST until the tool has run

    def __init__(self, upstream: Upstream, response: Any) -> None:
        self._http = upstream.http
        self._url = response.request.url
        self._events = _events(response.aiter_raw())
        self._endpoint = self._url

    async def open(self) -> None:
        """Wait for the event that says where to post."""
        async for name, data in self._events:
            if name != "endpoint":
                continue
            self._endpoint = joined(self._url, data.decode("utf-8", "replace"))
            if origin(self._endpoint) != origin(self._url):
                raise UpstreamError(
                    "The server asks for messages to be sent to another origin.",
                    code="redirect",
                    parked=True,
                )
            return
        raise not_mcp_error("an event stream that is not MCP")

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield each message until the stream ends."""
        async for name, data in self._events:
            if name == "message" and data:
                yield data

    async def send(self, message: bytes, seen: RequestTrace | None) -> None:
        """Post one message, and tell `seen` how it was received. Its answer comes on the stream."""
        posted = _observe(RequestTrace(call=True))
        try:
            response = await self._http.post(
                self._endpoint,
                content=message,
                headers={"Content-Type": "application/json"},
                extensions={"answer": "ignored"},
            )
        finally:
            if seen is not None:
                seen.sent, seen.status, seen.taken = posted.sent, posted.status, posted.taken
        if response.status_code >= 300:
            raise posted.fault or UpstreamError("The server did not take a message.")


@asynccontextmanager
async def open_event_stream(upstream: Upstream, url: str) -> AsyncIterator[EventStream]:
    """Keep a stream open for as long as the block lasts."""
    seen = _observe(RequestTrace())
    headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
    request = upstream.http.build_request("GET", url, headers=headers)
    for _ in range(MAX_REDIRECTS + 1):
        response = await upstream.http.send(request, stream=True)
        if response.next_request is None:
            break
        await response.aclose()
        request = response.next_request
    try:
        if response.status_code >= 300:
            raise seen.fault or UpstreamError("The server did not open an event stream.")
        stream = EventStream(upstream, response)
        try:
            await stream.open()
        except BodyError as error:
            raise error.fault from None
        yield stream
    finally:
        await response.aclose()


def _observe(seen: RequestTrace) -> RequestTrace:
    current_trace.set(seen)
    return seen


async def _events(chunks: Any) -> AsyncIterator[tuple[str, bytes]]:
    events = EventParser(settings.MAX_MESSAGE_BYTES)
    async with aclosing(chunks):
        async for chunk in chunks:
            for event in events.feed(chunk):
                yield event
