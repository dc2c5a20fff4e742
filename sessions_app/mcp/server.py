"""MCP server of Toolcrib on the SDK: handshake, discovery and subscriptions.

endpoint.py has authenticated the request, and serves calls and lists itself. Instructions and
capabilities depend on the session, so a middleware merges them into the SDK's response.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import mcp_types as types
from django.conf import settings
from django.db import DatabaseError, InterfaceError
from mcp.server import Server
from mcp.server.caching import CacheHint
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel.server import NotificationOptions
from mcp.server.models import InitializationOptions
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPError

from sessions_app.dispatch import features
from sessions_app.dispatch.authorization import Caller
from sessions_app.ledger import writer as ledger_writer
from sessions_app.mcp import feature_list, resource_watch, tool_list
from sessions_app.mcp.errors import SERVER_ERROR
from sessions_app.mcp.list_requests import TOOLS_TTL_MS
from sessions_app.mcp.sessions import ConnectionCaller, RollingCaller
from sessions_app.mcp.tool_list import Object
from sessions_app.models import Agent, ApiKey, Strategy
from sessions_app.sessions import lifecycle
from sessions_app.sessions.scope import scope_of_agent, scope_of_session
from toolcrib.lib.errors import DatabaseUnavailable, ToolcribError

logger = logging.getLogger(__name__)

Context = ServerRequestContext[Any, Any]
REQUEST_KEY = "toolcrib.request"  # key of the AuthenticatedRequest in the ASGI scope

_raw_result: ContextVar[Object | None] = ContextVar("raw_result", default=None)


@dataclass(frozen=True)
class AuthenticatedRequest:
    """A request with a valid key, for the SDK's server."""

    key: ApiKey
    agent: Agent
    caller: Caller | None  # None during the handshake
    url_session_id: str = ""
    strategy: str = ""  # from the URL, as the mode
    mode: str = ""
    connection_id: str = ""  # of a handshake client


class ToolcribMcpServer(Server[Any]):
    """The SDK server, shared by all sessions; each request carries its own session."""

    def __init__(self) -> None:
        super().__init__(
            "toolcrib",
            title="Toolcrib",
            version=settings.VERSION,
            cache_hints={
                "server/discover": CacheHint(TOOLS_TTL_MS, "private"),
            },
            on_subscribe_resource=self.subscribe,
            on_unsubscribe_resource=self.unsubscribe,
            on_subscriptions_listen=self.listen,
        )
        self.middleware += [_merge_raw_result, _add_instructions]
        self.subscriptions: WeakValueDictionary[tuple[str, str], _Subscriptions]
        self.subscriptions = WeakValueDictionary()

    def create_initialization_options(self, *args: Any, **named: Any) -> InitializationOptions:
        """Announce that tool lists may change, as they do in sessions with the inject strategy."""
        return super().create_initialization_options(NotificationOptions(tools_changed=True))

    async def listen(
        self, ctx: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        """Serve a subscription, which reports when a new rolling session changes the tool list."""
        request = _request(ctx)
        assert request.caller is not None  # noqa: S101 - set for all but the handshake
        listener = feature_list.Listener(request.agent, request.url_session_id)
        subscriptions = self.subscriptions.setdefault(
            _list_owner(request.caller), _Subscriptions(listener)
        )
        uris = params.notifications.resource_subscriptions or ()
        async with resource_watch.watching(request.caller, uris, subscriptions.report_update):
            return await subscriptions.handler(ctx, params)

    async def subscribe(
        self, ctx: Context, params: types.SubscribeRequestParams
    ) -> types.EmptyResult:
        return await _change_subscription(ctx, str(params.uri), subscribe=True)

    async def unsubscribe(
        self, ctx: Context, params: types.UnsubscribeRequestParams
    ) -> types.EmptyResult:
        return await _change_subscription(ctx, str(params.uri), subscribe=False)

    async def compare_features(self) -> None:
        """Tell subscribers whose prompts or resources have changed."""
        if keys := list(self.subscriptions.values()):
            listeners = [each.listener for each in keys]
            versions = await ledger_writer.run_off_loop(feature_list.read_versions, listeners)
            for each in keys:
                await each.compare(versions.get(each.listener))

    async def notify_changed_list(self, caller: Caller) -> None:
        """Tell a client's subscribers of a new rolling session with another tool list."""
        if subscriptions := self.subscriptions.get(_list_owner(caller)):
            await subscriptions.bus.publish(ToolsListChanged())

    def close_subscriptions(self) -> None:
        for subscriptions in list(self.subscriptions.values()):
            subscriptions.handler.close()


class _Subscriptions:
    """Subscriptions to the same lists; garbage-collected with the last of them."""

    def __init__(self, listener: feature_list.Listener) -> None:
        self.listener = listener
        self.bus = InMemorySubscriptionBus()
        self.handler = ListenHandler(self.bus)
        self._versions: feature_list.Versions | None = None
        self._publishing: set[asyncio.Task[None]] = set()

    async def compare(self, versions: feature_list.Versions | None) -> None:
        before, self._versions = self._versions, versions or self._versions
        if before is None or versions is None:
            return
        if before.prompts != versions.prompts:
            await self.bus.publish(PromptsListChanged())
        if before.resources != versions.resources:
            await self.bus.publish(ResourcesListChanged())

    def report_update(self, uri: str) -> None:
        task = asyncio.ensure_future(self.bus.publish(ResourceUpdated(uri=uri)))
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)


