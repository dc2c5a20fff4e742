"""Minimal HTTP server: parses requests and passes them to a handler function."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

Handler = Callable[[str, str, dict[str, Any], asyncio.StreamWriter], Awaitable[bool]]


def write_response(writer: asyncio.StreamWriter, text: str | None, status: int = 200) -> bool:
    """Write a JSON response, or 202 for None; return True: the connection stays open."""
    body = (text or "").encode()
    writer.write(
        f"HTTP/1.1 {202 if text is None else status} Status\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return True


async def serve(handler: Handler) -> None:
    """Call `handler(method, path, message, writer)` for each request; False closes the connection.

    The first line of stdout contains the port.
    """

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            keep_open = True
            while keep_open:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                fields = dict(line.lower().split(": ", 1) for line in head[1:-2])
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                keep_open = await handler(method, path, json.loads(body) if body else {}, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    sys.stdout.write(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()
