"""Direct tools/call over streamable HTTP, bypassing the SDK. Both protocol versions.

One POST per call: the request as the SDK would send it; the response is parsed once, strictly, and
returned unchanged. The SDK still does the handshake and the listening, and takes over
(`FallBackToSdk`) for redirects and for streams that end early and can be resumed.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from django.conf import settings

from servers.errors import ServerErrorResponse, UpstreamError, auth_error, status_error
from servers.transports import http as upstream_http
from servers.transports.http import BackgroundPosts, check_redirect, session_lost_error
from servers.transports.http1 import HttpConnectionPool, Response
from servers.transports.request_trace import ACCEPTED_STATUSES, RequestTrace, TooLarge
from servers.transports.response_body import (
    EventParser,
    decode_in_slices,
    decoder,
    wrong_content_error,
)
from toolcrib.lib.protocols.jsonrpc import BOM, LARGE_BYTES, ParsedMessage, parse_message

FIRST_ID = 1_000_000_000  # the SDK counts up from 0 in the same session
MAX_SERVER_REQUESTS = 100  # unanswered requests of a server to the client
SESSION_HEADER = "mcp-session-id"
NO_CONTENT_STATUSES = frozenset({202, 204})
LIST_CHANGES = frozenset(
    f"notifications/{name}/list_changed" for name in ("tools", "prompts", "resources")
)


class FallBackToSdk(Exception):
    """The SDK has to continue this call. `resume` is the event id to resume its stream from."""

    def __init__(self, resume: str | None = None, wait: float = 0.0) -> None:
        super().__init__(resume)
        self.resume, self.wait = resume, wait


class DirectHttpCaller:
    """Calls the tools of one server, next to an SDK connection that did the handshake."""

    def __init__(
        self,
        connections: HttpConnectionPool,
        transport: upstream_http.UpstreamTransport,
        on_session_lost: Callable[[], None],
    ) -> None:
        self._connections = connections
        self._transport = transport
        self._on_session_lost = on_session_lost
        self._ids = itertools.count(FIRST_ID)
        self._replies = BackgroundPosts()  # to requests of the server
        self._cancels = BackgroundPosts()
        self.modern = False
        self.on_list_changed: Callable[[], None] = lambda: None
        self.on_resource_updated: Callable[[object], None] = lambda _: None

    @property
    def session_id(self) -> str:
        """The session id from the SDK's handshake; the modern protocol has none."""
        return "" if self.modern else self._transport.session_id

    async def call(
        self, params: Mapping[str, Any], headers: Mapping[str, str], trace: RequestTrace
    ) -> tuple[dict[str, Any], int]:
        """Send tools/call; return the result unchanged, and its size in bytes."""
        request_id = next(self._ids)
        trace.request_id = request_id
        message = {"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params}
        body = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()
        try:
            return await self._exchange(request_id, body, self._with_session(headers), trace)
        except asyncio.CancelledError:
            if trace.sent and not self.modern:  # modern servers take a disconnect as a cancel
                self._cancel(request_id, headers)
            raise
        except UpstreamError as error:
            trace.error = trace.error or error
            raise

    async def _exchange(
        self, request_id: int, body: bytes, headers: Mapping[str, str], trace: RequestTrace
    ) -> tuple[dict[str, Any], int]:
        response = await self._connections.post(body, headers, trace)
        try:
            self._check_response(response, trace)
            if response.is_plain_json:
                raw = await self._read_body(response)
                parsed = await self._parse(raw, headers)
            else:
                async for raw in self._read_messages(response):
                    parsed = await self._parse(raw, headers)
                    if parsed is not None:
                        break
                else:
                    parsed = None
            if parsed is None:
                raise trace.error or UpstreamError(
                    "The connection to the server was lost while the tool ran.", code="closed"
                )
            result = self._get_result(parsed, request_id, len(raw), trace)
            self._connections.release(response)
            return result, len(raw)
        except BaseException:
            self._connections.drop(response)
            raise

    async def _parse(self, raw: bytes, headers: Mapping[str, str]) -> ParsedMessage | None:
        """Parse a message; answer one that is not a response, and return None."""
        large = len(raw) > LARGE_BYTES
        message = await asyncio.to_thread(parse_message, raw) if large else parse_message(raw)
        if message.is_response:
            return message
        self._handle_server_message(message.value, headers)
        return None

    def _check_response(self, response: Response, trace: RequestTrace) -> None:
        """Raise where the body is not needed, as UpstreamTransport does for the SDK."""
        status, location = response.status, response.headers.get("location")
        if status in (307, 308) and location is not None:  # the only ones to repeat a POST for
            raise FallBackToSdk
        trace.status, trace.accepted = status, status in ACCEPTED_STATUSES
        if 300 <= status < 400 and location is not None:
            raise check_redirect(self._connections.url, location)
        if status in (401, 403):
            raise auth_error(status)
        if status >= 400:
            if status == 404 and self.session_id:
                self._on_session_lost()
                trace.error = session_lost_error()
            else:
                trace.error = status_error(status)
        elif status in NO_CONTENT_STATUSES:
            raise no_response_error(status)
        elif response.content_type not in ("application/json", "text/event-stream"):
            raise wrong_content_error(response.content_type)

    async def _read_body(self, response: Response) -> bytes:
        chunks, size = list[bytes](), 0
        while chunk := await self._connections.read_chunk(response):
            chunks.append(chunk)
            size += len(chunk)
            if size > settings.MAX_MESSAGE_BYTES:
                raise TooLarge("server sent a response", settings.MAX_MESSAGE_BYTES)
        return b"".join(chunks).removeprefix(BOM)

    async def _read_messages(self, response: Response) -> AsyncIterator[bytes]:
        """Yield each message of the body: one, or those of an event stream."""
        decode = decoder(response.headers.get("content-encoding", "identity").strip().lower())
        limit, size, chunks = settings.MAX_MESSAGE_BYTES, 0, list[bytes]()
        is_stream = response.content_type == "text/event-stream"
        events = EventParser(limit)
        while raw := await self._connections.read_chunk(response):
            async for chunk in decode_in_slices(raw, decode):
                if is_stream:
                    for name, data in events.feed(chunk):
                        if data and name == "message":
                            yield data
                    continue
                size += len(chunk)
                if size > limit:
                    raise TooLarge("server sent a response", limit)
                chunks.append(chunk)
        if not is_stream:
            yield b"".join(chunks).removeprefix(BOM)
        elif events.last_id and not self.modern:
            raise FallBackToSdk(events.last_id, events.retry)

    def _get_result(
        self, parsed: ParsedMessage, request_id: int, size: int, trace: RequestTrace
    ) -> dict[str, Any]:
        message = parsed.value if isinstance(parsed.value, dict) else {}
        if parsed.is_error:
            trace.error_response = True
            text = message["error"].get("message")
            raise ServerErrorResponse(text if isinstance(text, str) else "")
        if trace.status >= 400:  # the body of an HTTP error is not a response
            raise trace.error or status_error(trace.status)
        trace.size, trace.malformed = size, parsed.malformed
        if not trace.malformed and message.get("jsonrpc") != "2.0":
            trace.malformed = "is not a JSON-RPC message"
        if not trace.malformed and not _is_same_id(message.get("id"), request_id):
            trace.malformed = "has the id of another request"
        if trace.malformed:
            raise UpstreamError("The server sent an invalid message.")
        result: dict[str, Any] = message["result"]
        return result

    def _handle_server_message(self, message: Any, headers: Mapping[str, str]) -> None:
        method = message.get("method")
        if method in LIST_CHANGES:
            self.on_list_changed()
        elif method == "notifications/resources/updated":
            params = message.get("params")
            self.on_resource_updated(params.get("uri") if isinstance(params, dict) else None)
        if "id" not in message or self.modern:
            return
        if len(self._replies) >= MAX_SERVER_REQUESTS:
            raise UpstreamError(
                f"The server sent more than {MAX_SERVER_REQUESTS} requests without accepting a "
                "response.",
                hint="This is a bug in the server.",
            )
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if method == "ping":
            reply["result"] = {}
        else:  # sampling, elicitation, roots: not supported
            reply["error"] = {"code": -32600, "message": "Toolcrib does not support this request."}
        self._replies.send(self._post(reply, headers))

    def _cancel(self, request_id: int, headers: Mapping[str, str]) -> None:
        """Send a cancel notification, unless the server has too many pending already."""
        if len(self._cancels) < upstream_http.MAX_CANCELS:
            params = {"requestId": request_id}
            message = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
            self._cancels.send(self._post(message, headers))

    async def _post(self, message: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        body = json.dumps(message, ensure_ascii=False).encode()
        response = await self._connections.post(body, self._with_session(headers), None)
        self._connections.release(response)

    def _with_session(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        session_id = self.session_id
        return {**headers, SESSION_HEADER: session_id} if session_id else headers

    def close(self) -> None:
        self._replies.close()
        self._cancels.close()
        self._connections.close()


def no_response_error(status: int) -> UpstreamError:
    return UpstreamError(
        f"The server accepted the call and sent no result (HTTP {status}).",
        hint="This is a bug in the server.",
    )


def _is_same_id(response_id: object, request_id: int) -> bool:
    """Compare ids. Some servers turn numbers into strings, which the SDK accepts."""
    if type(response_id) is int:
        return response_id == request_id
    return response_id == str(request_id)
