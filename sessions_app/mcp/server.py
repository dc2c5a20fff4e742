"""MCP server of Toolcrib: handlers for handshake and modern protocol versions.

The SDK implements the protocol; endpoint.py has authenticated the request. Tool results are sent
exactly as the upstream server returned them: the SDK's models would drop unknown fields, so a
middleware merges the raw result into the SDK's response.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet, WeakValueDictionary

import anyio
import mcp_types as types
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.conf import settings
from django.db import DatabaseError, close_old_connections
from mcp.server import Server
from mcp.server.caching import CacheHint
from mcp.server.connection import Connection
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel.server import NotificationOptions
from mcp.server.models import InitializationOptions
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp.shared.exceptions import MCPError
from mcp_types.methods import serialize_server_result
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from catalog.definitions.public_names import META_TOOLS
from servers.connections import calls as upstream_calls
from servers.connections.sdk_compat import connection_of
from sessions_app.dispatch import concurrency, dispatcher, key_revocation
from sessions_app.fast_path.http import RATE_LIMIT_CHECKED
from sessions_app.mcp import meta_tools
from sessions_app.mcp import sessions as mcp_sessions
from sessions_app.mcp.errors import SERVER_ERROR
from sessions_app.mcp.meta_tools import Object
from sessions_app.mcp.sessions import AuthenticatedRequest, Client
from sessions_app.models import AgentSession, CallPath
from sessions_app.sessions import lifecycle
from toolcrib.lib.errors import DatabaseUnavailable, ToolcribError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Context = ServerRequestContext[Any, Any]
CALLER_KEY = "toolcrib.caller"  # key of the AuthenticatedRequest in the ASGI scope
CACHE_TTL_MS = 300_000  # the tool list of a session does not change
MAX_CLIENT_TEXT = 200  # characters of a client's name and version

current_caller: ContextVar[AuthenticatedRequest | None] = ContextVar("current_caller", default=None)
_raw_result: ContextVar[Object | None] = ContextVar("raw_result", default=None)


class ToolcribMcpServer(Server[Any]):
    """The SDK server, shared by all sessions; each request carries its own session."""

    def __init__(self) -> None:
        super().__init__(
            "toolcrib",
            title="Toolcrib",
            version=settings.VERSION,
            instructions=meta_tools.INSTRUCTIONS,
            cache_hints={
                "tools/list": CacheHint(CACHE_TTL_MS, "private"),
                "server/discover": CacheHint(CACHE_TTL_MS, "private"),
            },
            get_tool_input_schema=_input_schema,
            on_list_tools=self.list_tools,
            on_call_tool=self.call_tool,
            on_subscriptions_listen=self.listen,
        )
        self.middleware.append(_merge_raw_result)
        self.connections: WeakSet[Connection] = WeakSet()  # of handshake protocol versions
        self.subscriptions: WeakValueDictionary[int, _Subscriptions] = WeakValueDictionary()
        self.stopping = False
        self.disconnect: Callable[[str, int], None] = lambda connection, key: None

    def create_initialization_options(self, *args: Any, **named: Any) -> InitializationOptions:
        """Announce that tool lists may change, as they do in sessions with the inject strategy."""
        return super().create_initialization_options(NotificationOptions(tools_changed=True))

    # --- Requests -------------------------------------------------------------------------------

    async def list_tools(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        if params is not None and params.cursor is not None:
            raise MCPError(types.INVALID_PARAMS, "Invalid cursor: the tool list has one page.")
        version = ctx.protocol_version
        async with _database(), _translate_errors():
            session = await self._session(ctx)
            tools = await sync_to_async(meta_tools.list_tools)(
                session,
                fixed=not _has_connection(ctx),
                fits=lambda tool: _is_representable(tool, version),
            )
        _set_raw_result({"tools": tools})
        return types.ListToolsResult(tools=[])

    async def call_tool(
        self, ctx: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        try:
            async with _database():
                _set_raw_result(await self._call_tool(ctx, params.name, params.arguments or {}))
        except ToolcribError as error:
            _set_raw_result(
                meta_tools.text_result(f"{error.message}\n\n{error.hint}".strip(), is_error=True)
            )
        except DatabaseError:
            logger.exception("Database unavailable during a call over MCP")
            _set_raw_result(meta_tools.text_result(DatabaseUnavailable().sentence, is_error=True))
        return types.CallToolResult(content=[])

    async def _call_tool(self, ctx: Context, name: str, arguments: Mapping[str, Any]) -> Object:
        session = await self._session(ctx)
        if name not in META_TOOLS:
            return await self._dispatch(ctx, session, name, arguments, CallPath.NATIVE)
        if name in meta_tools.CALLS:
            call = meta_tools.unwrap_dispatcher(name, arguments)
            if isinstance(call, dict):
                return call
            return await self._dispatch(ctx, session, *call, CallPath.DISPATCH)
        if name in meta_tools.SEARCHES:
            outcome = await concurrency.run_with_limit(meta_tools.run, session, name, arguments)
        else:
            outcome = await sync_to_async(meta_tools.run)(session, name, arguments)
        if outcome.list_changed and _has_connection(ctx):
            await self._notify_list_changed(ctx, session.session_id)
        return outcome.result

    async def _dispatch(
        self, ctx: Context, session: AgentSession, name: str, arguments: object, path: CallPath
    ) -> Object:
        request = dispatcher.CallRequest(
            tool_name=name,
            arguments=arguments,
            idempotency_key=_request(ctx).headers.get("idempotency-key"),
            path=path,
        )
        agent, key = _caller(ctx).agent, _caller(ctx).key.pk
        checked_limit = _request(ctx).scope.get(RATE_LIMIT_CHECKED, 0)
        run = partial(
            dispatcher.dispatch,
            agent,
            session.session_id,
            request,
            key=key,
            checked_limit=checked_limit,
        )
        if "progress_token" not in (ctx.meta or {}):
            body = await run()
        else:
            async with _Progress(ctx) as progress:
                body = await run(on_progress=progress.report)
        return meta_tools.call_result(body)

    async def listen(
        self, ctx: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        """Serve a subscription, which reports when a new rolling session changes the tool list."""
        key = _caller(ctx).key.pk
        subscriptions = self.subscriptions.setdefault(key, _Subscriptions())
        return await subscriptions.handler(ctx, params)

    # --- Sessions -------------------------------------------------------------------------------

    async def _session(self, ctx: Context) -> AgentSession:
        """Return the session of this request."""
        caller, client = _caller(ctx), _client(ctx)
        if caller.session is not None:
            session = caller.session
            await sync_to_async(mcp_sessions.record_client)(session, client)
        elif not _has_connection(ctx):
            session, is_new = await sync_to_async(mcp_sessions.rolling_session)(caller, client)
            if is_new and (subscriptions := self.subscriptions.get(caller.key.pk)):
                await subscriptions.bus.publish(ToolsListChanged())
        else:
            session = await self._connection_session(ctx, caller, client)
        if _has_connection(ctx):
            connection_of(ctx).state.setdefault("sessions", set()).add(session.session_id)
        return session

    async def _connection_session(
        self, ctx: Context, caller: AuthenticatedRequest, client: Client | None
    ) -> AgentSession:
        connection = connection_of(ctx)
        async with connection.state.setdefault("opening", asyncio.Lock()):
            session_id = connection.state.get("own")
            if session_id is not None:
                return await sync_to_async(lifecycle.find_session)(caller.agent, session_id)
            session = await sync_to_async(mcp_sessions.open_connection_session)(caller, client)
            connection.state["own"] = session.session_id
            connection.exit_stack.push_async_callback(self._end, caller, session.session_id)
            return session

    async def _end(self, caller: AuthenticatedRequest, session_id: str) -> None:
        """Close the session of a closed connection, unless Toolcrib is stopping."""
        if self.stopping:
            return
        async with _database():
            await sync_to_async(mcp_sessions.close_session)(caller.agent, session_id)
        await upstream_calls.forget_session(session_id)

    async def _notify_list_changed(self, ctx: Context, session_id: str) -> None:
        """Notify all connections of a session that the tool list changed.

        This connection gets the notification on the stream of the request, others on their own.
        """
        await ctx.session.send_notification(
            types.ToolListChangedNotification(), related_request_id=ctx.request_id
        )
        for other in list(self.connections):
            if other is not connection_of(ctx) and session_id in other.state.get("sessions", ()):
                await other.send_tool_list_changed()

    def count_connections(self, key: int) -> int:
        """Return the number of handshake connections of a key."""
        return sum(other.state.get("key") == key for other in self.connections)

    async def track_connection(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        """Middleware: register each handshake connection when it is initialized."""
        connection = connection_of(ctx)
        if ctx.method == "initialize" and connection.session_id is not None:
            key = connection.state["key"] = _caller(ctx).key.pk
            self.connections.add(connection)
            connection.exit_stack.callback(self.connections.discard, connection)
            tracked = _TrackedConnection(key, partial(self.disconnect, connection.session_id, key))
            key_revocation.register(tracked)
            connection.exit_stack.callback(key_revocation.unregister, tracked)
        return await call_next(ctx)


class _TrackedConnection:
    """A handshake connection, which is closed when its key is revoked."""

    def __init__(self, key: int, disconnect: Callable[[], None]) -> None:
        self.key = key
        self._disconnect: Callable[[], None] | None = disconnect

    def end(self, reason: ToolcribError) -> None:
        disconnect, self._disconnect = self._disconnect, None
        if disconnect is not None:
            disconnect()


class _Subscriptions:
    """Subscriptions of one key; garbage-collected with the last of them."""

    def __init__(self) -> None:
        self.bus = InMemorySubscriptionBus()
        self.handler = ListenHandler(self.bus)


class _Progress:
    """Relays a server's progress in order; drops the oldest entries if the client is slow."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._wakeup = asyncio.Event()
        self._queue: deque[tuple[float, float | None, str | None]] = deque(maxlen=100)

    def report(self, progress: float, total: float | None, message: str | None) -> None:
        self._queue.append((progress, total, message))
        self._wakeup.set()

    async def _relay(self) -> None:
        while True:
            await self._wakeup.wait()
            await self._send()

    async def _send(self) -> None:
        self._wakeup.clear()
        while self._queue:
            await self._ctx.session.report_progress(*self._queue.popleft())

    async def __aenter__(self) -> "_Progress":
        self._task = asyncio.create_task(self._relay())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        if exc_info[0] is None:
            await self._send()  # the last progress must precede the result


