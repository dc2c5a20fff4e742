"""Tool calls to upstream servers: concurrency slot, connection, one send, outcome.

Upstream failures are returned as outcomes, never raised. A result is passed on unchanged or not at
all; only the server's own credentials are replaced. A call that was sent is never sent again:
if its answer is lost, its outcome is `unknown`. A slow call neither marks its connection as failed
nor affects other calls.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from django.conf import settings

from servers.connections import pool
from servers.connections.asking import AskingClient
from servers.connections.connection import Connection, RawResult
from servers.connections.coordination import DatabaseWatcher, maintain_forever, record_asking
from servers.connections.pool import ConnectionOwner, Pool, Slot
from servers.credential_filter import CredentialFilter
from servers.errors import ServerErrorResponse, UpstreamError, format_bytes
from servers.spec import (
    COMPLETE,
    PROMPTS_GET,
    RESOURCES_READ,
    TOOLS_CALL,
    OnProgress,
)
from servers.transports.request_trace import RequestTrace, TooLarge
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.telemetry import tracing
from toolcrib.lib.text import escape_hidden

logger = logging.getLogger(__name__)

MAX_TRIES = 3  # connections to try while the call was not sent
LATE_GRACE = 10.0  # seconds to wait for an answer after the deadline
MAX_BYTES_ON_LOOP = 64 * 1024  # larger results are parsed and redacted in a thread
WATCH_RETRY_SECONDS, MAX_WATCH_RETRY_SECONDS = 1.0, 60.0
MAX_QUOTED = 500  # characters of a server's error message
URI_MEMBERS = '"uri":', '"resourceUri":', '"ui/resourceUri":'  # of a result, in canonical JSON
SERVER_INFO = "io.modelcontextprotocol/serverInfo"  # in `_meta`: about the connection
REJECTION_CODES = frozenset({"auth", "http_status", "redirect", "not_mcp"})
POOL_CHECK_SECONDS = 0.02

_call_pool: Pool | None = None


@dataclass(frozen=True)
class CallTarget:
    server_id: int
    slug: str
    generation: int
    isolation: str  # shared, per_session
    session: str = ""  # the agent session's id; used when per_session
    concurrency: int = 0  # maximum concurrent calls; 0: the setting
    elicits: bool = False  # the client can ask its user, and the server may want that


class CallOutcome(NamedTuple):  # every call makes one: a frozen dataclass takes five times as long
    """The outcome of a call.

    `not_sent`: nothing reached the server. `unknown`: it was sent, and whether the tool ran is
    not known. `code`, `message` and `hint` are Toolcrib's, where the state is not `succeeded`.
    """

    state: str  # succeeded, failed, timed_out, cancelled, unknown, not_sent
    content: list[Any] | None = None  # exactly as the server sent it
    structured: Any = None  # likewise; see has_structured
    has_structured: bool = False
    is_error: bool = False  # the server's own isError
    meta: dict[str, Any] | None = None  # the result's `_meta`
    serialized: tuple[str, str, str] | None = None  # content, structured, meta: canonical JSON
    code: str = ""
    message: str = ""
    hint: str = ""
    size: int = 0  # bytes of `serialized`
    rpc_code: int = 0  # of the server's JSON-RPC error
    # With the state `input_required`: what the server asks, and its own `requestState`.
    input_requests: dict[str, Any] | None = None
    request_state: str | None = None

    @property
    def mentions_resources(self) -> bool:
        """Whether the result may contain URIs of resources. Cheap: every call asks."""
        return any(member in text for text in self.serialized or () for member in URI_MEMBERS)


class UpstreamRequest(NamedTuple):
    target: CallTarget
    tool: str
    arguments: dict[str, Any]
    schema: Mapping[str, Any] | None
    timeout: float
    deadline: float  # in loop time
    on_sent: Callable[[], Awaitable[None]] | None
    on_late: Callable[[str], None] | None
    on_progress: OnProgress | None
    method: str = TOOLS_CALL
    client: AskingClient | None = None


async def call(
    target: CallTarget,
    tool: str,
    arguments: dict[str, Any],
    *,
    timeout: float,  # noqa: ASYNC109 - a deadline that is part of the outcome
    schema: Mapping[str, Any] | None = None,
    on_sent: Callable[[], Awaitable[None]] | None = None,
    on_late: Callable[[str], None] | None = None,
    on_progress: OnProgress | None = None,
    method: str = TOOLS_CALL,
    client: AskingClient | None = None,
) -> CallOutcome:
    """Call a tool by the server's own name for it.

    With another `method`, `arguments` are the parameters of that request.

    `arguments` are valid JSON. `on_sent` is awaited right before the request is sent: if it raises,
    nothing is sent. `on_late` is called when an answer arrives shortly after the deadline,
    `on_progress` on each progress notification. `schema` is the tool's input schema, which maps
    arguments to HTTP headers in the modern protocol.
    """
    active = current_pool()
    if active is None:
        return _not_sent("stopping", "Toolcrib is starting or stopping.", "Try again.")

    async def run() -> CallOutcome:
        deadline = asyncio.get_running_loop().time() + timeout
        request = UpstreamRequest(
            target, tool, arguments, schema, timeout, deadline, on_sent, on_late, on_progress,
            method, client,
        )  # fmt: skip
        return await _call_in_slot(active, request)

    return await active.run_on_loop(run())


async def watch_resource(target: CallTarget, uri: str, on_update: Callable[[], None]) -> None:
    """Call `on_update` on every change of a resource, until cancelled or the server rejects it."""
    active = current_pool()
    if active is not None:
        await active.run_on_loop(_watch_resource(active, target, uri, on_update))


async def _watch_resource(
    active: Pool, target: CallTarget, uri: str, on_update: Callable[[], None]
) -> None:
    session = target.session if target.isolation == "per_session" else ""
    wait = WATCH_RETRY_SECONDS
    while True:
        owner: ConnectionOwner | None = None
        try:
            owner = await active.owner_for_call(target.server_id, session, target.generation)
            owner.call_started(0.0)
            await (await owner.connection_for_call()).watch_resource(uri, on_update)
            wait = WATCH_RETRY_SECONDS
            on_update()  # a change may be missed until it is watched again
        except ServerErrorResponse:
            return
        except ToolcribError:
            wait = min(wait * 2, MAX_WATCH_RETRY_SECONDS)
        finally:
            if owner is not None:
                owner.call_ended()
        await asyncio.sleep(wait)


async def forget_session(session: str) -> None:
    if (active := current_pool()) is not None:
        await active.run_on_loop(active.forget_session(session))


# --- The pool for calls -----------------------------------------------------------------------


@asynccontextmanager
async def call_pool() -> AsyncIterator[None]:
    """Enable calls inside the block, in a process or test without a listener."""
    global _call_pool
    own = _call_pool = Pool(DatabaseWatcher())
    maintenance = asyncio.create_task(maintain_forever(own, persistent=False), name="calls")
    try:
        yield
    finally:
        if _call_pool is own:
            _call_pool = None
        maintenance.cancel()
        with suppress(asyncio.CancelledError):
            await maintenance
        await own.close()


async def run() -> None:
    """Enable calls until cancelled."""
    async with call_pool():
        await asyncio.Event().wait()


def current_pool() -> Pool | None:
    return _call_pool or pool.process_pool()


async def wait_for_pool() -> None:
    """Wait until this process can call servers: at its start, background tasks come before that."""
    while current_pool() is None:  # noqa: ASYNC110 - for a moment of the start, either of two pools
        await asyncio.sleep(POOL_CHECK_SECONDS)


# --- One call ---------------------------------------------------------------------------------


async def _call_in_slot(active: Pool, request: UpstreamRequest) -> CallOutcome:
    bulkhead = active.bulkhead(request.target.server_id)
    size = request.target.concurrency or settings.CALLS_IN_FLIGHT
    try:
        slot = bulkhead.try_acquire(size)
        if slot is None:
            async with asyncio.timeout_at(request.deadline):
                slot = await bulkhead.acquire(size)
    except TimeoutError:
        return _not_sent(
            "timeout",
            f"The server had no free slot for this call within {request.timeout:g} s.",
            "It is busy with other calls. Try again.",
        )
    except UpstreamError as busy:
        return _not_sent(busy.code, busy.message, busy.hint)
    try:
        with ExitStack() as resources:
            return await _call_connected(active, request, resources, slot)
    finally:
        if not slot.is_late:
            slot.release()


async def _call_connected(
    active: Pool, request: UpstreamRequest, resources: ExitStack, slot: Slot
) -> CallOutcome:
    """Get a live connection and make the call. `resources` keeps its owners in use."""
    target, tries = request.target, 0
    session = target.session if target.isolation == "per_session" else ""
    if target.elicits and not session and active.has_room(target.server_id, target.session):
        # What a server asks on a connection is for the one session that it belongs to.
        session = target.session
    while True:
        try:
            owner = active.live_owner(target.server_id, session, target.generation)
            if owner is None:
                async with asyncio.timeout_at(request.deadline):
                    owner = await active.owner_for_call(
                        target.server_id, session, target.generation, elicits=target.elicits
                    )
            owner.call_started(request.deadline)
            resources.callback(owner.call_ended)
            connection = owner.live_connection
            if connection is None:
                async with asyncio.timeout_at(request.deadline):
                    connection = await owner.connection_for_call()
        except TimeoutError:
            return _not_sent(
                "timeout",
                f"The server could not be reached within {request.timeout:g} s.",
                "It may be slow to start. Try again.",
            )
        except ToolcribError as error:
            return _not_sent(error.code, error.message, error.hint)
        if request.on_sent is not None and not tries:
            await request.on_sent()
        tries += 1
        exchange = _exchange(active, owner, connection, request, slot)
        outcome = await (_trace(exchange, owner, request) if tracing.enabled else exchange)
        if connection.take_asked(_error_text(outcome)):
            await run_in_db_thread(record_asking, target.server_id)
        # The connection may turn out to be dead before anything was sent: try another.
        if outcome.state == "not_sent" and tries < MAX_TRIES and connection.closed.is_set():
            continue
        return outcome


async def _trace(
    exchange: Coroutine[Any, Any, CallOutcome], owner: ConnectionOwner, request: UpstreamRequest
) -> CallOutcome:
    """Make the exchange with a server in a span of its own."""
    is_program = owner.spec is not None and owner.spec.transport == "stdio"
    attributes = {
        "mcp.method.name": "tools/call",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": request.tool,
        "network.transport": "pipe" if is_program else "tcp",
        "toolcrib.server": request.target.slug,
    }
    with tracing.client_span(f"tools/call {request.tool}", attributes) as span:
        outcome = await exchange
        span.set_attribute("toolcrib.outcome", outcome.state)
        if outcome.is_error or outcome.state != "succeeded":
            tracing.set_error(span, outcome.code or "tool_error")
        return outcome


async def _exchange(
    active: Pool,
    owner: ConnectionOwner,
    connection: Connection,
    request: UpstreamRequest,
    slot: Slot,
) -> CallOutcome:
    loop, trace = asyncio.get_running_loop(), RequestTrace(is_call=True)
    on_progress = _redact_progress(request.on_progress, owner)
    if request.method == TOOLS_CALL:
        sending = connection.call_tool(
            request.tool,
            request.arguments,
            trace,
            schema=request.schema,
            on_progress=on_progress,
            client=request.client,
        )
    else:
        sending = connection.request(
            request.method,
            request.arguments,
            trace,
            on_progress=on_progress,
            client=request.client,
        )
    task = asyncio.create_task(sending)
    owner.call_started(request.deadline)
    task.add_done_callback(lambda _: owner.call_ended())
    try:
        while not task.done():
            asked = request.client.asked_seconds if request.client is not None else 0.0
            remaining = request.deadline + asked - loop.time()
            await asyncio.wait({task}, timeout=max(0.0, remaining))
            if remaining <= 0 or request.client is None:
                break
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    if task.done():
        return await _build_outcome(task, owner, trace, request)
    if not trace.sent:
        await _cancel(task)
    if not trace.sent:
        return _not_sent(
            "timeout",
            f"The call could not be sent within {request.timeout:g} s.",
            "The server does not accept messages. Try again.",
        )
    slot.hold_after_timeout()
    late = active.run_in_background(_await_late_answer(task, request, slot))
    late.add_done_callback(lambda _: slot.release())
    return CallOutcome(
        "timed_out",
        code="timeout",
        message=f"The server did not answer within {request.timeout:g} s.",
        hint="The tool may have run, or still be running. Check before retrying.",
    )


async def _cancel(task: asyncio.Task[RawResult]) -> None:
    """Cancel the request, and give the server a moment to receive the notification."""
    task.cancel()
    await asyncio.wait({task}, timeout=2)
    if task.done() and not task.cancelled():
        task.exception()  # mark as retrieved


async def _await_late_answer(
    task: asyncio.Task[RawResult], request: UpstreamRequest, slot: Slot
) -> None:
    """Wait a little after the deadline, unless another call needs the slot; then cancel."""
    started = time.monotonic()
    needed = asyncio.create_task(slot.needed.wait())
    try:
        either = {task, needed}
        await asyncio.wait(either, timeout=LATE_GRACE, return_when=asyncio.FIRST_COMPLETED)
    finally:
        needed.cancel()
        answered = task.done() and not task.cancelled()
        if not task.done():
            await _cancel(task)
    if not answered or request.on_late is None:
        return
    if task.exception() is None or isinstance(task.exception(), ServerErrorResponse):
        try:
            request.on_late(f"answered {time.monotonic() - started:.1f} s after its deadline")
        except Exception:
            logger.exception("Late answer could not be recorded")


# --- Outcomes ---------------------------------------------------------------------------------


async def _build_outcome(
    task: asyncio.Task[RawResult],
    owner: ConnectionOwner,
    trace: RequestTrace,
    request: UpstreamRequest,
) -> CallOutcome:
    credentials = owner.spec.credential_filter if owner.spec else CredentialFilter(())
    try:
        result, size = task.result()
    except ServerErrorResponse as response:
        message = credentials.redact_text(response.server_message)
        text = f"The server returned an error: {_quote(message)}"
        return _failed("server_error", text)._replace(rpc_code=response.rpc_code)
    except UpstreamError as error:
        return _lost_outcome(error, trace)
    parse = partial(parse_result, result, credentials, max_items=settings.MAX_CONTENT_ITEMS)
    if request.method != TOOLS_CALL:
        parse = partial(parse_feature_result, request.method, result, credentials)
    try:
        if trace.malformed:
            raise InvalidResult(trace.malformed)
        outcome = await asyncio.to_thread(parse) if size > MAX_BYTES_ON_LOOP else parse()
    except InputRequired:
        return _input_required(result, credentials, request.client)
    except InvalidResult as problem:
        return _invalid(str(problem))
    if outcome.size > settings.MAX_RESULT_BYTES:
        return _too_large(format_bytes(outcome.size))
    return outcome


def _error_text(outcome: CallOutcome) -> str:
    """Return the beginning of what a call failed with."""
    if outcome.is_error and outcome.serialized is not None:
        return outcome.serialized[0][:MAX_QUOTED]
    return outcome.message


def _input_required(
    result: Mapping[str, Any], credentials: CredentialFilter, client: AskingClient | None
) -> CallOutcome:
    """Return what the server asks, if the calling client can ask its user that."""
    requests, state = result.get("inputRequests"), result.get("requestState")
    is_valid = isinstance(requests, dict) and isinstance(state, str | None)
    can_ask = (
        client is not None
        and is_valid
        and all(
            isinstance(each, dict) and client.supports(each) for each in (requests or {}).values()
        )
    )
    if not can_ask or not (requests or state):
        return _failed(
            "input_required",
            "The tool asks for input before it answers, which this client cannot give.",
            "Pass everything it needs in the arguments, or use another tool.",
        )
    redacted = credentials.redact(requests) if requests else {}
    return CallOutcome("input_required", input_requests=redacted, request_state=state)


def _redact_progress(on_progress: OnProgress | None, owner: ConnectionOwner) -> OnProgress | None:
    """Wrap the callback: remove credentials from messages and limit their length."""
    if on_progress is None or owner.spec is None:
        return on_progress
    redact = owner.spec.credential_filter.redact_text

    def report(progress: float, total: float | None, message: str | None) -> None:
        on_progress(progress, total, None if message is None else redact(message)[:MAX_QUOTED])

    return report


def _lost_outcome(error: UpstreamError, trace: RequestTrace) -> CallOutcome:
    if not trace.sent:
        return _not_sent(error.code, error.message, error.hint)
    if trace.malformed:
        return _invalid(trace.malformed)
    if isinstance(trace.error, TooLarge):
        return _too_large(f"more than {format_bytes(settings.MAX_RESULT_BYTES)}")
    if _was_rejected(trace):
        return _failed(error.code, error.message, error.hint)
    return CallOutcome(
        "unknown",
        code=error.code,
        message=f"{error.message} Whether the tool ran is not known.",
        hint="Check whether the tool ran before retrying.",
    )


def _was_rejected(trace: RequestTrace) -> bool:
    """Tell whether the server rejected the request before a tool could run, unlike most 5xx."""
    early = not trace.accepted and (trace.status < 500 or trace.status in (501, 503))
    return trace.error is not None and trace.error.code in REJECTION_CODES and early


def _not_sent(code: str, message: str, hint: str = "") -> CallOutcome:
    return CallOutcome("not_sent", code=code, message=message, hint=hint)


def _failed(code: str, message: str, hint: str = "") -> CallOutcome:
    return CallOutcome("failed", code=code, message=message, hint=hint)


def _invalid(problem: str) -> CallOutcome:
    return _failed(
        "result_invalid",
        f"The tool ran, but its result cannot be passed on: it {problem}.",
        "This is a bug in the server. Check what the tool did before retrying.",
    )


def _too_large(size: str) -> CallOutcome:
    return _failed(
        "result_too_large",
        f"The tool ran, but its result is too large: {size}; the maximum is "
        f"{format_bytes(settings.MAX_RESULT_BYTES)}.",
        "Ask for less at once, e.g. with a limit or a filter.",
    )


def _quote(text: str) -> str:
    """Return a server's text on one line, invisible characters escaped, truncated."""
    line = escape_hidden(" ".join(text.split()))
    return line if len(line) <= MAX_QUOTED else line[:MAX_QUOTED] + "…"


