"""ASGI endpoint of `/mcp`: host, origin, authentication and limits in front of the MCP SDK.

Host and Origin are checked first, then the key, with the same function as in the agent API. The
agent's key is not passed on to the SDK.
"""

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

from django.conf import settings
from django.db import DatabaseError
from django.http.request import split_domain_port, validate_host
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS

from sessions_app.mcp import server as mcp_server
from sessions_app.mcp import sessions as mcp_sessions
from sessions_app.mcp.errors import send_error
from sessions_app.mcp.sessions import AuthenticatedRequest
from sessions_app.mcp.streams import Streams
from toolcrib.lib.asgi import Message, Receive, Scope, Send, send_response
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import DatabaseUnavailable, Forbidden, NotFound, ToolcribError

PATH = re.compile(r"/mcp(?:/(?P<session>[^/]+))?/?")
IDLE_CONNECTION_SECONDS = 30 * 60  # an idle handshake connection is then closed
OPTIONAL_WHITESPACE = b" \t"  # allowed around header values; ASGI servers do not strip it
STREAM_CLOSE_SECONDS = 1.0  # time for streams to end before they are cancelled
BROWSER_NOTICE = (
    "This is the MCP endpoint of Toolcrib. It has no page for browsers.\n"
    "Configure your MCP client with this URL and the header `Authorization: Bearer tcb_…` with an "
    "agent's key. The agent's page has instructions for each client.\n"
)


class TooManyConnections(ToolcribError):
    code = "too_many_connections"
    status = 429


def is_mcp_path(path: str) -> bool:
    return path == "/mcp" or path.startswith("/mcp/")


