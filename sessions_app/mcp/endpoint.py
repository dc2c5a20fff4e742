"""The door of `/mcp`: who asks, from where, how much, and for which session. Then the SDK.

Host and Origin are checked before anything else is looked at, then the key, by the same function
as the agent API's. Nothing of an agent's key is passed on.
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
from sessions_app.mcp.errors import refuse
from sessions_app.mcp.sessions import AuthenticatedRequest
from sessions_app.mcp.streams import Streams
from toolcrib.lib.asgi import Message, Receive, Scope, Send, send_response
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import DatabaseUnavailable, Forbidden, NotFound, ToolcribError

PATH = re.compile(r"/mcp(?:/(?P<session>[^/]+))?/?")
IDLE_CONNECTION = 30 * 60  # seconds after which a quiet handshake connection is dropped
BLANK = b" \t"  # HTTP allows it around a value, and servers pass it on
CLOSING = 1.0  # second for streams to say goodbye
FOR_PEOPLE = (
    "This is where MCP clients reach Toolcrib; there is nothing to see in a browser.\n"
    "Give your client this address and the header `Authorization: Bearer tcb_…` with an agent's "
    "key. The agent's page shows how, for each client.\n"
)


class TooManyConnections(ToolcribError):
    code = "too_many_connections"
    status = 429


def handles(path: str) -> bool:
    return path == "/mcp" or path.startswith("/mcp/")


class Endpoint:
    """An ASGI application. `running` is entered once, by the lifespan."""

    def __init__(self) -> None:
        self.server = mcp_server.make()
        self.streams = Streams()
        self.manager: StreamableHTTPSessionManager | None = None
        self._hanging_up: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.manager = StreamableHTTPSessionManager(
            app=self.server,
            # Checked at the door, for what the manager answers by itself too.
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            stateless=settings.MCP_STATELESS,
            session_idle_timeout=IDLE_CONNECTION,
            max_request_body_size=settings.MAX_BODY_BYTES,
        )
        self.server.hang_up = self._hang_up
        async with self.manager.run():
            yield
            self.server.stopping = True

    async def close_streams(self) -> None:
        """Say goodbye on every stream, before the process waits for its connections to end."""
        self.server.stopping = True
        for listeners in list(self.server.listeners.values()):
            listeners.handler.close()
        await self.streams.close(CLOSING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        except ToolcribError as error:
            await refuse(send, error)
        except DatabaseError:
            await refuse(send, DatabaseUnavailable())

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _texts(scope)
        check_host(headers.get("host", ""))
        check_origin(headers.get("origin"))
        allowed = _allowed(scope, headers)
        if allowed:
            if "text/html" in headers.get("accept", ""):
                kind, headers = "text/plain; charset=utf-8", {"allow": allowed}
                await send_response(send, 405, kind, FOR_PEOPLE.encode(), headers)
            else:
                await refuse(send, _not_allowed(allowed), {"allow": allowed})
            return
        asking = await self._admitted(scope, headers)
        self._check_connections(scope, headers, asking)
        live = self.streams.enter(asking.key.pk, stream=_is_stream(scope, headers))
        mark = mcp_server.asking_now.set(asking)
        try:
            assert self.manager is not None  # noqa: S101 - the lifespan set it
            body = await _whole(receive)
            await live.serve(self.manager.handle_request, _inner(scope, asking), body, send)
        finally:
            mcp_server.asking_now.reset(mark)
            self.streams.leave(live)

    async def _admitted(self, scope: Scope, headers: Mapping[str, str]) -> AuthenticatedRequest:
        found = PATH.fullmatch(scope["path"])
        if found is None:
            raise NotFound("There is no such address.", hint="Use /mcp, or /mcp/{session id}.")
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            raise mcp_sessions.no_key()
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        strategy = query.get("strategy", [""])[-1]
        return await run_in_db_thread(
            mcp_sessions.authenticate, token.strip(), found["session"] or "", strategy
        )

    def _hang_up(self, connection: str, key: int) -> None:
        """End a handshake connection as its client would, with DELETE."""
        head = [(b"mcp-session-id", connection.encode())]
        scope = {"type": "http", "method": "DELETE", "path": "/mcp", "headers": head,
                 "query_string": b"", "user": _user(key)}  # fmt: skip

        async def delete() -> None:
            assert self.manager is not None  # noqa: S101 - there is a connection
            await self.manager.handle_request(scope, _nothing, _unheard)

        task = asyncio.create_task(delete(), name="hang up")
        self._hanging_up.add(task)
        task.add_done_callback(self._hanging_up.discard)

    def _check_connections(
        self, scope: Scope, headers: Mapping[str, str], asking: AuthenticatedRequest
    ) -> None:
        """Hold a key to a number of handshake connections; the SDK caps only their total."""
        if scope["method"] != "POST" or "mcp-session-id" in headers:
            return
        if headers.get("mcp-protocol-version") in MODERN_PROTOCOL_VERSIONS:
            return
        if self.server.connected(asking.key.pk) >= settings.MAX_CONNECTIONS:
            raise TooManyConnections(
                f"This key has {settings.MAX_CONNECTIONS} connections open, the cap.",
                hint="End one with DELETE; quiet ones end after 30 minutes. "
                "TOOLCRIB_MAX_CONNECTIONS sets the cap.",
                details={"retry_after": 60},
            )


def _texts(scope: Scope) -> dict[str, str]:
    """The headers by name; of one that is there twice, all values, as HTTP joins them."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1"), value.strip(BLANK).decode("latin-1")
        found[key] = f"{found[key]}, {text}" if key in found else text
    return found


