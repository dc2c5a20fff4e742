"""HTTP server on the event loop of the test with scripted responses to `tools/call`.

A function of the test writes the bytes of each response to `tools/call`; all other messages get a
valid response, in either protocol era.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.support.upstreams.answers import ONE_TOOL, respond

Write = Callable[[bytes], Awaitable[None]]
DONE_RESULT = '{"content": [{"type": "text", "text": "done"}], "resultType": "complete"}'


class ReceivedRequest:
    """One received request, with the writer for its response."""

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

    async def wait_for_disconnect(self) -> None:
        """Wait, without a response, until the client disconnects."""
        await self.reader.read()

    def result(self, text: str = DONE_RESULT, **fields: Any) -> bytes:
        """Return a JSON-RPC response to this request; `id` overrides its id."""
        request_id = json.dumps(fields.get("id", self.body.get("id")))
        return f'{{"jsonrpc": "2.0", "id": {request_id}, "result": {text}}}'.encode()


Script = Callable[[ReceivedRequest], Awaitable[bool | None]]


def response_head(status: str = "200 OK", *lines: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"HTTP/{version} {status}", *lines, "", ""]).encode()


def full_response(body: bytes, *lines: str, status: str = "200 OK", version: str = "1.1") -> bytes:
    """Return a valid response with a Content-Length."""
    kind = () if any(line.lower().startswith("content-type") for line in lines) else (JSON,)
    sized = response_head(status, *kind, *lines, f"Content-Length: {len(body)}", version=version)
    return sized + body


JSON = "Content-Type: application/json"
EVENT_STREAM = "Content-Type: text/event-stream"


class ScriptedServer:
    """The server. `calls` are the received tools/call, `other_requests` all others."""

    def __init__(self, listener: socket.socket, script: Script, *, era: str) -> None:
        self.listener, self.script, self.era = listener, script, era
        self.calls: list[ReceivedRequest] = []
        self.other_requests: list[ReceivedRequest] = []
        self.on_get: Script | None = None  # handles GET
        self.on_cancelled: Script | None = None  # handles notifications/cancelled
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
        request = ReceivedRequest(method, headers, json.loads(raw) if raw else {}, reader, writer)
        if method == "POST" and request.body.get("method") == "tools/call":
            self.calls.append(request)
            return bool(await self.script(request))
        self.other_requests.append(request)
        if method == "GET" and self.on_get is not None:
            return bool(await self.on_get(request))
        if (
            self.on_cancelled is not None
            and request.body.get("method") == "notifications/cancelled"
        ):
            return bool(await self.on_cancelled(request))
        if method != "POST":
            await request.write(full_response(b"", status="405 No"))
            return True
        await request.write(self._valid_response(request.body))
        return True

    def _valid_response(self, message: Any) -> bytes:
        if self.era == "legacy" and message.get("method") == "server/discover":
            return full_response(b"unknown", "Content-Type: text/plain", status="400 No")
        text = respond(message, ONE_TOOL, self.era) if "method" in message else None
        if text is None:
            return full_response(b"", status="202 Accepted")
        session = ("Mcp-Session-Id: s1",) if message["method"] == "initialize" else ()
        return full_response(text.encode(), *session)
