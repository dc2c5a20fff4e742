"""What the transport sees while one request of ours runs, told to whoever made the request.

A failure never raises into the SDK, where it would tear down requests that are well: it is noted
here. The SDK carries the context of whoever sends a message into the task that posts it, so what
is noted finds the request it belongs to even while others run.
"""

import asyncio
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass

from servers.errors import UpstreamError, format_bytes
from servers.transports import jsonrpc

HEAD = 200  # bytes of a message in which its id is looked for


class TooLarge(UpstreamError):
    """A message over the cap. `head` is how it starts, where that is known."""

    code = "too_large"

    def __init__(self, what: str, cap: int, head: bytes = b"") -> None:
        super().__init__(
            f"The {what} of more than {format_bytes(cap)}.",
            hint="TOOLCRIB_MAX_MESSAGE_BYTES sets how large one message may be.",
        )
        self.head = head


@dataclass
class RequestTrace:
    """One request. All but `fault` is filled in for calls of tools only."""

    fault: UpstreamError | None = None
    call: bool = False
    opening: bool = False  # of a connection, and of what is only listened to from then on
    request_id: int | str | None = None
    sent: bool = False  # the server may have got it
    status: int = 0  # of HTTP
    taken: bool = False  # the server began to answer, so that a tool may have run
    size: int = 0  # of the answer in bytes
    flaw: str = ""  # of the answer as JSON, as the end of a sentence
    refused: bool = False  # the answer is an error of the protocol

    async def examine(self, raw: bytes) -> None:
        """Look at an answer as it arrived, for what a lenient parser would not tell."""
        large = len(raw) > jsonrpc.LARGE_BYTES
        found = (
            await asyncio.to_thread(jsonrpc.parse_message, raw)
            if large
            else jsonrpc.parse_message(raw)
        )
        if found.is_answer:
            self.refused = found.is_refusal
            if self.status < 400:  # the body of a refusal is no answer
                self.size, self.flaw = len(raw), found.flaw


def mark_accepted(status: int) -> bool:
    """Tell whether a status says that the server did what was asked. 303 says where to see it."""
    return status < 300 or status == 303


current_trace: ContextVar[RequestTrace | None] = ContextVar("attempt", default=None)


def trace_error(fault: UpstreamError | None) -> None:
    """Set, or clear, the fault of the request this code runs for."""
    if (current := current_trace.get()) is not None:
        current.fault = fault


def observed_by(seen: RequestTrace) -> Context:
    """Return a context in which what the transport sees is told to `seen`."""
    context = copy_context()
    context.run(current_trace.set, seen)
    return context
