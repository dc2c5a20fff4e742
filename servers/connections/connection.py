"""Talk MCP to a server: connect, list its tools, call them, hear of changes.

Both protocol eras, over stdio, streamable HTTP, SSE, or in memory. Every failure leaves here as
an UpstreamError with a code and a sentence; nothing a server sent is quoted in it. Definitions
and results are passed on raw: whether they are acceptable is decided elsewhere. With wires.py,
link.py, subscribing.py and explaining.py the only importer of `mcp`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import mcp_types as types
from django.conf import settings
from mcp.client import Client, ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.server import MCPServer, Server
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from servers.connections.connection_state import ConnectionState
from servers.connections.sdk_compat import param_headers, raw_request, stamp_request
from servers.connections.sdk_errors import explain_error, flatten_errors, handshake_timeout
from servers.connections.streams import Streams, connect_streams, watch_streams
from servers.connections.subscriptions import Subscription
from servers.connections.tool_listing import list_all_pages
from servers.errors import ListingError, UpstreamError
from servers.spec import Listing, OnProgress, ServerSpec
from servers.transports import http as upstream_http
from servers.transports import sse, stdio
from servers.transports.direct_http import (
    EMPTY,
    DirectHttpCaller,
    FallBackToSdk,
    ProtocolErrorResponse,
    unanswered,
)
from servers.transports.http1 import HttpConnectionPool
from servers.transports.request_trace import RequestTrace, observed_by

__all__ = ["Connection", "ListingError", "UpstreamError", "connect", "run_session"]

logger = logging.getLogger(__name__)
# The SDK logs what servers send, with tracebacks. What matters of it arrives here as an error.
logging.getLogger("mcp.client").setLevel(logging.CRITICAL)

MAX_INSTRUCTIONS = 32 * 1024
MAX_CLAIM = 200
CLOSE_TIMEOUT = 2
# Nothing listens any more where the server was. Over HTTP only a request finds out.
UNREACHABLE = frozenset({"refused", "resolve", "tls", "timeout"})

T = TypeVar("T")
Transport = AbstractAsyncContextManager[Streams] | Server[Any] | MCPServer[Any]


@dataclass(frozen=True)
class RawResult:
    """What a server answered to a call, unread."""

    result: dict[str, Any]
    size: int  # in bytes as it arrived; 0 where unknown


class ServerErrorResponse(UpstreamError):
    """The server answered a call with an error of the protocol. `said` is its own text: hostile."""

    code = "server_error"

    def __init__(self, said: str) -> None:
        super().__init__("The server answered with an error.")
        self.said = said


class Connection:
    """An open connection. Any task of the loop may use it; only `connect` opens and closes."""

    def __init__(
        self, client: Client, link: ConnectionState, on_list_changed: Callable[[], None]
    ) -> None:
        self._session: ClientSession = client.session
        self._client = client
        self._link = link
        self._subscription = Subscription(client, link, on_list_changed)
        self.closed = link.closed
        self.protocol_version: str = client.protocol_version
        self._lean = link.lean
        if self._lean is not None:
            self._lean.modern = self.protocol_version in MODERN_PROTOCOL_VERSIONS
            self._lean.on_list_changed = on_list_changed
        claimed = client.server_info
        self.server_info: dict[str, str] = {
            name: value[:MAX_CLAIM]
            for name in ("name", "version", "title")
            if isinstance(value := getattr(claimed, name, None), str)
        }
        self.instructions = _cut(client.instructions or "", MAX_INSTRUCTIONS)

    def stderr_tail(self) -> str:
        """Return the last lines a program wrote to stderr, control characters escaped."""
        return self._link.stderr()

    # --- Listing ------------------------------------------------------------------------------

    async def list_tools(self) -> Listing:
        """Return every page of tools, raw, or raise: never a part of them."""
        try:
            async with asyncio.timeout(settings.SYNC_TIMEOUT):
                return await list_all_pages(self._page)
        except TimeoutError:
            raise ListingError(
                f"The list of tools was not complete after {settings.SYNC_TIMEOUT} s.",
                code="timeout",
                hint="The server is slow, or hangs. TOOLCRIB_SYNC_TIMEOUT sets the limit.",
            ) from None

    async def _page(self, cursor: str | None) -> dict[str, object] | None:
        params = {} if cursor is None else {"cursor": cursor}
        capabilities = self._client.server_capabilities
        seen = RequestTrace()
        asking = raw_request(self._session, "tools/list", params)
        try:
            return await self._until_closed(asking, seen)
        except MCPError as error:
            offers_none = error.code == types.METHOD_NOT_FOUND and capabilities.tools is None
            if offers_none and cursor is None and seen.fault is None:
                return None
            raise await self._explain(error, seen, "while listing its tools") from None

    # --- Calling ------------------------------------------------------------------------------

    async def call_tool(
        self,
        name: str,
        arguments: dict[str, Any],
        seen: RequestTrace,
        *,
        schema: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> RawResult:
        """Call a tool and return the answer raw. `seen` is told what the transport sees.

        The SDK's own call_tool lists tools first, validates what they return, on the loop, and
        drops what it does not know.
        """
        if self._link.leaving:  # the next connection is dialled when this one is gone
            await self.closed.wait()
        if self.closed.is_set():
            raise await self._link.why("before the call was sent")
        params = {"name": name, "arguments": arguments}
        modern = self.protocol_version in MODERN_PROTOCOL_VERSIONS
        headers = param_headers(schema, arguments) if schema and modern else {}
        with self._link.calling():
            try:
                if self._lean is None or on_progress is not None:
                    return await self._call(params, headers, seen, on_progress)
                return await self._call_lean(self._lean, params, headers, seen)
            except UpstreamError as fault:
                if not seen.sent and fault.code in UNREACHABLE:
                    self._link.doubt(fault)
                raise

    async def _call(
        self,
        params: dict[str, Any],
        headers: Mapping[str, str],
        seen: RequestTrace,
        on_progress: OnProgress | None = None,
        resume: str | None = None,
    ) -> RawResult:
        """Call a tool through the SDK, or hear the rest of a call."""
        asking = raw_request(
            self._session, "tools/call", params, headers, on_progress=on_progress, resume=resume
        )
        try:
            return RawResult(await self._until_closed(asking, seen), seen.size)
        except MCPError as error:
            raise await self._call_fault(error, seen) from None

    async def _call_lean(
        self,
        lean: DirectHttpCaller,
        params: dict[str, Any],
        headers: Mapping[str, str],
        seen: RequestTrace,
    ) -> RawResult:
        """Call a tool beside the SDK, which goes on where that is not enough."""
        sent, options = stamp_request(self._session, "tools/call", params, headers)
        try:
            return RawResult(*await lean.call(sent, options["headers"], seen))
        except ProtocolErrorResponse as refusal:
            raise ServerErrorResponse(str(refusal)) from None
        except FallBackToSdk as left:
            if left.resume is None:  # a redirect: nothing ran, and the next will not either
                self._lean, seen.sent = None, False
            else:
                await asyncio.sleep(left.wait)
            return await self._call(params, headers, seen, resume=left.resume)

    async def _call_fault(self, error: MCPError, seen: RequestTrace) -> UpstreamError:
        if error.code == types.PARSE_ERROR and not seen.refused and seen.fault is None:
            seen.flaw = seen.flaw or "is not a message of the protocol"
        elif seen.status in EMPTY and not seen.refused and error.code == types.INVALID_REQUEST:
            return unanswered(seen.status)  # the error is the SDK's, not the server's
        elif seen.refused or (seen.fault is None and error.code != types.CONNECTION_CLOSED):
            return ServerErrorResponse(error.message)
        return await self._explain(error, seen, "while the tool ran")

    async def _until_closed(self, request: Coroutine[Any, Any, T], seen: RequestTrace) -> T:
        """Run a request of the SDK, but not beyond the end of the connection."""
        asked = asyncio.create_task(request, context=observed_by(seen))
        closed = asyncio.create_task(self.closed.wait())
        try:
            await asyncio.wait({asked, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise await self._link.why("while it was being asked")
            return asked.result()
        finally:
            for task in (asked, closed):
                task.cancel()
            # The SDK takes its time to tell the server; it may do so on its own.
            await asyncio.wait({asked, closed}, timeout=1)
            if asked.done() and not asked.cancelled():
                asked.exception()  # seen, whether or not it was raised above

    async def _explain(self, error: BaseException, seen: RequestTrace, when: str) -> UpstreamError:
        return await explain_error(error, seen, self._link, when)

    async def listen(self) -> None:
        """Call on_list_changed on every change, until the connection is lost (then raise).

        It may be called too often, never too seldom: also when a change may have been missed.
        """
        if self.protocol_version in MODERN_PROTOCOL_VERSIONS:
            listening = asyncio.create_task(self._subscription.keep())
            closed = asyncio.create_task(self.closed.wait())
            try:
                await asyncio.wait({listening, closed}, return_when=asyncio.FIRST_COMPLETED)
                if listening.done() and not listening.cancelled():
                    listening.result()
            finally:
                for task in (listening, closed):
                    task.cancel()
                await asyncio.wait({listening, closed})
        await self.closed.wait()
        why = await self._link.why("while waiting for changes")
        raise UpstreamError(
            why.message,
            code="too_large" if why.code == "too_large" else "closed",
            hint=why.hint,
            detail=why.detail,
            parked=why.parked,
        )


def _cut(text: str, limit: int) -> str:
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


# --- Connecting -------------------------------------------------------------------------------


@asynccontextmanager
async def connect(
    spec: ServerSpec, *, on_list_changed: Callable[[], None] | None = None
) -> AsyncIterator[Connection]:
    """Connect to a server, and leave nothing behind at the end of the block."""
    link = ConnectionState()
    async with (
        _transport(spec, link) as transport,
        run_session(transport, on_list_changed=on_list_changed, link=link) as connection,
    ):
        yield connection


@asynccontextmanager
async def _transport(spec: ServerSpec, link: ConnectionState) -> AsyncIterator[Transport]:
    if spec.transport not in ("stdio", "http", "sse"):
        raise ValueError(f"There is no transport {spec.transport}.")
    if spec.transport == "stdio":
        if not settings.ALLOW_STDIO:
            raise UpstreamError(
                "This Toolcrib does not run programs.",
                code="blocked",
                hint="The operator of the machine can allow it with TOOLCRIB_ALLOW_STDIO=1.",
                parked=True,
            )
        async with stdio.run_process(
            [argument.reveal() for argument in spec.argv],
            cwd=spec.cwd,
            env={name: value.reveal() for name, value in spec.env.items()},
            redact=spec.credential_filter.redact_text,
            max_line=settings.MAX_MESSAGE_BYTES,
            stderr_bytes=settings.STDERR_BYTES,
            most=settings.MAX_PROCESSES,
        ) as child:
            link.stderr, link.ended = child.stderr_tail, child.ended
            yield watch_streams(connect_streams(child, link), link)
        return
    url = spec.url.reveal()
    checked = upstream_http.check_url(url)
    headers = {name: value.reveal() for name, value in spec.headers.items()}
    async with upstream_http.upstream(headers) as upstream:
        if spec.transport == "sse":
            async with _in_time(sse.open_event_stream(upstream, url), link) as stream:
                yield watch_streams(connect_streams(stream, link), link)
        else:
            upstream.transport.on_session_lost = link.leave
            http = streamable_http_client(
                url,
                http_client=upstream.http,
                max_sse_event_size=None,  # network.py caps
            )
            link.lean = DirectHttpCaller(
                HttpConnectionPool(upstream, checked), upstream.transport, link.leave
            )
            try:
                yield watch_streams(http, link)
            finally:
                link.lean.close()


@asynccontextmanager
async def _in_time(
    opening: AbstractAsyncContextManager[sse.EventStream], link: ConnectionState
) -> AsyncIterator[sse.EventStream]:
    try:
        async with asyncio.timeout_at(link.handshake_ends):
            stream = await opening.__aenter__()
    except TimeoutError:
        raise handshake_timeout() from None
    try:
        yield stream
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await opening.__aexit__(None, None, None)


@asynccontextmanager
async def run_session(
    transport: Transport,
    *,
    on_list_changed: Callable[[], None] | None = None,
    mode: str = "auto",
    link: ConnectionState | None = None,
) -> AsyncIterator[Connection]:
    """Speak MCP over any transport of the SDK, or with a server in this process.

    A task of its own enters and leaves the SDK's client, so that its cancellations, which it
    uses freely when a transport fails, reach neither the caller nor the block.
    """
    link = link or ConnectionState()
    changed = _contained(on_list_changed)

    async def heed(message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            changed()

    client = Client(
        transport,
        mode=mode,
        cache=None,
        message_handler=heed,
        client_info=types.Implementation(name="toolcrib", version=settings.VERSION),
    )
    ready, stop = asyncio.Event(), asyncio.Event()

    async def own() -> None:
        try:
            async with client:
                ready.set()
                await stop.wait()
        finally:
            link.closed.set()
            ready.set()

    seen = RequestTrace(opening=True)
    owner = asyncio.create_task(own(), context=observed_by(seen))
    try:
        try:
            async with asyncio.timeout_at(link.handshake_ends):
                await ready.wait()
        except TimeoutError:
            raise seen.fault or handshake_timeout(link.stderr()) from None
        if link.closed.is_set():
            await asyncio.wait({owner})
            problem = None if owner.cancelled() else owner.exception()
            raise await explain_error(problem, seen, link, "during the handshake", shaking=True)
        yield Connection(client, link, changed)
    finally:
        stop.set()
        await _finish(owner)


async def _finish(owner: asyncio.Task[None]) -> None:
    """Let the owner leave by itself, then make it."""
    try:
        await asyncio.wait({owner}, timeout=CLOSE_TIMEOUT)
    finally:
        owner.cancel()
    await asyncio.wait({owner}, timeout=CLOSE_TIMEOUT / 2)
    if owner.done() and not owner.cancelled():
        for problem in flatten_errors(owner.exception()):
            logger.debug("A connection ended with %s.", type(problem).__name__)


def _contained(callback: Callable[[], None] | None) -> Callable[[], None]:
    """Wrap the caller's callback: what it raises must not reach the SDK."""

    def call() -> None:
        try:
            if callback is not None:
                callback()
        except Exception:
            logger.exception("A listener for changed tools failed.")

    return call
