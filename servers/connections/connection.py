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
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import mcp_types as types
from django.conf import settings
from mcp.client import Client, ClientSession
from mcp.client.extension import advertise
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import SubscriptionLost
from mcp.server import MCPServer, Server
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from catalog.definitions.parsing import MAX_NAME
from servers.connections.asking import AskingClient
from servers.connections.connection_state import ConnectionState
from servers.connections.sdk_compat import param_headers, raw_request, stamp_of
from servers.connections.streams import Streams, connect_streams, unreadable_error, watch_streams
from servers.connections.tool_listing import METHODS, list_all_pages
from servers.errors import (
    ListingError,
    ParkedError,
    ServerErrorResponse,
    UpstreamError,
    not_mcp_error,
)
from servers.spec import TOOLS_CALL, UI_EXTENSION, Listing, OnProgress, ServerSpec
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
from toolcrib.lib.telemetry import tracing
from toolcrib.lib.text import escape_hidden

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

# By kind of feature: the server's capability, and the member of the result that is the list.
FEATURE_LISTS = {
    "prompt": ("prompts", "prompts"),
    "resource": ("resources", "resources"),
    "template": ("resources", "resourceTemplates"),
}

# MCP Apps: views are passed on to clients, so servers may offer the tools that have one.
UI_SETTINGS = {"mimeTypes": ["text/html;profile=mcp-app"]}
# What servers may list more tools for, besides what Toolcrib passes on.
NOT_PASSED_ON: Mapping[str, Any] = {"sampling": {}, "roots": {}, "tasks": {}}

