"""Talk MCP to a server: connect, list its tools, hear of changes. The only importer of `mcp`.

Both protocol eras, over stdio, streamable HTTP, SSE, or in memory. Every failure leaves here as
an UpstreamError with a code and a sentence; nothing a server sent is quoted in it. Definitions
are passed on raw: whether a tool is acceptable is decided elsewhere, one tool at a time.
"""

import asyncio
import contextvars
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

import anyio
import mcp_types as types
from django.conf import settings
from mcp.client import Client, ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import SubscriptionLost
from mcp.server import MCPServer, Server
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from servers import network, sse, stdio
from servers.faults import ListingError, UpstreamError, not_mcp
from servers.listing import all_pages
from servers.network import Attempt
from servers.spec import Listing, ServerSpec

__all__ = ["Connection", "ListingError", "UpstreamError", "connect", "over"]

logger = logging.getLogger(__name__)
# The SDK logs what servers send, with tracebacks. What matters of it arrives here as an error.
logging.getLogger("mcp.client").setLevel(logging.CRITICAL)

MAX_UNANSWERED = 100  # requests of a server to us
MAX_STRAYS = 50  # lines that are no message, such as a banner
MAX_INSTRUCTIONS = 32 * 1024
MAX_CLAIM = 200
CLOSE_TIMEOUT = 2
LISTEN_TRIES = 3  # to open a subscription, before the connection counts as lost
LISTEN_STEADY = 60  # seconds after which a lost subscription counts as the first loss

T = TypeVar("T")
Streams = tuple[Any, Any]
Transport = AbstractAsyncContextManager[Streams] | Server[Any] | MCPServer[Any]


class Wire(Protocol):
    """What stdio.Child and sse.EventStream have in common: messages in, messages out."""

    def messages(self) -> AsyncIterator[bytes]: ...

    async def send(self, message: bytes) -> None: ...


