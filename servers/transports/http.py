"""HTTP to servers: the one place where Toolcrib opens a connection to an address someone typed.

Addresses are checked when connecting, so neither a redirect nor a name that changes its mind
gets around it. Bodies are counted as they arrive. Nothing is sent but the server's own headers
and what the protocol needs; nothing is kept between requests. A failure never raises into the
SDK: it is noted on the current `Attempt`, and the SDK is handed an error response.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import socket
import ssl
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any

import httpcore2
import httpx2
from django.conf import settings

from servers.errors import UpstreamError, auth_error, not_mcp_error, status_error
from servers.transports.jsonrpc import LARGE_BYTES
from servers.transports.request_trace import RequestTrace, current_trace, mark_accepted, trace_error
from servers.transports.response_body import BodyError, CappedBody, connection_error, decoder
from servers.transports.ssrf import OTHER_PORTS, Address, Network, allowed_networks, check_address

__all__ = [
    "BodyError",
    "RequestTrace",
    "Upstream",
    "check_url",
    "current_trace",
    "trace_error",
    "upstream",
]
MAX_CANCELS = 50  # calls given up that a server is being told of
POST_TIMEOUT = 5.0  # seconds for a server to take what asks for no answer

# Its INFO lines hold whole URLs, and a query may hold a key.
logging.getLogger("httpx2").setLevel(logging.WARNING)

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]

MAX_REDIRECTS = 3
CANCELLED = b"notifications/cancelled"
SMALL = 4096  # bytes; a message that gives up a call has less
# A stream that is silent for hours must still find out that the other side is gone.
KEEPALIVE: list[httpcore2.SOCKET_OPTION] = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
if hasattr(socket, "TCP_KEEPIDLE"):
    KEEPALIVE.append((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60))
PROTOCOL_HEADERS = frozenset(
    {"host", "accept", "accept-encoding", "cache-control", "connection", "content-length"}
    | {"content-type", "last-event-id", "mcp-method", "mcp-name", "mcp-protocol-version"}
    | {"mcp-session-id", "transfer-encoding", "user-agent"}
)

PARAM_HEADER = "mcp-param-"  # arguments that a tool wants repeated in headers


# --- Connecting -------------------------------------------------------------------------------


def check_url(url: str) -> httpx2.URL:
    """Return the URL parsed, or refuse it for what can be seen without connecting."""

    def refuse(why: str, hint: str = "") -> UpstreamError:
        return UpstreamError(f"The URL {why}.", code="blocked", hint=hint, parked=True)

    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError):
        raise refuse("is not valid") from None
    if parsed.scheme not in ("http", "https"):
        raise refuse("must start with https://")
    if parsed.scheme == "http" and not settings.ALLOW_PLAIN_HTTP:
        raise refuse(
            "is plain HTTP", "Use https, or set TOOLCRIB_ALLOW_PLAIN_HTTP where that is acceptable."
        )
    if not parsed.host or "%" in parsed.host or "\0" in url:
        raise refuse("names no host")
    if parsed.userinfo:
        raise refuse("holds a user name or password", "Put credentials into a header.")
    if parsed.port is not None and (parsed.port in OTHER_PORTS or parsed.port > 65535):
        raise refuse(f"uses port {parsed.port}, which is not one for HTTP")
    return parsed


async def resolve(host: str, port: int) -> Sequence[str]:
    """Ask the system for the addresses of a host, in the order to try them."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class GuardedBackend(httpcore2.AsyncNetworkBackend):
    """Opens connections to checked addresses only: resolve, judge every one, connect to that IP."""

    def __init__(self, resolver: Resolver, allowed: Sequence[Network]) -> None:
        self._resolver = resolver
        self._allowed = allowed
        self._inner = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the signature is httpcore's
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (timeout or settings.CONNECT_TIMEOUT)
        addresses = await self.checked(host, port, deadline)
        problem: Exception | None = None
        for index, address in enumerate(addresses):
            # Each gets its share, so that one dead IPv6 route does not use up all the time.
            share = (deadline - loop.time()) / (len(addresses) - index)
            try:
                return await self._inner.connect_tcp(
                    str(address), port, max(share, 0.05), local_address, KEEPALIVE
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                problem = error
        raise problem or httpcore2.ConnectError("no address")

    async def checked(self, host: str, port: int, deadline: float) -> list[Address]:
        """Resolve a host and judge every address of it, by the clock of the loop."""
        try:
            async with asyncio.timeout_at(deadline):
                found = await self._resolver(host, port)
        except (OSError, UnicodeError) as error:
            if isinstance(error, TimeoutError):
                raise httpcore2.ConnectTimeout("resolving") from None
            found = []
        addresses = list(
            dict.fromkeys(check_address(text, self._allowed) for text in found)
        )  # one bad address refuses all: a name must not mix public and private ones
        if not addresses:
            raise UpstreamError(
                f"The host name {host[:100]} cannot be resolved.",
                code="resolve",
                hint="Check the spelling, and that this machine can resolve it.",
            )
        return addresses

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


# --- Requests and responses -------------------------------------------------------------------


class UpstreamTransport(httpx2.AsyncBaseTransport):
    """Sends the requests of one server, and judges what comes back before the SDK reads it."""

    def __init__(self, headers: Iterable[str], resolver: Resolver, tls: ssl.SSLContext) -> None:
        self._headers = PROTOCOL_HEADERS | {name.lower() for name in headers}
        self._inner = httpx2.AsyncHTTPTransport(verify=tls, trust_env=False)
        _guard(self._inner, GuardedBackend(resolver, allowed_networks()))
        self.on_session_lost: Callable[[], None] = lambda: None
        self.session_id = ""  # as the server gave it in the handshake
        self._last_stream = 0.0
        self._quick_streams = 0
        self._cancels = BackgroundPosts()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if not _gives_up(request):
            return await self._answered(request)
        # The SDK would post nothing more until the server takes it.
        if len(self._cancels) < MAX_CANCELS:
            self._cancels.send(self._told(request))
        return httpx2.Response(202)

    async def _told(self, request: httpx2.Request) -> None:
        current_trace.set(None)  # what becomes of this says nothing about the call
        response = await self._answered(request)
        await response.aclose()

    async def _answered(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET" and {"mcp-session-id", "last-event-id"} & set(request.headers):
            await self._pace()
        for name in set(request.headers) - self._headers:
            if not name.startswith(PARAM_HEADER):
                del request.headers[name]
        seen = current_trace.get()
        if seen is not None and seen.call:
            request.extensions = {**request.extensions, "trace": _sending(seen)}
        try:
            check_url(str(request.url))
            response = await self._inner.handle_async_request(request)
        except UpstreamError as fault:
            return refusal(fault)
        except (httpx2.HTTPError, ssl.SSLError, OSError) as error:
            return refusal(connection_error(error))
        except httpx2.StreamError:
            return refusal(UpstreamError("The request could not be sent.", code="protocol"))
        response.headers.pop("set-cookie", None)
        self.session_id = response.headers.get("mcp-session-id") or self.session_id
        try:
            return self._judged(request, response)
        except UpstreamError as fault:
            await response.aclose()
            return refusal(fault)

    async def _pace(self) -> None:
        """Hold back streams that are reopened in quick succession.

        The SDK reopens a stream that ended after a delay of the server's choosing, zero included,
        and for ever.
        """
        now = asyncio.get_running_loop().time()
        recent = self._last_stream and now - self._last_stream < 60
        self._quick_streams = self._quick_streams + 1 if recent else 0
        self._last_stream = now
        await asyncio.sleep(min(30, 2**self._quick_streams - 1))

    def _judged(self, request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
        """Return the response with its body capped; raise when there is no use in reading it."""
        status, seen = response.status_code, current_trace.get()
        if seen is not None:
            seen.status = status
            # What a stream that is taken up again says does not unmake what ran.
            seen.taken = seen.taken or (mark_accepted(status) and request.method == "POST")
        if response.has_redirect_location:
            trace_error(check_redirect(request.url, response.headers["location"]))
        elif status in (401, 403):
            raise auth_error(status)
        elif status >= 400:
            trace_error(self._status_fault(request, status))
        else:
            check_content_type(request, response)
            trace_error(None)
        encoding = response.headers.pop("content-encoding", "identity").strip().lower()
        body = CappedBody(
            response,
            decoder=decoder(encoding),
            per_event=_content_type(response) == "text/event-stream",
            cap=LARGE_BYTES if _listens(request, seen) else settings.MAX_MESSAGE_BYTES,
            seen=seen if seen is not None and seen.call else None,
        )
        return httpx2.Response(
            status, headers=response.headers, stream=body, extensions=response.extensions
        )

    def _status_fault(self, request: httpx2.Request, status: int) -> UpstreamError:
        if status == 404 and request.method == "POST" and "mcp-session-id" in request.headers:
            self.on_session_lost()
            return UpstreamError("The server no longer knows this session.", code="closed")
        return status_error(status)

    async def aclose(self) -> None:
        self._cancels.close()
        await self._inner.aclose()


def _gives_up(request: httpx2.Request) -> bool:
    """Tell whether the SDK tells a server that nobody waits for a call any more."""
    ours = request.extensions.get("answer") == "ignored"  # sse.py, which takes care by itself
    try:
        body = request.content if request.method == "POST" and not ours else b""
    except httpx2.RequestNotRead:  # one that follows a redirect
        return False
    if len(body) > SMALL or CANCELLED not in body:
        return False
    message = json.loads(body)
    return isinstance(message, dict) and message.get("method") == CANCELLED.decode()


def _listens(request: httpx2.Request, seen: RequestTrace | None) -> bool:
    """Tell whether nothing but notifications can come back. The SDK reads them on the loop.

    A stream that a request's own attempt takes up again is that of an answer.
    """
    if request.method == "GET":
        return "mcp-session-id" in request.headers and seen is not None and seen.opening
    return request.headers.get("mcp-method") == "subscriptions/listen"


def _sending(seen: RequestTrace) -> Callable[[str, object], Awaitable[None]]:
    """Return what tells a request that may have arrived from one that surely has not."""

    async def trace(event: str, info: object) -> None:
        if event.endswith("send_request_headers.started"):
            seen.sent = True

    return trace


def _guard(transport: httpx2.AsyncHTTPTransport, backend: httpcore2.AsyncNetworkBackend) -> None:
    """Make every connection of the transport go through the backend.

    httpx2 has no public way to set it; `_pool._network_backend` is private, hence the exact pins
    and test_network.py, which fails when it moves. Setting an attribute that is not there would
    leave us unguarded, so its absence is an error.
    """
    pool = transport._pool
    if not hasattr(pool, "_network_backend"):
        raise RuntimeError("httpx2 has changed: connections can no longer be guarded.")
    pool._network_backend = backend


def refusal(fault: UpstreamError) -> httpx2.Response:
    """Note the fault, and return a response that makes the SDK fail this request at once.

    The body is a JSON-RPC error that also stops version negotiation (-32022 with no version in
    common), so that a server that cannot be reached is not asked twice.
    """
    trace_error(fault)
    data = {"supported": [], "requested": ""}
    error = {"code": -32022, "message": "not reached", "data": data}
    return httpx2.Response(503, json={"jsonrpc": "2.0", "id": None, "error": error})


def _content_type(response: httpx2.Response) -> str:
    return response.headers.get("content-type", "").partition(";")[0].strip().lower()


def check_content_type(request: httpx2.Request, response: httpx2.Response) -> None:
    """Refuse a success that is not MCP, such as the HTML of a web page."""
    kind = _content_type(response)
    if response.status_code in (202, 204) or request.method == "DELETE":
        return
    if kind == "text/event-stream" or (request.method == "POST" and kind == "application/json"):
        return
    if request.extensions.get("answer") == "ignored":
        return
    raise not_mcp_error("HTML" if "html" in kind else "something that is not MCP")


def joined(url: httpx2.URL, reference: str) -> httpx2.URL:
    """Resolve what a server calls a URL, relative to the one it was asked at."""
    try:
        return url.join(reference.strip())
    except (httpx2.InvalidURL, ValueError):
        raise UpstreamError(
            "The server names a place to go to that is not a URL.", code="redirect", parked=True
        ) from None


def origin(url: httpx2.URL) -> tuple[str, str, int | None, bytes]:
    return url.scheme, url.host, url.port, url.userinfo


def check_redirect(url: httpx2.URL, location: str) -> UpstreamError:
    """Return the fault this redirect will be if the SDK does not follow it; raise if it must not.

    The SDK follows at most MAX_REDIRECTS, within the origin and without changing the method.
    """
    hint = "Enter the final URL of the MCP endpoint."
    target = joined(url, location)
    if origin(target) != origin(url):
        scheme, host, port, _ = origin(target)
        named = f"{scheme}://{host[:200]}" + (f":{port}" if port else "")
        raise UpstreamError(
            f"The server redirects to another origin, {named}, which is not followed.",
            code="redirect",
            hint=hint,
            parked=True,
        )
    return UpstreamError(
        "The server answers with redirects only.", code="redirect", hint=hint, parked=True
    )


# --- What client.py uses ----------------------------------------------------------------------


@functools.cache
def _tls_context(cert_file: str, cert_dir: str) -> ssl.SSLContext:
    """Load the authorities once: it takes tens of milliseconds. OpenSSL reads the two variables."""
    return ssl.create_default_context()


@dataclass
class Upstream:
    """An HTTP client for one server, and what it takes to make another (http1.py)."""

    http: httpx2.AsyncClient
    transport: UpstreamTransport = field(repr=False)
    headers: Mapping[bytes, bytes] = field(repr=False)
    tls: ssl.SSLContext = field(repr=False)
    resolver: Resolver = field(repr=False)


@contextlib.asynccontextmanager
async def upstream(
    headers: Mapping[str, str],
    *,
    resolver: Resolver = resolve,
) -> AsyncIterator[Upstream]:
    """Give a client that sends these headers and what the protocol needs, and nothing else."""
    certificates = (os.environ.get(name, "") for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
    tls = _tls_context(*certificates)
    transport = UpstreamTransport(headers, resolver, tls)
    own = {"Accept-Encoding": "identity", "User-Agent": f"toolcrib/{settings.VERSION}"}
    allowed = {
        name: value for name, value in headers.items() if name.lower() not in PROTOCOL_HEADERS
    }
    sent = _sendable({**allowed, **own})
    client = httpx2.AsyncClient(
        transport=transport,
        headers=sent,
        trust_env=False,
        follow_redirects=False,
        max_redirects=MAX_REDIRECTS,
        # Reading has no limit of its own: event streams are silent for hours. Callers set one.
        timeout=httpx2.Timeout(settings.CONNECT_TIMEOUT, read=None, pool=None),
    )
    try:
        yield Upstream(client, transport, sent, tls, resolver)
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await client.aclose()


def _sendable(headers: Mapping[str, str]) -> dict[bytes, bytes]:
    try:
        pairs = {name.encode("ascii"): value.encode("latin-1") for name, value in headers.items()}
    except UnicodeError:
        pairs = {b"": b""}
    if any(not name or set(name + value) & set(b"\r\n\0") for name, value in pairs.items()):
        raise connection_error(httpx2.LocalProtocolError(""))
    return pairs


# --- Fire-and-forget POSTs ------------------------------------------------------------------------


class BackgroundPosts:
    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._under_way)

    def send(self, errand: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(errand)
        late = task.get_loop().call_later(POST_TIMEOUT, task.cancel)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        task.add_done_callback(lambda done: late.cancel())
        # Seen: a courtesy that failed.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def close(self) -> None:
        for task in self._under_way:
            task.cancel()
