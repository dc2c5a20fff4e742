"""Call a tool: wait for a turn, find the connection, send once, and say what became of it.

Upstream trouble is data here, never an exception. A call that was sent is never sent again:
where its answer is lost, its outcome is `unknown`. A call that is slow is no fault of the
connection, and disturbs no other.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.conf import settings

from servers.connections import coordination, pool, results
from servers.connections.bulkhead import Slot
from servers.connections.connection import Connection, RawResult, ServerErrorResponse
from servers.connections.coordination import POLL_SECONDS, current_spec, server_generations
from servers.connections.pool import ConnectionOwner, Pool
from servers.credential_filter import CredentialFilter
from servers.errors import UpstreamError, format_bytes
from servers.spec import OnProgress, ServerSpec
from servers.transports.request_trace import RequestTrace, TooLarge
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.text import escape_hidden

logger = logging.getLogger(__name__)

TRIES = 3  # connections that a call is offered to while nothing was sent
LATE_GRACE = 10.0  # seconds to hear an answer after its deadline
ON_LOOP = 64 * 1024  # bytes of a result that are read and redacted on the event loop
MAX_QUOTED = 500  # characters of a server's own words
TURNED_DOWN = frozenset({"auth", "http_status", "redirect", "not_mcp"})

_opened: Pool | None = None


@dataclass(frozen=True)
class CallTarget:
    """Which connection a call goes over."""

    server_id: int
    slug: str
    generation: int
    isolation: str  # shared, per_session
    session: str = ""  # the agent session's id; used when per_session
    concurrency: int = 0  # calls at once; 0: the setting


@dataclass(frozen=True)
class CallOutcome:
    """What became of a call.

    `not_sent`: nothing reached the server. `unknown`: it was sent, and whether the tool ran is
    not known. `code`, `message` and `hint` are ours, where the state is not `succeeded`.
    """

    state: str  # succeeded, failed, timed_out, cancelled, unknown, not_sent
    content: list[Any] | None = None  # exactly as the server sent it
    structured: Any = None  # likewise; see has_structured
    has_structured: bool = False
    is_error: bool = False  # the server's own isError
    written: tuple[str, str] | None = None  # content and structured, as canonical JSON
    code: str = ""
    message: str = ""
    hint: str = ""
    size: int = 0  # bytes of these


@dataclass(frozen=True)
class UpstreamRequest:
    """One call on its way."""

    target: CallTarget
    tool: str
    arguments: dict[str, Any]
    schema: Mapping[str, Any] | None
    timeout: float
    deadline: float  # by the clock of the loop
    on_sent: Callable[[], Awaitable[None]] | None
    on_late: Callable[[str], None] | None
    on_progress: OnProgress | None
    checked: bool


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
    checked: bool = False,
) -> CallOutcome:
    """Call a tool of a server, by the name the server knows it by.

    `on_sent` is awaited right before the request goes out: if it raises, nothing is sent.
    `on_late` is told when an answer arrives shortly after the deadline, `on_progress` what the
    server says meanwhile. `schema` is the tool's input schema, which tells what the newer
    protocol repeats in HTTP headers. `checked`: the arguments are known to be plain JSON.
    """
    shared = _pool()
    if shared is None:
        return _not_sent("stopping", "Toolcrib is starting or stopping.", "Try again.")

    async def on_loop() -> CallOutcome:
        deadline = asyncio.get_running_loop().time() + timeout
        request = UpstreamRequest(
            *(target, tool, arguments, schema, timeout, deadline, on_sent, on_late, on_progress),
            checked=checked,
        )
        return await _in_turn(shared, request)

    return await shared.elsewhere(on_loop())


async def forget_session(session: str) -> None:
    """Close the connections that were a session's own."""
    if (shared := _pool()) is not None:
        await shared.elsewhere(shared.forget_session(session))


def in_flight(server_id: int) -> int:
    """How many calls of this process a server is working on."""
    shared = _pool()
    return shared.bulkhead(server_id).running if shared is not None else 0


# --- Where calls find connections -------------------------------------------------------------


class CallPoolWatcher(pool.PoolWatcher):
    """Watches a pool that serves calls only. What it sees is the listener's to report."""

    async def spec(self, server_id: int) -> ServerSpec | None:
        return await run_in_db_thread(current_spec, server_id)

    async def may_dial(self, server_id: int, apart: float) -> bool:
        return await run_in_db_thread(coordination.claim_reconnect, server_id, apart)

    async def connected(self, spec: ServerSpec, *, kept: bool) -> None:
        await run_in_db_thread(coordination.clear_reconnect_claim, spec.server_id)


