"""Messages in, messages out: what lies between the SDK and a program, event stream or HTTP.

Answers are matched to what was asked here, before the SDK sees them: those that nobody asked for
are dropped and counted, and the answer to a call is examined as it arrived.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Protocol, Self

import anyio
import mcp_types as types
from anyio.abc import TaskGroup
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from servers.connections.connection_state import ConnectionState, Id, plain
from servers.errors import UpstreamError
from servers.transports.jsonrpc import (
    BOM,
    LARGE_BYTES,
    id_at_head,
    parse_leading_values,
    parse_message,
)
from servers.transports.request_trace import RequestTrace, current_trace
from servers.transports.response_body import BodyError

MAX_UNANSWERED = 100  # requests of a server to us
MAX_STRAYS = 50  # lines that are no message, such as a banner
SENDS_WITHIN = 10.0  # seconds for a server to take a message

Streams = tuple[Any, Any]


class MessageStream(Protocol):
    """What stdio.Child and sse.EventStream have in common: messages in, messages out.

    `side_by_side`: requests need not wait for each other. `send` tells the attempt what it knows
    of the message, also when it is cancelled: whether the server may have got all of it.
    """

    side_by_side: bool

    def messages(self) -> AsyncIterator[bytes]: ...

    async def send(self, message: bytes, seen: RequestTrace | None) -> None: ...


def unreadable_error() -> UpstreamError:
    return UpstreamError(
        "The server sent a message that cannot be read: it is not valid JSON, or nested too deep.",
        hint="This is a fault of the server.",
    )


# --- Watching the streams of any transport ----------------------------------------------------


class _Stream:
    """A stream of the SDK with something done to each message."""

    def __init__(self, inner: Any, link: ConnectionState) -> None:
        self._inner = inner
        self._link = link

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *problem: Any) -> None:
        await self._inner.__aexit__(*problem)


class _Outgoing(_Stream):
    async def send(self, item: SessionMessage) -> None:
        self._link.note_sent(item.message)
        await self._inner.send(item)


class _Incoming(_Stream):
    @property
    def last_context(self) -> Any:
        return getattr(self._inner, "last_context", None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        while True:
            item: SessionMessage | Exception = await self._inner.__anext__()
            if isinstance(item, Exception) or self._link.awaits(item.message):
                return item
            # Over HTTP an answer with the wrong id still belongs to a request: it ends here.
            context = self.last_context
            seen = context.get(current_trace) if context is not None else None
            if (
                seen is not None
                and seen.call
                and self._link.waiting.pop(plain(seen.request_id), None)
            ):
                seen.flaw = "answers something else than what was asked"
                return SessionMessage(_parse_error(seen.request_id))

    async def receive(self) -> SessionMessage | Exception:
        return await self.__anext__()


@asynccontextmanager
async def watch_streams(
    transport: AbstractAsyncContextManager[Streams], link: ConnectionState
) -> AsyncIterator[Streams]:
    """Match answers to requests on a transport's streams."""
    async with transport as (read, write):
        yield _Incoming(read, link), _Outgoing(write, link)


# --- Programs and event streams ---------------------------------------------------------------


@asynccontextmanager
async def connect_streams(wire: MessageStream, link: ConnectionState) -> AsyncIterator[Streams]:
    """Present lines or events as the streams of messages that the SDK reads and writes."""
    read_end, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, write_end = anyio.create_memory_object_stream[SessionMessage](0)
    async with anyio.create_task_group() as tasks, read, write, read_end, write_end:
        through = _Through(wire, link, read_end, write_end, tasks)
        tasks.start_soon(through.receive)
        tasks.start_soon(through.forward)
        yield read, write
        tasks.cancel_scope.cancel()


