"""MCP client connection: connect, list tools, call tools, listen for changes.

Both protocol versions, over stdio, streamable HTTP, SSE, or in memory. Every failure is raised as
an UpstreamError with a code and a message that quotes nothing the server sent. Definitions and
results are returned raw; callers validate them.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, TypeVar

import mcp_types as types
from django.conf import settings
from mcp.client import Client, ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import SubscriptionLost
from mcp.server import MCPServer, Server
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from servers.connections.connection_state import ConnectionState
from servers.connections.sdk_compat import param_headers, raw_request, stamp_of
from servers.connections.streams import Streams, connect_streams, unreadable_error, watch_streams
from servers.connections.tool_listing import list_all_pages
from servers.errors import (
    ListingError,
    ParkedError,
    ServerErrorResponse,
    UpstreamError,
    not_mcp_error,
)
from servers.spec import Listing, OnProgress, ServerSpec
from servers.transports import http as upstream_http
from servers.transports import sse, stdio
from servers.transports.direct_http import (
    NO_CONTENT_STATUSES,
    DirectHttpCaller,
    FallBackToSdk,
    no_response_error,
)
from servers.transports.http1 import HttpConnectionPool
from servers.transports.request_trace import RequestTrace, trace_context
from servers.transports.response_body import BodyError

logger = logging.getLogger(__name__)
# The SDK logs what servers send, with tracebacks. Everything relevant is also raised as an error.
logging.getLogger("mcp.client").setLevel(logging.CRITICAL)

MAX_INSTRUCTIONS_BYTES = 32 * 1024
MAX_SERVER_INFO_LENGTH = 200  # characters of each field
CLOSE_TIMEOUT = 2
MAX_SUBSCRIPTION_FAILURES = 3  # to open one, before the connection is marked suspect
STABLE_AFTER = 60  # seconds after which the backoff of a lost subscription starts again
# The server is gone. Over HTTP only a request reveals it.
UNREACHABLE = frozenset({"refused", "resolve", "tls", "timeout"})

T = TypeVar("T")
RawResult = tuple[dict[str, Any], int]  # not validated; its bytes as received, 0 where unknown
Transport = AbstractAsyncContextManager[Streams] | Server[Any] | MCPServer[Any]


class Connection:
    """An open connection. Any task of the loop may use it; only `connect` opens and closes it."""

    def __init__(
        self, client: Client, state: ConnectionState, on_list_changed: Callable[[], None]
    ) -> None:
        self._session: ClientSession = client.session
        self._stamp = stamp_of(client.session)
        self._client = client
        self._state = state
        self._on_list_changed = on_list_changed
        self.closed = state.closed
        self.protocol_version: str = client.protocol_version
        self._direct_caller = state.direct_caller
        if self._direct_caller is not None:
            self._direct_caller.modern = self.protocol_version in MODERN_PROTOCOL_VERSIONS
            self._direct_caller.on_list_changed = on_list_changed
        info = client.server_info
        self.server_info: dict[str, str] = {
            name: value[:MAX_SERVER_INFO_LENGTH]
            for name in ("name", "version", "title")
            if isinstance(value := getattr(info, name, None), str)
        }
        instructions = (client.instructions or "").encode("utf-8", "replace")
        self.instructions = instructions[:MAX_INSTRUCTIONS_BYTES].decode("utf-8", "ignore")

    async def list_tools(self) -> Listing:
        """Return all tools, raw. Raises rather than return an incomplete list."""
        try:
            async with asyncio.timeout(settings.SYNC_TIMEOUT):
                return await list_all_pages(self._fetch_page)
        except TimeoutError:
            raise ListingError(
                f"The list of tools was not complete after {settings.SYNC_TIMEOUT} s.",
                code="timeout",
                hint="The server is slow or hangs. TOOLCRIB_SYNC_TIMEOUT sets the limit.",
            ) from None

    async def _fetch_page(self, cursor: str | None) -> dict[str, object] | None:
        params = {} if cursor is None else {"cursor": cursor}
        capabilities = self._client.server_capabilities
        trace = RequestTrace()
        request = raw_request(self._session, "tools/list", params)
        try:
            return await self._run_until_closed(request, trace)
        except MCPError as error:
            has_no_tools = error.code == types.METHOD_NOT_FOUND and capabilities.tools is None
            if has_no_tools and cursor is None and trace.error is None:
                return None
            when = "while listing its tools"
            raise await _explain_error(error, trace, self._state, when) from None

    async def call_tool(
        self,
        name: str,
        arguments: dict[str, Any],
        trace: RequestTrace,
        *,
        schema: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> RawResult:
        """Call a tool and return the raw result. The transport records its progress in `trace`.

        The SDK's own call_tool lists the tools first, validates results on the event loop, and
        drops unknown fields.
        """
        if self._state.draining:  # the next connection is opened when this one is closed
            await self.closed.wait()
        if self.closed.is_set():
            raise await self._state.close_reason("before the call was sent")
        params = {"name": name, "arguments": arguments}
        modern = self.protocol_version in MODERN_PROTOCOL_VERSIONS
        headers = param_headers(schema, arguments) if schema and modern else {}
        with self._state.track_call():
            try:
                if self._direct_caller is None or on_progress is not None:
                    return await self._call_sdk(params, headers, trace, on_progress)
                return await self._call_direct(self._direct_caller, params, headers, trace)
            except UpstreamError as error:
                if not trace.sent and error.code in UNREACHABLE:
                    self._state.mark_suspect(error)
                raise

    async def _call_sdk(
        self,
        params: dict[str, Any],
        headers: Mapping[str, str],
        trace: RequestTrace,
        on_progress: OnProgress | None = None,
        resume: str | None = None,
    ) -> RawResult:
        request = raw_request(
            self._session, "tools/call", params, headers, on_progress=on_progress, resume=resume
        )
        try:
            return await self._run_until_closed(request, trace), trace.size
        except MCPError as error:
            raise await self._call_error(error, trace) from None

    async def _call_direct(
        self,
        caller: DirectHttpCaller,
        params: dict[str, Any],
        headers: Mapping[str, str],
        trace: RequestTrace,
    ) -> RawResult:
        """Call a tool without the SDK; fall back to the SDK where needed."""
        message: dict[str, Any] = {"method": "tools/call", "params": params}
        options: dict[str, Any] = {}
        self._stamp(message, options)
        options["headers"].update(headers)
        try:
            return await caller.call(message["params"], options["headers"], trace)
        except FallBackToSdk as fallback:
            if fallback.resume is None:  # a redirect: nothing ran; later calls are redirected too
                self._direct_caller, trace.sent = None, False
            else:
                await asyncio.sleep(fallback.wait)
            return await self._call_sdk(params, headers, trace, resume=fallback.resume)

    async def _call_error(self, error: MCPError, trace: RequestTrace) -> UpstreamError:
        from_server = trace.error_response
        if error.code == types.PARSE_ERROR and not from_server and trace.error is None:
            trace.malformed = trace.malformed or "is not a JSON-RPC message"
        elif (
            trace.status in NO_CONTENT_STATUSES
            and not from_server
            and error.code == types.INVALID_REQUEST
        ):
            return no_response_error(trace.status)  # the SDK's error, not the server's
        elif from_server or (trace.error is None and error.code != types.CONNECTION_CLOSED):
            return ServerErrorResponse(error.message)
        return await _explain_error(error, trace, self._state, "while the tool ran")

    async def _run_until_closed(self, request: Coroutine[Any, Any, T], trace: RequestTrace) -> T:
        """Run a request of the SDK; raise if the connection closes first."""
        running = asyncio.create_task(request, context=trace_context(trace))
        closed = asyncio.create_task(self.closed.wait())
        try:
            await asyncio.wait({running, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise await self._state.close_reason("during a request")
            return running.result()
        finally:
            for task in (running, closed):
                task.cancel()
            # The SDK notifies the server of the cancellation; do not wait long for it.
            await asyncio.wait({running, closed}, timeout=1)
            if running.done() and not running.cancelled():
                running.exception()  # retrieved, whether or not it was raised above

    async def listen(self) -> None:
        """Call on_list_changed on every possible change; raise when the connection is lost."""
        if self.protocol_version in MODERN_PROTOCOL_VERSIONS:
            subscribe = _keep_subscription(self._client, self._state, self._on_list_changed)
            listening = asyncio.create_task(subscribe)
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
        reason = await self._state.close_reason("while waiting for changes")
        error = ParkedError if reason.parked else UpstreamError
        code = "too_large" if reason.code == "too_large" else "closed"
        raise error(reason.message, code=code, hint=reason.hint, detail=reason.detail)


async def _keep_subscription(
    client: Client, state: ConnectionState, on_list_changed: Callable[[], None]
) -> None:
    """Keep a subscription open, renewing it after a loss; return if none is possible."""
    losses = failures = 0

    async def listen(established: asyncio.Event, *, is_renewal: bool) -> None:
        async with asyncio.timeout(settings.HANDSHAKE_TIMEOUT) as acknowledgement:
            async with client.listen(tools_list_changed=True) as subscription:
                acknowledgement.reschedule(None)
                established.set()
                if is_renewal:  # a change may have been missed
                    on_list_changed()
                if not subscription.honored.tools_list_changed:
                    await state.closed.wait()
                async for _ in subscription:
                    on_list_changed()

    while True:
        trace, established = RequestTrace(), asyncio.Event()
        attempt = listen(established, is_renewal=losses > 0)
        listening = asyncio.create_task(attempt, context=trace_context(trace))
        try:
            done, _ = await asyncio.wait({listening}, timeout=STABLE_AFTER)
            losses = losses + 1 if done else 1
            await asyncio.wait({listening})
        finally:
            listening.cancel()
            await asyncio.wait({listening}, timeout=1)
        if listening.cancelled() or not _is_retryable(listening.exception(), trace):
            return
        failures = 0 if established.is_set() else failures + 1
        if failures >= MAX_SUBSCRIPTION_FAILURES:
            if trace.error is not None:
                state.mark_suspect(trace.error)
            return
        jitter = random.uniform(0.5, 1)  # noqa: S311 - spreads load, hides nothing
        await asyncio.sleep(jitter * 2 ** min(losses, 7) / 2)


def _is_retryable(error: BaseException | None, trace: RequestTrace) -> bool:
    """Tell a lost subscription from a server that does not support subscriptions."""
    if error is None:  # the server closed it properly
        return True
    if trace.error is not None:
        return not trace.error.parked
    if isinstance(error, MCPError):
        return error.code == types.CONNECTION_CLOSED
    return isinstance(error, SubscriptionLost | TimeoutError)


@asynccontextmanager
async def connect(
    spec: ServerSpec, *, on_list_changed: Callable[[], None] | None = None
) -> AsyncIterator[Connection]:
    state = ConnectionState()
    async with (
        _open_transport(spec, state) as transport,
        run_session(transport, on_list_changed=on_list_changed, state=state) as connection,
    ):
        yield connection


@asynccontextmanager
async def _open_transport(spec: ServerSpec, state: ConnectionState) -> AsyncIterator[Transport]:
    if spec.transport not in ("stdio", "http", "sse"):
        raise ValueError(f"Unknown transport: {spec.transport}.")
    if spec.transport == "stdio":
        if not settings.ALLOW_STDIO:
            raise ParkedError(
                "Running programs is disabled in this installation.",
                code="blocked",
                hint="An administrator of the machine can enable it with TOOLCRIB_ALLOW_STDIO=1.",
            )
        async with stdio.run_process(
            [argument.reveal() for argument in spec.argv],
            cwd=spec.cwd,
            env={name: value.reveal() for name, value in spec.env.items()},
            redact=spec.credential_filter.redact_text,
        ) as process:
            state.stderr_tail, state.exit_error = process.stderr_tail, process.exit_error
            yield watch_streams(connect_streams(process, state), state)
        return
    url = spec.url.reveal()
    parsed_url = upstream_http.check_url(url)
    headers = {name: value.reveal() for name, value in spec.headers.items()}
    async with upstream_http.upstream(headers) as upstream:
        if spec.transport == "sse":
            async with _within_handshake(sse.open_event_stream(upstream, url), state) as stream:
                yield watch_streams(connect_streams(stream, state), state)
        else:
            upstream.transport.on_session_lost = state.drain
            http = streamable_http_client(
                url,
                http_client=upstream.http,
                max_sse_event_size=None,  # limited by UpstreamTransport
            )
            state.direct_caller = DirectHttpCaller(
                HttpConnectionPool(upstream, parsed_url), upstream.transport, state.drain
            )
            try:
                yield watch_streams(http, state)
            finally:
                state.direct_caller.close()


@asynccontextmanager
async def _within_handshake(
    opening: AbstractAsyncContextManager[sse.EventStream], state: ConnectionState
) -> AsyncIterator[sse.EventStream]:
    try:
        async with asyncio.timeout_at(state.handshake_deadline):
            stream = await opening.__aenter__()
    except TimeoutError:
        raise _handshake_timeout() from None
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
    state: ConnectionState | None = None,
) -> AsyncIterator[Connection]:
    """Run an MCP session over any transport of the SDK, or with a server in this process.

    A separate task enters and exits the SDK's client: the SDK cancels its own task when a
    transport fails, which must affect neither the caller nor the block.
    """
    state = state or ConnectionState()
    changed = _suppress_errors(on_list_changed)

    async def handle_message(message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            changed()

    client = Client(
        transport,
        mode=mode,
        cache=None,
        message_handler=handle_message,
        client_info=types.Implementation(name="toolcrib", version=settings.VERSION),
    )
    ready, stop = asyncio.Event(), asyncio.Event()

    async def run_client() -> None:
        try:
            async with client:
                ready.set()
                await stop.wait()
        finally:
            state.closed.set()
            ready.set()

    trace = RequestTrace(opening=True)
    owner = asyncio.create_task(run_client(), context=trace_context(trace))
    try:
        try:
            async with asyncio.timeout_at(state.handshake_deadline):
                await ready.wait()
        except TimeoutError:
            raise trace.error or _handshake_timeout(state.stderr_tail()) from None
        if state.closed.is_set():
            await asyncio.wait({owner})
            error = None if owner.cancelled() else owner.exception()
            raise await _explain_error(
                error, trace, state, "during the handshake", in_handshake=True
            )
        yield Connection(client, state, changed)
    finally:
        stop.set()
        await _finish(owner)


async def _finish(owner: asyncio.Task[None]) -> None:
    try:
        await asyncio.wait({owner}, timeout=CLOSE_TIMEOUT)
    finally:
        owner.cancel()
    await asyncio.wait({owner}, timeout=CLOSE_TIMEOUT / 2)
    if owner.done() and not owner.cancelled():
        for error in _flatten_errors(owner.exception()):
            logger.debug("Connection ended with %s", type(error).__name__)


def _suppress_errors(callback: Callable[[], None] | None) -> Callable[[], None]:
    """Wrap the caller's callback: its exceptions must not reach the SDK."""

    def call() -> None:
        try:
            if callback is not None:
                callback()
        except Exception:
            logger.exception("Callback for changed tools failed")

    return call