@asynccontextmanager
async def call_pool() -> AsyncIterator[None]:
    """Let calls be made in this block, in a process or test that runs no listener."""
    global _opened
    own = _opened = Pool(CallPoolWatcher())
    following = asyncio.create_task(_follow(own), name="calls")
    try:
        yield
    finally:
        if _opened is own:
            _opened = None
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        await own.close()


async def run() -> None:
    """Let calls be made until cancelled."""
    async with call_pool():
        await asyncio.Event().wait()


async def _follow(own: Pool) -> None:
    """Let go of connections that are idle, or whose server was edited or session ended."""
    while True:
        await asyncio.sleep(POLL_SECONDS)
        if own.owners:
            try:
                await own.keep({}, *await run_in_db_thread(_look, own.sessions))
            except Exception:  # nobody would start this loop again
                logger.exception("The connections could not be looked after; trying again")


def _look(sessions: set[str]) -> tuple[dict[int, int], set[str]]:
    return server_generations(), coordination.ended_sessions(sessions)


def _pool() -> Pool | None:
    return _opened or pool.process_pool()


# --- One call ---------------------------------------------------------------------------------


async def _in_turn(shared: Pool, request: UpstreamRequest) -> CallOutcome:
    """Make the call when it is its turn at the server."""
    try:
        if not request.checked:
            results.serialize(request.arguments)
    except results.InvalidResult as problem:
        return _not_sent(
            "invalid_arguments",
            f"The call {problem} in its arguments.",
            "Correct the arguments.",
        )
    bulkhead = shared.bulkhead(request.target.server_id)
    try:
        async with asyncio.timeout_at(request.deadline):
            turn = await bulkhead.enter(request.target.concurrency or settings.CALLS_IN_FLIGHT)
    except TimeoutError:
        return _not_sent(
            "timeout",
            f"The server had no turn free for this call within {request.timeout:g} s.",
            "It has many calls to answer. Try again.",
        )
    except UpstreamError as busy:
        return _not_sent(busy.code, busy.message, busy.hint)
    try:
        with ExitStack() as held:
            return await _connected(shared, request, held, turn)
    finally:
        if not turn.is_late:
            turn.leave()


async def _connected(
    shared: Pool, request: UpstreamRequest, held: ExitStack, turn: Slot
) -> CallOutcome:
    """Find a live connection and make the call over it. What it needs of owners is `held`."""
    target, tries = request.target, 0
    session = target.session if target.isolation == "per_session" else ""
    while True:
        try:
            async with asyncio.timeout_at(request.deadline):
                owner = await shared.owner_for_call(target.server_id, session, target.generation)
                owner.began(request.deadline)
                held.callback(owner.ended)
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
        seen = RequestTrace(call=True)
        outcome = await _exchanged(shared, owner, connection, request, seen, turn)
        # A connection may turn out dead before anything was sent over it: another, then.
        if outcome.state == "not_sent" and tries < TRIES and connection.closed.is_set():
            continue
        return outcome


async def _exchanged(
    shared: Pool,
    owner: ConnectionOwner,
    connection: Connection,
    request: UpstreamRequest,
    seen: RequestTrace,
    turn: Slot,
) -> CallOutcome:
    """Send the request and wait for its answer, but not longer than the deadline."""
    loop = asyncio.get_running_loop()
    asking = connection.call_tool(
        request.tool,
        request.arguments,
        seen,
        schema=request.schema,
        on_progress=_redacted(request.on_progress, owner),
    )
    asked = asyncio.create_task(asking)
    owner.began(request.deadline)
    asked.add_done_callback(lambda _: owner.ended())
    try:
        await asyncio.wait({asked}, timeout=max(0.0, request.deadline - loop.time()))
    except asyncio.CancelledError:
        await _cancel(asked)
        raise
    if asked.done():
        return await _judged(asked, owner, seen)
    if not seen.sent:
        await _cancel(asked)
    if not seen.sent:
        return _not_sent(
            "timeout",
            f"The call could not be sent within {request.timeout:g} s.",
            "The server takes no more messages. Try again.",
        )
    turn.linger()
    shared.later(_hear_late(asked, request, turn)).add_done_callback(lambda _: turn.leave())
    return CallOutcome(
        "timed_out",
        code="timeout",
        message=f"The server did not answer within {request.timeout:g} s.",
        hint="The tool may have run, or still be running: look before calling it again.",
    )


async def _cancel(asked: asyncio.Task[RawResult]) -> None:
    """Tell the server that nobody waits any more; it has a second to take that in."""
    asked.cancel()
    await asyncio.wait({asked}, timeout=2)
    if asked.done() and not asked.cancelled():
        asked.exception()  # seen


