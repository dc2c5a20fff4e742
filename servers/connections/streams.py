"""Message streams between the SDK and a transport (program, event stream or HTTP).

Matches responses to pending requests before the SDK sees them: unmatched responses are dropped and
counted, and the response to a call is examined strictly, as received.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self

import anyio
import mcp_types as types
from anyio.abc import TaskGroup
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from servers.connections.connection_state import ConnectionState, Id, normalize_id
from servers.errors import UpstreamError
from servers.transports.request_trace import RequestTrace, current_trace, parse_off_loop
from servers.transports.response_body import BodyError
from toolcrib.lib.protocols.jsonrpc import (
    BOM,
    LARGE_BYTES,
    id_at_head,
    limit_depth,
    parse_leading_values,
    parse_message,
)

MAX_UNANSWERED = 100  # requests of a server to the client
MAX_NON_MCP_LINES = 50  # such as a banner
SEND_TIMEOUT = 10.0  # seconds for a server to accept a message

Streams = tuple[Any, Any]


class MessageStream(Protocol):
    """The common interface of StdioProcess and EventStream.

    `concurrent_sends`: requests need not wait for each other. `send` records in the trace whether
    the server may have received the whole message, also when it is cancelled.
    """

    concurrent_sends: bool

    def messages(self) -> AsyncIterator[bytes]: ...

    async def send(self, message: bytes, trace: RequestTrace | None) -> None: ...


def unreadable_error() -> UpstreamError:
    return UpstreamError(
        "The server sent a message that cannot be read: invalid JSON, or nested too deeply.",
        hint="This is a bug in the server.",
    )


@dataclass(eq=False)
class _Stream:
    inner: Any
    state: ConnectionState

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self.inner.__aexit__(*exception)


class _Outgoing(_Stream):
    async def send(self, item: SessionMessage) -> None:
        self.state.record_sent(item.message)
        await self.inner.send(item)


class _Incoming(_Stream):
    @property
    def last_context(self) -> Any:
        return getattr(self.inner, "last_context", None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        while True:
            item: SessionMessage | Exception = await self.inner.__anext__()
            if isinstance(item, Exception) or self.state.match_response(item.message):
                return item
            # Over HTTP a response with the wrong id still belongs to a request, which ends here.
            context = self.last_context
            trace = context.get(current_trace) if context is not None else None
            if (
                trace is not None
                and trace.is_call
                and self.state.pending.pop(normalize_id(trace.request_id), None)
            ):
                trace.malformed = "has the id of another request"
                return SessionMessage(_parse_error(trace.request_id))

    async def receive(self) -> SessionMessage | Exception:
        return await self.__anext__()


@asynccontextmanager
async def watch_streams(
    transport: AbstractAsyncContextManager[Streams], state: ConnectionState
) -> AsyncIterator[Streams]:
    async with transport as (read, write):
        yield _Incoming(read, state), _Outgoing(write, state)


@asynccontextmanager
async def connect_streams(stream: MessageStream, state: ConnectionState) -> AsyncIterator[Streams]:
    """Present lines or events as the message streams that the SDK reads and writes."""
    read_end, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, write_end = anyio.create_memory_object_stream[SessionMessage](0)
    async with anyio.create_task_group() as tasks, read, write, read_end, write_end:
        bridge = _StreamBridge(stream, state, read_end, write_end, tasks)
        tasks.start_soon(bridge.receive)
        tasks.start_soon(bridge.forward)
        yield read, write
        tasks.cancel_scope.cancel()


@dataclass(eq=False)
class _StreamBridge:
    stream: MessageStream
    state: ConnectionState
    read_end: Any
    write_end: Any
    tasks: TaskGroup
    non_mcp_lines: int = 0
    unanswered: int = 0  # requests of the server without a response yet

    async def receive(self) -> None:
        try:
            async for raw in self.stream.messages():
                for message in await self._parse(raw):
                    if isinstance(message, types.JSONRPCRequest):
                        self.unanswered += 1
                    await self.read_end.send(SessionMessage(message))
                self._check_limits()
            self.state.mark_dead()
        except UpstreamError as error:
            self._assign_error(error, getattr(error, "head", b""))
            self.state.mark_dead(error)
        except BodyError as body_error:
            self._assign_error(body_error.error, b"")
            self.state.mark_dead(body_error.error)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        finally:
            self.read_end.close()

    async def _parse(self, raw: bytes) -> list[types.JSONRPCMessage]:
        """Return the messages of a line or event: usually one."""
        raw = raw.removeprefix(BOM)
        parser = parse_large if len(raw) > LARGE_BYTES else parse
        messages = await parse_off_loop(parser, raw)
        if any(isinstance(item, types.JSONRPCError) and _is_parse_error(item) for item in messages):
            messages = await self._parse_nested(raw) or messages
        if not messages and raw.strip():
            messages = await self._handle_non_message(raw)
        for message in messages:
            if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
                trace = self.state.find_trace(message.id)
                if trace is not None and trace.is_call:
                    await trace.examine(raw)
        return messages

    async def _handle_non_message(self, raw: bytes) -> list[types.JSONRPCMessage]:
        """Handle a line that is not a message; raise if the stream cannot continue after it."""
        if b'"jsonrpc"' not in raw[:4096]:
            self.non_mcp_lines += 1
            return []
        # JSON that is not a message, such as a response whose id is 1.0
        if await parse_off_loop(parse_leading_values, raw):
            self.state.count_unmatched()
            return []
        trace = self.state.find_trace(id_at_head(raw)) or self.state.only_trace()
        if trace is None or not trace.is_call or trace.request_id is None:
            if not (messages := await self._parse_nested(raw)):
                raise unreadable_error()
            return messages
        trace.malformed = "cannot be read: it is not valid JSON, or nested too deeply"
        return [_parse_error(trace.request_id)]

    async def _parse_nested(self, raw: bytes) -> list[types.JSONRPCMessage]:
        """Return a tool list of which a part is nested too deeply; nothing for other messages."""
        limited = await parse_off_loop(limit_depth, raw)
        if limited == raw:
            return []
        parser = parse_large if len(limited) > LARGE_BYTES else parse
        messages = await parse_off_loop(parser, limited)
        for message in messages:
            if not isinstance(message, types.JSONRPCResponse):
                return []
            trace = self.state.find_trace(message.id)
            if trace is not None and trace.is_call:  # results are passed unchanged or not at all
                return []
        return messages

    def _assign_error(self, error: UpstreamError, head: bytes) -> None:
        """Record the error on the call whose response ended the connection, if known."""
        trace = self.state.find_trace(id_at_head(head)) or self.state.only_trace()
        if error.code == "too_large" and trace is not None:
            trace.error = error

    def _check_limits(self) -> None:
        if self.unanswered > MAX_UNANSWERED:
            raise UpstreamError(
                f"The server sent more than {MAX_UNANSWERED} requests without accepting a "
                "response.",
                hint="This is a bug in the server.",
            )
        if self.non_mcp_lines > MAX_NON_MCP_LINES:
            raise UpstreamError(
                f"The server wrote more than {MAX_NON_MCP_LINES} lines that are not MCP.",
                hint="A stdio server must write its logs to stderr, not to stdout.",
                detail=self.state.stderr_tail(),
            )

    async def forward(self) -> None:
        async for item in self.write_end:
            message = item.message
            if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
                self.unanswered -= 1
            trace = self.state.find_trace(_request_id(message))
            if trace is not None:
                trace.sent = True
            if self._is_sent_concurrently(message):
                self.tasks.start_soon(self._send, message, trace)
            else:
                await self._send(message, trace)
            if self.state.closed.is_set():
                self.read_end.close()
                return

    async def _send(self, message: types.JSONRPCMessage, trace: RequestTrace | None) -> None:
        line = message.model_dump_json(by_alias=True, exclude_unset=True)
        try:
            async with self._send_timeout(message):
                await self.stream.send(line.encode(), trace)
        except UpstreamError as error:
            await self._fail_request(message, trace, error)
        except BodyError as body_error:
            self._mark_dead(body_error.error)
        except TimeoutError:
            if not self._is_sent_concurrently(message):  # else the request was cancelled
                self._mark_dead(
                    UpstreamError(
                        f"The server did not accept a message within {SEND_TIMEOUT:g} s.",
                        code="timeout",
                        hint="It may hang. Toolcrib reconnects.",
                    )
                )
        except OSError:  # a broken pipe: the exit status of the program gives the reason
            self._mark_dead()

    @asynccontextmanager
    async def _send_timeout(self, message: types.JSONRPCMessage) -> AsyncIterator[None]:
        """Raise TimeoutError after SEND_TIMEOUT, which starts again when the server is not busy."""
        loop = asyncio.get_running_loop()
        timeout = asyncio.timeout(None)
        was_busy = self._may_block(message)

        def check() -> None:
            nonlocal was_busy
            is_busy = self._may_block(message)
            if is_busy or was_busy:
                was_busy = is_busy
                timers.append(loop.call_later(SEND_TIMEOUT, check))
            else:
                timeout.reschedule(loop.time())

        async with timeout:
            timers = [loop.call_later(SEND_TIMEOUT, check)]
            try:
                yield
            finally:
                timers[-1].cancel()

    def _may_block(self, message: types.JSONRPCMessage) -> bool:
        """Tell whether sending may block because the server is busy.

        A program may not read its stdin while it runs a tool, and a server may not answer the POST
        of a request before the tool has run.
        """
        if self.stream.concurrent_sends:
            return self.state.find_trace(_request_id(message)) is not None
        return self.state.is_busy(besides=_request_id(message))

    def _is_sent_concurrently(self, message: types.JSONRPCMessage) -> bool:
        return self.stream.concurrent_sends and isinstance(message, types.JSONRPCRequest)

    async def _fail_request(
        self, message: types.JSONRPCMessage, trace: RequestTrace | None, error: UpstreamError
    ) -> None:
        """Fail only the request that the server did not accept."""
        if trace is None:
            return  # a notification or response, or a cancelled request
        trace.error = error
        if trace.opening:
            self._mark_dead(error)
            return
        if trace.status == 404:  # the server no longer knows this stream
            self.state.drain()
        data = types.ErrorData(code=types.INTERNAL_ERROR, message="not accepted")
        response = types.JSONRPCError(jsonrpc="2.0", id=_request_id(message), error=data)
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self.read_end.send(SessionMessage(response))

    def _mark_dead(self, error: UpstreamError | None = None) -> None:
        self.state.mark_dead(error)
        self.read_end.close()


def _request_id(message: types.JSONRPCMessage) -> types.RequestId | None:
    return message.id if isinstance(message, types.JSONRPCRequest) else None


def parse_large(raw: bytes) -> list[types.JSONRPCMessage]:
    """Return the messages in a large line. Only responses may be large.

    Runs in a thread, without the fast parser, which would not release the GIL. Content that the
    SDK would process on the event loop is left out of other messages.
    """
    parsed = parse_message(raw)
    if not isinstance(parsed.value, dict):
        return parse(raw)
    head = {
        name: parsed.value[name] for name in ("jsonrpc", "id", "method") if name in parsed.value
    }
    if parsed.is_response:
        head["result"] = {}
    messages = parse(json.dumps(head).encode())
    if not parsed.is_response:
        return messages
    response = messages[0] if messages else None
    if parsed.malformed or parsed.is_error or not isinstance(response, types.JSONRPCResponse):
        return parse(raw)
    response.result = parsed.value["result"]
    return [response]


def parse(raw: bytes) -> list[types.JSONRPCMessage]:
    """Return the messages in a line, with an error in place of an invalid response."""
    try:
        return [types.jsonrpc_message_adapter.validate_json(raw, by_name=False)]
    except ValidationError:
        pass
    messages: list[types.JSONRPCMessage] = []
    values = parse_leading_values(raw)
    for value in values:
        try:
            if len(values) == 1:  # rejected by the strict parser; do not accept it leniently
                raise ValueError
            messages.append(types.jsonrpc_message_adapter.validate_python(value, by_name=False))
        except ValueError:
            request_id = normalize_id(value.get("id")) if isinstance(value, dict) else None
            if request_id is not None:
                messages.append(_parse_error(request_id))
    return messages


def _is_parse_error(message: types.JSONRPCError) -> bool:
    return message.error.code == types.PARSE_ERROR


def _parse_error(request_id: Id) -> types.JSONRPCError:
    error = types.ErrorData(code=types.PARSE_ERROR, message="not a valid response")
    return types.JSONRPCError(jsonrpc="2.0", id=request_id, error=error)