def _handshake_timeout(detail: str = "") -> UpstreamError:
    return UpstreamError(
        f"The server did not complete the handshake within {settings.HANDSHAKE_TIMEOUT} s.",
        code="timeout",
        hint="It may not support MCP, or be slow to start. TOOLCRIB_HANDSHAKE_TIMEOUT sets the "
        "limit.",
        detail=detail,
    )


def _flatten_errors(error: BaseException | None) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [inner for each in error.exceptions for inner in _flatten_errors(each)]
    return [] if error is None else [error]


async def _explain_error(
    error: BaseException | None,
    trace: RequestTrace,
    state: ConnectionState,
    when: str,
    *,
    in_handshake: bool = False,
) -> UpstreamError:
    """Return the UpstreamError for an SDK exception, from the most specific source available."""
    errors = _flatten_errors(error)
    for each in errors:
        if isinstance(each, UpstreamError):
            return each
        if isinstance(each, BodyError):
            return each.error
    if trace.error is not None:
        return trace.error
    codes = [each.code for each in errors if isinstance(each, MCPError)]
    if state.error is not None or types.CONNECTION_CLOSED in codes or not errors:
        return await state.close_reason(when)
    if in_handshake and types.PARSE_ERROR in codes:
        return not_mcp_error("something that is not MCP")
    if types.PARSE_ERROR in codes:
        return unreadable_error()
    if types.REQUEST_TIMEOUT in codes:
        return _handshake_timeout(state.stderr_tail())
    if codes:
        return UpstreamError(
            f"The server answered with error {codes[0]} {when}.",
            hint="This is a bug in the server, or it does not support the request.",
        )
    kinds = ", ".join(sorted({type(each).__name__ for each in errors}))
    return UpstreamError(
        f"The server violated the protocol {when} ({kinds}).",
        hint="It may use a version of MCP that Toolcrib does not support.",
    )