async def _hear_late(asked: asyncio.Task[RawResult], request: UpstreamRequest, turn: Slot) -> None:
    """Wait a little for an answer that nobody waits for, then cancel the request.

    At once where another call needs the turn: the server is to have no more than it is given.
    """
    began = time.monotonic()
    needed = asyncio.create_task(turn.needed.wait())
    try:
        either = {asked, needed}
        await asyncio.wait(either, timeout=LATE_GRACE, return_when=asyncio.FIRST_COMPLETED)
    finally:
        needed.cancel()
        answered = asked.done() and not asked.cancelled()
        if not asked.done():
            await _cancel(asked)
    if not answered or request.on_late is None:
        return
    if asked.exception() is None or isinstance(asked.exception(), ServerErrorResponse):
        try:
            request.on_late(f"answered {time.monotonic() - began:.1f} s after its deadline")
        except Exception:
            logger.exception("A late answer could not be noted.")


# --- Outcomes ---------------------------------------------------------------------------------


async def _judged(
    asked: asyncio.Task[RawResult], owner: ConnectionOwner, seen: RequestTrace
) -> CallOutcome:
    credentials = owner.spec.credential_filter if owner.spec else CredentialFilter(())
    try:
        answer = asked.result()
    except ServerErrorResponse as refusal:
        message = credentials.redact_text(refusal.said)
        return _failed("server_error", f"The server said: {_quoted(message)}")
    except UpstreamError as fault:
        return _lost(fault, seen)
    read = partial(
        results.parse_result,
        answer.result,
        max_items=settings.MAX_CONTENT_ITEMS,
        credentials=credentials,
    )
    try:
        if seen.flaw:
            raise results.InvalidResult(seen.flaw)
        result = await asyncio.to_thread(read) if answer.size > ON_LOOP else read()
    except results.InputRequired:
        return _failed(
            "input_required",
            "The tool asks for input before it answers, which Toolcrib does not support yet.",
            "Give everything it needs in the arguments, or use another tool.",
        )
    except results.InvalidResult as problem:
        return _invalid(str(problem))
    if result.size > settings.MAX_RESULT_BYTES:
        return _too_large(format_bytes(result.size))
    return CallOutcome(
        "succeeded",
        content=result.content,
        structured=result.structured,
        has_structured=result.has_structured,
        is_error=result.is_error,
        written=result.written,
        size=result.size,
    )


def _redacted(on_progress: OnProgress | None, owner: ConnectionOwner) -> OnProgress | None:
    """Pass progress on, its message without credentials and cut to a line."""
    if on_progress is None or owner.spec is None:
        return on_progress
    redact = owner.spec.credential_filter.redact_text

    def report(progress: float, total: float | None, message: str | None) -> None:
        on_progress(progress, total, None if message is None else redact(message)[:MAX_QUOTED])

    return report


def _lost(fault: UpstreamError, seen: RequestTrace) -> CallOutcome:
    """Say what became of a call that has no answer."""
    if not seen.sent:
        return _not_sent(fault.code, fault.message, fault.hint)
    if seen.flaw:
        return _invalid(seen.flaw)
    if isinstance(seen.fault, TooLarge):
        return _too_large(f"more than {format_bytes(settings.MAX_RESULT_BYTES)}")
    if _turned_down(seen):
        return _failed(fault.code, fault.message, fault.hint)
    return CallOutcome(
        "unknown",
        code=fault.code,
        message=f"{fault.message} Whether the tool ran is not known.",
        hint="Look what it did before calling it again.",
    )


def _turned_down(seen: RequestTrace) -> bool:
    """Tell whether the server refused the request before a tool could run.

    Other statuses from 500 on may come from something that failed halfway.
    """
    early = not seen.taken and (seen.status < 500 or seen.status in (501, 503))
    return seen.fault is not None and seen.fault.code in TURNED_DOWN and early


def _not_sent(code: str, message: str, hint: str = "") -> CallOutcome:
    return CallOutcome("not_sent", code=code, message=message, hint=hint)


def _failed(code: str, message: str, hint: str = "") -> CallOutcome:
    return CallOutcome("failed", code=code, message=message, hint=hint)


def _invalid(problem: str) -> CallOutcome:
    return _failed(
        "result_invalid",
        f"The tool ran, but its result cannot be passed on: it {problem}.",
        "This is a fault of the server. Look what the tool did before calling it again.",
    )


def _too_large(size: str) -> CallOutcome:
    return _failed(
        "result_too_large",
        f"The tool ran, but its result is too large: {size}, and "
        f"{format_bytes(settings.MAX_RESULT_BYTES)} are allowed.",
        "Ask for less at once, e.g. with a limit or a filter.",
    )


def _quoted(text: str) -> str:
    """Return a server's words on one line, invisible characters shown, and not too many."""
    line = escape_hidden(" ".join(text.split()))
    return line if len(line) <= MAX_QUOTED else line[:MAX_QUOTED] + "…"