# --- Results --------------------------------------------------------------------------------------


class InvalidResult(ValueError):
    """Why a result cannot be passed on, as a verb phrase."""


class InputRequired(InvalidResult):
    """The server asks for input instead of returning a result."""


def parse_result(
    response: Mapping[str, Any], credentials: CredentialFilter, *, max_items: int
) -> CallOutcome:
    """Return the outcome of a call with this response, or raise InvalidResult."""
    kind = response.get("resultType", "complete")
    if kind == "input_required":
        raise InputRequired("asks for input")
    if kind != "complete":
        raise InvalidResult("has an unknown resultType")
    content = response.get("content")
    if not isinstance(content, list):
        raise InvalidResult("has no content list")
    if len(content) > max_items:
        raise InvalidResult(f"has {len(content):,} content items; the maximum is {max_items:,}")
    if not all(isinstance(item, dict) for item in content):
        raise InvalidResult("has a content item that is not an object")
    is_error = response.get("isError", False)
    if not isinstance(is_error, bool):
        raise InvalidResult("has an isError that is not a boolean")
    meta = response.get("_meta")
    if meta is not None and not isinstance(meta, dict):
        raise InvalidResult("has a _meta that is not an object")
    if meta is not None and SERVER_INFO in meta:
        meta = {name: value for name, value in meta.items() if name != SERVER_INFO} or None
    content, content_text, content_size = _redact(content, credentials)
    structured, text, size = _redact(response.get("structuredContent"), credentials)
    meta, meta_text, meta_size = _redact(meta, credentials)
    return CallOutcome(
        "succeeded",
        content=content,
        structured=structured,
        has_structured="structuredContent" in response,
        is_error=is_error,
        meta=meta,
        serialized=(content_text, text, meta_text),
        size=content_size + size + meta_size,
    )