def _list_owner(caller: Caller) -> tuple[str, str]:
    """Return what tells the lists of a caller from those of others."""
    return caller.digest, caller.label if isinstance(caller, RollingCaller) else caller.session_id


def _request(ctx: Context) -> AuthenticatedRequest:
    assert ctx.request is not None  # noqa: S101 - the transport is HTTP
    request: AuthenticatedRequest = ctx.request.scope[REQUEST_KEY]
    return request


async def _change_subscription(ctx: Context, uri: str, *, subscribe: bool) -> types.EmptyResult:
    """Subscribe a handshake client to a resource, or end that."""
    caller = _request(ctx).caller
    assert caller is not None  # noqa: S101 - set for all but the handshake
    connection_id = _request(ctx).connection_id
    change = partial(resource_watch.change_subscription, subscribe=subscribe)
    async with _translate_errors():
        if subscribe:
            await features.find_watched(caller, uri)
        await ledger_writer.run_off_loop(change, connection_id, uri)
    return types.EmptyResult()


async def _merge_raw_result(ctx: Context, call_next: CallNext) -> HandlerResult:
    """Middleware: merge the raw result of a handler into the SDK's response."""
    context_token = _raw_result.set({})
    try:
        response = await call_next(ctx)
        raw = _raw_result.get()
        return {**response, **raw} if isinstance(response, dict) and raw else response
    finally:
        _raw_result.reset(context_token)


async def _add_instructions(ctx: Context, call_next: CallNext) -> HandlerResult:
    """Middleware: tell a client that connects what its session holds."""
    response = await call_next(ctx)
    raw = _raw_result.get()
    if ctx.method in ("initialize", "server/discover") and raw is not None:
        async with _translate_errors():
            run, request = ledger_writer.run_off_loop, _request(ctx)
            raw["instructions"] = await run(_instructions, request)
            raw["capabilities"] = await run(_capabilities, request)
    return response


def _instructions(request: AuthenticatedRequest) -> str:
    if request.url_session_id:
        session = lifecycle.find_session(request.agent, request.url_session_id)
        return tool_list.session_instructions(session)
    lifecycle.check_mode(request.agent, request.mode)
    is_handshake = request.caller is None or isinstance(request.caller, ConnectionCaller)
    strategy = (request.strategy or request.agent.strategy) if is_handshake else Strategy.DISPATCH
    return tool_list.agent_instructions(request.agent, strategy, request.mode)


def _capabilities(request: AuthenticatedRequest) -> Object:
    """Return what this client is offered: tools, and what its servers have besides."""
    if request.url_session_id:
        session = lifecycle.find_session(request.agent, request.url_session_id)
        return feature_list.capabilities(scope_of_session(session))
    return feature_list.capabilities(scope_of_agent(request.agent))


@asynccontextmanager
async def _translate_errors() -> AsyncIterator[None]:
    try:
        yield
    except ToolcribError as error:
        raise MCPError(SERVER_ERROR, error.sentence, error.as_json()["error"]) from error
    except (DatabaseError, InterfaceError) as error:
        logger.error("Database unavailable: %s", error)  # noqa: TRY400 - no traceback needed
        raise MCPError(SERVER_ERROR, DatabaseUnavailable(error).sentence) from error
