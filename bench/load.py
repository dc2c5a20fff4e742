"""Load generators for bench/dispatch.py: the SDK's client, httpx, and a minimal HTTP client.

The minimal REST caller uses plain asyncio streams: it costs 0.1 ms per call, so that the figures
are those of Toolcrib. MCP callers use the SDK's own client, as an agent would. A caller is a
function `call(number, text)`; callers with different numbers run concurrently.
"""

import asyncio
import itertools
import json
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import lru_cache
from urllib.parse import urlsplit

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

READ_LIMIT = 2**23  # bytes
CLOSE_TIMEOUT = 5.0  # seconds
MODERN, LEGACY = "2026-07-28", "legacy"


def echo_arguments(text, _):
    return {"text": text}


def dispatch_arguments(name):
    return lambda text, _: {"name": name, "arguments": {"text": text}}


def check_echo(content, text):
    assert content == text, content[:300]


@asynccontextmanager
async def sdk_caller(
    target, tool, key=None, mode=MODERN, arguments=echo_arguments, check=check_echo
):
    """Yield a caller over one SDK client, connected to a URL or to a command over stdio.

    `arguments(text, number)` makes the arguments of a call, `check(content, text)` its result.
    """
    async with AsyncExitStack() as stack:
        if isinstance(target, list):
            transport = StdioServerParameters(command=target[0], args=target[1:])
        else:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=60))
            transport = streamable_http_client(target, http_client=http)
        client = await stack.enter_async_context(Client(transport, mode=mode))
        await client.list_tools()  # otherwise the client lists them before its first call
        numbers = itertools.count()

        async def call(_, text):
            result = await client.call_tool(tool, arguments(text, next(numbers)))
            assert not result.is_error, result.content[0].text[:300]
            check(result.content[0].text, text)

        yield call


@asynccontextmanager
async def httpx_caller(url, key, session, tool):
    """Yield a caller over one httpx client, as most programs would use the REST API."""
    path = f"{url}/api/v1/sessions/{session}/call"
    headers = {"Authorization": f"Bearer {key}"}
    limits = httpx2.Limits(max_connections=256, max_keepalive_connections=256)
    async with httpx2.AsyncClient(headers=headers, timeout=60, limits=limits) as http:

        async def call(_, text):
            response = await http.post(path, json={"tool_name": tool, "arguments": {"text": text}})
            assert response.status_code == 200, response.text[:300]
            check_echo(response.json()["content"][0]["text"], text)

        yield call


@asynccontextmanager
async def rest_caller(url, key, session, tool):
    """Yield a caller with one connection per number."""
    address = urlsplit(url)
    head = (
        f"POST /api/v1/sessions/{session}/call HTTP/1.1\r\nhost: {address.netloc}\r\n"
        f"authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    ).encode()
    connections = {}

    @lru_cache(maxsize=4)
    def request_bytes(text):
        body = json.dumps({"tool_name": tool, "arguments": {"text": text}}).encode()
        expected = json.dumps({"text": text, "type": "text"}, separators=(",", ":")).encode()
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body), expected

    async def call(caller, text):
        request, expected = request_bytes(text)
        if caller not in connections or connections[caller][0].at_eof():
            connections[caller] = await asyncio.open_connection(
                address.hostname, address.port, limit=READ_LIMIT
            )
        reader, writer = connections[caller]
        writer.write(request)
        response_head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length: " in response_head:
            length = int(response_head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
        else:
            body = await _read_chunks(reader)
        assert int(response_head[9:12]) == 200, body[:300]
        assert expected in body, body[:300]

    try:
        yield call
    finally:
        for _, writer in connections.values():
            writer.close()


async def _read_chunks(reader):
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


class PersistentCaller:
    """A caller whose connection is kept between rounds, opened and closed by its own task."""

    def __init__(self, make):
        self._make = make
        self._task = None

    async def call(self):
        """Return the caller; connect if there is no connection."""
        if self._task is None or self._task.done():
            self._end, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._own(ready))
            await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                self._task.result()  # raises the connection error
            self._call = ready.result()
        return self._call

    async def _own(self, ready):
        async with self._make() as call:
            ready.set_result(call)
            await self._end.wait()

    async def close(self):
        if self._task is None:
            return
        self._end.set()
        done, _ = await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT)
        if self._task.done():
            with suppress(asyncio.CancelledError):
                self._task.exception()  # retrieved, so that asyncio does not log it
        self._task = None


async def time_calls(call, text, callers, seconds, least):
    """Run concurrent callers in a loop; return the seconds of each call, and the total time.

    Callers stop after `seconds`; each makes at least `least` calls.
    """
    durations = []
    ends = time.perf_counter() + seconds

    async def run(caller):
        calls = 0
        while (started := time.perf_counter()) < ends or calls < least:
            await call(caller, text)
            durations.append(time.perf_counter() - started)
            calls += 1

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for caller in range(callers):
            group.create_task(run(caller))
    return durations, time.perf_counter() - started
