"""An HTTP server for messages written by hand: it reads requests, a function answers them."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

Answering = Callable[[str, str, dict[str, Any], asyncio.StreamWriter], Awaitable[bool]]


def say(writer: asyncio.StreamWriter, text: str | None, status: int = 200) -> bool:
    """Write a JSON answer, or 202 for none. The connection goes on."""
    body = (text or "").encode()
    writer.write(
        f"HTTP/1.1 {202 if text is None else status} Said\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return True


async def serve(answering: Answering) -> None:
    """Call `answering(method, path, message, writer)` for each request; it tells whether to go on.

    Says the port in the first line of stdout.
    """

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            going = True
            while going:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                fields = dict(line.lower().split(": ", 1) for line in head[1:-2])
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                going = await answering(method, path, json.loads(body) if body else {}, writer)
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
