"""The HTTP client for servers: SSRF protection, headers, size limits, TLS."""

import asyncio
import datetime
import ipaddress
import json
import socket
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from django.conf import settings

from servers.connections.connection import connect, run_session
from servers.errors import UpstreamError
from servers.transports import http as upstream_http
from servers.transports import response_body
from servers.transports.http import check_url
from servers.transports.request_trace import RequestTrace, current_trace
from servers.transports.ssrf import check_address
from tests.support.upstreams.running import http_spec, received_by, running_http


class Listener:
    """Accepts TCP connections on one loopback address and counts them."""

    def __init__(self, host="127.0.0.1", port=0):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.create_server((host, port), family=family)
        self.port = self.socket.getsockname()[1]

    def connections(self) -> int:
        """Count the connections so far, including those in the backlog."""
        self.socket.setblocking(False)
        count = 0
        while True:
            try:
                self.socket.accept()[0].close()
            except BlockingIOError:
                return count
            count += 1


@contextmanager
def listening(host="127.0.0.1", port=0):
    listener = Listener(host, port)
    try:
        yield listener
    finally:
        listener.socket.close()


async def list_over(spec):
    async with connect(spec) as connection:
        return await connection.list_tools()


def failure(spec) -> UpstreamError:
    with pytest.raises(UpstreamError) as caught:
        asyncio.run(list_over(spec))
    return caught.value


def ask(resolver, *urls, method="GET"):
    """Request each URL with one client and a custom resolver; return the error codes."""

    async def scenario():
        codes = []
        async with upstream_http.upstream({}, resolver=resolver) as upstream:
            for url in urls:
                trace = RequestTrace()
                current_trace.set(trace)
                await upstream.http.request(method, url, headers={"Connection": "close"})
                codes.append(trace.error and trace.error.code)
        return codes

    return asyncio.run(scenario())


# --- Addresses --------------------------------------------------------------------------------

LOOPBACK_FORMS = [
    "127.0.0.1",
    "2130706433",  # decimal
    "0x7f000001",
    "0x7f.1",
    "0177.0.0.1",  # octal
    "127.1",
    "0.0.0.0",  # noqa: S104 - an address to block
    "0",
    "localhost",
    "[::1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[0:0:0:0:0:ffff:7f00:0001]",
]
PRIVATE_FORMS = [
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",  # metadata
    "[::ffff:169.254.169.254]",
    "[fd00:ec2::254]",
    "[fd12:3456::1]",  # ULA
    "[fe80::1]",
    "[fec0::1]",
    "100.64.0.1",  # CGNAT
    "100.100.100.200",
    "[64:ff9b::7f00:1]",  # NAT64
    "[2002:7f00:1::]",  # 6to4
    "224.0.0.1",
    "255.255.255.255",
    "192.0.2.1",
]


@pytest.mark.parametrize("host", LOOPBACK_FORMS)
@pytest.mark.parametrize("transport", ["http", "sse"])
def test_no_notation_of_the_loopback_address_is_connected_to(monkeypatch, host, transport):
    monkeypatch.setattr(settings, "ALLOWED_NETWORKS", [])
    with listening() as listener:
        error = failure(http_spec(f"http://{host}:{listener.port}/mcp", transport=transport))
        assert listener.connections() == 0
    # A notation that this system cannot resolve is blocked as well.
    assert error.code in {"blocked", "resolve"}
    if error.code == "blocked" and host != "0177.0.0.1":  # which httpx2 rejects as a URL
        assert "this machine itself" in error.message
        assert "TOOLCRIB_ALLOWED_NETWORKS" in error.hint
        assert error.parked


