"""Idle connections of strangers are closed above a limit; known clients and new ones are served."""

import asyncio
import resource
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn

from tests.support.waiting import wait_for
from toolcrib.http import http_protocol
from toolcrib.http.client_address import limited_address
from toolcrib.http.http_protocol import ConnectionLimits, TimeoutHttpProtocol


async def app(scope, receive, send):
    """Answer at once; `/known` as if a key had been checked, `/slow` when it is told to."""
    if scope["path"] == "/known":
        scope["state"]["client"].is_known = True
    if scope["path"] == "/slow":
        await release.wait()
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


release = asyncio.Event()


class Clients:
    """Connections to a server, made one after another, and requests on them."""

    def __init__(self, server, address):
        self.server, self._address, self._opened = server, address, []

    def connect(self):
        client = socket.create_connection(self._address)
        self._opened.append(client)
        client.settimeout(30)
        return client

    async def open(self):
        before = self.server.accepted
        client = self.connect()
        await until(lambda: self.server.accepted > before)
        return client

    async def request(self, client, path="/"):
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return await asyncio.to_thread(client.recv, 4096)

    def close(self):
        for client in self._opened:
            client.close()


async def until(condition):
    await asyncio.to_thread(wait_for, condition)


@asynccontextmanager
async def serving(monkeypatch, *, total, per_address):
    global release
    release = asyncio.Event()
    limits = ConnectionLimits(total, per_address)
    monkeypatch.setattr(http_protocol, "client_connections", lambda: limits)
    server = uvicorn.Server(
        uvicorn.Config(app, http=TimeoutHttpProtocol, lifespan="off", log_config=None)
    )
    server.accepted = 0

    class Counting(TimeoutHttpProtocol):
        def connection_made(self, transport):
            super().connection_made(transport)
            server.accepted += 1

    server.config.http = Counting
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    clients = Clients(server, listener.getsockname())
    try:
        yield clients, limits
    finally:
        release.set()
        clients.close()
        server.should_exit = server.force_exit = True
        await task


def is_closed(client):
    with suppress(ConnectionResetError):
        return client.recv(1) == b""
    return True


def test_the_oldest_idle_connection_of_an_address_makes_room_for_a_new_one(monkeypatch):
    async def scenario():
        async with serving(monkeypatch, total=50, per_address=3) as (clients, limits):
            idle = [await clients.open() for _ in range(5)]
            assert len(limits) == 3
            assert [await asyncio.to_thread(is_closed, client) for client in idle[:2]] == [True] * 2
            assert b" 204 " in await clients.request(idle[2])
            assert b" 204 " in await clients.request(await clients.open())

    asyncio.run(scenario())


def test_an_incomplete_request_is_idle_and_a_complete_one_is_not(monkeypatch):
    async def scenario():
        async with serving(monkeypatch, total=50, per_address=2) as (clients, limits):
            working = await clients.open()
            answer = asyncio.create_task(clients.request(working, "/slow"))
            await until(lambda: limits._waiting_count == 0)
            slow_body = await clients.open()
            slow_body.sendall(b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1")
            await clients.open()
            await clients.open()
            assert await asyncio.to_thread(is_closed, slow_body)
            release.set()
            assert b" 204 " in await answer

    asyncio.run(scenario())


def test_known_clients_keep_their_connections_among_strangers(monkeypatch):
    async def scenario():
        async with serving(monkeypatch, total=12, per_address=50) as (clients, limits):
            known = [await clients.open() for _ in range(4)]
            for client in known:
                assert b" 204 " in await clients.request(client, "/known")
            for _ in range(40):
                await clients.open()
            assert len(limits) == 4 + limits.strangers == 12
            for client in known:
                assert b" 204 " in await clients.request(client)
            assert b" 204 " in await clients.request(await clients.open())

    asyncio.run(scenario())


def test_a_known_client_that_opens_too_many_loses_its_oldest_idle_one(monkeypatch):
    async def scenario():
        async with serving(monkeypatch, total=4, per_address=4) as (clients, limits):
            known = []
            for _ in range(6):
                known.append(await clients.open())
                assert b" 204 " in await clients.request(known[-1], "/known")
            assert len(limits) == 4
            assert await asyncio.to_thread(is_closed, known[0])
            assert b" 204 " in await clients.request(known[-1])

    asyncio.run(scenario())


def test_a_connection_is_refused_with_a_reason_while_all_are_at_work(monkeypatch):
    async def scenario():
        async with serving(monkeypatch, total=3, per_address=3) as (clients, limits):
            answers = []
            for _ in range(3):
                client = await clients.open()
                answers.append(asyncio.create_task(clients.request(client, "/slow")))
                await until(lambda: limits._waiting_count == 0)
            refused = await asyncio.to_thread(clients.connect().recv, 4096)
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 2" in refused
            assert b"Retry in a moment." in refused
            release.set()
            assert all([b" 204 " in await answer for answer in answers])

    asyncio.run(scenario())


def test_a_trusted_proxy_is_not_limited_as_an_address(monkeypatch, settings):
    settings.PROXIES = ["127.0.0.0/8"]

    async def scenario():
        async with serving(monkeypatch, total=50, per_address=2) as (clients, limits):
            for _ in range(6):
                await clients.open()
            return len(limits)

    assert asyncio.run(scenario()) == 6


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("", ""),
    ],
)
def test_addresses_of_one_ipv6_network_are_counted_together(address, counted):
    assert limited_address(address) == counted


def test_the_limit_of_open_files_is_raised_and_leaves_a_quarter_for_other_uses():
    script = (
        "import django; django.setup()\n"
        "from toolcrib.http import http_protocol\n"
        "http_protocol.raise_open_files_limit()\n"
        "print(http_protocol.client_connections().total)"
    )

    def total(hard):
        return subprocess.run(
            [sys.executable, "-c", script],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard)),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    assert [total(200), total(800)] == ["150", "600"]