class _Through:
    """Carries messages between a wire and the SDK's streams."""

    def __init__(
        self,
        wire: MessageStream,
        link: ConnectionState,
        read_end: Any,
        write_end: Any,
        tasks: TaskGroup,
    ) -> None:
        self._wire = wire
        self._tasks = tasks
        self._link = link
        self._read_end = read_end
        self._write_end = write_end
        self._strays = 0
        self._unanswered = 0  # requests of the server that no answer was sent to yet

    async def receive(self) -> None:
        try:
            async for raw in self._wire.messages():
                for message in await self._messages(raw):
                    if isinstance(message, types.JSONRPCRequest):
                        self._unanswered += 1
                    await self._read_end.send(SessionMessage(message))
                self._check()
            self._link.lose()
        except UpstreamError as fault:
            self._blame(fault, getattr(fault, "head", b""))
            self._link.lose(fault)
        except BodyError as error:
            self._blame(error.fault, b"")
            self._link.lose(error.fault)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        finally:
            self._read_end.close()

    async def _messages(self, raw: bytes) -> list[types.JSONRPCMessage]:
        """Return the messages of a line or event: one, as a rule."""
        raw = raw.removeprefix(BOM)
        found = await asyncio.to_thread(parse_large, raw) if len(raw) > LARGE_BYTES else parse(raw)
        if not found and raw.strip():
            found = await self._unread(raw)
        for message in found:
            if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
                seen = self._link.asker(message.id)
                if seen is not None and seen.call:
                    await seen.examine(raw)
        return found

    async def _unread(self, raw: bytes) -> list[types.JSONRPCMessage]:
        """Find out what a line is that is no message; raise if nobody can go on after it."""
        if b'"jsonrpc"' not in raw[:4096]:
            self._strays += 1
            return []
        values = (
            await asyncio.to_thread(parse_leading_values, raw)
            if len(raw) > LARGE_BYTES
            else parse_leading_values(raw)
        )
        if values:  # JSON, but no message, such as an answer whose id is 1.0
            self._link.note_stray()
            return []
        seen = self._link.asker(id_at_head(raw)) or self._link.only_asker()
        if seen is None or not seen.call or seen.request_id is None:
            raise unreadable_error()
        seen.flaw = "cannot be read: it is not valid JSON, or nested too deep"
        return [_parse_error(seen.request_id)]

    def _blame(self, fault: UpstreamError, head: bytes) -> None:
        """Tell the call whose answer ended the connection, if that can be known."""
        seen = self._link.asker(id_at_head(head)) or self._link.only_asker()
        if fault.code == "too_large" and seen is not None:
            seen.fault = fault

    def _check(self) -> None:
        if self._unanswered > MAX_UNANSWERED:
            raise UpstreamError(
                f"The server asked more than {MAX_UNANSWERED} things at once and took no answer.",
                hint="This is a fault of the server.",
            )
        if self._strays > MAX_STRAYS:
            raise UpstreamError(
                f"The server wrote more than {MAX_STRAYS} lines that are not MCP.",
                hint="A stdio server must write its logs to stderr, not to stdout.",
                detail=self._link.stderr(),
            )

    async def forward(self) -> None:
        async for item in self._write_end:
            message = item.message
            if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
                self._unanswered -= 1
            seen = self._link.asker(_asked(message))
            if seen is not None:
                seen.sent = True
            if self._goes_apart(message):
                self._tasks.start_soon(self._send, message, seen)
            else:
                await self._send(message, seen)
            if self._link.closed.is_set():
                self._read_end.close()
                return

    async def _send(self, message: types.JSONRPCMessage, seen: RequestTrace | None) -> None:
        line = message.model_dump_json(by_alias=True, exclude_unset=True)
        try:
            async with self._patience(message):
                await self._wire.send(line.encode(), seen)
        except UpstreamError as fault:
            await self._not_taken(message, seen, fault)
        except BodyError as error:
            self._lose(error.fault)
        except TimeoutError:
            if not self._goes_apart(message):  # else nobody waits for it any more
                self._lose(_deaf())
        except OSError:  # a pipe that nobody reads: how the program ended tells why
            self._lose()

    @asynccontextmanager
    async def _patience(self, message: types.JSONRPCMessage) -> AsyncIterator[None]:
        """Raise TimeoutError where sending takes long, and nothing excuses it."""
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(None)

        def look() -> None:
            if self._excused(message):
                timers.append(loop.call_later(SENDS_WITHIN, look))
            else:
                limit.reschedule(loop.time())

        async with limit:
            timers = [loop.call_later(SENDS_WITHIN, look)]
            try:
                yield
            finally:
                timers[-1].cancel()

    def _excused(self, message: types.JSONRPCMessage) -> bool:
        """Tell whether a message may be slow to go out because the server is at work.

        A program may read on only when it has done what it works on, and a server may answer the
        POST of a request only then.
        """
        if self._wire.side_by_side:
            return self._link.asker(_asked(message)) is not None
        return self._link.is_busy(besides=_asked(message))

    def _goes_apart(self, message: types.JSONRPCMessage) -> bool:
        return self._wire.side_by_side and isinstance(message, types.JSONRPCRequest)

    async def _not_taken(
        self, message: types.JSONRPCMessage, seen: RequestTrace | None, fault: UpstreamError
    ) -> None:
        """Fail the one request that the server would not take; the others may be well."""
        if seen is None:
            return  # nobody waits for it
        seen.fault = fault
        if seen.opening:
            self._lose(fault)
            return
        if seen.status == 404:  # it knows this stream no more
            self._link.leave()
        error = types.ErrorData(code=types.INTERNAL_ERROR, message="not taken")
        failed = types.JSONRPCError(jsonrpc="2.0", id=_asked(message), error=error)
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._read_end.send(SessionMessage(failed))

    def _lose(self, fault: UpstreamError | None = None) -> None:
        self._link.lose(fault)
        self._read_end.close()


