"""`tools/call` at `/mcp`, of every protocol version: checks, meta-tools, response.

The SDK validates the message; its server is not involved. A call is answered as JSON, or as an
event stream if the client asked for progress, if the tool list changed, or after 15 seconds, so
that proxies keep the connection open.
"""

import asyncio
import base64
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import mcp_types as types
from django.conf import settings
from django.db import DatabaseError, InterfaceError
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
from servers.connections.asking import AskingClient
from servers.spec import OnProgress
from sessions_app.dispatch import dispatcher, operations
from sessions_app.dispatch.authorization import Caller
from sessions_app.dispatch.planner import CallRequest
from sessions_app.held_calls import checking
from sessions_app.held_calls.waiting import watch
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.calls import CHECK_BEFORE_RETRY, CallResponse
from sessions_app.mcp import elicitation, questions
from sessions_app.mcp.errors import Id, ProtocolError, error_message
from sessions_app.mcp.sessions import (
    Client,
    ConnectionCaller,
    UnknownConnection,
    add_cancellation,
    elicitation_of,
    take_cancellations,
)
from sessions_app.models import CallPath, CallState, Strategy
from sessions_app.scripts import runner
from sessions_app.scripts.schemas import ScriptIn
from sessions_app.sessions import search as session_search
from sessions_app.sessions.loading import SessionEnded
from sessions_app.sessions.schemas import CallIn, CheckCallIn, DetailsIn, LoadIn, SearchIn
from toolcrib.lib.errors import DatabaseUnavailable, ToolcribError
from toolcrib.lib.json_codec import canonical, join_members
from toolcrib.lib.protocols.asgi import Message, Scope, Send, content_type_of, send_response
from toolcrib.lib.telemetry import tracing

logger = logging.getLogger(__name__)

