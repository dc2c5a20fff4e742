"""MCP server of Toolcrib on the SDK: handshake, discovery, tool lists and subscriptions.

endpoint.py has authenticated the request, and serves `tools/call` itself. Tool lists are sent as
they are: the SDK's models would drop unknown fields, so a middleware merges the raw result into the
SDK's response.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import mcp_types as types
from django.conf import settings
from django.db import DatabaseError
from mcp.server import Server
from mcp.server.caching import CacheHint
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel.server import NotificationOptions
from mcp.server.models import InitializationOptions
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp.shared.exceptions import MCPError
from mcp_types.methods import serialize_server_result
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from sessions_app.dispatch.authorization import Caller
from sessions_app.ledger import writer as ledger_writer
from sessions_app.mcp import tool_list
from sessions_app.mcp.errors import SERVER_ERROR
from sessions_app.mcp.sessions import RollingCaller
from sessions_app.mcp.tool_list import Object
from sessions_app.models import Agent, ApiKey
from sessions_app.sessions import lifecycle
from toolcrib.lib.errors import DatabaseUnavailable, ToolcribError

logger = logging.getLogger(__name__)

Context = ServerRequestContext[Any, Any]
REQUEST_KEY = "toolcrib.request"  # key of the AuthenticatedRequest in the ASGI scope
CACHE_TTL_MS = 300_000  # the tool list of a session does not change

_raw_result: ContextVar[Object | None] = ContextVar("raw_result", default=None)


@dataclass(frozen=True)
class AuthenticatedRequest:
    """A request with a valid key, for the SDK's server."""

    key: ApiKey
    agent: Agent
    caller: Caller | None  # None during the handshake


class ToolcribMcpServer(Server[Any]):
    """The SDK server, shared by all sessions; each request carries its own session."""

    def __init__(self) -> None:
        super().__init__(
            "toolcrib",
            title="Toolcrib",
            version=settings.VERSION,
            instructions=tool_list.INSTRUCTIONS,
            cache_hints={
                "tools/list": CacheHint(CACHE_TTL_MS, "private"),
                "server/discover": CacheHint(CACHE_TTL_MS, "private"),
            },
            on_list_tools=self.list_tools,
            on_subscriptions_listen=self.listen,
        )
        self.middleware.append(_merge_raw_result)
        self.subscriptions: WeakValueDictionary[str, _Subscriptions] = WeakValueDictionary()

    def create_initialization_options(self, *args: Any, **named: Any) -> InitializationOptions:
        """Announce that tool lists may change, as they do in sessions with the inject strategy."""
        return super().create_initialization_options(NotificationOptions(tools_changed=True))

    async def list_tools(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        if params is not None and params.cursor is not None:
            raise MCPError(types.INVALID_PARAMS, "Invalid cursor: the tool list has one page.")
        request, version = _request(ctx), ctx.protocol_version
        caller = request.caller
        assert caller is not None  # noqa: S101 - the handshake lists no tools
        async with _translate_errors():
            session_id = await caller.find_session(renew=True)
            tools = await ledger_writer.run_off_loop(
                _list_tools, request.agent, session_id, version
            )
        if isinstance(caller, RollingCaller) and caller.new_sessions:
            await self.notify_new_session(caller.digest)
        raw = _raw_result.get()
        assert raw is not None  # noqa: S101 - set by the middleware
        raw["tools"] = tools
        return types.ListToolsResult(tools=[])

    async def listen(
        self, ctx: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        """Serve a subscription, which reports when a new rolling session changes the tool list."""
        digest = _request(ctx).key.sha256
        subscriptions = self.subscriptions.setdefault(digest, _Subscriptions())
        return await subscriptions.handler(ctx, params)

    async def notify_new_session(self, digest: str) -> None:
        """Tell subscribers that a request has opened a new rolling session of their key."""
        if subscriptions := self.subscriptions.get(digest):
            await subscriptions.bus.publish(ToolsListChanged())

    def close_subscriptions(self) -> None:
        for subscriptions in list(self.subscriptions.values()):
            subscriptions.handler.close()


class _Subscriptions:
    """Subscriptions of one key; garbage-collected with the last of them."""

    def __init__(self) -> None:
        self.bus = InMemorySubscriptionBus()
        self.handler = ListenHandler(self.bus)


def _request(ctx: Context) -> AuthenticatedRequest:
    assert ctx.request is not None  # noqa: S101 - the transport is HTTP
    request: AuthenticatedRequest = ctx.request.scope[REQUEST_KEY]
    return request


def _list_tools(agent: Agent, session_id: str, version: str) -> list[Object]:
    session = lifecycle.find_session(agent, session_id)
    fixed = version in MODERN_PROTOCOL_VERSIONS  # they forbid a list that changes
    return tool_list.list_tools(
        session, fixed=fixed, fits=lambda tool: _is_representable(tool, version)
    )


def _is_representable(tool: Object, version: str) -> bool:
    try:
        serialize_server_result("tools/list", version, {"tools": [tool], **_RESULT_FIELDS})
    except ValidationError:
        return False
    return True


_RESULT_FIELDS = {"ttlMs": 0, "cacheScope": "private", "resultType": "complete"}


async def _merge_raw_result(ctx: Context, call_next: CallNext) -> HandlerResult:
    """Middleware: merge the raw result of a handler into the SDK's response."""
    context_token = _raw_result.set({})
    try:
        response = await call_next(ctx)
        raw = _raw_result.get()
        return {**response, **raw} if isinstance(response, dict) and raw else response
    finally:
        _raw_result.reset(context_token)


@asynccontextmanager
async def _translate_errors() -> AsyncIterator[None]:
    try:
        yield
    except ToolcribError as error:
        raise MCPError(SERVER_ERROR, error.sentence, error.as_json()["error"]) from error
    except DatabaseError as error:
        logger.exception("Database unavailable during an MCP request")
        raise MCPError(SERVER_ERROR, DatabaseUnavailable().sentence) from error