LIST_CHANGES = (
    types.ToolListChangedNotification,
    types.PromptListChangedNotification,
    types.ResourceListChangedNotification,
)

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
        self.is_modern = self.protocol_version in MODERN_PROTOCOL_VERSIONS
        self._is_known_to_ask = False
        self._direct_caller = state.direct_caller
        if self._direct_caller is not None:
            self._direct_caller.modern = self.protocol_version in MODERN_PROTOCOL_VERSIONS
            self._direct_caller.on_list_changed = on_list_changed
            self._direct_caller.on_resource_updated = state.report_update
        info = client.server_info
        self.server_info: dict[str, str] = {
            name: value[:MAX_SERVER_INFO_LENGTH]
            for name in ("name", "version", "title")
            if isinstance(value := getattr(info, name, None), str)
        }
        self.capabilities = _declared(client.server_capabilities)
        instructions = (client.instructions or "").encode("utf-8", "replace")
        self.instructions = instructions[:MAX_INSTRUCTIONS_BYTES].decode("utf-8", "ignore")

    def read_log(self) -> str:
        """Return the last lines that a program wrote to stderr; empty for servers with a URL."""
        return self._state.stderr_tail()

    def take_asked(self, error: str) -> bool:
        """Return once whether the server of an older version wants to ask the user of a client.

        It asks on a connection that does not declare that, or its SDK ends the call with an error
        that says so, which is `error`, the text of what the call failed with.
        """
        if self.is_modern or self._state.elicits or self._is_known_to_ask:
            return False
        self._is_known_to_ask = self._state.was_asked or "elicitation" in error.lower()
        return self._is_known_to_ask

    async def list_tools(self) -> Listing:
        """Return all tools, raw. Raises rather than return an incomplete list."""
        try:
            async with asyncio.timeout(settings.SYNC_TIMEOUT):
                listing = await list_all_pages(partial(self._fetch_page, "tools"))
                if self.is_modern:
                    listing = await self._add_gated_tools(listing)
                return await self._add_features(listing)
        except TimeoutError:
            raise ListingError(
                f"The list of tools was not complete after {settings.SYNC_TIMEOUT} s.",
                code="timeout",
                hint="The server is slow or hangs. TOOLCRIB_SYNC_TIMEOUT sets the limit.",
            ) from None

    async def _add_gated_tools(self, listing: Listing) -> Listing:
        """Add the tools that clients get which can ask their user.

        A warning names those that need what Toolcrib does not pass on.
        """
        asking: dict[str, Any] = {"elicitation": {"form": {}, "url": {}}}
        plain = _names_of(listing.tools)
        for_all = await self._list_as({**asking, **NOT_PASSED_ON})
        if for_all is not None and _names_of(for_all) <= plain:
            return replace(listing, tools_for_askers=listing.tools)
        for_askers = await self._list_as(asking)
        if _names_of(for_askers) - plain:
            # The list may have changed in between: what is new to all comes with the next sync.
            plain |= _names_of(await self._list_as({}))
        known = _names_of(listing.tools)
        for_askers = for_askers and tuple(
            tool for tool in for_askers if (names := _names_of((tool,))) <= known or names - plain
        )
        hidden = sorted(_names_of(for_all) - _names_of(for_askers) - plain)
        warnings = listing.warnings
        if hidden and for_askers is not None:
            quoted = ", ".join(hidden[:5]) + (", …" if len(hidden) > 5 else "")
            warnings += (
                f"Tools listed only to clients with {', '.join(NOT_PASSED_ON)}, which Toolcrib "
                f"does not pass on: {quoted}.",
            )
        return replace(listing, tools_for_askers=for_askers, warnings=warnings)

    async def _list_as(self, capabilities: Mapping[str, Any]) -> tuple[object, ...] | None:
        """Return the tools that clients with these capabilities get; None if that fails."""
        fetch = partial(self._fetch_page, "tools", capabilities=capabilities)
        try:
            return (await list_all_pages(fetch)).tools
        except UpstreamError:
            if self.closed.is_set():
                raise
            return None

    async def _add_features(self, listing: Listing) -> Listing:
        """Fetch the other lists too. One that fails is left out, with a warning."""
        features: dict[str, tuple[object, ...]] = {}
        warnings = list(listing.warnings)
        for kind, (capability, member) in FEATURE_LISTS.items():
            features[kind] = ()
            if capability not in self.capabilities:
                continue
            try:
                found = await list_all_pages(partial(self._fetch_page, member), member)
                features[kind] = found.tools
            except UpstreamError as error:
                if self.closed.is_set():
                    raise
                del features[kind]
                warnings.append(f"Its {member} could not be listed: {error.message}")
        return replace(listing, features=features, warnings=tuple(warnings))

    async def _fetch_page(
        self, member: str, cursor: str | None, capabilities: Mapping[str, Any] | None = None
    ) -> dict[str, object] | None:
        params = {} if cursor is None else {"cursor": cursor}
        trace = RequestTrace(is_list=True)
        request = raw_request(self._session, METHODS[member], params, capabilities=capabilities)
        is_optional = member == "resourceTemplates" or (
            member == "tools" and self._client.server_capabilities.tools is None
        )
        try:
            return await self._run_until_closed(request, trace)
        except MCPError as error:
            has_none = error.code == types.METHOD_NOT_FOUND and is_optional
            if has_none and cursor is None and trace.error is None:
                return None
            when = f"while listing its {member}"
            raise await _explain_error(error, trace, self._state, when) from None

    async def call_tool(
        self,
        name: str,
        arguments: dict[str, Any],
        trace: RequestTrace,
        *,
        schema: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
        client: AskingClient | None = None,
    ) -> RawResult:
        """Call a tool and return the raw result. The transport records its progress in `trace`.

        The SDK's own call_tool lists the tools first, validates results on the event loop, and
        drops unknown fields.
        """
        params = {"name": name, "arguments": arguments}
        modern = self.protocol_version in MODERN_PROTOCOL_VERSIONS
        headers = param_headers(schema, arguments) if schema and modern else {}
        return await self.request(TOOLS_CALL, params, trace, headers, on_progress, client)

    async def request(
        self,
        method: str,
        params: dict[str, Any],
        trace: RequestTrace,
        headers: Mapping[str, str] = MappingProxyType({}),
        on_progress: OnProgress | None = None,
        client: AskingClient | None = None,
    ) -> RawResult:
        """Send a request for an agent and return the raw result, as `call_tool`."""
        if self._state.draining:  # the next connection is opened when this one is closed
            await self.closed.wait()
        if self.closed.is_set():
            raise await self._state.close_reason("before the call was sent")
        if context := tracing.outgoing():
            params = {**params, "_meta": context}
        self._state.call_started()
        is_success = False
        try:
            direct = self._direct_caller
            modern = self.protocol_version in MODERN_PROTOCOL_VERSIONS
            if client is not None and (modern or self._state.elicits):
                asking = self._call_asking
                result = await asking(method, params, headers, trace, client, on_progress)
            elif direct is None or on_progress is not None or method != TOOLS_CALL:
                result = await self._call_sdk(method, params, headers, trace, on_progress)
            else:
                result = await self._call_direct(direct, params, headers, trace)
            is_success = True
            return result
        except UpstreamError as error:
            if not trace.sent and error.code in UNREACHABLE:
                self._state.mark_suspect(error)
            raise
        finally:
            self._state.call_ended(is_success=is_success)

    async def _call_asking(
        self,
        method: str,
        params: dict[str, Any],
        headers: Mapping[str, str],
        trace: RequestTrace,
        client: AskingClient,
        on_progress: OnProgress | None = None,
    ) -> RawResult:
        """Send a request whose server may ask the user of the calling client."""
        if self.protocol_version in MODERN_PROTOCOL_VERSIONS:
            if client.input_responses is not None:
                params = {**params, "inputResponses": dict(client.input_responses)}
            if client.request_state is not None:
                params = {**params, "requestState": client.request_state}
            modes = dict(client.modes)
            return await self._call_sdk(method, params, headers, trace, on_progress, modes=modes)
        self._state.askers.append(client)
        try:
            return await self._call_sdk(method, params, headers, trace, on_progress)
        finally:
            self._state.askers.remove(client)

    async def _call_sdk(
        self,
        method: str,
        params: dict[str, Any],
        headers: Mapping[str, str],
        trace: RequestTrace,
        on_progress: OnProgress | None = None,
        resume: str | None = None,
        modes: Mapping[str, Any] | None = None,
    ) -> RawResult:
        request = raw_request(
            self._session,
            method,
            params,
            headers,
            on_progress=on_progress,
            resume=resume,
            capabilities=None if modes is None else {"elicitation": modes},
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
            resume = fallback.resume
            return await self._call_sdk(TOOLS_CALL, params, headers, trace, resume=resume)

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
            return ServerErrorResponse(error.message, error.code)
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

    async def watch_resource(self, uri: str, on_update: Callable[[], None]) -> None:
        """Call `on_update` on every change of a resource; return when the connection closes.

        Raises UpstreamError if the server rejects that.
        """
        try:
            if self.is_modern:
                async with self._client.listen(resource_subscriptions=[uri]) as subscription:
                    async for _ in subscription:
                        on_update()
                return
            watchers = self._state.watchers.setdefault(uri, [])
            watchers.append(on_update)
            try:
                request = raw_request(self._session, "resources/subscribe", {"uri": uri})
                await self._run_until_closed(request, RequestTrace())
                await self.closed.wait()
            finally:
                watchers.remove(on_update)
                if not watchers and not self.closed.is_set():
                    del self._state.watchers[uri]
                    with suppress(MCPError, UpstreamError):
                        request = raw_request(self._session, "resources/unsubscribe", {"uri": uri})
                        await asyncio.shield(self._run_until_closed(request, RequestTrace()))
        except MCPError as error:
            raise ServerErrorResponse(error.message, error.code) from None
        except SubscriptionLost:
            return

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


def _names_of(tools: tuple[object, ...] | None) -> set[str]:
    named = [tool.get("name") for tool in tools or () if isinstance(tool, dict)]
    return {escape_hidden(name)[:MAX_NAME] for name in named if isinstance(name, str)}


def _declared(capabilities: types.ServerCapabilities) -> tuple[str, ...]:
    """Return what a server offers besides tools."""
    resources = capabilities.resources
    names = {
        "prompts": capabilities.prompts is not None,
        "resources": resources is not None,
        "subscribe": resources is not None and bool(resources.subscribe),
        "completions": capabilities.completions is not None,
    }
    return tuple(name for name, is_declared in names.items() if is_declared)


async def _keep_subscription(
    client: Client, state: ConnectionState, on_list_changed: Callable[[], None]
) -> None:
    """Keep a subscription open, renewing it after a loss; return if none is possible."""
    losses = failures = 0
    declared = _declared(client.server_capabilities)
    lists = ("tools", *(name for name in ("prompts", "resources") if name in declared))
    changes: dict[str, Any] = {f"{name}_list_changed": True for name in lists}

    async def listen(established: asyncio.Event, *, is_renewal: bool) -> None:
        async with asyncio.timeout(settings.HANDSHAKE_TIMEOUT) as acknowledgement:
            async with client.listen(**changes) as subscription:
                acknowledgement.reschedule(None)
                established.set()
                if is_renewal:  # a change may have been missed
                    on_list_changed()
                if not any(getattr(subscription.honored, name) for name in changes):
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
    spec: ServerSpec, *, on_list_changed: Callable[[], None] | None = None, elicits: bool = False
) -> AsyncIterator[Connection]:
    """Connect to a server; with `elicits`, as a client that can ask its user."""
    state = ConnectionState()
    state.elicits = elicits
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
        if isinstance(message, LIST_CHANGES):
            changed()
        elif isinstance(message, types.ResourceUpdatedNotification):
            state.report_update(str(message.params.uri))

    client = Client(
        transport,
        mode=mode,
        cache=None,
        message_handler=handle_message,
        elicitation_callback=partial(_ask_user, state) if state.elicits else None,
        extensions=[advertise(UI_EXTENSION, UI_SETTINGS)],
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


async def _ask_user(
    state: ConnectionState, context: object, params: types.ElicitRequestParams
) -> types.ElicitResult | types.ErrorData:
    """Pass a server's question on to the client whose call is running, the newest first."""
    asked = params.model_dump(mode="json", by_alias=True, exclude_none=True)
    asked.pop("_meta", None)
    request = {"method": "elicitation/create", "params": asked}
    for client in reversed(state.askers):
        if client.supports(request):
            return types.ElicitResult.model_validate(await client.ask(asked))
    return types.ErrorData(code=types.INVALID_REQUEST, message="No client can ask its user this.")


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