class Endpoint:
    """ASGI application of `/mcp`. The lifespan enters `run` once."""

    def __init__(self) -> None:
        self.server = mcp_server.create_server()
        self.streams = Streams()
        self.manager: StreamableHTTPSessionManager | None = None
        self._disconnect_tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        self.manager = StreamableHTTPSessionManager(
            app=self.server,
            # _serve checks the host, also for requests that the manager answers itself.
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            stateless=settings.MCP_STATELESS,
            session_idle_timeout=IDLE_CONNECTION_SECONDS,
            max_request_body_size=settings.MAX_BODY_BYTES,
        )
        self.server.disconnect = self._disconnect
        async with self.manager.run():
            yield
            self.server.stopping = True

    async def close_streams(self) -> None:
        """Close every stream, so that shutdown does not wait for them."""
        self.server.stopping = True
        for subscriptions in list(self.server.subscriptions.values()):
            subscriptions.handler.close()
        await self.streams.close_all(STREAM_CLOSE_SECONDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        except ToolcribError as error:
            await send_error(send, error)
        except DatabaseError:
            await send_error(send, DatabaseUnavailable())

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _decode_headers(scope)
        check_host(headers.get("host", ""))
        check_origin(headers.get("origin"))
        allowed = _allowed_methods(scope, headers)
        if allowed:
            if "text/html" in headers.get("accept", ""):
                content_type, headers = "text/plain; charset=utf-8", {"allow": allowed}
                await send_response(send, 405, content_type, BROWSER_NOTICE.encode(), headers)
            else:
                await send_error(send, _method_not_allowed(allowed), {"allow": allowed})
            return
        caller = await self._authenticate(scope, headers)
        self._check_connections(scope, headers, caller)
        live_request = self.streams.register(caller.key.pk, stream=_is_stream(scope, headers))
        context_token = mcp_server.current_caller.set(caller)
        try:
            assert self.manager is not None  # noqa: S101 - set by run
            body = await _buffer_body(receive)
            sdk_scope = _sdk_scope(scope, caller)
            await live_request.serve(self.manager.handle_request, sdk_scope, body, send)
        finally:
            mcp_server.current_caller.reset(context_token)
            self.streams.unregister(live_request)

    async def _authenticate(self, scope: Scope, headers: Mapping[str, str]) -> AuthenticatedRequest:
        match = PATH.fullmatch(scope["path"])
        if match is None:
            raise NotFound("Not found.", hint="Use /mcp or /mcp/{session id}.")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise mcp_sessions.missing_key()
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        strategy = query.get("strategy", [""])[-1]
        return await run_in_db_thread(
            mcp_sessions.authenticate, token.strip(), match["session"] or "", strategy
        )

    def _disconnect(self, connection: str, key: int) -> None:
        """Close a handshake connection with DELETE, as its client would."""
        headers = [(b"mcp-session-id", connection.encode())]
        scope = {"type": "http", "method": "DELETE", "path": "/mcp", "headers": headers,
                 "query_string": b"", "user": _user(key)}  # fmt: skip

        async def delete() -> None:
            assert self.manager is not None  # noqa: S101 - the connection belongs to it
            await self.manager.handle_request(scope, _empty_body, _discard)

        task = asyncio.create_task(delete(), name="disconnect")
        self._disconnect_tasks.add(task)
        task.add_done_callback(self._disconnect_tasks.discard)

    def _check_connections(
        self, scope: Scope, headers: Mapping[str, str], caller: AuthenticatedRequest
    ) -> None:
        """Limit the handshake connections of a key; the SDK limits only their total."""
        if scope["method"] != "POST" or "mcp-session-id" in headers:
            return
        if headers.get("mcp-protocol-version") in MODERN_PROTOCOL_VERSIONS:
            return
        if self.server.count_connections(caller.key.pk) >= settings.MAX_CONNECTIONS:
            raise TooManyConnections(
                f"This key has reached the limit of {settings.MAX_CONNECTIONS} open connections.",
                hint="Close one with DELETE; idle ones are closed after 30 minutes. "
                "TOOLCRIB_MAX_CONNECTIONS sets the limit.",
                details={"retry_after": 60},
            )


def _decode_headers(scope: Scope) -> dict[str, str]:
    """Return the headers by name; repeated ones are joined with commas, as in HTTP."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1"), value.strip(OPTIONAL_WHITESPACE).decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


def _sdk_scope(scope: Scope, caller: AuthenticatedRequest) -> Scope:
    """Return the scope for the SDK, without credentials; the SDK binds connections to `user`."""
    headers = [pair for pair in scope["headers"] if pair[0] not in (b"authorization", b"cookie")]
    return {
        **scope,
        "headers": [(name, value.strip(OPTIONAL_WHITESPACE)) for name, value in headers],
        "user": _user(caller.key.pk),
        mcp_server.CALLER_KEY: caller,
    }


def _user(key: int) -> AuthenticatedUser:
    return AuthenticatedUser(AccessToken(token="", client_id=f"key {key}", scopes=[]))


async def _empty_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _discard(message: Message) -> None:
    """Ignore the response to our own DELETE."""


# --- Checks -------------------------------------------------------------------------------------


def check_host(host: str) -> None:
    """Reject an unknown host name, to prevent DNS rebinding."""
    domain, _ = split_domain_port(host)
    if not domain or not validate_host(domain, settings.ALLOWED_HOSTS):
        raise ToolcribError(
            "Unknown host.",
            hint="Use Toolcrib's own address; TOOLCRIB_HOSTS sets additional hosts.",
            code="wrong_host",
            status=421,
        )


def check_origin(origin: str | None) -> None:
    """Reject requests from pages of other sites. Programs send no Origin."""
    if origin is None or origin in settings.CSRF_TRUSTED_ORIGINS:
        return
    parts = urlsplit(origin)
    domain, _ = split_domain_port(parts.netloc)
    is_own_host = domain and validate_host(domain, settings.ALLOWED_HOSTS)
    if parts.scheme not in ("http", "https") or not is_own_host:
        raise Forbidden(
            "Requests from this origin are not allowed.",
            hint="TOOLCRIB_ORIGINS sets the allowed origins.",
            code="wrong_origin",
        )


def _allowed_methods(scope: Scope, headers: Mapping[str, str]) -> str:
    """Return the allowed methods if this one is not allowed, otherwise an empty string.

    Checked here because the SDK's response has no explanation.
    """
    version = headers.get("mcp-protocol-version")
    if version is not None and version not in HANDSHAKE_PROTOCOL_VERSIONS:
        allowed = "POST"
    else:
        allowed = "GET, POST, DELETE"
        if scope["method"] == "GET" and "text/event-stream" not in headers.get("accept", ""):
            return "POST"
    return "" if scope["method"] in allowed.split(", ") else allowed


def _method_not_allowed(allowed: str) -> ToolcribError:
    return ToolcribError(
        "Method not allowed.",
        hint=f"Use {allowed}. GET requires `Accept: text/event-stream`.",
        code="method_not_allowed",
        status=405,
    )


def _is_stream(scope: Scope, headers: Mapping[str, str]) -> bool:
    return scope["method"] == "GET" or headers.get("mcp-method") == "subscriptions/listen"


async def _buffer_body(receive: Receive) -> Receive:
    """Read the body, up to its size limit, and return a `receive` that replays it."""
    messages: deque[Message] = deque()
    size = 0
    while not messages or messages[-1].get("more_body"):
        messages.append(await receive())
        size += len(messages[-1].get("body", b""))
        if size > settings.MAX_BODY_BYTES:
            raise ToolcribError(
                f"The request body exceeds {settings.MAX_BODY_BYTES // 1024} KB.",
                hint="Send a smaller request.",
                code="too_large",
                status=413,
            )

    async def replay() -> Message:
        return messages.popleft() if messages else await receive()

    return replay
