"""Call tools of streamable HTTP servers of either era without the SDK in between.

One POST a call: the request as the SDK would send it, the answer read once, strictly, and passed
on as it is. The SDK keeps the handshake, the listening and whatever this leaves to it
(`Elsewhere`): redirects, and streams that end before the answer and can be taken up again.
"""

import asyncio
import itertools
import json
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from django.conf import settings

from servers.errors import UpstreamError, auth_error, not_mcp_error, status_error
from servers.transports import http as upstream_http
from servers.transports.http import UpstreamTransport, check_redirect
from servers.transports.http1 import HttpConnectionPool, Response
from servers.transports.jsonrpc import BOM, LARGE_BYTES, ParsedMessage, parse_message
from servers.transports.request_trace import RequestTrace, TooLarge, mark_accepted
from servers.transports.response_body import Decoder, EventParser, body_error, decoder, unpacked

FIRST_ID = 1_000_000_000  # far from those the SDK counts up from 0 in the same session
MAX_ASKED_BACK = 100  # requests of a server within one call
SESSION = "mcp-session-id"
EMPTY = frozenset({202, 204})  # statuses that say: done, or taken, and there is no more to come


class FallBackToSdk(Exception):
    """The SDK has to go on with this call. `resume` is where its stream broke off."""

    def __init__(self, resume: str | None = None, wait: float = 0.0) -> None:
        super().__init__(resume)
        self.resume, self.wait = resume, wait


class ProtocolErrorResponse(Exception):
    """The server answered with an error of the protocol, in its own words: hostile."""


