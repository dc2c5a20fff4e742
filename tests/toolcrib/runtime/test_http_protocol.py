"""Who does not take their answer is hung up on; who takes it slowly is waited for."""

import asyncio
import socket
from contextlib import asynccontextmanager

import uvicorn

from tests.support.waiting import wait_for
from toolcrib.runtime.http_protocol import TimeoutHttpProtocol

SIZE = 32 * 1024 * 1024  # more than any socket holds by itself


async def large(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(SIZE)})


@asynccontextmanager
async def asked(connection="keep-alive"):
    """A server and a caller who asked and reads nothing; yields the connection as it sees it."""
    config = uvicorn.Config(large, http=TimeoutHttpProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.to_thread(wait_for, lambda: server.started)
    caller = socket.create_connection(listener.getsockname())
    try:
        caller.sendall(f"GET / HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\n\r\n".encode())
        await asyncio.to_thread(wait_for, lambda: waiting(server))
        yield server, next(iter(server.server_state.connections)), caller
    finally:
        caller.close()
        server.should_exit = server.force_exit = True
        await serving


def waiting(server):
    return any(one._unread is not None for one in server.server_state.connections)


def test_an_answer_that_nobody_takes_is_thrown_away(settings):
    settings.BODY_TIMEOUT = 1

    async def scenario(connection):
        async with asked(connection) as (server, line, _):
            await asyncio.to_thread(wait_for, lambda: not server.server_state.connections)
            return line._unread

    for connection in ("keep-alive", "close"):
        assert asyncio.run(scenario(connection)) is None


def test_an_answer_of_which_some_was_taken_waits_on(settings):
    settings.BODY_TIMEOUT = 600

    async def scenario():
        async with asked() as (server, line, caller):
            left = line.transport.get_write_buffer_size()
            line._look(left + 1)  # a byte of it was taken since
            assert line._unread is not None
            assert not line.transport.is_closing()
            got = await asyncio.to_thread(read, caller)
            line._look(left)
            assert (line._unread, len(server.server_state.connections)) == (None, 1)
            return got

    assert asyncio.run(scenario()) >= SIZE


def read(caller):
    """Take all of an answer."""
    got = 0
    while got < SIZE:
        got += len(caller.recv(2**20))
    return got