def test_common_notations_of_the_loopback_address_are_blocked(monkeypatch):
    monkeypatch.setattr(settings, "ALLOWED_NETWORKS", [])
    for host in ("127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "localhost", "[::1]"):
        assert failure(http_spec(f"http://{host}:8080/")).code == "blocked", host


@pytest.mark.parametrize("host", PRIVATE_FORMS)
def test_addresses_outside_the_public_internet_are_blocked(host):
    # Checked without connecting: if this test fails, no packet was sent.
    loopback = [ipaddress.ip_network("127.0.0.0/8")]
    for allowed in ([], loopback):
        with pytest.raises(UpstreamError) as caught:
            check_address(host.strip("[]"), allowed)
        assert (caught.value.code, caught.value.parked) == ("blocked", True)


def test_a_name_that_does_not_exist_cannot_be_resolved():
    async def nowhere(host, port):
        raise socket.gaierror(socket.EAI_NONAME, "not known")

    async def empty(host, port):
        return []

    for resolver in (nowhere, empty):
        assert ask(resolver, "http://nowhere.example/?key=hunter2") == ["resolve"]


def test_an_address_in_an_allowed_network_is_connected_to(monkeypatch):
    monkeypatch.setattr(settings, "HANDSHAKE_TIMEOUT", 1)
    monkeypatch.setattr(settings, "ALLOWED_NETWORKS", ["127.0.0.0/8"])
    with listening() as listener:
        failure(http_spec(f"http://127.0.0.1:{listener.port}/mcp"))
        assert listener.connections() > 0


def test_a_name_with_a_public_and_a_private_address_is_blocked(monkeypatch):
    monkeypatch.setattr(settings, "ALLOWED_NETWORKS", [])

    async def both(host, port):
        return ["93.184.215.14", "127.0.0.1"]

    with listening() as listener:
        url = f"http://two.example:{listener.port}/"
        assert ask(both, url) == ["blocked"]
        assert listener.connections() == 0


def test_a_name_that_changes_its_address_is_checked_at_every_connection(monkeypatch):
    monkeypatch.setattr(settings, "ALLOWED_NETWORKS", ["127.0.0.1/32"])
    answers = iter([["127.0.0.1"], ["127.0.0.2"], ["::ffff:127.0.0.2"]])

    async def rebinding(host, port):
        return next(answers)

    with running_http("raw_http") as url:
        port = url.rpartition(":")[2]
        with listening("127.0.0.2", int(port)) as inside:
            url = f"http://rebinding.example:{port}/404"
            assert ask(rebinding, url, url, url) == ["http_status", "blocked", "blocked"]
            assert inside.connections() == 0


def test_the_checked_address_is_the_one_connected_to(monkeypatch):
    monkeypatch.setattr(settings, "ALLOWED_NETWORKS", ["127.0.0.1/32"])
    resolved = []

    async def once(host, port):
        resolved.append(host)
        return ["127.0.0.1"]

    with running_http("raw_http") as url:
        port = url.rpartition(":")[2]
        assert ask(once, f"http://pinned.example:{port}/404") == ["http_status"]
        headers = received_by(url)["requests"][0]["headers"]
    assert resolved == ["pinned.example"]
    assert headers["host"] == f"pinned.example:{port}"


@pytest.mark.parametrize("transport", ["http", "sse"])
@pytest.mark.parametrize("to", ["http://127.0.0.2:{}/", "http://localhost:{}/", "//127.0.0.2:{}/"])
def test_a_redirect_to_another_origin_is_not_followed(transport, to):
    with running_http("raw_http") as url, listening("127.0.0.2") as inside:
        target = to.format(inside.port)
        spec = http_spec(f"{url}/redirect-out?to={target}", transport=transport)
        error = failure(spec)
        assert inside.connections() == 0
        assert len(received_by(url)["requests"]) == 1
    assert error.code == "redirect"


def test_redirects_within_the_origin_are_followed_three_times_at_most():
    with running_http("raw_http") as url:
        assert len(asyncio.run(list_over(http_spec(f"{url}/redirect-in"))).tools) == 1
        before = len(received_by(url)["requests"])
        assert failure(http_spec(f"{url}/redirect-loop", transport="sse")).code == "redirect"
        assert len(received_by(url)["requests"]) - before == 4


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "gopher://example.com/",
        "//example.com/mcp",
        "example.com/mcp",
        "http://user:hunter2@example.com/",
        "http://user@example.com/",
        "https:///mcp",
        "https://example.com:22/",
        "https://example.com:6379/",
        "https://example.com:0/",
        "https://exa%00mple.com/",
        "https://example.com:99999/",
        "",
    ],
)
def test_an_invalid_url_is_rejected_without_connecting(url):
    with pytest.raises(UpstreamError) as caught:
        check_url(url)
    assert (caught.value.code, caught.value.parked) == ("blocked", True)
    assert "hunter2" not in caught.value.message + caught.value.hint


def test_plain_http_needs_permission(monkeypatch):
    check_url("http://example.com/")
    monkeypatch.setattr(settings, "ALLOW_PLAIN_HTTP", False)
    with pytest.raises(UpstreamError, match="plain HTTP"):
        check_url("http://example.com/")
    check_url("https://example.com/")


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
def test_public_addresses_are_allowed(address):
    assert str(check_address(address, [])) == address


