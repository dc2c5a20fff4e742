"""HTTP client for MCP servers, with SSRF protection, size limits and a header allowlist.

Addresses are checked at connection time, so neither redirects nor DNS rebinding bypass the check.
Requests carry the server's configured headers and those of the protocol only; no cookies and no
state between requests. Failures never raise into the SDK: they are recorded on the current
`RequestTrace`, and the SDK receives an error response.
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
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import httpcore2
import httpx2
from django.conf import settings

from servers.errors import ParkedError, UpstreamError, auth_error, status_error
from servers.transports.request_trace import (
    ACCEPTED_STATUSES,
    RequestTrace,
    current_trace,
    record_error,
)
from servers.transports.response_body import (
    CappedBody,
    ShallowBody,
    connection_error,
    decoder,
    wrong_content_error,
)
from servers.transports.ssrf import (
    NON_HTTP_PORTS,
    Address,
    Network,
    allowed_networks,
    check_address,
)
from toolcrib.lib.protocols.asgi import content_type_of
from toolcrib.lib.protocols.jsonrpc import LARGE_BYTES

MAX_CANCELS = 50  # cancel notifications in flight to one server
POST_TIMEOUT = 5.0  # seconds for a fire-and-forget POST

# Its INFO lines contain full URLs, and a query may contain a key.
logging.getLogger("httpx2").setLevel(logging.WARNING)

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]

MAX_REDIRECTS = 3
MAX_INTERIM = 20  # responses with a status below 200 before the final one
MAX_HEAD_BYTES = 256 * 1024  # received before a response begins
CANCELLED = b"notifications/cancelled"
MAX_CANCEL_BYTES = 4096  # larger bodies are not searched for a cancel notification
# An idle stream must still detect, after hours, that the peer is gone.
KEEPALIVE: list[httpcore2.SOCKET_OPTION] = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
if hasattr(socket, "TCP_KEEPIDLE"):
    KEEPALIVE.append((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60))
PROTOCOL_HEADERS = frozenset(
    {"host", "accept", "accept-encoding", "cache-control", "connection", "content-length"}
    | {"content-type", "last-event-id", "mcp-method", "mcp-name", "mcp-protocol-version"}
    | {"mcp-session-id", "transfer-encoding", "user-agent"}
)

PARAM_HEADER = "mcp-param-"  # arguments that a tool's schema maps to headers


# --- Connecting -------------------------------------------------------------------------------


def check_url(url: str) -> httpx2.URL:
    """Return the parsed URL, or raise if it is invalid or not allowed. Does not connect."""

    def refuse(reason: str, hint: str = "") -> UpstreamError:
        return ParkedError(f"The URL {reason}.", code="blocked", hint=hint)

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
        raise refuse("has no host")
    if parsed.userinfo:
        raise refuse("contains a user name or password", "Put credentials into a header.")
    if parsed.port is not None and (parsed.port in NON_HTTP_PORTS or parsed.port > 65535):
        raise refuse(f"uses port {parsed.port}, which is not an HTTP port")
    return parsed


async def resolve(host: str, port: int) -> Sequence[str]:
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in entries]


def too_many_interim_responses() -> httpx2.RemoteProtocolError:
    return httpx2.RemoteProtocolError("too many interim responses")


class HeadCounter:
    """What arrived of a response before its final headers; httpcore accepts any number of 1xx."""

    def __init__(self) -> None:
        self._bytes = self._heads = 0

    def add(self, data: bytes) -> None:
        """Raise if there are too many interim responses. A body has no line breaks before HTTP/."""
        self._bytes += len(data)
        self._heads += data.startswith(b"HTTP/1.") + data.count(b"\r\n\r\nHTTP/1.")
        if self._heads > MAX_INTERIM + 1 or self._bytes > MAX_HEAD_BYTES:
            raise httpcore2.RemoteProtocolError("too many interim responses")


# Set while httpcore waits for the headers of a response.
_head_counter: ContextVar[HeadCounter | None] = ContextVar("head counter", default=None)


class CountingStream(httpcore2.AsyncNetworkStream):
    """A connection that limits what arrives before a response."""

    def __init__(self, inner: httpcore2.AsyncNetworkStream) -> None:
        self._inner = inner

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        data = await self._inner.read(max_bytes, timeout)
        if (counter := _head_counter.get()) is not None:
            counter.add(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore2.AsyncNetworkStream:
        return CountingStream(await self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class GuardedBackend(httpcore2.AsyncNetworkBackend):
    """Network backend that resolves, checks every address, and connects to the checked IP."""

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
        addresses = await self.resolve_checked(host, port, deadline)
        last_error: Exception | None = None
        for index, address in enumerate(addresses):
            # Split the time, so that one dead IPv6 route does not use up all of it.
            share = (deadline - loop.time()) / (len(addresses) - index)
            try:
                stream = await self._inner.connect_tcp(
                    str(address), port, max(share, 0.05), local_address, KEEPALIVE
                )
                return CountingStream(stream)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                last_error = error
        raise last_error or httpcore2.ConnectError("no address")

    async def resolve_checked(self, host: str, port: int, deadline: float) -> list[Address]:
        try:
            async with asyncio.timeout_at(deadline):
                resolved = await self._resolver(host, port)
        except TimeoutError:
            raise connection_error(httpx2.ConnectTimeout("resolving")) from None
        except (OSError, UnicodeError):
            resolved = []
        addresses = list(
            dict.fromkeys(check_address(text, self._allowed) for text in resolved)
        )  # one blocked address blocks the host: a name must not mix public and private ones
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
    """Sends the SDK's requests to one server and checks each response before the SDK reads it."""

    def __init__(self, headers: Iterable[str], resolver: Resolver, tls: ssl.SSLContext) -> None:
        self._headers = PROTOCOL_HEADERS | {name.lower() for name in headers}
        self._inner = httpx2.AsyncHTTPTransport(verify=tls, trust_env=False)
        _guard(self._inner, GuardedBackend(resolver, allowed_networks()))
        self.on_session_lost: Callable[[], None] = lambda: None
        self.session_id = ""  # as assigned by the server in the handshake
        self._last_stream = 0.0
        self._quick_streams = 0
        self._cancels = BackgroundPosts()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if not _is_cancel(request):
            return await self._send(request)
        # In the background: the SDK sends nothing else until this POST is answered.
        if len(self._cancels) < MAX_CANCELS:
            self._cancels.send(self._send_cancel(request))
        return httpx2.Response(202)

    async def _send_cancel(self, request: httpx2.Request) -> None:
        current_trace.set(None)  # the result of this POST says nothing about the call
        response = await self._send(request)
        await response.aclose()

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET" and {"mcp-session-id", "last-event-id"} & set(request.headers):
            await self._throttle_reopening()
        for name in set(request.headers) - self._headers:
            if not name.startswith(PARAM_HEADER):
                del request.headers[name]
        trace = current_trace.get()
        sent = trace if trace is not None and trace.is_call else None
        request.extensions = {**request.extensions, "trace": _observe(sent)}
        try:
            check_url(str(request.url))
            response = await self._inner.handle_async_request(request)
        except UpstreamError as error:
            return error_response(error)
        except (httpx2.HTTPError, ssl.SSLError, OSError) as error:
            return error_response(connection_error(error))
        except httpx2.StreamError:
            return error_response(UpstreamError("The request could not be sent.", code="protocol"))
        response.headers.pop("set-cookie", None)
        self.session_id = response.headers.get("mcp-session-id") or self.session_id
        try:
            return self._check_response(request, response)
        except UpstreamError as error:
            await response.aclose()
            return error_response(error)

    async def _throttle_reopening(self) -> None:
        """Delay streams that are reopened quickly: the SDK reopens ended ones without a limit."""
        now = asyncio.get_running_loop().time()
        recent = self._last_stream and now - self._last_stream < 60
        self._quick_streams = self._quick_streams + 1 if recent else 0
        self._last_stream = now
        await asyncio.sleep(min(30, 2**self._quick_streams - 1))

    def _check_response(
        self, request: httpx2.Request, response: httpx2.Response
    ) -> httpx2.Response:
        """Return the response with a size limit on its body; raise if the body is not needed."""
        status, trace = response.status_code, current_trace.get()
        if trace is not None:
            trace.status = status
            # The status of a resumed stream does not change that the call was accepted.
            is_accepted = status in ACCEPTED_STATUSES and request.method == "POST"
            trace.accepted = trace.accepted or is_accepted
        if response.has_redirect_location:
            record_error(check_redirect(request.url, response.headers["location"]))
        elif status in (401, 403):
            raise auth_error(status)
        elif status >= 400:
            record_error(self._status_error(request, status))
        else:
            _check_content_type(request, response)
            record_error(None)
        encoding = response.headers.pop("content-encoding", "identity").strip().lower()
        body = CappedBody(
            response,
            decoder=decoder(encoding),
            per_event=content_type_of(response.headers) == "text/event-stream",
            limit=LARGE_BYTES if _is_listen_only(request, trace) else settings.MAX_MESSAGE_BYTES,
            trace=trace if trace is not None and trace.is_call else None,
        )
        stream = ShallowBody(body) if trace is not None and trace.is_list else body
        return httpx2.Response(
            status, headers=response.headers, stream=stream, extensions=response.extensions
        )

    def _status_error(self, request: httpx2.Request, status: int) -> UpstreamError:
        if status == 404 and request.method == "POST" and "mcp-session-id" in request.headers:
            self.on_session_lost()
            return session_lost_error()
        return status_error(status)

    async def aclose(self) -> None:
        self._cancels.close()
        await self._inner.aclose()


