"""Clients that read nothing are disconnected; slow readers are not."""

import asyncio
import socket
from contextlib import asynccontextmanager

import uvicorn

from tests.support.waiting import wait_for
from toolcrib.http.http_protocol import TimeoutHttpProtocol

SIZE = 32 * 1024 * 1024  # more than any socket buffer holds


async def send_large_response(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(SIZE)})


@asynccontextmanager
async def unread_response(connection="keep-alive"):
    """Yield a server, its side of a connection, and a client that has not read the response."""
    config = uvicorn.Config(
        send_large_response, http=TimeoutHttpProtocol, lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.to_thread(wait_for, lambda: server.started)
    client = socket.create_connection(listener.getsockname())
    try:
        client.sendall(f"GET / HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\n\r\n".encode())
        await asyncio.to_thread(wait_for, lambda: has_unread_response(server))
        yield server, next(iter(server.server_state.connections)), client
    finally:
        client.close()
        server.should_exit = server.force_exit = True
        await serving


def has_unread_response(server):
    return any(line._read_timer is not None for line in server.server_state.connections)


def test_a_client_that_reads_nothing_is_disconnected(settings):
    settings.BODY_TIMEOUT = 1

    async def scenario(connection):
        async with unread_response(connection) as (server, line, _):
            await asyncio.to_thread(wait_for, lambda: not server.server_state.connections)
            return line._read_timer

    for connection in ("keep-alive", "close"):
        assert asyncio.run(scenario(connection)) is None


def test_a_client_that_reads_slowly_stays_connected(settings):
    settings.BODY_TIMEOUT = 600

    async def scenario():
        async with unread_response() as (server, line, client):
            unread = line.transport.get_write_buffer_size()
            line._check_read_progress(unread + 1)  # one byte was read since
            assert line._read_timer is not None
            assert not line.transport.is_closing()
            received = await asyncio.to_thread(read, client)
            line._check_read_progress(unread)
            assert (line._read_timer, len(server.server_state.connections)) == (None, 1)
            return received

    assert asyncio.run(scenario()) >= SIZE


def read(client):
    """Read a complete response and return its size."""
    received = 0
    while received < SIZE:
        received += len(client.recv(2**20))
    return received
