"""ASGI endpoint of `/mcp`: origin, authentication, limits, sessions; routes to calls or the SDK.

The key is checked with the same functions as in the agent API. `tools/call` is served by
tool_calls.py, lists by list_requests.py, the event streams and handshake connections of older
protocol versions here; the SDK's server answers everything else, one request at a time. It never
gets the agent's key.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import mcp_types as types
from django.conf import settings
from django.db import DatabaseError, InterfaceError
from django.http.request import split_domain_port, validate_host
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from servers.connections import calls as upstream_calls
from sessions_app.agents import api_keys, rate_limits, slots
from sessions_app.dispatch import polling
from sessions_app.dispatch.authorization import Caller
from sessions_app.dispatch.planner import ON_LOOP_BYTES
from sessions_app.dispatch.polling import repeat
from sessions_app.held_calls.waiting import watch
from sessions_app.ledger import writer as ledger_writer
from sessions_app.mcp import (
    conversations,
    elicitation,
    feature_requests,
    list_requests,
    questions,
    tool_calls,
)
from sessions_app.mcp import server as mcp_server
from sessions_app.mcp import sessions as mcp_sessions
from sessions_app.mcp.admin_server import PATH as ADMIN_PATH
from sessions_app.mcp.admin_server import AdminEndpoint
from sessions_app.mcp.errors import ProtocolError, send_error, send_protocol_error
from sessions_app.mcp.server import AuthenticatedRequest
from sessions_app.mcp.sessions import (
    Client,
    ConnectionCaller,
    RollingCaller,
    UrlCaller,
    elicitation_of,
)
from sessions_app.mcp.streams import POLL_SECONDS, Streams
from sessions_app.models import ApiKey, Strategy
from sessions_app.sessions import lifecycle
from toolcrib.lib.errors import DatabaseUnavailable, Forbidden, Invalid, NotFound, ToolcribError
from toolcrib.lib.json_codec import parse_strict
from toolcrib.lib.protocols.asgi import (
    ClientDisconnected,
    Message,
    Receive,
    Scope,
    Send,
    bearer_digest,
    cancel_on_disconnect,
    read_body,
    read_headers,
    send_response,
)

logger = logging.getLogger(__name__)

PATH = re.compile(r"/mcp(?:/(?P<session>[^/]+))?/?")
STREAM_CLOSE_SECONDS = 1.0  # time for streams to end before they are cancelled
CALL_METHODS = frozenset({tool_calls.METHOD, *feature_requests.METHODS})
SESSION_HEADER = "mcp-session-id"
NAME_HEADER = "toolcrib-session"
FIRST_RESUMABLE_VERSION = "2025-11-25"  # clients before it do not expect an event without data
MAX_SESSION_NAME = 100
BROWSER_NOTICE = (
    "This is the MCP endpoint of Toolcrib. It has no page for browsers.\n"
    "Configure your MCP client with this URL and the header `Authorization: Bearer tcb_…` with an "
    "agent's key. The agent's page has instructions for each client.\n"
)


class Request:
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.headers = read_headers(scope)
        version = self.headers.get("mcp-protocol-version")
        self.is_modern = version is not None and version not in HANDSHAKE_PROTOCOL_VERSIONS
        self.connection_id = self.headers.get(SESSION_HEADER, "")
        self.query: Mapping[str, list[str]] = {}
        if query := scope.get("query_string"):
            self.query = parse_qs(query.decode("latin-1"))

    def option(self, name: str) -> str:
        """Return a parameter of the URL; empty if it is not there."""
        return self.query.get(name, [""])[-1]

    @property
    def session_name(self) -> str:
        """The name that tells a client's conversations apart, from a header or the URL."""
        name = self.headers.get(NAME_HEADER) or self.option("session")
        if len(name) > MAX_SESSION_NAME or not name.isprintable():
            raise Invalid(
                f"The name of a session has at most {MAX_SESSION_NAME} printable characters.",
                code="invalid_session_name",
            )
        return name

    def authenticate(self) -> None:
        """Read the URL and the key. Database code checks the key."""
        match = PATH.fullmatch(self.scope["path"])
        if match is None:
            raise NotFound("Not found.", hint="Use /mcp or /mcp/{session id}.")
        self.url_session_id = match["session"] or ""
        self.digest = bearer_digest(self.headers)
        if not self.digest:
            raise api_keys.Unauthorized

    async def check_key(self) -> ApiKey:
        return await ledger_writer.run_off_loop(api_keys.require_agent_key, self.digest)

    async def check_session(self, key: ApiKey) -> None:
        if self.url_session_id:
            find = lifecycle.find_session
            await ledger_writer.run_off_loop(find, key.agent, self.url_session_id)

    async def find_caller(self, client: Client | None = None, *, renew: bool = False) -> Caller:
        """Return who asks, for which session. Raises UnknownConnection or ProtocolError."""
        if self.is_modern:
            if self.url_session_id:
                return UrlCaller(self.digest, self.url_session_id, client=client)
            name, mode = self.session_name, self.option("mode")
            return RollingCaller(self.digest, client=client, name=name, mode=mode)
        await self.find_connection(renew=renew)
        if self.url_session_id:
            return UrlCaller(self.digest, self.url_session_id)
        return ConnectionCaller(self.digest, connection_id=self.connection_id)

    async def find_connection(self, *, renew: bool) -> mcp_sessions.Connection:
        if not self.connection_id:
            raise ProtocolError(400, types.INVALID_REQUEST, "Bad Request: Missing session ID")
        return await mcp_sessions.find_connection(self.digest, self.connection_id, renew=renew)