class Link:
    """What is known about the state of a connection, from whichever layer saw it first."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.handshake_ends = asyncio.get_running_loop().time() + settings.HANDSHAKE_TIMEOUT
        self.fault: UpstreamError | None = None
        self.stderr: Callable[[], str] = str
        # How a program ended takes a moment to learn, so it is asked for, not told.
        self.ended: Callable[[str], Awaitable[UpstreamError]] | None = None

    def lose(self, fault: UpstreamError | None = None) -> None:
        """Mark the connection dead. The first reason is the one that counts."""
        self.fault = self.fault or fault
        self.closed.set()

    async def why(self, while_what: str) -> UpstreamError:
        """Say why the connection is dead."""
        if self.fault is None and self.ended is not None:
            self.fault = await self.ended(while_what)
        return self.fault or UpstreamError(
            f"The connection to the server was lost {while_what}.", code="closed"
        )


class Connection:
    """An open connection. Any task of the loop may use it; only `connect` opens and closes."""

    def __init__(self, client: Client, link: Link, on_list_changed: Callable[[], None]) -> None:
        self._session: ClientSession = client.session
        self._client = client
        self._link = link
        self._on_list_changed = on_list_changed
        self.closed = link.closed
        self.protocol_version: str = client.protocol_version
        claimed = client.server_info
        self.server_info: dict[str, str] = {
            name: value[:MAX_CLAIM]
            for name in ("name", "version", "title")
            if isinstance(value := getattr(claimed, name, None), str)
        }
        self.instructions = _cut(client.instructions or "", MAX_INSTRUCTIONS)

    def stderr_tail(self) -> str:
        """Return the last lines a program wrote to stderr, control characters escaped."""
        return self._link.stderr()

    # --- Listing ------------------------------------------------------------------------------

    async def list_tools(self) -> Listing:
        """Return every page of tools, raw, or raise: never a part of them."""
        try:
            async with asyncio.timeout(settings.SYNC_TIMEOUT):
                return await all_pages(self._page)
        except TimeoutError:
            raise ListingError(
                f"The list of tools was not complete after {settings.SYNC_TIMEOUT} s.",
                code="timeout",
                hint="The server is slow, or hangs. TOOLCRIB_SYNC_TIMEOUT sets the limit.",
            ) from None

    async def _page(self, cursor: str | None) -> dict[str, object] | None:
        params = {} if cursor is None else {"cursor": cursor}
        capabilities = self._client.server_capabilities
        seen = Attempt()
        asking = _raw_request(self._session, "tools/list", params)
        try:
            return await self._until_closed(asking, seen)
        except MCPError as error:
            offers_none = error.code == types.METHOD_NOT_FOUND and capabilities.tools is None
            if offers_none and cursor is None and seen.fault is None:
                return None
            raise await self._explain(error, seen, "while listing its tools") from None

    async def _until_closed(self, request: Coroutine[Any, Any, T], seen: Attempt) -> T:
        """Run a request of the SDK, but not beyond the end of the connection."""
        asked = asyncio.create_task(request, context=_observed_by(seen))
        closed = asyncio.create_task(self.closed.wait())
        try:
            await asyncio.wait({asked, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise await self._link.why("while it was being asked")
            return asked.result()
        finally:
            for task in (asked, closed):
                task.cancel()
            # The SDK takes its time to tell the server; it may do so on its own.
            await asyncio.wait({asked, closed}, timeout=1)
            if asked.done() and not asked.cancelled():
                asked.exception()  # seen, whether or not it was raised above

    async def _explain(self, error: BaseException, seen: Attempt, when: str) -> UpstreamError:
        return await _explain(error, seen, self._link, when)

    # --- Changes ------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Call on_list_changed on every change, until the connection is lost (then raise).

        It may be called too often, never too seldom: also when a change may have been missed.
        """
        if self.protocol_version in MODERN_PROTOCOL_VERSIONS:
            listening = asyncio.create_task(self._subscribe())
            closed = asyncio.create_task(self.closed.wait())
            try:
                await asyncio.wait({listening, closed}, return_when=asyncio.FIRST_COMPLETED)
                if listening.done() and not listening.cancelled():
                    listening.result()
            finally:
                for task in (listening, closed):
                    task.cancel()
                await asyncio.wait({listening, closed})
        await self.closed.wait()
        why = await self._link.why("while waiting for changes")
        raise UpstreamError(
            why.message, code="closed", hint=why.hint, detail=why.detail, parked=why.parked
        )

    async def _subscribe(self) -> None:
        """Keep a subscription, renewing it when it is lost; return if there is no having one."""
        losses = failures = 0
        while True:
            seen, stood = Attempt(), asyncio.Event()
            hear = self._hear(stood, missed=losses > 0)
            hearing = asyncio.create_task(hear, context=_observed_by(seen))
            try:
                done, _ = await asyncio.wait({hearing}, timeout=LISTEN_STEADY)
                losses = losses + 1 if done else 1
                await asyncio.wait({hearing})
            finally:
                hearing.cancel()
                await asyncio.wait({hearing}, timeout=1)
            if hearing.cancelled() or not _may_listen_again(hearing.exception(), seen):
                return
            failures = 0 if stood.is_set() else failures + 1
            if failures >= LISTEN_TRIES:
                if seen.fault is not None:
                    self._link.lose(seen.fault)
                return
            jitter = random.uniform(0.5, 1)  # noqa: S311 - spreads load, hides nothing
            await asyncio.sleep(jitter * 2 ** min(losses, 7) / 2)

    async def _hear(self, stood: asyncio.Event, *, missed: bool) -> None:
        async with asyncio.timeout(settings.HANDSHAKE_TIMEOUT) as acknowledged:
            async with self._client.listen(tools_list_changed=True) as subscription:
                acknowledged.reschedule(None)
                stood.set()
                if missed:
                    self._on_list_changed()
                if not subscription.honored.tools_list_changed:
                    await self.closed.wait()
                async for _ in subscription:
                    self._on_list_changed()


def _may_listen_again(problem: BaseException | None, seen: Attempt) -> bool:
    """Tell a lost subscription, which is worth another try, from a server that has none."""
    if problem is None:  # the server closed it, in all form
        return True
    if seen.fault is not None:
        return not seen.fault.parked
    if isinstance(problem, MCPError):
        return problem.code == types.CONNECTION_CLOSED
    return isinstance(problem, SubscriptionLost | TimeoutError)


async def _raw_request(
    session: ClientSession, method: str, params: dict[str, Any]
) -> dict[str, object]:
    """Send a request and return its result unvalidated.

    `session.list_tools` fails as a whole when one tool is malformed. `_stamp` and `_dispatcher`
    are private, hence mcp<2.4; nothing else of the project touches them.
    """
    data: dict[str, Any] = {"method": method, "params": params}
    options: Any = {}
    session._stamp(data, options)
    return await session._dispatcher.send_raw_request(method, data["params"], options)


def _cut(text: str, limit: int) -> str:
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


# --- Connecting -------------------------------------------------------------------------------


@asynccontextmanager
async def connect(
    spec: ServerSpec, *, on_list_changed: Callable[[], None] | None = None
) -> AsyncIterator[Connection]:
    """Connect to a server, and leave nothing behind at the end of the block."""
    link = Link()
    async with (
        _transport(spec, link) as transport,
        over(transport, on_list_changed=on_list_changed, link=link) as connection,
    ):
        yield connection


