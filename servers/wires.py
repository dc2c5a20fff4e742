"""Messages in, messages out: what lies between the SDK and a program, event stream or HTTP.

Answers are matched to what was asked here, before the SDK sees them: those that nobody asked for
are dropped and counted, and the answer to a call is examined as it arrived.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any, Protocol, Self

import anyio
import mcp_types as types
from anyio.abc import TaskGroup
from django.conf import settings
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from servers.attempts import Attempt, attempt
from servers.bodies import BodyFault
from servers.faults import UpstreamError
from servers.lean import Lean
from servers.messages import BOM, LARGE, id_at_head, read, several

MAX_UNANSWERED = 100  # requests of a server to us
MAX_STRAYS = 50  # lines that are no message, such as a banner
MAX_STRAY_ANSWERS = 100
FORGIVEN = 1000  # requests given up lately, whose answers may still come
SENDS_WITHIN = 10.0  # seconds for a server to take a message
LEAVES_WITHIN = 30.0  # seconds for calls to end over a connection that takes no new ones

Streams = tuple[Any, Any]
Id = int | str | None


class Wire(Protocol):
    """What stdio.Child and sse.EventStream have in common: messages in, messages out.

    `side_by_side`: requests need not wait for each other. `send` tells the attempt what it knows
    of the message, also when it is cancelled: whether the server may have got all of it.
    """

    side_by_side: bool

    def messages(self) -> AsyncIterator[bytes]: ...

    async def send(self, message: bytes, seen: Attempt | None) -> None: ...


class Link:
    """What is known about the state of a connection, from whichever layer saw it first."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.leaving = False  # no new call may be made
        self.handshake_ends = asyncio.get_running_loop().time() + settings.HANDSHAKE_TIMEOUT
        self.fault: UpstreamError | None = None
        self.stderr: Callable[[], str] = str
        # How a program ended takes a moment to learn, so it is asked for, not told.
        self.ended: Callable[[str], Awaitable[UpstreamError]] | None = None
        self.waiting: dict[Id, Attempt] = {}  # what was asked and not answered yet
        self.standing: set[Id] = set()  # of these, what is answered only at the end
        self.forgiven: OrderedDict[Id, None] = OrderedDict()
        self.stray_answers = 0
        self.lean: Lean | None = None  # the short way for calls, where there is one
        self._calls = 0
        self._doubt: UpstreamError | None = None

    def lose(self, fault: UpstreamError | None = None) -> None:
        """Mark the connection dead. The first reason is the one that counts."""
        self.fault = self.fault or fault
        self.closed.set()

    def doubt(self, fault: UpstreamError) -> None:
        """Mark the connection dead, but let the calls on it end, since they may be well."""
        self._doubt = fault
        if not self._calls:
            self.lose(fault)

    def leave(self) -> None:
        """Let the calls under way end, and no other begin; the connection is lost after them."""
        if not self._calls:
            self.lose()
        elif not self.leaving:  # others wait for the next connection, so not for ever
            asyncio.get_running_loop().call_later(LEAVES_WITHIN, self.lose)
        self.leaving = True

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Count a call for as long as the block lasts; one that succeeds ends all doubt."""
        self._calls += 1
        try:
            yield
            self._doubt = None
        finally:
            self._calls -= 1
            if (self._doubt is not None or self.leaving) and not self._calls:
                self.lose(self._doubt)

    async def why(self, while_what: str) -> UpstreamError:
        """Say why the connection is dead."""
        if self.fault is None and self.ended is not None:
            self.fault = await self.ended(while_what)
        return self.fault or UpstreamError(
            f"The connection to the server was lost {while_what}.", code="closed"
        )

    def note_sent(self, message: types.JSONRPCMessage) -> None:
        """Remember a request until its answer comes, or until it is given up."""
        if isinstance(message, types.JSONRPCRequest):
            seen = attempt.get() or Attempt()
            seen.request_id = message.id
            self.waiting[_plain(message.id)] = seen
            if message.method == "subscriptions/listen":
                self.standing.add(_plain(message.id))
        elif isinstance(message, types.JSONRPCNotification):
            given_up = _plain((message.params or {}).get("requestId"))
            if message.method == "notifications/cancelled" and given_up in self.waiting:
                del self.waiting[given_up]
                self.forgiven[given_up] = None
                if len(self.forgiven) > FORGIVEN:
                    self.forgiven.popitem(last=False)

    def awaits(self, message: types.JSONRPCMessage) -> bool:
        """Tell whether a message may be passed on; an answer may, once, to what was asked."""
        if not isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
            return True
        asked = _plain(message.id)
        self.standing.discard(asked)
        if self.waiting.pop(asked, None) is not None:
            return True
        if asked in self.forgiven:
            del self.forgiven[asked]
        else:
            self.note_stray()
        return False

    def note_stray(self) -> None:
        """Count an answer that nobody asked for."""
        self.stray_answers += 1
        if self.stray_answers > MAX_STRAY_ANSWERS:
            self.lose(
                UpstreamError(
                    f"The server sent more than {MAX_STRAY_ANSWERS} answers to nothing that was "
                    "asked.",
                    hint="This is a fault of the server.",
                )
            )

    def asker(self, answer_id: object) -> Attempt | None:
        """Return who waits for an answer, for the transport to tell it something."""
        return self.waiting.get(_plain(answer_id))

    def is_busy(self, *, besides: object) -> bool:
        """Tell whether the server has anything to work on that someone waits for."""
        return any(
            seen.sent and asked not in self.standing and asked != _plain(besides)
            for asked, seen in self.waiting.items()
        )

    def only_asker(self) -> Attempt | None:
        asking = [seen for asked, seen in self.waiting.items() if asked not in self.standing]
        return asking[0] if len(asking) == 1 else None


def _plain(answer_id: object) -> Id:
    """Return an id as we sent it: some servers turn numbers into texts, and the SDK lets them."""
    if isinstance(answer_id, str) and answer_id.isascii() and answer_id.isdecimal():
        return int(answer_id) if len(answer_id) < 16 else answer_id
    if isinstance(answer_id, bool) or not isinstance(answer_id, int | str):
        return None
    return answer_id


def unreadable() -> UpstreamError:
    return UpstreamError(
        "The server sent a message that cannot be read: it is not valid JSON, or nested too deep.",
        hint="This is a fault of the server.",
    )


# --- Watching the streams of any transport ----------------------------------------------------


class _Stream:
    """A stream of the SDK with something done to each message."""

    def __init__(self, inner: Any, link: Link) -> None:
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
            seen = context.get(attempt) if context is not None else None
            if (
                seen is not None
                and seen.call
                and self._link.waiting.pop(_plain(seen.request_id), None)
            ):
                seen.flaw = "answers something else than what was asked"
                return SessionMessage(_parse_error(seen.request_id))

    async def receive(self) -> SessionMessage | Exception:
        return await self.__anext__()


@asynccontextmanager
async def watched(
    transport: AbstractAsyncContextManager[Streams], link: Link
) -> AsyncIterator[Streams]:
    """Match answers to requests on a transport's streams."""
    async with transport as (read, write):
        yield _Incoming(read, link), _Outgoing(write, link)


