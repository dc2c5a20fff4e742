"""Callers for bench/dispatch.py: the SDK's client, and a lean one for REST.

The REST caller is plain asyncio streams, written for this: it costs a tenth of a millisecond a
call, so that what is measured is Toolcrib. The others are called with the SDK's own client, which
is what an agent would use. A caller is `call(number, text)`: callers of different numbers call at
the same time.
"""

import asyncio
import json
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import lru_cache
from urllib.parse import urlsplit

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

LINE = 2**23  # bytes of an answer that are read at once
GOODBYE = 5.0  # seconds for a connection to be closed in good order


@asynccontextmanager
async def sdk(target, tool, key=None):
    """Give a caller over one connection of the SDK's client, to a URL or to a command's stdio."""
    async with AsyncExitStack() as stack:
        if isinstance(target, list):
            transport = StdioServerParameters(command=target[0], args=target[1:])
        elif key:
            http = await stack.enter_async_context(
                httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=60)
            )
            transport = streamable_http_client(target, http_client=http)
        else:
            transport = target
        client = await stack.enter_async_context(Client(transport))

        async def call(_, text):
            result = await client.call_tool(tool, {"text": text})
            said = result.content[0].text
            assert said == text, said[:300]

        yield call


@asynccontextmanager
async def rest(url, key, session, tool):
    """Give a caller that has a connection for each number."""
    at = urlsplit(url)
    head = (
        f"POST /api/v1/sessions/{session}/call HTTP/1.1\r\nhost: {at.netloc}\r\n"
        f"authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    ).encode()
    lines = {}

    @lru_cache(maxsize=4)
    def written(text):
        body = json.dumps({"tool_name": tool, "arguments": {"text": text}}).encode()
        expected = json.dumps({"text": text, "type": "text"}, separators=(",", ":")).encode()
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body), expected

    async def call(caller, text):
        request, expected = written(text)
        if caller not in lines or lines[caller][0].at_eof():
            lines[caller] = await asyncio.open_connection(at.hostname, at.port, limit=LINE)
        reader, writer = lines[caller]
        writer.write(request)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length: " in answer:
            length = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            told = await reader.readexactly(length)
        else:
            told = await _chunks(reader)
        assert int(answer[9:12]) == 200, told[:300]
        assert expected in told, told[:300]

    try:
        yield call
    finally:
        for _, writer in lines.values():
            writer.close()


async def _chunks(reader):
    told = b""
    while size := int(await reader.readline(), 16):
        told += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return told


class Held:
    """A connection that is kept from round to round, opened and closed by a task of its own."""

    def __init__(self, make):
        self._make = make
        self._task = None

    async def call(self):
        """Return the caller, connecting where there is no connection."""
        if self._task is None or self._task.done():
            self._end, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._own(ready))
            await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                self._task.result()  # raises what went wrong
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
        done, _ = await asyncio.wait({self._task}, timeout=GOODBYE)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=GOODBYE)
        if self._task.done():
            with suppress(asyncio.CancelledError):
                self._task.exception()  # seen
        self._task = None


async def measure(call, text, callers, seconds, least):
    """Have so many callers call over and over; return each call's seconds, and the time in all.

    They go on for the time given, and each makes so many calls at least.
    """
    took = []
    ends = time.perf_counter() + seconds

    async def run(caller):
        made = 0
        while (began := time.perf_counter()) < ends or made < least:
            await call(caller, text)
            took.append(time.perf_counter() - began)
            made += 1

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for caller in range(callers):
            group.create_task(run(caller))
    return took, time.perf_counter() - began
