"""Per-request trace: what the transport observed about one request.

Transport failures must not raise into the SDK, which would cancel unrelated requests; they are
recorded here instead. The SDK runs each POST in the context of the task that sent the message, so
a context variable assigns every observation to its own request, also with concurrent requests.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import TypeVar

from servers.errors import UpstreamError, format_bytes
from toolcrib.lib.protocols import jsonrpc

T = TypeVar("T")
# HTTP statuses of a request that was processed; 303 names the result.
ACCEPTED_STATUSES = frozenset({*range(100, 300), 303})
HEAD_BYTES = 200  # of a message, searched for its id


class TooLarge(UpstreamError):
    """A message over the size limit. `head` is its beginning, where known."""

    code = "too_large"

    def __init__(self, what: str, limit: int, head: bytes = b"") -> None:
        super().__init__(
            f"The {what} of more than {format_bytes(limit)}.",
            hint="TOOLCRIB_MAX_MESSAGE_BYTES sets the maximum message size.",
        )
        self.head = head


@dataclass
class RequestTrace:
    """One request. All fields but `error` and `is_list` are set for tool calls only."""

    error: UpstreamError | None = None
    is_call: bool = False
    is_list: bool = False  # of tools
    opening: bool = False  # opens the connection, or a stream that only carries notifications
    request_id: int | str | None = None
    sent: bool = False  # the server may have received it
    status: int = 0  # HTTP
    accepted: bool = False  # the server began to answer, so the tool may have run
    size: int = 0  # bytes of the response
    malformed: str = ""  # what is wrong with the response as JSON, as a verb phrase
    error_response: bool = False  # the response is a JSON-RPC error

    async def examine(self, raw: bytes) -> None:
        """Parse a response strictly, to record what the SDK's lenient parser hides."""
        message = await parse_off_loop(jsonrpc.parse_message, raw)
        if message.is_response:
            self.error_response = message.is_error
            if self.status < 400:  # the body of an HTTP error is not a response
                self.size, self.malformed = len(raw), message.malformed


async def parse_off_loop(parse: Callable[[bytes], T], raw: bytes) -> T:
    """Parse a message; a large one in a thread."""
    large = len(raw) > jsonrpc.LARGE_BYTES
    return await asyncio.to_thread(parse, raw) if large else parse(raw)


current_trace: ContextVar[RequestTrace | None] = ContextVar("request_trace", default=None)


def record_error(error: UpstreamError | None) -> None:
    if (trace := current_trace.get()) is not None:
        trace.error = error


def trace_context(trace: RequestTrace) -> Context:
    """Return a context in which the transport records its observations in `trace`."""
    context = copy_context()
    context.run(current_trace.set, trace)
    return context