def _asked(message: types.JSONRPCMessage) -> types.RequestId | None:
    return message.id if isinstance(message, types.JSONRPCRequest) else None


def _deaf() -> UpstreamError:
    return UpstreamError(
        f"The server took no message for {SENDS_WITHIN:g} s.",
        code="timeout",
        hint="It may hang. The connection is made anew.",
    )


def parse_large(raw: bytes) -> list[types.JSONRPCMessage]:
    """Return what there is of use in a line that is large. Only answers may be.

    In a thread, but not by the fast parser: that would let no other thread run meanwhile. The SDK
    works through the rest of a message on the loop, so that is left out.
    """
    found = parse_message(raw)
    if not isinstance(found.value, dict):
        return parse(raw)
    short = {name: found.value[name] for name in ("jsonrpc", "id", "method") if name in found.value}
    if found.is_answer:
        short["result"] = {}
    read_short = parse(json.dumps(short).encode())
    if not found.is_answer:
        return read_short
    answer = read_short[0] if read_short else None
    if found.flaw or found.is_refusal or not isinstance(answer, types.JSONRPCResponse):
        return parse(raw)
    answer.result = found.value["result"]
    return [answer]


def parse(raw: bytes) -> list[types.JSONRPCMessage]:
    """Return the messages in a line, an error in place of an answer that is not one."""
    try:
        return [types.jsonrpc_message_adapter.validate_json(raw, by_name=False)]
    except ValidationError:
        pass
    found: list[types.JSONRPCMessage] = []
    values = parse_leading_values(raw)
    for value in values:
        try:
            if len(values) == 1:  # what the strict parser refuses alone, no other shall accept
                raise ValueError
            found.append(types.jsonrpc_message_adapter.validate_python(value, by_name=False))
        except ValueError:
            answered = plain(value.get("id")) if isinstance(value, dict) else None
            if answered is not None:
                found.append(_parse_error(answered))
    return found


def _parse_error(request_id: Id) -> types.JSONRPCError:
    error = types.ErrorData(code=types.PARSE_ERROR, message="not a valid answer")
    return types.JSONRPCError(jsonrpc="2.0", id=request_id, error=error)