# The list in the result of each method.
RESULT_LISTS = {PROMPTS_GET: "messages", RESOURCES_READ: "contents"}
MAX_COMPLETIONS = 100


def parse_feature_result(
    method: str, response: Mapping[str, Any], credentials: CredentialFilter
) -> CallOutcome:
    """Return the outcome of another request: its list as content, the rest as structured."""
    kind = response.get("resultType", "complete")
    if kind == "input_required" and method != COMPLETE:
        raise InputRequired("asks for input")
    if kind != "complete":
        raise InvalidResult("has an unknown resultType")
    if method == COMPLETE:
        items = [_completion(response.get("completion"))]
    else:
        found = response.get(RESULT_LISTS[method])
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            raise InvalidResult(f"has no list of {RESULT_LISTS[method]}")
        items = found
    if len(items) > settings.MAX_CONTENT_ITEMS:
        raise InvalidResult(f"has {len(items):,} items")
    meta = response.get("_meta")
    if meta is not None and not isinstance(meta, dict):
        raise InvalidResult("has a _meta that is not an object")
    meta = {name: value for name, value in (meta or {}).items() if name != SERVER_INFO} or None
    description = response.get("description") if method == PROMPTS_GET else None
    rest = {"description": description} if isinstance(description, str) else None
    values = [_redact(value, credentials) for value in (items, rest, meta)]
    return CallOutcome(
        "succeeded",
        content=values[0][0],
        structured=values[1][0],
        has_structured=True,
        meta=values[2][0],
        serialized=(values[0][1], values[1][1], values[2][1]),
        size=sum(size for _, _, size in values),
    )


def _completion(completion: Any) -> dict[str, Any]:
    values = completion.get("values") if isinstance(completion, dict) else None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise InvalidResult("has no list of values")
    return {**completion, "values": values[:MAX_COMPLETIONS]}


def _redact(value: Any, credentials: CredentialFilter) -> tuple[Any, str, int]:
    """Return a value without credentials, as canonical JSON, and the size of that."""
    if value is None:
        return None, "null", len("null")
    text, size = serialize(value)
    if credentials.occurs_in(text):
        value = credentials.redact(value)
        text, size = serialize(value)
    return value, text, size


def serialize(value: object) -> tuple[str, int]:
    """Return a value as canonical JSON and its size in bytes, or raise InvalidResult."""
    try:
        text = canonical(value)
        return text, len(text.encode())
    except UnicodeEncodeError:
        raise InvalidResult("contains a lone surrogate (half a character)") from None
    except RecursionError:
        raise InvalidResult("is nested too deeply") from None
    except (ValueError, TypeError):
        raise InvalidResult("contains a number that JSON cannot represent") from None
