"""Clients that read nothing are disconnected, slow readers are not; heads go with their bodies."""

import asyncio
import socket
from contextlib import asynccontextmanager

import uvicorn

from tests.support.waiting import wait_for
from toolcrib.http.http_protocol import ResponseTransport, TimeoutHttpProtocol

SIZE = 32 * 1024 * 1024  # more than any socket buffer holds


async def send_large_response(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(SIZE)})


@asynccontextmanager
async def serving(app):
    """Yield a server of an ASGI application, and a client that is connected to it."""
    config = uvicorn.Config(app, http=TimeoutHttpProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.to_thread(wait_for, lambda: server.started)
    client = socket.create_connection(listener.getsockname())
    try:
        yield server, client
    finally:
        client.close()
        server.should_exit = server.force_exit = True
        await serving


@asynccontextmanager
async def unread_response(connection="keep-alive"):
    """Yield a server, its side of a connection, and a client that has not read the response."""
    async with serving(send_large_response) as (server, client):
        client.sendall(f"GET / HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\n\r\n".encode())
        await asyncio.to_thread(wait_for, lambda: has_unread_response(server))
        yield server, next(iter(server.server_state.connections)), client


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


class WritesTransport(asyncio.Transport):
    """Records what reaches the operating system together."""

    def __init__(self):
        super().__init__()
        self.writes, self.closed = [], False

    def write(self, data):
        assert not self.closed
        self.writes.append(data)

    def writelines(self, parts):
        self.write(b"".join(parts))

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True


def respond(*steps):
    """Return what a response writes; None among its steps is a turn of the event loop."""

    async def scenario():
        transport = WritesTransport()
        response = ResponseTransport(transport, asyncio.get_running_loop())
        for step in steps:
            if step is None:
                await asyncio.sleep(0)
            elif step == "close":
                response.close()
            else:
                response.write(step)
        return transport.writes

    return asyncio.run(scenario())


def test_the_head_of_a_response_is_sent_with_its_body():
    assert respond(b"head ", b"body") == [b"head body"]
    assert respond(b"head ", b"one ", b"two") == [b"head one ", b"two"]


def test_a_head_without_a_body_is_sent_at_once():
    """For example that of an event stream, or of a response to HEAD."""
    assert respond(b"head ", None, b"event") == [b"head ", b"event"]
    assert respond(b"head ", "close") == [b"head "]
    assert respond(b"head ", "close", None) == [b"head "]


def test_a_client_that_waits_for_permission_to_send_gets_it_before_the_head():
    permission = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert respond(permission, b"head ", b"body") == [permission, b"head body"]


def test_a_client_receives_head_and_body_together():
    async def small(scope, receive, send):
        await send({"type": "http.response.start", "status": 200,
                    "headers": [(b"content-length", b"4")]})  # fmt: skip
        await send({"type": "http.response.body", "body": b"body"})

    async def scenario():
        async with serving(small) as (_, client):
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            return await asyncio.to_thread(client.recv, 2**16)

    assert asyncio.run(scenario()).endswith(b"\r\n\r\nbody")