# --- Programs and event streams ---------------------------------------------------------------


@asynccontextmanager
async def wired(wire: Wire, link: Link) -> AsyncIterator[Streams]:
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
        self, wire: Wire, link: Link, read_end: Any, write_end: Any, tasks: TaskGroup
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
        except BodyFault as error:
            self._blame(error.fault, b"")
            self._link.lose(error.fault)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        finally:
            self._read_end.close()

    async def _messages(self, raw: bytes) -> list[types.JSONRPCMessage]:
        """Return the messages of a line or event: one, as a rule."""
        raw = raw.removeprefix(BOM)
        found = await asyncio.to_thread(parse_large, raw) if len(raw) > LARGE else parse(raw)
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
        values = await asyncio.to_thread(several, raw) if len(raw) > LARGE else several(raw)
        if values:  # JSON, but no message, such as an answer whose id is 1.0
            self._link.note_stray()
            return []
        seen = self._link.asker(id_at_head(raw)) or self._link.only_asker()
        if seen is None or not seen.call or seen.request_id is None:
            raise unreadable()
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

    async def _send(self, message: types.JSONRPCMessage, seen: Attempt | None) -> None:
        line = message.model_dump_json(by_alias=True, exclude_unset=True)
        try:
            async with self._patience(message):
                await self._wire.send(line.encode(), seen)
        except UpstreamError as fault:
            await self._not_taken(message, seen, fault)
        except BodyFault as error:
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
        self, message: types.JSONRPCMessage, seen: Attempt | None, fault: UpstreamError
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
    found = read(raw)
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
    values = several(raw)
    for value in values:
        try:
            if len(values) == 1:  # what the strict parser refuses alone, no other shall accept
                raise ValueError
            found.append(types.jsonrpc_message_adapter.validate_python(value, by_name=False))
        except ValueError:
            answered = _plain(value.get("id")) if isinstance(value, dict) else None
            if answered is not None:
                found.append(_parse_error(answered))
    return found


def _parse_error(request_id: Id) -> types.JSONRPCError:
    error = types.ErrorData(code=types.PARSE_ERROR, message="not a valid answer")
    return types.JSONRPCError(jsonrpc="2.0", id=request_id, error=error)
