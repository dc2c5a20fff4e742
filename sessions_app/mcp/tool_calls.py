"""`tools/call` at `/mcp`, of every protocol version: checks, meta-tools, response.

The SDK validates the message; its server is not involved. A call is answered as JSON, or as an
event stream if the client asked for progress, if the tool list changed, or after 15 seconds, so
that proxies keep the connection open.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mcp_types as types
from django.conf import settings
from django.db import DatabaseError
from mcp.shared.inbound import (
    ERROR_CODE_HTTP_STATUS,
    InboundLadderRejection,
    classify_inbound_request,
    find_duplicated_routing_header,
    validate_mcp_param_headers,
)
from mcp_types.jsonrpc import HEADER_MISMATCH
from mcp_types.methods import validate_client_request
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from pydantic import ValidationError

from catalog import rendering
from catalog.definitions.public_names import META_TOOLS
from catalog.models import JsonSchema
from servers.spec import OnProgress
from sessions_app.dispatch import dispatcher, operations
from sessions_app.dispatch.authorization import Caller
from sessions_app.dispatch.planner import CallRequest
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.calls import CallResponse
from sessions_app.mcp.errors import Id, ProtocolError, error_message
from sessions_app.mcp.sessions import (
    Client,
    ConnectionCaller,
    UnknownConnection,
    add_cancellation,
    take_cancellations,
)
from sessions_app.models import CallPath, Strategy
from sessions_app.sessions import search as session_search
from sessions_app.sessions.loading import SessionEnded
from sessions_app.sessions.schemas import CallIn, DetailsIn, LoadIn, SearchIn
from toolcrib.lib.asgi import Scope, Send, content_type_of, send_response
from toolcrib.lib.errors import DatabaseUnavailable, ToolcribError
from toolcrib.lib.json_codec import canonical, join_members

logger = logging.getLogger(__name__)

METHOD = "tools/call"
META = "io.modelcontextprotocol/"
SEARCHES = ("search_tools", "tool_search", "tool_search_regex")
CALLS = ("deferred_tool_call", "call_tool")
PING_SECONDS = 15.0
CANCELLATION_POLL_SECONDS = 0.5
MAX_QUEUED_PROGRESS = 100
SERVER_INFO_META = canonical(
    {f"{META}serverInfo": {"name": "toolcrib", "title": "Toolcrib", "version": settings.VERSION}}
)
LIST_CHANGED = canonical({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
# Errors about the request itself, not about the call: HTTP errors instead of results.
HTTP_ERRORS = frozenset({"unauthorized", "forbidden", "unknown_session"})


@dataclass(frozen=True)
class ToolCall:
    """A valid `tools/call` message."""

    request_id: int | str
    name: str
    arguments: Mapping[str, Any]
    is_modern: bool
    client: Client | None  # in a modern message
    progress_token: int | str | None
    headers: Mapping[str, str] = field(repr=False)
    size: int = 0  # bytes


# --- Checks ---------------------------------------------------------------------------------------


def parse_call(
    message: Mapping[str, Any], scope: Scope, headers: Mapping[str, str], size: int
) -> ToolCall:
    """Check a message as the protocol version in its headers requires. Raises ProtocolError."""
    _check_headers(headers)
    request_id: Any = message.get("id")
    is_id = isinstance(request_id, int | str) and not isinstance(request_id, bool)
    if message.get("jsonrpc") != "2.0" or not is_id:
        raise ProtocolError(400, types.INVALID_REQUEST, "The message is not a JSON-RPC request.")
    version = headers.get("mcp-protocol-version", types.DEFAULT_NEGOTIATED_VERSION)
    is_modern = version not in HANDSHAKE_PROTOCOL_VERSIONS
    if is_modern:
        _check_routing(message, scope, headers)
    params: Any = message.get("params")
    try:
        validate_client_request(METHOD, version, params)
    except ValidationError:
        status = 400 if is_modern else 200
        text = "Invalid request parameters"
        raise ProtocolError(status, types.INVALID_PARAMS, text, "") from None
    meta = params.get("_meta") or {}
    return ToolCall(
        request_id,
        params["name"],
        params.get("arguments") or {},
        is_modern,
        Client(meta.get(f"{META}clientInfo"), version) if is_modern else None,
        meta.get("progressToken"),
        headers,
        size,
    )


def _check_headers(headers: Mapping[str, str]) -> None:
    if content_type_of(headers) != "application/json":
        raise ProtocolError(400, types.INVALID_REQUEST, "Content-Type must be application/json.")
    accepted = {
        part.partition(";")[0].strip() for part in headers.get("accept", "").lower().split(",")
    }
    has_json = accepted & {"*/*", "application/*", "application/json"}
    has_stream = accepted & {"*/*", "text/*", "text/event-stream"}
    if not has_json or not has_stream:
        text = "Not Acceptable: Client must accept both application/json and text/event-stream"
        raise ProtocolError(406, types.INVALID_REQUEST, text)


def _check_routing(message: Mapping[str, Any], scope: Scope, headers: Mapping[str, str]) -> None:
    """Check the headers and the envelope that versions from 2026 on require."""
    if len(headers) != len(scope["headers"]):
        names = ((name.decode("latin-1"), "") for name, _ in scope["headers"])
        if (repeated := find_duplicated_routing_header(names)) is not None:
            raise ProtocolError(400, HEADER_MISMATCH, f"{repeated} header appears more than once")
    verdict = classify_inbound_request(message, headers=headers)
    if isinstance(verdict, InboundLadderRejection):
        raise _rejection(verdict)


def _rejection(verdict: InboundLadderRejection) -> ProtocolError:
    status = ERROR_CODE_HTTP_STATUS.get(verdict.code, 200)
    return ProtocolError(status, verdict.code, verdict.message, verdict.data)


def _check_parameter_headers(call: ToolCall, schema: JsonSchema) -> None:
    """Compare headers with the arguments that a tool's schema mirrors in them."""
    has_headers = any(name.startswith("mcp-param-") for name in call.headers)
    if call.arguments or has_headers:
        verdict = validate_mcp_param_headers(schema, call.arguments, call.headers)
        if verdict is not None:
            raise _rejection(verdict)


