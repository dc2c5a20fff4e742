"""State of one upstream connection: liveness, pending requests, close reason.

Updated by whichever layer notices first: the transport, the SDK's streams or the direct caller.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import mcp_types as types
from django.conf import settings

from servers.connections.asking import AskingClient
from servers.errors import UpstreamError
from servers.transports.direct_http import DirectHttpCaller
from servers.transports.request_trace import RequestTrace, current_trace

MAX_UNMATCHED_RESPONSES = 100
MAX_CANCELLED_IDS = 1000  # recently cancelled requests, whose responses may still arrive
DRAIN_TIMEOUT = 30.0  # seconds for running calls to end on a connection that takes no new ones

Id = int | str | None


class ConnectionState:
    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.draining = False  # no new call may start
        self.handshake_deadline = asyncio.get_running_loop().time() + settings.HANDSHAKE_TIMEOUT
        self.error: UpstreamError | None = None
        self.stderr_tail: Callable[[], str] = str
        # The exit code of a program is available only after a moment, hence a coroutine.
        self.exit_error: Callable[[str], Awaitable[UpstreamError]] | None = None
        self.pending: dict[Id, RequestTrace] = {}  # requests without a response yet
        self.subscriptions: set[Id] = set()  # pending requests that are answered at their end
        self.cancelled: OrderedDict[Id, None] = OrderedDict()
        self.unmatched_responses = 0
        self.direct_caller: DirectHttpCaller | None = None
        self.watchers: dict[str, list[Callable[[], None]]] = {}  # of resources, by URI
        self.elicits = False  # the connection declares that its client can ask its user
        self.was_asked = False  # by the server, although the connection does not declare that
        self.askers: list[AskingClient] = []  # of running calls, the newest last
        self._calls = 0
        self._suspected: UpstreamError | None = None

    def mark_dead(self, error: UpstreamError | None = None) -> None:
        """Mark the connection dead. The first error is kept as the reason."""
        self.error = self.error or error
        self.closed.set()

    def mark_suspect(self, error: UpstreamError) -> None:
        """Mark the connection dead once its running calls end; a success clears the suspicion."""
        self._suspected = error
        if not self._calls:
            self.mark_dead(error)

    def drain(self) -> None:
        """Start no new calls; mark the connection dead when the running ones have ended."""
        if not self._calls:
            self.mark_dead()
        elif not self.draining:  # a limit, since new calls wait for the next connection
            asyncio.get_running_loop().call_later(DRAIN_TIMEOUT, self.mark_dead)
        self.draining = True

    def call_started(self) -> None:
        self._calls += 1

    def call_ended(self, *, is_success: bool) -> None:
        """Note the end of a running call; a successful one clears a suspicion."""
        self._calls -= 1
        if is_success:
            self._suspected = None
        if (self._suspected is not None or self.draining) and not self._calls:
            self.mark_dead(self._suspected)

    async def close_reason(self, when: str) -> UpstreamError:
        if self.error is None and self.exit_error is not None:
            self.error = await self.exit_error(when)
        return self.error or UpstreamError(
            f"The connection to the server was lost {when}.", code="closed"
        )

    def record_sent(self, message: types.JSONRPCMessage) -> None:
        """Record a request as pending, until its response arrives or it is cancelled."""
        if isinstance(message, types.JSONRPCRequest):
            trace = current_trace.get() or RequestTrace()
            trace.request_id = message.id
            self.pending[normalize_id(message.id)] = trace
            if message.method == "subscriptions/listen":
                self.subscriptions.add(normalize_id(message.id))
        elif isinstance(message, types.JSONRPCNotification):
            request_id = normalize_id((message.params or {}).get("requestId"))
            if message.method == "notifications/cancelled" and request_id in self.pending:
                del self.pending[request_id]
                self.cancelled[request_id] = None
                if len(self.cancelled) > MAX_CANCELLED_IDS:
                    self.cancelled.popitem(last=False)

    def match_response(self, message: types.JSONRPCMessage) -> bool:
        """Tell whether to pass a message on. Responses are passed once, for a pending request."""
        if not isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
            self.was_asked |= not self.elicits and message.method == "elicitation/create"
            return True
        request_id = normalize_id(message.id)
        self.subscriptions.discard(request_id)
        if self.pending.pop(request_id, None) is not None:
            return True
        if request_id in self.cancelled:
            del self.cancelled[request_id]
        else:
            self.count_unmatched()
        return False

    def count_unmatched(self) -> None:
        """Count a response that matches no request; too many mark the connection dead."""
        self.unmatched_responses += 1
        if self.unmatched_responses > MAX_UNMATCHED_RESPONSES:
            self.mark_dead(
                UpstreamError(
                    f"The server sent more than {MAX_UNMATCHED_RESPONSES} responses that match no "
                    "request.",
                    hint="This is a bug in the server.",
                )
            )

    def report_update(self, uri: object) -> None:
        """Tell those that watch a resource, or one that contains it, that it has changed."""
        for watched, watchers in list(self.watchers.items()):
            if isinstance(uri, str) and uri.startswith(watched):
                for on_update in list(watchers):
                    on_update()

    def find_trace(self, response_id: object) -> RequestTrace | None:
        return self.pending.get(normalize_id(response_id))

    def is_busy(self, *, besides: object) -> bool:
        """Tell whether the server is working on a pending request other than `besides`."""
        return any(
            trace.sent
            and request_id not in self.subscriptions
            and request_id != normalize_id(besides)
            for request_id, trace in self.pending.items()
        )

    def only_trace(self) -> RequestTrace | None:
        traces = [
            trace
            for request_id, trace in self.pending.items()
            if request_id not in self.subscriptions
        ]
        return traces[0] if len(traces) == 1 else None


def normalize_id(message_id: object) -> Id:
    """Return an id as it was sent. Some servers turn numbers into strings, as the SDK allows."""
    if isinstance(message_id, str) and message_id.isascii() and message_id.isdecimal():
        return int(message_id) if len(message_id) < 16 else message_id
    if isinstance(message_id, bool) or not isinstance(message_id, int | str):
        return None
    return message_id
