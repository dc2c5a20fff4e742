"""What is known about one connection: whether it lives, who waits for what over it, and why not.

Told by whichever layer saw it first: the wire, the SDK's streams, the short way for calls.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import mcp_types as types
from django.conf import settings

from servers.errors import UpstreamError
from servers.transports.direct_http import DirectHttpCaller
from servers.transports.request_trace import RequestTrace, current_trace

MAX_STRAY_ANSWERS = 100
FORGIVEN = 1000  # requests given up lately, whose answers may still come
LEAVES_WITHIN = 30.0  # seconds for calls to end over a connection that takes no new ones

Id = int | str | None


class ConnectionState:
    """What is known about the state of a connection, from whichever layer saw it first."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.leaving = False  # no new call may be made
        self.handshake_ends = asyncio.get_running_loop().time() + settings.HANDSHAKE_TIMEOUT
        self.fault: UpstreamError | None = None
        self.stderr: Callable[[], str] = str
        # How a program ended takes a moment to learn, so it is asked for, not told.
        self.ended: Callable[[str], Awaitable[UpstreamError]] | None = None
        self.waiting: dict[Id, RequestTrace] = {}  # what was asked and not answered yet
        self.standing: set[Id] = set()  # of these, what is answered only at the end
        self.forgiven: OrderedDict[Id, None] = OrderedDict()
        self.stray_answers = 0
        self.lean: DirectHttpCaller | None = None  # the short way for calls, where there is one
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
            seen = current_trace.get() or RequestTrace()
            seen.request_id = message.id
            self.waiting[plain(message.id)] = seen
            if message.method == "subscriptions/listen":
                self.standing.add(plain(message.id))
        elif isinstance(message, types.JSONRPCNotification):
            given_up = plain((message.params or {}).get("requestId"))
            if message.method == "notifications/cancelled" and given_up in self.waiting:
                del self.waiting[given_up]
                self.forgiven[given_up] = None
                if len(self.forgiven) > FORGIVEN:
                    self.forgiven.popitem(last=False)

    def awaits(self, message: types.JSONRPCMessage) -> bool:
        """Tell whether a message may be passed on; an answer may, once, to what was asked."""
        if not isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
            return True
        asked = plain(message.id)
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

    def asker(self, answer_id: object) -> RequestTrace | None:
        """Return who waits for an answer, for the transport to tell it something."""
        return self.waiting.get(plain(answer_id))

    def is_busy(self, *, besides: object) -> bool:
        """Tell whether the server has anything to work on that someone waits for."""
        return any(
            seen.sent and asked not in self.standing and asked != plain(besides)
            for asked, seen in self.waiting.items()
        )

    def only_asker(self) -> RequestTrace | None:
        asking = [seen for asked, seen in self.waiting.items() if asked not in self.standing]
        return asking[0] if len(asking) == 1 else None


def plain(answer_id: object) -> Id:
    """Return an id as we sent it: some servers turn numbers into texts, and the SDK lets them."""
    if isinstance(answer_id, str) and answer_id.isascii() and answer_id.isdecimal():
        return int(answer_id) if len(answer_id) < 16 else answer_id
    if isinstance(answer_id, bool) or not isinstance(answer_id, int | str):
        return None
    return answer_id