# --- Calls ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The members of a result, as canonical JSON."""

    members: Mapping[str, str]
    list_version: int = 0  # version of the session's loads, if they changed the tool list


async def run(caller: Caller, call: ToolCall, on_progress: OnProgress | None) -> Result:
    """Run a tool or a meta-tool. Errors that a model can correct are results."""
    try:
        if call.name in SEARCHES:
            return await _search(caller, call)
        if call.name == "load_tools":
            return await _load(caller, call)
        if call.name == "get_tool_details":
            body = DetailsIn.model_validate(call.arguments)
            return text_result((await operations.details(caller, body.name, "full")).text)
        return await _dispatch(caller, call, on_progress)
    except ValidationError as error:
        return _validation_error_result(call.name, error)
    except SessionEnded:
        if isinstance(caller, ConnectionCaller):
            raise UnknownConnection from None  # the client then initializes a new one
        raise


async def _search(caller: Caller, call: ToolCall) -> Result:
    values = dict(call.arguments)
    if call.name == "tool_search_regex":  # an alias that other products use; it loads its results
        pattern = values.get("pattern") or values.get("query", "")
        values = {"load": True, **values, "pattern": pattern}
    query = session_search.parse_body(SearchIn.model_validate(values))
    found = await operations.search(caller, query)
    is_injected = found.context.strategy == Strategy.INJECT and found.newly_loaded
    return text_result(found.text, list_version=found.loads_version if is_injected else 0)


async def _load(caller: Caller, call: ToolCall) -> Result:
    body = LoadIn.model_validate(call.arguments)
    loaded = await operations.load(caller, body.group_id, body.tool_names)
    is_injected = loaded.schemas is None and loaded.newly_loaded
    return text_result(
        loaded.as_json(),
        is_error=loaded.error is not None,
        list_version=loaded.loads_version if is_injected else 0,
    )


