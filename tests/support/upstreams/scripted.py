"""An HTTP server on the test's own loop that shakes hands properly and calls by a script.

What answers a `tools/call` is a function of the test that writes the very bytes; all else is
answered as it should be, in either era.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.support.upstreams.answers import ONE_TOOL, answer

Write = Callable[[bytes], Awaitable[None]]
GOOD = '{"content": [{"type": "text", "text": "done"}], "resultType": "complete"}'


class Asked:
    """One request as it came in, and where its answer is written to."""

    def __init__(
        self,
        method: str,
        headers: dict[str, str],
        body: Any,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.method, self.headers, self.body = method, headers, body
        self.reader, self.writer = reader, writer
        self.connection: object = writer

    async def write(self, raw: bytes) -> None:
        self.writer.write(raw)
        await self.writer.drain()

    async def hung_up(self) -> None:
        """Wait, without an answer, until the client is gone."""
        await self.reader.read()

    def result(self, text: str = GOOD, **fields: Any) -> bytes:
        """A JSON-RPC answer to this; `id` may be another."""
        asked = json.dumps(fields.get("id", self.body.get("id")))
        return f'{{"jsonrpc": "2.0", "id": {asked}, "result": {text}}}'.encode()


Script = Callable[[Asked], Awaitable[bool | None]]


def head(status: str = "200 OK", *lines: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"HTTP/{version} {status}", *lines, "", ""]).encode()


def whole(body: bytes, *lines: str, status: str = "200 OK", version: str = "1.1") -> bytes:
    """A proper answer with a length."""
    kind = () if any(line.lower().startswith("content-type") for line in lines) else (JSON,)
    sized = head(status, *kind, *lines, f"Content-Length: {len(body)}", version=version)
    return sized + body


JSON = "Content-Type: application/json"
EVENTS = "Content-Type: text/event-stream"


class Scripted:
    """The server. `calls` are the tools/call it got, `others` what else was posted or asked."""

    def __init__(self, listener: socket.socket, script: Script, *, era: str) -> None:
        self.listener, self.script, self.era = listener, script, era
        self.calls: list[Asked] = []
        self.others: list[Asked] = []
        self.streams: Script | None = None  # for GET
        self.notices: Script | None = None  # for notifications/cancelled
        self.connections = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._connected, sock=self.listener)
        try:
            yield
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method = lines[0].split(" ")[0]
        headers = {}
        for line in lines[1:-2]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        asked = Asked(method, headers, json.loads(raw) if raw else {}, reader, writer)
        if method == "POST" and asked.body.get("method") == "tools/call":
            self.calls.append(asked)
            return bool(await self.script(asked))
        self.others.append(asked)
        if method == "GET" and self.streams is not None:
            return bool(await self.streams(asked))
        if self.notices is not None and asked.body.get("method") == "notifications/cancelled":
            return bool(await self.notices(asked))
        if method != "POST":
            await asked.write(whole(b"", status="405 No"))
            return True
        await asked.write(self._ordinary(asked.body))
        return True

    def _ordinary(self, message: Any) -> bytes:
        if self.era == "legacy" and message.get("method") == "server/discover":
            return whole(b"unknown", "Content-Type: text/plain", status="400 No")
        text = answer(message, ONE_TOOL, self.era) if "method" in message else None
        if text is None:
            return whole(b"", status="202 Accepted")
        session = ("Mcp-Session-Id: s1",) if message["method"] == "initialize" else ()
        return whole(text.encode(), *session)