@asynccontextmanager
async def _transport(spec: ServerSpec, link: Link) -> AsyncIterator[Transport]:
    if spec.transport not in ("stdio", "http", "sse"):
        raise ValueError(f"There is no transport {spec.transport}.")
    if spec.transport == "stdio":
        if not settings.ALLOW_STDIO:
            raise UpstreamError(
                "This Toolcrib does not run programs.",
                code="blocked",
                hint="The operator of the machine can allow it with TOOLCRIB_ALLOW_STDIO=1.",
                parked=True,
            )
        async with stdio.running(
            [argument.reveal() for argument in spec.argv],
            cwd=spec.cwd,
            env={name: value.reveal() for name, value in spec.env.items()},
            hidden=[value.reveal() for value in spec.hidden],
            max_line=settings.MAX_MESSAGE_BYTES,
            stderr_bytes=settings.STDERR_BYTES,
        ) as child:
            link.stderr, link.ended = child.stderr_tail, child.ended
            yield _wired(child, link)
        return
    url = spec.url.reveal()
    network.check_url(url)
    headers = {name: value.reveal() for name, value in spec.headers.items()}
    async with network.upstream(headers) as upstream:
        if spec.transport == "sse":
            async with _in_time(sse.opened(upstream, url), link) as stream:
                yield _wired(stream, link)
        else:
            upstream.transport.on_session_lost = link.lose
            yield streamable_http_client(
                url,
                http_client=upstream.http,
                max_sse_event_size=None,  # network.py caps
            )


@asynccontextmanager
async def _in_time(
    opening: AbstractAsyncContextManager[sse.EventStream], link: Link
) -> AsyncIterator[sse.EventStream]:
    try:
        async with asyncio.timeout_at(link.handshake_ends):
            stream = await opening.__aenter__()
    except TimeoutError:
        raise _too_slow() from None
    try:
        yield stream
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await opening.__aexit__(None, None, None)