async def _dispatch(caller: Caller, call: ToolCall, on_progress: OnProgress | None) -> Result:
    key = call.headers.get("idempotency-key")
    if call.name in META_TOOLS:
        body = CallIn.model_validate(call.arguments)
        request = CallRequest(body.tool_name, body.arguments, body.timeout, key, size=call.size)
    else:
        check = partial(_check_parameter_headers, call) if call.is_modern else None
        native = CallPath.NATIVE
        request = CallRequest(call.name, call.arguments, None, key, native, call.size, check)
    return _call_result(await dispatcher.call(caller, request, on_progress))


def _call_result(response: CallResponse) -> Result:
    members = {"content": response.content, "isError": "true" if response.is_error else "false"}
    if response.structured != "null":
        members["structuredContent"] = response.structured
    if response.meta != "null":
        members["_meta"] = response.meta
    return Result(members)


def text_result(text: str, *, is_error: bool = False, list_version: int = 0) -> Result:
    content = canonical([{"type": "text", "text": text}])
    members = {"content": content, "isError": "true" if is_error else "false"}
    return Result(members, list_version)


def _validation_error_result(name: str, error: ValidationError) -> Result:
    """Return an error result that lists the problems and quotes the meta-tool's schema."""
    problems = [
        f"- {'.'.join(str(part) for part in item['loc']) or 'arguments'}: {item['msg']}"[:300]
        for item in error.errors(include_url=False, include_input=False)[:20]
    ]
    known = "search_tools" if name in SEARCHES else "deferred_tool_call" if name in CALLS else name
    tools = rendering.meta_tools(Strategy.DISPATCH)
    schema = next(tool["parameters"] for tool in tools if tool["name"] == known)
    return text_result(
        f"The arguments for {name} do not match its schema:\n{chr(10).join(problems)}\n\n"
        f"Input schema of {name}:\n{json.dumps(schema, ensure_ascii=False, sort_keys=True)}\n\n"
        "Correct the arguments and call again.",
        is_error=True,
    )


# --- Responses ------------------------------------------------------------------------------------


class CallResponder:
    """Sends the response to one call: JSON, or an event stream once something precedes it."""

    def __init__(self, call: ToolCall, send: Send) -> None:
        self._call, self._send = call, send
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytes] = deque(maxlen=MAX_QUEUED_PROGRESS)
        self.is_stream = False
        self._sending: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(PING_SECONDS, self._ping)

    def report_progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Queue a server's progress; drop the oldest entries if the client is slow."""
        params = {"progressToken": self._call.progress_token, "progress": progress}
        optional = {"total": total, "message": message}
        params |= {name: value for name, value in optional.items() if value is not None}
        notification = {"jsonrpc": "2.0", "method": "notifications/progress", "params": params}
        self._enqueue(stream_event(canonical(notification)))

    def _ping(self) -> None:
        self._enqueue(b": ping\r\n\r\n")
        self._timer = self._loop.call_later(PING_SECONDS, self._ping)

    def _enqueue(self, data: bytes) -> None:
        self._queue.append(data)
        if self._sending is None:
            self._sending = self._loop.create_task(self._send_queued())

    async def _send_queued(self) -> None:
        try:
            if not self.is_stream:
                self.is_stream = True
                await start_stream(self._send)
            while self._queue:
                message = {"type": "http.response.body", "body": self._queue.popleft()}
                await self._send({**message, "more_body": True})
        finally:
            self._sending = None

    async def finish(self, result: Result) -> None:
        """Send the result, after everything that precedes it."""
        if result.list_version and not self._call.is_modern:
            self._enqueue(stream_event(LIST_CHANGED))
        await self._end(200, _result_message(self._call, result))

    async def fail(self, error: ProtocolError) -> None:
        text = error_message(self._call.request_id, error.code, error.message, error.data)
        await self._end(error.status, text)

    async def end_without_response(self) -> None:
        """End the response to a call that its client has cancelled."""
        self._enqueue(b"")
        await self._end(200, "")

    async def _end(self, status: int, text: str) -> None:
        self.close()
        if self._sending is not None:
            await self._sending
        if self.is_stream:
            data = stream_event(text) if text else b""
            await self._send({"type": "http.response.body", "body": data})
        else:
            await send_response(self._send, status, "application/json", text.encode())

    def close(self) -> None:
        self._timer.cancel()