def test_an_allowed_network_allows_its_addresses_and_no_others():
    office = [ipaddress.ip_network("10.1.0.0/16")]
    check_address("10.1.2.3", office)
    check_address("::ffff:10.1.2.3", office)
    for other in ("10.2.0.1", "127.0.0.1", "::ffff:10.2.0.1"):
        with pytest.raises(UpstreamError):
            check_address(other, office)


def test_a_client_library_that_cannot_be_guarded_is_not_used():
    with pytest.raises(RuntimeError, match="guarded"):
        upstream_http._guard(SimpleNamespace(_pool=object()), None)


# --- Requests ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("era", "protocol"),
    [
        ("modern", {"mcp-protocol-version", "mcp-method"}),
        ("legacy", {"mcp-protocol-version"}),
    ],
)
def test_only_the_servers_own_headers_and_those_of_the_protocol_are_sent(era, protocol):
    headers = {"Authorization": "Bearer token", "X-Team": "a", "Accept-Encoding": "gzip"}
    with running_http("raw_http") as url:
        asyncio.run(list_over(http_spec(f"{url}/tools?era={era}", headers=headers)))
        listed = received_by(url)["requests"][-1]["headers"]
    assert set(listed) == protocol | {
        "host",
        "accept",
        "accept-encoding",
        "connection",
        "content-type",
        "content-length",
        "user-agent",
        "authorization",
        "x-team",
    }
    assert listed["authorization"] == "Bearer token"
    assert listed["user-agent"] == f"toolcrib/{settings.VERSION}"
    assert listed["accept-encoding"] == "identity"


def test_headers_that_are_not_configured_are_dropped_even_if_a_library_adds_them():
    async def scenario(url):
        async with upstream_http.upstream({"X-Own": "yes"}) as upstream:
            extra = {"Cookie": "a=b", "X-Forwarded-For": "10.0.0.1", "Traceparent": "00-1"}
            await upstream.http.post(f"{url}/404", headers=extra)

    with running_http("raw_http") as url:
        asyncio.run(scenario(url))
        sent = received_by(url)["requests"][0]["headers"]
    assert {"cookie", "x-forwarded-for", "traceparent"}.isdisjoint(sent)
    assert sent["x-own"] == "yes"


def test_cookies_are_not_sent_back():
    with running_http("raw_http") as url:
        asyncio.run(list_over(http_spec(f"{url}/cookies")))
        requests = received_by(url)["requests"]
    assert len(requests) >= 2
    assert all("cookie" not in request["headers"] for request in requests)


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    with listening() as proxy, running_http("raw_http") as url:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        asyncio.run(list_over(http_spec(f"{url}/tools")))
        assert proxy.connections() == 0
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\nb", "a\0b", "snow ☃"])
def test_an_invalid_header_is_rejected_without_being_quoted(value):
    with listening() as listener:
        error = failure(
            http_spec(f"http://127.0.0.1:{listener.port}/", headers={"X-Key": f"hunter2{value}"})
        )
        assert listener.connections() == 0
    assert error.parked
    assert "hunter2" not in error.message + error.hint


# --- Responses --------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["list/gzip", "gzip"])
def test_a_compressed_response_is_decoded(what):
    with running_http("raw_http") as url:
        assert len(asyncio.run(list_over(http_spec(f"{url}/{what}"))).tools) == 1


def test_the_size_limit_applies_to_one_event_not_to_the_stream(monkeypatch):
    monkeypatch.setattr(settings, "MAX_MESSAGE_BYTES", 4096)
    with running_http("raw_http") as url:
        listing = asyncio.run(list_over(http_spec(f"{url}/list/many-events")))
    assert len(listing.tools) == 1


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
@pytest.mark.parametrize("split", [1, 2, 3, 7, 1000])
def test_event_boundaries_are_found_for_any_chunk_size(end, split):
    stream = (b"data: " + b"x" * 50 + end) * 20
    size, tail, largest = 0, b"", 0
    for start in range(0, len(stream), split):
        chunk = stream[start : start + split]
        size, tail = response_body._bytes_since_last_event(size + len(chunk), tail, chunk)
        largest = max(largest, size)
    assert size == 0
    assert largest <= 56 + len(end)


def test_an_event_without_an_end_is_counted_in_full():
    size, tail = 0, b""
    for _ in range(100):
        size, tail = response_body._bytes_since_last_event(size + 10, tail, b"data: xxx\n")
    assert size == 1000