class Endpoint:
    """ASGI application of `/mcp`. The lifespan enters `run` once."""

    def __init__(self) -> None:
        self.server = mcp_server.ToolcribMcpServer()
        self.streams = Streams()
        self.calls = tool_calls.ConnectionCalls()
        self.admin = AdminEndpoint()
        self.manager: StreamableHTTPSessionManager | None = None

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        self.manager = StreamableHTTPSessionManager(
            app=self.server,
            json_response=True,
            # The router checks the host, also for requests that the manager answers itself.
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            stateless=True,  # connections are rows (sessions.py)
            max_request_body_size=settings.MAX_BODY_BYTES,
        )
        checks = [
            repeat(self.streams.compare_lists, POLL_SECONDS, "Comparison of tool lists"),
            repeat(self.server.compare_features, POLL_SECONDS, "Comparison of other lists"),
        ]
        if not settings.EMBEDDED:  # otherwise there is no other process
            seconds = tool_calls.CANCELLATION_POLL_SECONDS
            take = self.calls.take_cancellations
            checks.append(repeat(take, seconds, "Reading of cancellations"))
            take = questions.take_stored_answers
            checks.append(repeat(take, seconds, "Reading of answers"))
            take = conversations.take_left_answers
            checks.append(repeat(take, seconds, "Reading of answers to waiting calls"))
            find = conversations.outcomes.check
            checks.append(repeat(find, seconds, "Reading of what follows answers"))
        async with polling.running(*checks), self.manager.run(), self.admin.run():
            yield

    async def close_streams(self) -> None:
        """Close every stream, so that shutdown does not wait for them."""
        self.server.close_subscriptions()
        await self.streams.close_all(STREAM_CLOSE_SECONDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            check_origin(request.headers.get("origin"))
            if scope["path"] == ADMIN_PATH:
                await self.admin(scope, receive, send)
                return
            if allowed := _allowed_methods(request):
                await _send_method_not_allowed(send, request, allowed)
                return
            request.authenticate()
            if scope["method"] == "POST":
                await self._post(request, receive, send)
            elif scope["method"] == "GET":
                await self._open_stream(request, receive, send)
            else:
                await self._close_connection(request, send)
        except ClientDisconnected:
            return
        except ProtocolError as error:
            await send_protocol_error(send, error)
        except ToolcribError as error:
            await send_error(send, error)
        except (DatabaseError, InterfaceError) as error:
            logger.error("Database unavailable: %s", error)  # noqa: TRY400 - no traceback needed
            await send_error(send, DatabaseUnavailable(error))

    async def _post(self, request: Request, receive: Receive, send: Send) -> None:
        body = await read_body(receive, settings.MAX_BODY_BYTES)
        message = await _parse(body)
        method = message.get("method")
        if method in CALL_METHODS and "id" in message:
            await self._call(request, message, len(body), receive, send)
        elif method in list_requests.METHODS and "id" in message:
            await self._list(request, message, len(body), send)
        elif request.is_modern or method == "initialize" or ("id" in message and method):
            await self._serve_sdk(request, message, _replay(body, receive), send)
        else:
            await self._notify(request, message, _replay(body, receive), send)

    # --- Calls ----------------------------------------------------------------------------------

    async def _call(
        self, request: Request, message: Mapping[str, Any], size: int, receive: Receive, send: Send
    ) -> None:
        try:
            call = tool_calls.parse_call(message, request.scope, request.headers, size)
            caller = await request.find_caller(call.client)
        except ProtocolError as error:
            await request.check_key()
            await send_protocol_error(send, error, message["id"])
            return
        run = tool_calls.run if call.method == tool_calls.METHOD else feature_requests.run
        if request.is_modern:  # a disconnect is a cancellation
            await cancel_on_disconnect(tool_calls.respond(caller, call, send, run=run), receive)
            if mcp_sessions.has_changed_list(caller):
                await self.server.notify_changed_list(caller)
            return
        connection = await request.find_connection(renew=False)
        if connection.capabilities:
            call = replace(call, capabilities=connection.capabilities)
        is_resumable = connection.protocol_version >= FIRST_RESUMABLE_VERSION
        first = tool_calls.first_event(call.request_id) if is_resumable else b""
        with self.calls.running(request.connection_id, call.request_id) as running:
            list_version = await tool_calls.respond(
                *(caller, call, running.keep_end(send), lambda: running.is_cancelled, run, first)
            )
        if list_version:
            self.streams.set_known(request.connection_id, list_version)

    async def _list(
        self, request: Request, message: Mapping[str, Any], size: int, send: Send
    ) -> None:
        key = await request.check_key()
        assert key.agent is not None  # noqa: S101 - ensured by check_key
        await rate_limits.check_request(key.agent, list_requests.cost_of(message["method"]))
        try:
            call = tool_calls.parse_call(message, request.scope, request.headers, size)
            version = request.headers.get("mcp-protocol-version", "")
            if not request.is_modern:
                version = (await request.find_connection(renew=True)).protocol_version
            caller = await request.find_caller(call.client, renew=True)
            async with slots.slot(request.digest):
                result = await list_requests.run(caller, call, key.agent, version)
        except ProtocolError as error:
            await send_protocol_error(send, error, message["id"])
            return
        body = tool_calls.result_message(call, result).encode()
        await send_response(send, 200, "application/json", body)
        await rate_limits.add_bytes(key.agent, len(body))
        if mcp_sessions.has_changed_list(caller):
            await self.server.notify_changed_list(caller)

    async def _notify(
        self, request: Request, message: Mapping[str, Any], receive: Receive, send: Send
    ) -> None:
        """Accept a notification, or a response, of a handshake connection."""
        if not isinstance(message.get("method"), str) and not {"result", "error"} & message.keys():
            await self._serve_sdk(request, message, receive, send)  # it reports what is wrong
            return
        connection = await request.find_connection(renew=True)
        if message.get("method") == "notifications/cancelled":
            request_id = _member(message.get("params"), "requestId")
            await self.calls.cancel(request.connection_id, request_id)
        elif questions.is_answer(message):
            await self._take_answer(request, message)
        elif call_id := elicitation.answered_call(message):
            await self._decide(connection, call_id, message.get("result"))
        await send_response(send, 202, "application/json", b"")

    async def _decide(
        self, connection: mcp_sessions.Connection, call_id: str, answer: object
    ) -> None:
        """Decide about a held call as the user of its client answered."""
        mode = elicitation.mode_of(connection.capabilities)
        if elicitation.is_opened(mode, answer):
            return  # the request that asked waits for the decision
        take = elicitation.take_answer
        if await ledger_writer.run_off_loop(take, connection.digest, call_id, answer, mode):
            await watch.check()
        else:
            watch.notify(call_id)  # the call stays held: end the request that asked

    async def _take_answer(self, request: Request, message: Mapping[str, Any]) -> None:
        """Give the answer of a client's user to the process whose request asked."""
        answer = request.connection_id, str(message["id"]), message.get("result")
        if not questions.take_answer(*answer) and not settings.EMBEDDED:
            await ledger_writer.run_off_loop(mcp_sessions.add_answer, request.digest, *answer)

    # --- Everything else ------------------------------------------------------------------------

    async def _serve_sdk(
        self, request: Request, message: Mapping[str, Any], receive: Receive, send: Send
    ) -> None:
        assert self.manager is not None  # noqa: S101 - set by run
        method = message.get("method")
        key = await request.check_key()
        assert key.agent is not None  # noqa: S101 - ensured by check_key
        await rate_limits.check_request(key.agent)
        is_handshake = method == "initialize" and not request.is_modern
        caller = None
        if not is_handshake and message:
            caller = await request.find_caller(_client(message), renew=True)
        await request.check_session(key)
        with self.streams.register(key.pk, stream=method == "subscriptions/listen") as live:
            wish = request.url_session_id, request.option("strategy"), request.option("mode")
            fields = key, key.agent, caller, *wish, request.connection_id
            authenticated = AuthenticatedRequest(*fields)
            sdk_scope = await _sdk_scope(request, authenticated)
            tracking_send = live.track(send)
            if is_handshake:
                tracking_send = _Handshake(request, message, key, tracking_send).send
            await live.run(self.manager.handle_request(sdk_scope, receive, tracking_send), send)
        await rate_limits.add_bytes(key.agent, live.sent_bytes)

    async def _open_stream(self, request: Request, receive: Receive, send: Send) -> None:
        """Open the notification stream of a handshake connection, or resume that of a call."""
        key = await request.check_key()
        await request.find_connection(renew=True)
        await request.check_session(key)
        ids = request.connection_id, request.url_session_id
        resumed = tool_calls.resumed_request(request.headers.get("last-event-id", ""))
        if resumed is not None:
            await read_body(receive, settings.MAX_BODY_BYTES)  # before the message that it left
            with self.streams.register(key.pk, stream=True) as live:
                resuming = self.calls.resume(request.connection_id, resumed, live.track(send))
                await live.run(cancel_on_disconnect(resuming, receive), send)
            return
        caller = await request.find_caller()
        with self.streams.register(key.pk, stream=True) as live:
            async with self.streams.notifications_of(*ids, caller) as stream:
                await live.run(stream.serve(receive, live.track(send)), send)

    async def _close_connection(self, request: Request, send: Send) -> None:
        """Close a handshake connection, and the session that was opened for it."""
        await request.check_key()
        await request.find_connection(renew=True)
        session_id = await ledger_writer.run_off_loop(
            mcp_sessions.close_connection, request.digest, request.connection_id
        )
        if session_id is not None:
            await upstream_calls.forget_session(session_id)
        await send_response(send, 200, "application/json", b"")


class _Handshake:
    """Response of the SDK to `initialize`: held back until the connection is recorded."""

    def __init__(
        self, request: Request, message: Mapping[str, Any], key: ApiKey, send: Send
    ) -> None:
        self._request, self._message, self._key, self._send = request, message, key, send
        self._start: Message = {}
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        version = _negotiated_version(self._body)
        if self._start["status"] == 200 and version:
            connection_id = await ledger_writer.run_off_loop(self._record, version)
            header = (SESSION_HEADER.encode(), connection_id.encode())
            self._start = {**self._start, "headers": [*self._start["headers"], header]}
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": self._body})

    def _record(self, version: str) -> str:
        params = self._message.get("params") or {}
        elicits = elicitation_of(params.get("capabilities")) is not None
        client = Client(params.get("clientInfo"), version, elicits)
        strategy = self._request.option("strategy")
        if strategy and strategy not in Strategy.values:
            raise Invalid(f"strategy must be one of: {', '.join(Strategy.values)}.")
        if self._request.url_session_id:
            caller = UrlCaller(self._request.digest, self._request.url_session_id, client=client)
            mcp_sessions.record_client(caller)
        connection = mcp_sessions.create_connection(
            self._key, client, params.get("capabilities"), strategy, self._request.option("mode")
        )
        return connection.connection_id


def _negotiated_version(body: bytes) -> str:
    return str(_member(_member(parse_strict(body), "result"), "protocolVersion") or "")


def _member(value: Any, name: str) -> Any:
    """Return a member of a JSON object; None if there is none."""
    return value.get(name) if isinstance(value, dict) else None


async def _parse(body: bytes) -> Mapping[str, Any]:
    """Return a message; empty if it is not a JSON object, which the SDK reports."""
    try:
        if len(body) > ON_LOOP_BYTES:
            message = await asyncio.to_thread(parse_strict, body)
        else:
            message = parse_strict(body)
    except Invalid as error:  # a duplicate key
        raise ProtocolError(400, types.INVALID_REQUEST, error.message) from None
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _client(message: Mapping[str, Any]) -> Client | None:
    """Return the client that a message of a modern protocol version names."""
    meta = _member(message.get("params"), "_meta")
    if not isinstance(meta, dict):
        return None
    version = str(meta.get(f"{tool_calls.META}protocolVersion", ""))[:20]
    declared = elicitation_of(meta.get(f"{tool_calls.META}clientCapabilities"))
    info = meta.get(f"{tool_calls.META}clientInfo")
    return Client(info, version, elicits=declared is not None)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that replays a body that has been read."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def _sdk_scope(request: Request, authenticated: AuthenticatedRequest) -> Scope:
    """Return the scope for the SDK: without credentials, with the negotiated version."""
    dropped = {b"authorization", b"cookie", SESSION_HEADER.encode()}
    headers = [
        (name, value.strip(b" \t"))
        for name, value in request.scope["headers"]
        if name not in dropped
    ]
    if request.connection_id and "mcp-protocol-version" not in request.headers:
        connection = await request.find_connection(renew=False)
        headers.append((b"mcp-protocol-version", connection.protocol_version.encode()))
    return {**request.scope, "headers": headers, mcp_server.REQUEST_KEY: authenticated}


def check_origin(origin: str | None) -> None:
    """Reject requests from pages of other sites. Programs send no Origin."""
    if origin is None or origin in (*settings.CSRF_TRUSTED_ORIGINS, *settings.BROWSER_ORIGINS):
        return
    parts = urlsplit(origin)
    domain, _ = split_domain_port(parts.netloc)
    is_own_host = domain and validate_host(domain, settings.ALLOWED_HOSTS)
    if parts.scheme not in ("http", "https") or not is_own_host:
        raise Forbidden(
            "Requests from this origin are not allowed.",
            hint="TOOLCRIB_BROWSER_ORIGINS sets the origins of pages that may use /mcp.",
            code="wrong_origin",
        )


def _allowed_methods(request: Request) -> str:
    """Return the allowed methods if this one is not allowed, otherwise an empty string."""
    method = request.scope["method"]
    if request.is_modern:
        allowed = "POST"
    else:
        allowed = "GET, POST, DELETE"
        if method == "GET" and "text/event-stream" not in request.headers.get("accept", ""):
            return "POST"
    return "" if method in allowed.split(", ") else allowed


async def _send_method_not_allowed(send: Send, request: Request, allowed: str) -> None:
    headers = {"allow": allowed}
    if "text/html" in request.headers.get("accept", ""):
        content_type = "text/plain; charset=utf-8"
        await send_response(send, 405, content_type, BROWSER_NOTICE.encode(), headers)
        return
    error = ToolcribError(
        "Method not allowed.",
        hint=f"Use {allowed}. GET requires `Accept: text/event-stream`.",
        code="method_not_allowed",
        status=405,
    )
    await send_error(send, error, headers)