# --- Request context ----------------------------------------------------------------------------


def _request(ctx: Context) -> Any:
    assert ctx.request is not None  # noqa: S101 - both transports are HTTP
    return ctx.request


def _caller(ctx: Context) -> AuthenticatedRequest:
    caller: AuthenticatedRequest = _request(ctx).scope[CALLER_KEY]
    return caller


def _has_connection(ctx: Context) -> bool:
    """Return whether the request belongs to a stateful handshake connection."""
    modern = ctx.protocol_version in MODERN_PROTOCOL_VERSIONS
    return not modern and connection_of(ctx).session_id is not None


def _client(ctx: Context) -> Client | None:
    params = ctx.session.client_params
    if params is None:
        return None
    info = params.client_info
    name, version = (_clean_client_text(text) for text in (info.name, info.version))
    return Client(name, version, ctx.protocol_version)


def _clean_client_text(text: str) -> str:
    return "".join(char for char in text if char.isprintable())[:MAX_CLIENT_TEXT]


def _input_schema(name: str) -> Mapping[str, Any] | None:
    """Return a tool's input schema; the SDK checks headers against it before handlers run."""
    caller = current_caller.get()
    tool = caller.scope.tools.get(name) if caller else None
    return tool.approved.input_schema if tool and tool.approved else None