def session_lost_error() -> UpstreamError:
    return UpstreamError("The server no longer knows this session.", code="closed")


def _is_cancel(request: httpx2.Request) -> bool:
    from_sse = request.extensions.get("answer") == "ignored"  # sse.py sends in the background
    try:
        body = request.content if request.method == "POST" and not from_sse else b""
    except httpx2.RequestNotRead:  # a request that follows a redirect
        return False
    if len(body) > MAX_CANCEL_BYTES or CANCELLED not in body:
        return False
    message = json.loads(body)
    return isinstance(message, dict) and message.get("method") == CANCELLED.decode()


def _is_listen_only(request: httpx2.Request, trace: RequestTrace | None) -> bool:
    """Tell whether the response can carry notifications only. The SDK parses them on the loop.

    A stream that is resumed by the trace of a request carries the response to that request.
    """
    if request.method == "GET":
        return "mcp-session-id" in request.headers and trace is not None and trace.opening
    return request.headers.get("mcp-method") == "subscriptions/listen"


def _observe(trace: RequestTrace | None) -> Callable[[str, object], Awaitable[None]]:
    """Return an httpcore trace function that records when the server may have the request, and
    when its response is awaited."""

    async def on_event(event: str, info: object) -> None:
        if trace is not None and event.endswith("send_request_headers.started"):
            trace.sent = True
        elif event.endswith("receive_response_headers.started"):
            _head_counter.set(HeadCounter())
        elif "receive_response_headers." in event:  # complete, or failed
            _head_counter.set(None)

    return on_event