def _result_message(call: ToolCall, result: Result) -> str:
    members = dict(result.members)
    if call.is_modern:
        members["resultType"] = '"complete"'
        members["_meta"] = _with_server_info(members.get("_meta"))
    return join_members(
        {"jsonrpc": '"2.0"', "id": canonical(call.request_id), "result": join_members(members)}
    )


def _with_server_info(meta: str | None) -> str:
    """Return the result's `_meta` with the name of this server instead of the upstream one."""
    if meta is None or meta == "{}":
        return SERVER_INFO_META
    return canonical({**json.loads(meta), **json.loads(SERVER_INFO_META)})


async def start_stream(send: Send, headers: Mapping[bytes, bytes] | None = None) -> None:
    fields = {
        b"content-type": b"text/event-stream",
        b"cache-control": b"no-cache, no-transform",
        b"x-accel-buffering": b"no",
        **(headers or {}),
    }
    await send({"type": "http.response.start", "status": 200, "headers": list(fields.items())})


def stream_event(message: str) -> bytes:
    return b"event: message\r\ndata: " + message.encode() + b"\r\n\r\n"


async def respond(
    caller: Caller,
    call: ToolCall,
    send: Send,
    is_cancelled: Callable[[], bool] = lambda: False,  # by its client
) -> int:
    """Run a call and send its response; return the `list_version` of its result.

    Raises ToolcribError for errors that are not results, before anything is sent.
    """
    responder = CallResponder(call, send)
    on_progress = responder.report_progress if call.progress_token is not None else None
    try:
        result = await run(caller, call, on_progress)
    except ProtocolError as error:
        await responder.fail(error)
        return 0
    except ToolcribError as error:
        if error.code in HTTP_ERRORS and not responder.is_stream:
            raise
        result = text_result(f"{error.message}\n\n{error.hint}".strip(), is_error=True)
    except DatabaseError:
        logger.exception("Database unavailable during a call over MCP")
        result = text_result(DatabaseUnavailable().sentence, is_error=True)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or not is_cancelled() or task.uncancel():
            raise
        await responder.end_without_response()
        return 0
    finally:
        responder.close()
    await responder.finish(result)
    return result.list_version


# --- Cancellation by older clients ----------------------------------------------------------------


class ConnectionCalls:
    """Running calls of handshake connections, which their clients may cancel by request id.

    The notification may reach another process than the call. It is then left in the connection's
    row, where the process of the call looks for it.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[str, Id], set[asyncio.Task[Any]]] = {}
        self._cancelled: set[asyncio.Task[Any]] = set()

    @contextmanager
    def running(self, connection_id: str, request_id: Id) -> Iterator[Callable[[], bool]]:
        """Register the current task; yield a function that tells whether it was cancelled.

        A client may reuse an id: each of its calls gets its own response.
        """
        task, key = asyncio.current_task(), (connection_id, request_id)
        assert task is not None  # noqa: S101 - a running coroutine has a task
        self._running.setdefault(key, set()).add(task)
        try:
            yield lambda: task in self._cancelled
        finally:
            self._cancelled.discard(task)
            self._running[key].discard(task)
            if not self._running[key]:
                del self._running[key]

    async def cancel(self, connection_id: str, request_id: object) -> None:
        if not isinstance(request_id, int | str):
            return
        if (connection_id, request_id) in self._running:
            self._cancel(connection_id, request_id)
        elif not settings.EMBEDDED:
            await ledger_writer.run_off_loop(add_cancellation, connection_id, request_id)

    def _cancel(self, connection_id: str, request_id: Id) -> None:
        for task in self._running.get((connection_id, request_id), set()) - self._cancelled:
            self._cancelled.add(task)
            task.cancel()

    async def take_cancellations(self) -> None:
        """Cancel calls whose cancellation another process received."""
        connections = {connection_id for connection_id, _ in self._running}
        if not connections:
            return
        for row in await ledger_writer.run_off_loop(take_cancellations, connections):
            self._cancel(*row)
