"""Toolcrib as an MCP server, in both protocol eras: what its requests are answered with.

The SDK speaks the protocol; who asks, and for which session, was settled at the door
(mcp_endpoint.py). Results of tools are put on the wire as the server behind sent them: the SDK
would drop what its models do not know, so they join its envelope last.
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
from sessions_app.dispatch import dispatcher, key_revocation
from sessions_app.fast_path.http import RATE_LIMIT_CHECKED
from sessions_app.mcp import meta_tools
from sessions_app.mcp import sessions as mcp_sessions
from sessions_app.mcp.errors import REFUSED
from sessions_app.mcp.meta_tools import Object
from sessions_app.mcp.sessions import AuthenticatedRequest, Client
from sessions_app.models import AgentSession, CallPath
from sessions_app.sessions import concurrency, lifecycle
from toolcrib.lib.errors import DatabaseUnavailable, ToolcribError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Context = ServerRequestContext[Any, Any]
ASKING = "toolcrib.asking"  # where the door leaves it in the request's scope
FRESH_FOR = 300_000  # milliseconds; a session's list does not change
MOST_CLAIMED = 200  # characters of what a client calls itself

asking_now: ContextVar[AuthenticatedRequest | None] = ContextVar("asking_now", default=None)
_carried: ContextVar[Object | None] = ContextVar("carried", default=None)


class ToolcribMcpServer(Server[Any]):
    """The one server object; what differs between sessions is read from each request."""

    def __init__(self) -> None:
        super().__init__(
            "toolcrib",
            title="Toolcrib",
            version=settings.VERSION,
            instructions=meta_tools.INSTRUCTIONS,
            cache_hints={
                "tools/list": CacheHint(FRESH_FOR, "private"),
                "server/discover": CacheHint(FRESH_FOR, "private"),
            },
            get_tool_input_schema=_input_schema,
            on_list_tools=self.list_tools,
            on_call_tool=self.call_tool,
            on_subscriptions_listen=self.listen,
        )
        self.middleware.append(_carry)
        self.connections: WeakSet[Connection] = WeakSet()  # of the handshake era
        self.listeners: WeakValueDictionary[int, _Listeners] = WeakValueDictionary()
        self.stopping = False
        self.hang_up: Callable[[str, int], None] = lambda connection, key: None

    def create_initialization_options(self, *args: Any, **named: Any) -> InitializationOptions:
        """Announce that lists may change, as they do for sessions that inject."""
        return super().create_initialization_options(NotificationOptions(tools_changed=True))

    # --- Requests -------------------------------------------------------------------------------

    async def list_tools(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        if params is not None and params.cursor is not None:
            raise MCPError(types.INVALID_PARAMS, "There is one page of tools, and no such cursor.")
        version = ctx.protocol_version
        async with _database(), _words_for_clients():
            session = await self._session(ctx)
            tools = await sync_to_async(meta_tools.list_tools)(
                session, fixed=not _is_connected(ctx), fits=lambda tool: _fits(tool, version)
            )
        _carry_out({"tools": tools})
        return types.ListToolsResult(tools=[])

    async def call_tool(
        self, ctx: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        try:
            async with _database():
                _carry_out(await self._called(ctx, params.name, params.arguments or {}))
        except ToolcribError as error:
            _carry_out(
                meta_tools.text_result(f"{error.message}\n\n{error.hint}".strip(), is_error=True)
            )
        except DatabaseError:
            logger.exception("Database unavailable during a call over MCP")
            _carry_out(meta_tools.text_result(DatabaseUnavailable().sentence, is_error=True))
        return types.CallToolResult(content=[])

    async def _called(self, ctx: Context, name: str, arguments: Mapping[str, Any]) -> Object:
        session = await self._session(ctx)
        if name not in META_TOOLS:
            return await self._dispatched(ctx, session, name, arguments, CallPath.NATIVE)
        if name in meta_tools.CALLS:
            wanted = meta_tools.unwrap_dispatcher(name, arguments)
            if isinstance(wanted, dict):
                return wanted
            return await self._dispatched(ctx, session, *wanted, CallPath.DISPATCH)
        if name in meta_tools.SEARCHES:
            done = await concurrency.run_with_limit(meta_tools.run, session, name, arguments)
        else:
            done = await sync_to_async(meta_tools.run)(session, name, arguments)
        if done.grew and _is_connected(ctx):
            await self._tell_grown(ctx, session.session_id)
        return done.result

    async def _dispatched(
        self, ctx: Context, session: AgentSession, name: str, arguments: object, path: CallPath
    ) -> Object:
        request = dispatcher.CallRequest(
            tool_name=name,
            arguments=arguments,
            idempotency_key=_request(ctx).headers.get("idempotency-key"),
            path=path,
        )
        agent, key = _asking(ctx).agent, _asking(ctx).key.pk
        counted = _request(ctx).scope.get(RATE_LIMIT_CHECKED, 0)
        run = partial(
            dispatcher.dispatch, agent, session.session_id, request, key=key, counted=counted
        )
        if "progress_token" not in (ctx.meta or {}):
            answer = await run()
        else:
            async with _Progress(ctx) as progress:
                answer = await run(on_progress=progress.heard)
        return meta_tools.call_result(answer)

    async def listen(
        self, ctx: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        """Serve a subscription: a key's rolling session may be followed by another."""
        key = _asking(ctx).key.pk
        listeners = self.listeners.setdefault(key, _Listeners())
        return await listeners.handler(ctx, params)

    # --- Sessions -------------------------------------------------------------------------------

    async def _session(self, ctx: Context) -> AgentSession:
        """Return the session this request means."""
        asking, client = _asking(ctx), _client(ctx)
        if asking.session is not None:
            session = asking.session
            await sync_to_async(mcp_sessions.remember)(session, client)
        elif not _is_connected(ctx):
            session, fresh = await sync_to_async(mcp_sessions.rolling_session)(asking, client)
            if fresh and (listeners := self.listeners.get(asking.key.pk)):
                await listeners.bus.publish(ToolsListChanged())
        else:
            session = await self._own_session(ctx, asking, client)
        if _is_connected(ctx):
            _connection(ctx).state.setdefault("sessions", set()).add(session.session_id)
        return session

    async def _own_session(
        self, ctx: Context, asking: AuthenticatedRequest, client: Client | None
    ) -> AgentSession:
        connection = _connection(ctx)
        async with connection.state.setdefault("opening", asyncio.Lock()):
            known = connection.state.get("own")
            if known is not None:
                return await sync_to_async(lifecycle.find_session)(asking.agent, known)
            session = await sync_to_async(mcp_sessions.connection_session)(asking, client)
            connection.state["own"] = session.session_id
            connection.exit_stack.push_async_callback(self._end, asking, session.session_id)
            return session

    async def _end(self, asking: AuthenticatedRequest, session_id: str) -> None:
        """Close the session of a connection that ended, unless it is us who end."""
        if self.stopping:
            return
        async with _database():
            await sync_to_async(mcp_sessions.close)(asking.agent, session_id)
        await upstream_calls.forget_session(session_id)

    async def _tell_grown(self, ctx: Context, session_id: str) -> None:
        """Say that the list grew: to whoever made it grow on this request, to others apart."""
        await ctx.session.send_notification(
            types.ToolListChangedNotification(), related_request_id=ctx.request_id
        )
        for other in list(self.connections):
            if other is not _connection(ctx) and session_id in other.state.get("sessions", ()):
                await other.send_tool_list_changed()

    def connected(self, key: int) -> int:
        """How many connections of the handshake era a key has."""
        return sum(other.state.get("key") == key for other in self.connections)

    async def note_connection(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        """Middleware: know each connection from its first word on."""
        connection = _connection(ctx)
        if ctx.method == "initialize" and connection.session_id is not None:
            key = connection.state["key"] = _asking(ctx).key.pk
            self.connections.add(connection)
            connection.exit_stack.callback(self.connections.discard, connection)
            held = _Held(key, partial(self.hang_up, connection.session_id, key))
            key_revocation.register(held)
            connection.exit_stack.callback(key_revocation.unregister, held)
        return await call_next(ctx)


class _Held:
    """A connection of the handshake era, which ends with its key."""

    def __init__(self, key: int, hang_up: Callable[[], None]) -> None:
        self.key = key
        self._hang_up: Callable[[], None] | None = hang_up

    def end(self, why: ToolcribError) -> None:
        hang_up, self._hang_up = self._hang_up, None
        if hang_up is not None:
            hang_up()


class _Listeners:
    """The subscriptions of one key; gone with the last of them."""

    def __init__(self) -> None:
        self.bus = InMemorySubscriptionBus()
        self.handler = ListenHandler(self.bus)


class _Progress:
    """Passes a server's progress on, in order; the oldest is dropped where a client is slow."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._news = asyncio.Event()
        self._waiting: deque[tuple[float, float | None, str | None]] = deque(maxlen=100)

    def heard(self, progress: float, total: float | None, message: str | None) -> None:
        self._waiting.append((progress, total, message))
        self._news.set()

    async def _relay(self) -> None:
        while True:
            await self._news.wait()
            await self._send()

    async def _send(self) -> None:
        self._news.clear()
        while self._waiting:
            await self._ctx.session.report_progress(*self._waiting.popleft())

    async def __aenter__(self) -> "_Progress":
        self._relaying = asyncio.create_task(self._relay())
        return self

    async def __aexit__(self, *problem: object) -> None:
        self._relaying.cancel()
        await asyncio.wait({self._relaying})
        if problem[0] is None:
            await self._send()  # what came last belongs before the answer


# --- What a request carries ---------------------------------------------------------------------


def _request(ctx: Context) -> Any:
    assert ctx.request is not None  # noqa: S101 - both transports are HTTP
    return ctx.request


def _asking(ctx: Context) -> AuthenticatedRequest:
    found: AuthenticatedRequest = _request(ctx).scope[ASKING]
    return found


def _connection(ctx: Context) -> Connection:
    """The connection of the handshake era. Private to the SDK, hence mcp<2.4."""
    return ctx.session._connection


def _is_connected(ctx: Context) -> bool:
    """Whether the request came over a connection that goes on: of the older era, and kept."""
    modern = ctx.protocol_version in MODERN_PROTOCOL_VERSIONS
    return not modern and _connection(ctx).session_id is not None


def _client(ctx: Context) -> Client | None:
    claimed = ctx.session.client_params
    if claimed is None:
        return None
    info = claimed.client_info
    name, version = (_claim(text) for text in (info.name, info.version))
    return Client(name, version, ctx.protocol_version)


def _claim(text: str) -> str:
    return "".join(char for char in text if char.isprintable())[:MOST_CLAIMED]


def _input_schema(name: str) -> Mapping[str, Any] | None:
    """The schema whose arguments a client repeats in headers, asked before handlers run."""
    asking = asking_now.get()
    item = asking.seen.items.get(name) if asking else None
    return item.approved.input_schema if item and item.approved else None


def _fits(tool: Object, version: str) -> bool:
    try:
        serialize_server_result("tools/list", version, {"tools": [tool], **_ENVELOPE})
    except ValidationError:
        return False
    return True


_ENVELOPE = {"ttlMs": 0, "cacheScope": "private", "resultType": "complete"}


# --- How an answer gets onto the wire -----------------------------------------------------------


async def _carry(ctx: Context, call_next: CallNext) -> HandlerResult:
    """Middleware: put what a handler carried out into the envelope that the SDK made."""
    mark = _carried.set({})
    try:
        envelope = await call_next(ctx)
        carried = _carried.get()
        return {**envelope, **carried} if isinstance(envelope, dict) and carried else envelope
    finally:
        _carried.reset(mark)


def _carry_out(result: Object) -> None:
    carried = _carried.get()
    assert carried is not None  # noqa: S101 - the middleware set it
    carried.update(result)


@asynccontextmanager
async def _database() -> AsyncIterator[None]:
    """Give a request a database thread of its own, as Django's handlers do."""
    async with ThreadSensitiveContext():
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await sync_to_async(close_old_connections)()


@asynccontextmanager
async def _words_for_clients() -> AsyncIterator[None]:
    """Turn our errors into the protocol's, where there is no result to say them in."""
    try:
        yield
    except ToolcribError as error:
        raise MCPError(REFUSED, error.sentence, error.as_json()["error"]) from error
    except DatabaseError as error:
        logger.exception("Database unavailable during an MCP request")
        raise MCPError(REFUSED, DatabaseUnavailable().sentence) from error


def make() -> ToolcribMcpServer:
    server = ToolcribMcpServer()
    server.middleware.append(server.note_connection)
    return server