def _guard(transport: httpx2.AsyncHTTPTransport, backend: httpcore2.AsyncNetworkBackend) -> None:
    """Make every connection of the transport use the backend.

    httpx2 has no public way to set it. `_pool._network_backend` is private, hence the exact pins
    and a test that fails when it moves. Setting an attribute that does not exist would disable
    the protection, so a missing one is an error.
    """
    pool = transport._pool
    if not hasattr(pool, "_network_backend"):
        raise RuntimeError("httpx2 has changed: connections can no longer be guarded.")
    pool._network_backend = backend


def guarded_transport() -> httpx2.AsyncHTTPTransport:
    """Return a transport for requests that are not MCP, with the same checks of addresses."""
    certificates = (os.environ.get(name, "") for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
    transport = httpx2.AsyncHTTPTransport(verify=_tls_context(*certificates), trust_env=False)
    _guard(transport, GuardedBackend(resolve, allowed_networks()))
    return transport


def error_response(error: UpstreamError) -> httpx2.Response:
    """Record the error, and return a response that makes the SDK fail this request at once.

    The body is a JSON-RPC error that also stops version negotiation (-32022 with no supported
    version), so that an unreachable server is not tried twice.
    """
    record_error(error)
    data = {"supported": [], "requested": ""}
    body = {"code": -32022, "message": "not reached", "data": data}
    return httpx2.Response(503, json={"jsonrpc": "2.0", "id": None, "error": body})


def _check_content_type(request: httpx2.Request, response: httpx2.Response) -> None:
    content_type = content_type_of(response.headers)
    is_json = request.method == "POST" and content_type == "application/json"
    if is_json or content_type == "text/event-stream":
        return
    is_ignored = request.method == "DELETE" or request.extensions.get("answer") == "ignored"
    if not is_ignored and response.status_code not in (202, 204):
        raise wrong_content_error(content_type)


def join_url(url: httpx2.URL, reference: str) -> httpx2.URL:
    try:
        return url.join(reference.strip())
    except (httpx2.InvalidURL, ValueError):
        raise ParkedError("The server redirects to an invalid URL.", code="redirect") from None


def origin(url: httpx2.URL) -> tuple[str, str, int | None, bytes]:
    return url.scheme, url.host, url.port, url.userinfo


def check_redirect(url: httpx2.URL, location: str) -> UpstreamError:
    """Return the error to report if the SDK does not follow this redirect; raise if forbidden.

    The SDK follows at most MAX_REDIRECTS, within the origin and without changing the method.
    """
    hint = "Enter the final URL of the MCP endpoint."
    target = join_url(url, location)
    if origin(target) != origin(url):
        scheme, host, port, _ = origin(target)
        target_origin = f"{scheme}://{host[:200]}" + (f":{port}" if port else "")
        raise ParkedError(
            f"The server redirects to another origin, {target_origin}, which is not followed.",
            code="redirect",
            hint=hint,
        )
    return ParkedError("The server answers with redirects only.", code="redirect", hint=hint)


# --- Clients ----------------------------------------------------------------------------------


@functools.cache
def _tls_context(cert_file: str, cert_dir: str) -> ssl.SSLContext:
    """Load the CA certificates (slow), once for the variables that OpenSSL itself reads."""
    return ssl.create_default_context()


@dataclass
class Upstream:
    """An HTTP client for one server, and the parameters for a second one (http1.py)."""

    http: httpx2.AsyncClient
    transport: UpstreamTransport = field(repr=False)
    headers: Mapping[bytes, bytes] = field(repr=False)
    tls: ssl.SSLContext = field(repr=False)
    resolver: Resolver = field(repr=False)


@contextlib.asynccontextmanager
async def upstream(
    headers: Mapping[str, str], *, resolver: Resolver = resolve
) -> AsyncIterator[Upstream]:
    """Open a client that sends these headers and the protocol's, and no others."""
    certificates = (os.environ.get(name, "") for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
    tls = _tls_context(*certificates)
    transport = UpstreamTransport(headers, resolver, tls)
    own = {"Accept-Encoding": "identity", "User-Agent": f"toolcrib/{settings.VERSION}"}
    allowed = {
        name: value for name, value in headers.items() if name.lower() not in PROTOCOL_HEADERS
    }
    encoded = _encode_headers({**allowed, **own})
    client = httpx2.AsyncClient(
        transport=transport,
        headers=encoded,
        trust_env=False,
        follow_redirects=False,
        max_redirects=MAX_REDIRECTS,
        # No read timeout: event streams are silent for hours. Callers set their own.
        timeout=httpx2.Timeout(settings.CONNECT_TIMEOUT, read=None, pool=None),
    )
    try:
        yield Upstream(client, transport, encoded, tls, resolver)
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await client.aclose()


def _encode_headers(headers: Mapping[str, str]) -> dict[bytes, bytes]:
    try:
        pairs = {name.encode("ascii"): value.encode("latin-1") for name, value in headers.items()}
    except UnicodeError:
        pairs = {b"": b""}
    if any(not name or set(name + value) & set(b"\r\n\0") for name, value in pairs.items()):
        raise connection_error(httpx2.LocalProtocolError(""))
    return pairs


class BackgroundPosts:
    """Fire-and-forget POSTs (cancellations, replies), with a 5 s timeout. Callers cap them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def send(self, post: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(post)
        timer = task.get_loop().call_later(POST_TIMEOUT, task.cancel)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: timer.cancel())
        # Retrieve the exception, so that asyncio does not log it: failures are ignored.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