def _inner(scope: Scope, asking: AuthenticatedRequest) -> Scope:
    """What the SDK is given: the caller as it binds connections to, and no key."""
    kept = [pair for pair in scope["headers"] if pair[0] not in (b"authorization", b"cookie")]
    return {
        **scope,
        "headers": [(name, value.strip(BLANK)) for name, value in kept],
        "user": _user(asking.key.pk),
        mcp_server.ASKING: asking,
    }


def _user(key: int) -> AuthenticatedUser:
    return AuthenticatedUser(AccessToken(token="", client_id=f"key {key}", scopes=[]))


async def _nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _unheard(message: Message) -> None:
    """The answer to what we asked ourselves."""


# --- Checks -------------------------------------------------------------------------------------


def check_host(host: str) -> None:
    """Refuse a name that is not ours, as one that was pointed here by an attacker would be."""
    domain, _ = split_domain_port(host)
    if not domain or not validate_host(domain, settings.ALLOWED_HOSTS):
        raise ToolcribError(
            "This is not a host Toolcrib answers for.",
            hint="Use its own address; TOOLCRIB_HOSTS names the others.",
            code="wrong_host",
            status=421,
        )


def check_origin(origin: str | None) -> None:
    """Refuse what a page of another site sends. Programs send no Origin."""
    if origin is None or origin in settings.CSRF_TRUSTED_ORIGINS:
        return
    parts = urlsplit(origin)
    domain, _ = split_domain_port(parts.netloc)
    ours = domain and validate_host(domain, settings.ALLOWED_HOSTS)
    if parts.scheme not in ("http", "https") or not ours:
        raise Forbidden(
            "Pages of another site may not speak to Toolcrib.",
            hint="TOOLCRIB_ORIGINS names those that may.",
            code="wrong_origin",
        )


def _allowed(scope: Scope, headers: Mapping[str, str]) -> str:
    """The methods that may be used here, where this one may not; the SDK has no words for it."""
    version = headers.get("mcp-protocol-version")
    if version is not None and version not in HANDSHAKE_PROTOCOL_VERSIONS:
        allowed = "POST"
    else:
        allowed = "GET, POST, DELETE"
        if scope["method"] == "GET" and "text/event-stream" not in headers.get("accept", ""):
            return "POST"
    return "" if scope["method"] in allowed.split(", ") else allowed


def _not_allowed(allowed: str) -> ToolcribError:
    return ToolcribError(
        "This address does not take this method.",
        hint=f"It takes {allowed}. A GET is for `Accept: text/event-stream`.",
        code="method_not_allowed",
        status=405,
    )


def _is_stream(scope: Scope, headers: Mapping[str, str]) -> bool:
    return scope["method"] == "GET" or headers.get("mcp-method") == "subscriptions/listen"


async def _whole(receive: Receive) -> Receive:
    """Read the body, within its cap; return what gives it to the next."""
    messages: deque[Message] = deque()
    size = 0
    while not messages or messages[-1].get("more_body"):
        messages.append(await receive())
        size += len(messages[-1].get("body", b""))
        if size > settings.MAX_BODY_BYTES:
            raise ToolcribError(
                f"The request is over {settings.MAX_BODY_BYTES // 1024} KB.",
                hint="Send less at a time.",
                code="too_large",
                status=413,
            )

    async def replay() -> Message:
        return messages.popleft() if messages else await receive()

    return replay