METHOD = "tools/call"
META = "io.modelcontextprotocol/"
SEARCHES = ("search_tools", "tool_search", "tool_search_regex")
PING_SECONDS = 15.0
FIRST_EVENT_SECONDS = 1.0
RECONNECT_SECONDS = 10  # Toolcrib has started again by then; clients try a few times
ANSWER_SECONDS = 20.0  # for the result of a call that its user has just allowed
CANCELLATION_POLL_SECONDS = 0.5
MAX_QUEUED_PROGRESS = 100
SERVER_INFO_META = canonical(
    {f"{META}serverInfo": {"name": "toolcrib", "title": "Toolcrib", "version": settings.VERSION}}
)
LIST_CHANGED = canonical({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
# Errors about the request itself, not about the call: HTTP errors instead of results.
HTTP_ERRORS = frozenset({"unauthorized", "forbidden", "unknown_session"})

SendRequest = Callable[[str, Mapping[str, Any]], None]  # id and parameters of a question


@dataclass(frozen=True)
class ToolCall:
    """A valid `tools/call` message."""

    request_id: int | str
    name: str
    arguments: Mapping[str, Any]
    is_modern: bool
    client: Client | None  # in a modern message
    progress_token: int | str | None
    capabilities: object  # of the client: in a modern message, or of its connection
    request_state: str | None  # a repeated call: its state, and the answers of the user
    input_responses: Mapping[str, Any]
    headers: Mapping[str, str] = field(repr=False)
    size: int = 0  # bytes
    method: str = METHOD  # or that of a prompt or resource
    params: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def subject(self) -> questions.Subject:
        """What an answer of the client's user is about."""
        return self.method, self.name, self.arguments


# --- Checks ---------------------------------------------------------------------------------------


def parse_call(
    message: Mapping[str, Any], scope: Scope, headers: Mapping[str, str], size: int
) -> ToolCall:
    """Check a message as the protocol version in its headers requires. Raises ProtocolError.

    Of `tools/call`, or of another method that is answered as a call.
    """
    method: str = message["method"]
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
        validate_client_request(method, version, params)
        params = params or {}  # of a list of older versions
    except ValidationError:
        status = 400 if is_modern else 200
        text = "Invalid request parameters"
        raise ProtocolError(status, types.INVALID_PARAMS, text, "") from None
    meta = params.get("_meta") or {}
    if "traceparent" in meta or "traceparent" in headers:
        tracing.accept(headers, meta)
    return ToolCall(
        request_id,
        params.get("name") or params.get("uri") or "",
        params.get("arguments") or {},
        is_modern,
        _client(meta, version) if is_modern else None,
        meta.get("progressToken"),
        meta.get(f"{META}clientCapabilities"),
        params.get("requestState"),
        params.get("inputResponses") or {},
        headers,
        size,
        method,
        params,
    )


def _client(meta: Mapping[str, Any], version: str) -> Client:
    elicits = elicitation_of(meta.get(f"{META}clientCapabilities")) is not None
    return Client(meta.get(f"{META}clientInfo"), version, elicits)


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


class Result(NamedTuple):
    """The members of a result, as canonical JSON."""

    members: Mapping[str, str]
    list_version: int = 0  # version of the session's loads, if they changed the tool list
    held_call: int | None = None  # whose answer this is; it counts as fetched when it has arrived
    held_id: str = ""  # id of a call that waits for a person


async def run(
    caller: Caller, call: ToolCall, on_progress: OnProgress | None, send_request: SendRequest
) -> Result:
    """Run a tool or a meta-tool. Errors that a model can correct are results."""
    try:
        return await _run(caller, call, on_progress, send_request)
    except SessionEnded:
        if not isinstance(caller, ConnectionCaller):
            raise
    await caller.find_session(renew=True)  # a new one, if the last has expired
    try:
        return await _run(caller, call, on_progress, send_request)
    except SessionEnded:
        raise UnknownConnection from None  # the client then initializes a new connection


async def _run(
    caller: Caller, call: ToolCall, on_progress: OnProgress | None, send_request: SendRequest
) -> Result:
    try:
        if call.name in SEARCHES:
            return await _search(caller, call)
        if call.name == "load_tools":
            return await _load(caller, call)
        if call.name == "get_tool_details":
            asked = DetailsIn.model_validate(call.arguments)
            details = await operations.details(caller, asked.name, asked.detail)
            return text_result(details.text)
        if call.name == "check_call":
            checked = CheckCallIn.model_validate(call.arguments)
            return await _check(caller, checked)
        if call.name == "run_script":
            body = ScriptIn.model_validate(call.arguments)
            key = call.headers.get("idempotency-key")
            script = runner.ScriptRequest(**dict(body), idempotency_key=key)
            return _script_result(await runner.run_script(caller, script))
        if call.is_modern and call.request_state is not None:
            state = questions.unseal(caller.digest, call.subject, call.request_state)
            if held_id := state.get("held"):
                await _take_answer(caller, call, held_id)
                call = replace(call, request_state=None)
        return await _dispatch(caller, call, on_progress, send_request)
    except ValidationError as error:
        return _validation_error_result(call.name, error)


async def _check(caller: Caller, asked: CheckCallIn) -> Result:
    wait = asked.wait_seconds or 0
    if asked.run_id is not None:
        return _script_result(await runner.check_run(caller.digest, asked.run_id, wait))
    assert asked.call_id is not None  # noqa: S101 - validated
    return _call_result(await checking.check_call(caller.digest, asked.call_id, wait))


def _script_result(body: Mapping[str, Any]) -> Result:
    return text_result(canonical(body), is_error=body["is_error"])


async def _search(caller: Caller, call: ToolCall) -> Result:
    values = dict(call.arguments)
    compat = ""
    if call.name == "tool_search_regex":  # as Logicore has it: it loads its results
        values["pattern"] = values.get("pattern") or values.pop("query", "")
        compat = "logicore"
    is_alias = call.name != "search_tools"
    body = SearchIn.model_validate(values)
    query = session_search.parse_body(body, more=not is_alias, compat=compat)
    found = await operations.search(caller, query)
    is_injected = found.context.strategy == Strategy.INJECT and found.newly_loaded
    return text_result(found.text, list_version=found.loads_version if is_injected else 0)


async def _load(caller: Caller, call: ToolCall) -> Result:
    body = LoadIn.model_validate(call.arguments)
    # Where a provider makes every field required, a model has only the empty list for "all".
    names = body.tool_names or None
    loaded = await operations.load(
        caller, body.group_id, names, confirmed=body.confirm, as_signatures=body.signature_language
    )
    is_injected = loaded.is_injected and loaded.newly_loaded
    return text_result(
        loaded.as_json(),
        is_error=loaded.error is not None,
        list_version=loaded.loads_version if is_injected else 0,
    )


async def _dispatch(
    caller: Caller, call: ToolCall, on_progress: OnProgress | None, send_request: SendRequest
) -> Result:
    request = _request(call)
    if (modes := elicitation_of(call.capabilities)) is None:
        return _call_result(await dispatcher.call(caller, request, on_progress))

    async def send(client: AskingClient) -> CallResponse:
        return await dispatcher.call(caller, replace(request, client=client), on_progress)

    answer = await ask_user(caller, call, modes, send, send_request)
    if isinstance(answer, questions.InputRequired):
        return Result(answer.members)
    return _call_result(answer)


async def ask_user(
    caller: Caller,
    call: ToolCall,
    modes: Mapping[str, Any],
    send: questions.Send,
    send_request: SendRequest,
) -> CallResponse | questions.InputRequired:
    """Send a request of a client that can ask its user, and ask what its server wants to know."""
    request = questions.ClientRequest(
        key_digest=caller.digest,
        subject=call.subject,
        is_modern=call.is_modern,
        modes=modes,
        request_state=call.request_state,
        input_responses=call.input_responses,
    )
    ask = questions.asking(call.headers.get("mcp-session-id", ""), send_request)
    return await questions.run(request, send, ask)


def _request(call: ToolCall) -> CallRequest:
    key = call.headers.get("idempotency-key")
    if call.name in META_TOOLS:
        body = CallIn.model_validate(call.arguments)
        arguments = _unwrap(body.tool_name, body.arguments)
        read_only = call.name == "call_read_only_tool" or bool(body.read_only)
        return CallRequest(
            body.tool_name, arguments, body.timeout, key, size=call.size, read_only=read_only
        )
    check = partial(_check_parameter_headers, call) if call.is_modern else None
    native = CallPath.NATIVE
    return CallRequest(call.name, call.arguments, None, key, native, call.size, check)


def _unwrap(tool_name: str, arguments: Any) -> Any:
    """Take the arguments out of a copy of the whole call, which Semantic Kernel sends there.

    It gives a function's parameter `arguments` all arguments of the function.
    """
    is_copy = isinstance(arguments, dict) and arguments.keys() == {"name", "arguments"}
    return arguments["arguments"] if is_copy and arguments["name"] == tool_name else arguments


async def _take_answer(caller: Caller, call: ToolCall, call_id: str) -> None:
    """Decide as the user answered, and wait a moment for the result, which this call then gets."""
    answer, mode = (
        call.input_responses.get(elicitation.INPUT),
        elicitation.mode_of(call.capabilities),
    )
    take = partial(elicitation.take_answer, caller.digest, call_id, answer, mode)
    if elicitation.is_opened(mode, answer) or await ledger_writer.run_off_loop(take):
        await watch.wait(call_id, ANSWER_SECONDS)


async def _ask_user(
    caller: Caller, call: ToolCall, result: Result, responder: "CallResponder"
) -> Result:
    """Let the user of the client decide about a held call, if the rule and the client permit."""
    run = ledger_writer.run_off_loop
    mode = elicitation.mode_of(call.capabilities)
    if call.request_state is not None or not mode:
        return result
    params = await run(elicitation.find_question, caller.digest, result.held_id, mode)
    if params is None:
        return result
    if call.is_modern:
        params.pop("elicitationId", None)
        question = {elicitation.INPUT: {"method": elicitation.METHOD, "params": params}}
        sealed = questions.seal(caller.digest, call.subject, {"held": result.held_id})
        return Result(questions.asking_members(question, sealed))
    responder.send_request(f"{elicitation.REQUEST_PREFIX}{result.held_id}", params)
    await watch.wait(result.held_id, elicitation.WAIT_SECONDS)
    return _call_result(await checking.check_call(caller.digest, result.held_id, 0))


def _call_result(response: CallResponse) -> Result:
    members = {"content": response.content, "isError": "true" if response.is_error else "false"}
    # What a client runs itself has no result yet; clients validate one by the output schema.
    if response.structured != "null" and response.state != CallState.CLIENT:
        members["structuredContent"] = response.structured
    if response.meta != "null":
        members["_meta"] = response.meta
    held_id = response.call_id if response.state == CallState.HELD else ""
    return Result(members, held_call=response.held_call, held_id=held_id)


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
    known = {**dict.fromkeys(SEARCHES, "search_tools"), "call_tool": "deferred_tool_call"}.get(
        name, name
    )
    tools = [
        *rendering.meta_tools(Strategy.DISPATCH),
        rendering.check_call(has_scripts=True),
        rendering.run_script(),
    ]
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

    def __init__(self, call: ToolCall, send: Send, first_event: bytes = b"") -> None:
        self._call, self._send = call, send
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytes] = deque(maxlen=MAX_QUEUED_PROGRESS)
        self.is_stream = self._is_ended = False
        self._sending: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(PING_SECONDS, self._ping)
        self._first: asyncio.TimerHandle | None = None
        if first_event:
            self._first = self._loop.call_later(FIRST_EVENT_SECONDS, self._enqueue, first_event)

    def report_progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Queue a server's progress; drop the oldest entries if the client is slow."""
        params = {"progressToken": self._call.progress_token, "progress": progress}
        optional = {"total": total, "message": message}
        params |= {name: value for name, value in optional.items() if value is not None}
        notification = {"jsonrpc": "2.0", "method": "notifications/progress", "params": params}
        self._enqueue(stream_event(canonical(notification)))

    def send_request(self, request_id: str, params: Mapping[str, Any]) -> None:
        """Ask the client, before the result. Its response arrives with another request."""
        request = {"jsonrpc": "2.0", "id": request_id, "method": elicitation.METHOD}
        self._enqueue(stream_event(canonical({**request, "params": params})))

    def _ping(self) -> None:
        self._enqueue(b": ping\r\n\r\n")
        self._timer = self._loop.call_later(PING_SECONDS, self._ping)

    def _enqueue(self, data: bytes) -> None:
        if self._is_ended:  # progress of a call that goes on while its client is asked
            return
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
        await self._end(200, result_message(self._call, result))

    async def fail(self, error: ProtocolError) -> None:
        text = error_message(self._call.request_id, error.code, error.message, error.data)
        await self._end(error.status, text)

    async def end_without_response(self) -> None:
        """End the response to a call that its client has cancelled."""
        self._enqueue(b"")
        await self._end(200, "")

    async def _end(self, status: int, text: str) -> None:
        self.close()
        self._is_ended = True
        if self._sending is not None:
            await self._sending
        if self.is_stream:
            data = stream_event(text) if text else b""
            await self._send({"type": "http.response.body", "body": data})
        else:
            await send_response(self._send, status, "application/json", text.encode())

    def close(self) -> None:
        self._timer.cancel()
        if self._first is not None:
            self._first.cancel()


def result_message(call: ToolCall, result: Result) -> str:
    members = dict(result.members)
    if call.is_modern:
        members.setdefault("resultType", '"complete"')
        members["_meta"] = _with_server_info(members.get("_meta"))
    return _envelope(call.request_id, members)


def _envelope(request_id: Id, members: Mapping[str, str]) -> str:
    return join_members(
        {"jsonrpc": '"2.0"', "id": canonical(request_id), "result": join_members(members)}
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


Run = Callable[[Caller, ToolCall, OnProgress | None, SendRequest], Awaitable[Result]]


async def respond(
    caller: Caller,
    call: ToolCall,
    send: Send,
    is_cancelled: Callable[[], bool] = lambda: False,  # by its client
    run: Run = run,
    first_event: bytes = b"",
) -> int:
    """Run a call and send its response; return the `list_version` of its result.

    A response that takes long becomes an event stream; the first event, if any, starts it earlier.

    Raises ToolcribError for errors that are not results, before anything is sent.
    """
    responder = CallResponder(call, send, first_event)
    on_progress = responder.report_progress if call.progress_token is not None else None
    try:
        result = await run(caller, call, on_progress, responder.send_request)
        if result.held_id:
            result = await _ask_user(caller, call, result, responder)
    except ProtocolError as error:
        await responder.fail(error)
        return 0
    except questions.InvalidState as error:
        await responder.fail(ProtocolError(400, types.INVALID_PARAMS, error.message))
        return 0
    except ToolcribError as error:
        if error.code in HTTP_ERRORS and not responder.is_stream:
            raise
        result = text_result(f"{error.message}\n\n{error.hint}".strip(), is_error=True)
    except (DatabaseError, InterfaceError) as error:
        logger.error("Database unavailable: %s", error)  # noqa: TRY400 - no traceback needed
        result = text_result(DatabaseUnavailable(error).sentence, is_error=True)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or not is_cancelled() or task.uncancel():
            raise
        await responder.end_without_response()
        return 0
    finally:
        responder.close()
    await responder.finish(result)
    if result.held_call is not None:
        await checking.confirm_arrival(result.held_call)
    return result.list_version


# --- Calls of handshake connections ---------------------------------------------------------------

EVENT_PREFIX = "call-"


def first_event(request_id: Id) -> bytes:
    """Return the event that lets a client resume the stream of a response whose connection broke.

    Its id names the request. Without it the Python SDK gives up all that is connected, and
    Toolcrib must be able to answer after a restart, so nothing but the request is remembered.
    """
    name = base64.urlsafe_b64encode(canonical(request_id).encode()).decode()
    retry = RECONNECT_SECONDS * 1000
    return f"id: {EVENT_PREFIX}{name}\r\nretry: {retry}\r\ndata: \r\n\r\n".encode()


def resumed_request(event_id: str) -> int | str | None:
    """Return the request that the id of an event names; None if it is not of `first_event`."""
    if not event_id.startswith(EVENT_PREFIX):
        return None
    try:
        request_id = json.loads(base64.urlsafe_b64decode(event_id.removeprefix(EVENT_PREFIX)))
    except ValueError:
        return None
    return request_id if isinstance(request_id, int | str) else None


def _lost_response(request_id: Id) -> bytes:
    text = "The connection broke before the response to this call arrived. The tool may have run."
    result = text_result(f"{text}\n\n{CHECK_BEFORE_RETRY}", is_error=True)
    return stream_event(_envelope(request_id, result.members))


class RunningCall:
    """A call of a handshake connection in this process."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task, self.is_cancelled = task, False  # by its client
        self.end: asyncio.Future[bytes] = task.get_loop().create_future()  # of its response

    def keep_end(self, send: Send) -> Send:
        """Return `send` that also keeps the last part of the response, for another stream."""

        async def keeping_send(message: Message) -> None:
            is_last = not message.get("more_body") and message["type"] == "http.response.body"
            if is_last and not self.end.done():
                self.end.set_result(message.get("body", b""))
            await send(message)

        return keeping_send


class ConnectionCalls:
    """Running calls of handshake connections: their clients may cancel them by request id, and
    resume the streams of their responses.

    A cancellation may reach another process than the call. It is then left in the connection's
    row, where the process of the call looks for it.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[str, Id], list[RunningCall]] = {}

    @contextmanager
    def running(self, connection_id: str, request_id: Id) -> Iterator[RunningCall]:
        """Register the current task. A client may reuse an id: each call gets its response."""
        task, key = asyncio.current_task(), (connection_id, request_id)
        assert task is not None  # noqa: S101 - a running coroutine has a task
        call = RunningCall(task)
        self._running.setdefault(key, []).append(call)
        try:
            yield call
        finally:
            if not call.end.done():
                call.end.set_result(b"")
            self._running[key].remove(call)
            if not self._running[key]:
                del self._running[key]

    async def resume(self, connection_id: str, request_id: Id, send: Send) -> None:
        """Send the response to a call on a new stream; if it is lost, an error that says so."""
        calls = self._running.get((connection_id, request_id))
        end = calls[-1].end if calls else None
        await start_stream(send, {b"mcp-session-id": connection_id.encode()})
        data = first_event(request_id)
        while end is not None and not end.done():
            await send({"type": "http.response.body", "body": data, "more_body": True})
            await asyncio.wait({end}, timeout=PING_SECONDS)
            data = b": ping\r\n\r\n"
        body = (end.result() if end is not None else b"") or _lost_response(request_id)
        await send({"type": "http.response.body", "body": body})

    async def cancel(self, connection_id: str, request_id: object) -> None:
        if not isinstance(request_id, int | str):
            return
        if (connection_id, request_id) in self._running:
            self._cancel(connection_id, request_id)
        elif not settings.EMBEDDED:
            await ledger_writer.run_off_loop(add_cancellation, connection_id, request_id)

    def _cancel(self, connection_id: str, request_id: Id) -> None:
        for call in self._running.get((connection_id, request_id), []):
            if not call.is_cancelled:
                call.is_cancelled = True
                call.task.cancel()

    async def take_cancellations(self) -> None:
        """Cancel calls whose cancellation another process received."""
        connections = {connection_id for connection_id, _ in self._running}
        if not connections:
            return
        for row in await ledger_writer.run_off_loop(take_cancellations, connections):
            self._cancel(*row)