def _is_representable(tool: Object, version: str) -> bool:
    try:
        serialize_server_result("tools/list", version, {"tools": [tool], **_RESULT_FIELDS})
    except ValidationError:
        return False
    return True


_RESULT_FIELDS = {"ttlMs": 0, "cacheScope": "private", "resultType": "complete"}


# --- Responses ----------------------------------------------------------------------------------


async def _merge_raw_result(ctx: Context, call_next: CallNext) -> HandlerResult:
    """Middleware: merge the raw result of a handler into the SDK's response."""
    context_token = _raw_result.set({})
    try:
        response = await call_next(ctx)
        raw = _raw_result.get()
        return {**response, **raw} if isinstance(response, dict) and raw else response
    finally:
        _raw_result.reset(context_token)


def _set_raw_result(result: Object) -> None:
    raw = _raw_result.get()
    assert raw is not None  # noqa: S101 - set by the middleware
    raw.update(result)


@asynccontextmanager
async def _database() -> AsyncIterator[None]:
    """Run a request's database code in a thread of its own, as Django's handlers do."""
    async with ThreadSensitiveContext():
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await sync_to_async(close_old_connections)()


@asynccontextmanager
async def _translate_errors() -> AsyncIterator[None]:
    """Convert errors to JSON-RPC errors, for methods whose results cannot report them."""
    try:
        yield
    except ToolcribError as error:
        raise MCPError(SERVER_ERROR, error.sentence, error.as_json()["error"]) from error
    except DatabaseError as error:
        logger.exception("Database unavailable during an MCP request")
        raise MCPError(SERVER_ERROR, DatabaseUnavailable().sentence) from error


def create_server() -> ToolcribMcpServer:
    server = ToolcribMcpServer()
    server.middleware.append(server.track_connection)
    return server