@asynccontextmanager
async def over(
    transport: Transport,
    *,
    on_list_changed: Callable[[], None] | None = None,
    mode: str = "auto",
    link: Link | None = None,
) -> AsyncIterator[Connection]:
    """Speak MCP over any transport of the SDK, or with a server in this process.

    A task of its own enters and leaves the SDK's client, so that its cancellations, which it
    uses freely when a transport fails, reach neither the caller nor the block.
    """
    link = link or Link()
    changed = _contained(on_list_changed)

    async def heed(message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            changed()

    client = Client(
        transport,
        mode=mode,
        cache=None,
        message_handler=heed,
        client_info=types.Implementation(name="toolcrib", version=settings.VERSION),
    )
    ready, stop = asyncio.Event(), asyncio.Event()

    async def own() -> None:
        try:
            async with client:
                ready.set()
                await stop.wait()
        finally:
            link.closed.set()
            ready.set()

    seen = Attempt()
    owner = asyncio.create_task(own(), context=_observed_by(seen))
    try:
        try:
            async with asyncio.timeout_at(link.handshake_ends):
                await ready.wait()
        except TimeoutError:
            raise seen.fault or _too_slow(link.stderr()) from None
        if link.closed.is_set():
            await asyncio.wait({owner})
            problem = None if owner.cancelled() else owner.exception()
            raise await _explain(problem, seen, link, "during the handshake", shaking=True)
        yield Connection(client, link, changed)
    finally:
        stop.set()
        await _finish(owner)


async def _finish(owner: asyncio.Task[None]) -> None:
    """Let the owner leave by itself, then make it."""
    try:
        await asyncio.wait({owner}, timeout=CLOSE_TIMEOUT)
    finally:
        owner.cancel()
    await asyncio.wait({owner}, timeout=CLOSE_TIMEOUT / 2)
    if owner.done() and not owner.cancelled():
        for problem in _unwrapped(owner.exception()):
            logger.debug("A connection ended with %s.", type(problem).__name__)


def _observed_by(seen: Attempt) -> contextvars.Context:
    context = contextvars.copy_context()
    context.run(network.attempt.set, seen)
    return context


def _contained(callback: Callable[[], None] | None) -> Callable[[], None]:
    """Wrap the caller's callback: what it raises must not reach the SDK."""

    def call() -> None:
        try:
            if callback is not None:
                callback()
        except Exception:
            logger.exception("A listener for changed tools failed.")

    return call


@asynccontextmanager
async def _wired(wire: Wire, link: Link) -> AsyncIterator[Streams]:
    """Present lines or events as the streams of messages that the SDK reads and writes."""
    read_end, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, write_end = anyio.create_memory_object_stream[SessionMessage](0)

    unanswered = 0  # requests of the server that no answer was sent to yet

    async def receive() -> None:
        nonlocal unanswered
        strays = 0
        try:
            async for raw in wire.messages():
                message = _parse(raw)
                if isinstance(message, types.JSONRPCRequest):
                    unanswered += 1
                if message is not None:
                    await read_end.send(SessionMessage(message))
                elif b'"jsonrpc"' in raw[:4096]:
                    raise _unreadable()
                elif raw.strip():
                    strays += 1
                if unanswered > MAX_UNANSWERED:
                    raise UpstreamError(
                        f"The server asked more than {MAX_UNANSWERED} things at once and took no "
                        "answer.",
                        hint="This is a fault of the server.",
                    )
                if strays > MAX_STRAYS:
                    raise UpstreamError(
                        f"The server wrote more than {MAX_STRAYS} lines that are not MCP.",
                        hint="A stdio server must write its logs to stderr, not to stdout.",
                        detail=link.stderr(),
                    )
            link.lose()
        except UpstreamError as fault:
            link.lose(fault)
        except network.BodyFault as error:
            link.lose(error.fault)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        finally:
            read_end.close()

    async def forward() -> None:
        nonlocal unanswered
        async for message in write_end:
            if isinstance(message.message, types.JSONRPCResponse | types.JSONRPCError):
                unanswered -= 1
            line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                await wire.send(line.encode())
            except UpstreamError as fault:
                link.lose(fault)
            except network.BodyFault as error:
                link.lose(error.fault)
            except OSError:  # a pipe that nobody reads: how the program ended tells why
                link.lose()
            if link.closed.is_set():
                read_end.close()
                return

    async with anyio.create_task_group() as tasks, read, write, read_end, write_end:
        tasks.start_soon(receive)
        tasks.start_soon(forward)
        yield read, write
        tasks.cancel_scope.cancel()


def _parse(raw: bytes) -> types.JSONRPCMessage | None:
    """Return the message, an error in place of an answer that is not one, or None."""
    try:
        return types.jsonrpc_message_adapter.validate_json(raw, by_name=False)
    except ValidationError:
        pass
    try:
        loose = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(loose, dict) or not isinstance(loose.get("id"), int | str):
        return None
    error = types.ErrorData(code=types.PARSE_ERROR, message="not a valid answer")
    return types.JSONRPCError(jsonrpc="2.0", id=loose["id"], error=error)


# --- Explaining -------------------------------------------------------------------------------


def _too_slow(detail: str = "") -> UpstreamError:
    return UpstreamError(
        f"The server did not complete the handshake within {settings.HANDSHAKE_TIMEOUT} s.",
        code="timeout",
        hint="It may not speak MCP, or be slow to start. TOOLCRIB_HANDSHAKE_TIMEOUT sets the "
        "limit.",
        detail=detail,
    )


def _unreadable() -> UpstreamError:
    return UpstreamError(
        "The server sent a message that cannot be read: it is not valid JSON, or nested too deep.",
        hint="This is a fault of the server.",
    )


def _unwrapped(error: BaseException | None) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [inner for each in error.exceptions for inner in _unwrapped(each)]
    return [] if error is None else [error]


async def _explain(
    error: BaseException | None, seen: Attempt, link: Link, when: str, *, shaking: bool = False
) -> UpstreamError:
    """Turn whatever the SDK raised into our error. The most exact witness is asked first."""
    errors = _unwrapped(error)
    for each in errors:
        if isinstance(each, UpstreamError):
            return each
        if isinstance(each, network.BodyFault):
            return each.fault
    if seen.fault is not None:
        return seen.fault
    codes = [each.code for each in errors if isinstance(each, MCPError)]
    if link.fault is not None or types.CONNECTION_CLOSED in codes or not errors:
        return await link.why(when)
    if shaking and types.PARSE_ERROR in codes:
        return not_mcp("something that is not MCP")
    if types.PARSE_ERROR in codes:
        return _unreadable()
    if types.REQUEST_TIMEOUT in codes:
        return _too_slow(link.stderr())
    if codes:
        return UpstreamError(
            f"The server answered with error {codes[0]} {when}.",
            hint="This is a fault of the server, or it does not support what was asked.",
        )
    kinds = ", ".join(sorted({type(each).__name__ for each in errors}))
    return UpstreamError(
        f"The server did not keep to the protocol {when} ({kinds}).",
        hint="It may speak a version of MCP that Toolcrib does not know.",
    )
