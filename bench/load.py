"""Callers for bench/dispatch.py: the SDK's client, and a lean one for REST.

The REST caller is plain asyncio streams, written for this: it costs a tenth of a millisecond a
call, so that what is measured is Toolcrib. The others are called with the SDK's own client, which
is what an agent would use.
"""

import asyncio
import json
import time
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client


@asynccontextmanager
async def sdk(target, tool, text, key=None):
    """Give a function that calls the tool once, over one connection of the SDK's client."""
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

        async def call(_):
            result = await client.call_tool(tool, {"text": text})
            assert result.content[0].text == text

        yield call


@asynccontextmanager
async def rest(url, key, session, tool, text):
    """Give a function that calls the tool once; each caller has a connection of its own."""
    at = urlsplit(url)
    body = json.dumps({"tool_name": tool, "arguments": {"text": text}}).encode()
    head = (
        f"POST /api/v1/sessions/{session}/call HTTP/1.1\r\nhost: {at.netloc}\r\n"
        f"authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()
    lines = {}
    expected = json.dumps({"text": text, "type": "text"}, separators=(",", ":")).encode()

    async def call(caller):
        if caller not in lines:
            lines[caller] = await asyncio.open_connection(at.hostname, at.port, limit=2**22)
        reader, writer = lines[caller]
        writer.write(head + body)
        status, length = 0, None
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(answer[9:12])
        if b"content-length: " in answer:
            length = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            told = await reader.readexactly(length)
        else:
            told = await _chunks(reader)
        assert status == 200, told[:500]
        assert expected in told, told[:500]

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


async def measure(call, callers, seconds):
    """Have so many callers call over and over; return each call's seconds, and the time in all."""
    took = []
    for caller in range(callers):  # connected, and known
        await call(caller)
    ends = time.perf_counter() + seconds

    async def run(caller):
        while (began := time.perf_counter()) < ends:
            await call(caller)
            took.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(run(caller) for caller in range(callers)))
    return took, time.perf_counter() - began