class DirectHttpCaller:
    """The short way to one server, beside a connection of the SDK."""

    def __init__(
        self,
        lines: HttpConnectionPool,
        transport: UpstreamTransport,
        on_session_lost: Callable[[], None],
    ) -> None:
        self._lines = lines
        self._transport = transport
        self._on_session_lost = on_session_lost
        self._ids = itertools.count(FIRST_ID)
        self._answers = upstream_http.BackgroundPosts()  # to what a server asked back
        self._cancels = upstream_http.BackgroundPosts()
        self.modern = False
        self.on_list_changed: Callable[[], None] = lambda: None

    @property
    def session_id(self) -> str:
        """The session the SDK shook hands for; the newer era has none."""
        return "" if self.modern else self._transport.session_id

    async def call(
        self, params: Mapping[str, Any], headers: Mapping[str, str], seen: RequestTrace
    ) -> tuple[dict[str, Any], int]:
        """Send tools/call; return the result as it came, and its size in bytes."""
        asked = next(self._ids)
        seen.request_id = asked
        message = {"jsonrpc": "2.0", "id": asked, "method": "tools/call", "params": params}
        sent = {**headers, SESSION: self.session_id} if self.session_id else headers
        body = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()
        try:
            return await self._exchanged(asked, body, sent, seen)
        except asyncio.CancelledError:
            if seen.sent and not self.modern:  # in the newer era hanging up says it
                self._cancel(asked, headers)
            raise
        except UpstreamError as fault:
            seen.fault = seen.fault or fault
            raise

    async def _exchanged(
        self, asked: int, body: bytes, headers: Mapping[str, str], seen: RequestTrace
    ) -> tuple[dict[str, Any], int]:
        response = await self._lines.post(body, headers, seen)
        try:
            self._judge(response, seen)
            async for raw in self._messages(response, seen):
                large = len(raw) > LARGE_BYTES
                found = await asyncio.to_thread(parse_message, raw) if large else parse_message(raw)
                if not found.is_answer:
                    self._heed(found.value, headers)
                    continue
                answer = self._answer(found, asked, len(raw), seen)
                self._lines.release(response)
                return answer
            self._ended(response, seen)
        except BaseException:
            self._lines.drop(response)
            raise
        raise AssertionError("unreachable")

    # --- Judging what comes back --------------------------------------------------------------

    def _judge(self, response: Response, seen: RequestTrace) -> None:
        """Raise where there is no use in reading on; as network.py does for the SDK."""
        status, location = response.status, response.headers.get("location")
        if status in (307, 308) and location is not None:  # the only ones that say: ask again
            raise FallBackToSdk
        seen.status, seen.taken = status, mark_accepted(status)
        if 300 <= status < 400 and location is not None:
            raise check_redirect(self._lines.url, location)
        if status in (401, 403):
            raise auth_error(status)
        if status >= 400:
            if status == 404 and self.session_id:
                self._on_session_lost()
                lost = "The server no longer knows this session."
                seen.fault = UpstreamError(lost, code="closed")
            else:
                seen.fault = status_error(status)
        elif status in EMPTY:
            raise unanswered(status)
        elif response.kind not in ("application/json", "text/event-stream"):
            raise not_mcp_error("HTML" if "html" in response.kind else "something that is not MCP")

    async def _messages(self, response: Response, seen: RequestTrace) -> AsyncIterator[bytes]:
        """Yield each message of a body: one, or those of an event stream."""
        decode = decoder(response.headers.get("content-encoding", "identity").strip().lower())
        cap, size, chunks = settings.MAX_MESSAGE_BYTES, 0, list[bytes]()
        stream = response.kind == "text/event-stream"
        events = self._events = EventParser(cap)
        while raw := await self._lines.piece(response):
            async for chunk in _undone(raw, decode):
                if stream:
                    for name, data in events.feed(chunk):
                        if data and name == "message":
                            yield data
                    continue
                size += len(chunk)
                if size > cap:
                    raise TooLarge("server sent a response", cap)
                chunks.append(chunk)
        if not stream:
            yield b"".join(chunks).removeprefix(BOM)
        elif events.last_id and not self.modern:
            raise FallBackToSdk(events.last_id, events.retry)

    def _answer(
        self, found: ParsedMessage, asked: int, size: int, seen: RequestTrace
    ) -> tuple[dict[str, Any], int]:
        message = found.value if isinstance(found.value, dict) else {}
        if found.is_refusal:
            seen.refused = True
            said = message["error"].get("message")
            raise ProtocolErrorResponse(said if isinstance(said, str) else "")
        if seen.status >= 400:  # its body is no answer
            raise seen.fault or status_error(seen.status)
        seen.size, seen.flaw = size, found.flaw
        if not seen.flaw and message.get("jsonrpc") != "2.0":
            seen.flaw = "is not a message of the protocol"
        if not seen.flaw and not _same(message.get("id"), asked):
            seen.flaw = "answers something else than what was asked"
        if seen.flaw:
            raise UpstreamError("The server sent a message that cannot be used.")
        result: dict[str, Any] = message["result"]
        return result, size

    def _ended(self, response: Response, seen: RequestTrace) -> None:
        """Say what a stream that ended without an answer means."""
        raise seen.fault or UpstreamError(
            "The connection to the server was lost while the tool ran.", code="closed"
        )

    # --- What a server says on the way --------------------------------------------------------

    def _heed(self, message: Any, headers: Mapping[str, str]) -> None:
        method = message.get("method")
        if method == "notifications/tools/list_changed":
            self.on_list_changed()
        if "id" not in message or self.modern:
            return
        if len(self._answers) >= MAX_ASKED_BACK:
            raise UpstreamError(
                f"The server asked more than {MAX_ASKED_BACK} things at once and took no answer.",
                hint="This is a fault of the server.",
            )
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if method == "ping":
            answer["result"] = {}
        else:  # sampling, elicitation, roots: nobody is there to answer
            answer["error"] = {"code": -32600, "message": "Toolcrib does not answer this."}
        self._answers.send(self._post(answer, headers))

    def _cancel(self, asked: int, headers: Mapping[str, str]) -> None:
        """Tell the server that nobody waits for a call any more, unless it heeds no such thing."""
        if len(self._cancels) < upstream_http.MAX_CANCELS:
            told = {"method": "notifications/cancelled", "params": {"requestId": asked}}
            self._cancels.send(self._post({"jsonrpc": "2.0", **told}, headers))

    async def _post(self, message: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        sent = {**headers, SESSION: self.session_id} if self.session_id else headers
        body = json.dumps(message, ensure_ascii=False).encode()
        response = await self._lines.post(body, sent, None)
        self._lines.release(response)

    def close(self) -> None:
        self._answers.close()
        self._cancels.close()
        self._lines.close()


def unanswered(status: int) -> UpstreamError:
    return UpstreamError(
        f"The server took the call and said that no answer follows (HTTP {status}).",
        hint="This is a fault of the server.",
    )


async def _undone(raw: bytes, decode: Decoder) -> AsyncIterator[bytes]:
    try:
        async for chunk in unpacked(raw, decode):
            yield chunk
    except zlib.error as error:
        raise body_error(error) from None


def _same(given: object, asked: int) -> bool:
    """Some servers turn numbers into texts, and the SDK lets them."""
    return (type(given) is int and given == asked) or given == str(asked)