def test_a_connection_is_usable_after_a_response_that_was_too_large():
    async def scenario(url):
        async with upstream_http.upstream({}) as upstream:
            trace = RequestTrace()
            current_trace.set(trace)
            with pytest.raises(response_body.BodyError):
                await upstream.http.post(f"{url}/big-json", json={})
            assert trace.error.code == "too_large"
            await upstream.http.post(f"{url}/404", json={})
            assert trace.error.code == "http_status"

    with running_http("raw_http") as url:
        asyncio.run(scenario(url))


# --- TLS --------------------------------------------------------------------------------------


def certificate(folder, *, name="localhost", days=1, signed_by=None, authority=False):
    """Write a certificate and its key; return their paths, and the issuer for others."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issuer, signing_key = signed_by or (subject, key)
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=10))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(signing_key, hashes.SHA256())
    )
    cert, key_file = folder / f"{name}{days}.pem", folder / f"{name}{days}.key"
    cert.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return (str(cert), str(key_file)), (subject, key)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"days": -1}, "expired"),
        ({"name": "other.example"}, "another host name"),
        ({"signed_by": None}, "self-signed"),
        ({}, None),
    ],
)
def test_certificates_are_verified_and_the_reason_is_reported(
    tmp_path, monkeypatch, options, words
):
    ca, signer = certificate(tmp_path, name="ca", authority=True)
    monkeypatch.setenv("SSL_CERT_FILE", ca[0])
    files, _ = certificate(tmp_path, **{"signed_by": signer, **options})
    with running_http("raw_http", "--tls", *files) as url:
        spec = http_spec(url.replace("127.0.0.1", "localhost") + "/tools")
        if words is None:
            assert len(asyncio.run(list_over(spec)).tools) == 1
            return
        error = failure(spec)
    assert (error.code, error.parked) == ("tls", True)
    assert words in error.message


def test_a_port_without_tls_is_reported():
    with running_http("raw_http") as url:
        error = failure(http_spec(url.replace("http://", "https://") + "/tools"))
    assert error.code == "tls"


# --- Concurrent requests ----------------------------------------------------------------------


def test_an_error_is_assigned_to_its_own_request():
    async def post(upstream, url):
        trace = RequestTrace()
        current_trace.set(trace)
        await upstream.http.post(url, json={})
        return trace.error and trace.error.message

    async def scenario(url):
        async with upstream_http.upstream({}) as upstream:
            return await asyncio.gather(
                *(asyncio.create_task(post(upstream, f"{url}/{code}")) for code in range(500, 520))
            )

    with running_http("raw_http") as url:
        messages = asyncio.run(scenario(url))
    assert messages == [f"The server answered HTTP {code}." for code in range(500, 520)]


def test_any_transport_of_the_sdk_can_be_used():
    from mcp.client.streamable_http import streamable_http_client

    async def scenario(url):
        async with (
            httpx2.AsyncClient() as http,
            run_session(streamable_http_client(url, http_client=http)) as connection,
        ):
            return await connection.list_tools()

    with running_http("healthy") as url:
        assert len(asyncio.run(scenario(url)).tools) == 7


# --- Interim responses ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 40])
def test_endless_interim_responses_end_the_connection(size):
    """The server sends them in one piece or in many."""
    interim = b"HTTP/1.1 100 Continue\r\n\r\n" * size
    sent = []

    async def send_interim(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        with suppress(ConnectionError):
            while len(sent) < 1_000_000:
                writer.write(interim)
                sent.append(size)
                await writer.drain()
        writer.close()

    async def scenario():
        server = await asyncio.start_server(send_interim, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await list_over(http_spec(f"http://127.0.0.1:{port}/mcp"))

    with pytest.raises(UpstreamError, match="interim responses") as caught:
        asyncio.run(scenario())
    assert caught.value.code == "protocol"
    assert len(sent) < 1_000_000


def test_a_few_interim_responses_are_accepted_and_a_body_may_quote_them():
    quoted = json.dumps({"text": "HTTP/1.1 100 Continue\r\n\r\n" * 50}).encode()
    final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 20)
        writer.write(final % (len(quoted), quoted))
        await writer.drain()
        writer.close()

    async def scenario():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server, upstream_http.upstream({}) as upstream:
            port = server.sockets[0].getsockname()[1]
            return (await upstream.http.post(f"http://127.0.0.1:{port}/")).content

    assert asyncio.run(scenario()) == quoted
