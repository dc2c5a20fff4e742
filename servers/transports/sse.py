"""HTTP+SSE transport of MCP 2024-11-05: messages arrive on one long GET and are sent as POSTs.

Replaces the SDK's implementation, which limits events to 1 MiB, does not report a failed POST
until the caller times out, and waits forever when the endpoint event names another origin.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from django.conf import settings

from servers.errors import ParkedError, UpstreamError, not_mcp_error
from servers.transports.http import MAX_REDIRECTS, Upstream, join_url, origin
from servers.transports.request_trace import RequestTrace, current_trace
from servers.transports.response_body import BodyError, EventParser


class EventStream:
    """One open stream; a MessageStream for `servers.connections.streams`."""

    concurrent_sends = True  # some servers do not answer a POST until the tool has run

    def __init__(self, upstream: Upstream, response: Any) -> None:
        self._http = upstream.http
        self._url = response.request.url
        self._events = _parse_events(response.aiter_raw())
        self._endpoint = self._url

    async def open(self) -> None:
        """Wait for the event that names the URL for POSTs."""
        async for name, data in self._events:
            if name != "endpoint":
                continue
            self._endpoint = join_url(self._url, data.decode("utf-8", "replace"))
            if origin(self._endpoint) != origin(self._url):
                raise ParkedError(
                    "The server asks for messages to be sent to another origin.", code="redirect"
                )
            return
        raise not_mcp_error("an event stream that is not MCP")

    async def messages(self) -> AsyncIterator[bytes]:
        async for name, data in self._events:
            if name == "message" and data:
                yield data

    async def send(self, message: bytes, trace: RequestTrace | None) -> None:
        """Post one message; record in `trace` how it was received. Its response is an event."""
        current_trace.set(post_trace := RequestTrace(is_call=True))
        try:
            response = await self._http.post(
                self._endpoint,
                content=message,
                headers={"Content-Type": "application/json"},
                extensions={"answer": "ignored"},
            )
        finally:
            if trace is not None:
                trace.sent, trace.status = post_trace.sent, post_trace.status
                trace.accepted = post_trace.accepted
        if response.status_code >= 300:
            raise post_trace.error or UpstreamError("The server did not accept a message.")


@asynccontextmanager
async def open_event_stream(upstream: Upstream, url: str) -> AsyncIterator[EventStream]:
    current_trace.set(trace := RequestTrace())
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
            raise trace.error or UpstreamError("The server did not open an event stream.")
        stream = EventStream(upstream, response)
        try:
            await stream.open()
        except BodyError as body_error:
            raise body_error.error from None
        yield stream
    finally:
        await response.aclose()


async def _parse_events(chunks: Any) -> AsyncIterator[tuple[str, bytes]]:
    parser = EventParser(settings.MAX_MESSAGE_BYTES)
    async with aclosing(chunks):
        async for chunk in chunks:
            for event in parser.feed(chunk):
                yield event
