"""Server with oversized responses, without the SDK; the tool name selects the form.

python -m tests.support.upstreams.heavy [--http] [--megabytes 50]; stdio by default.

ping   responds normally
json   a JSON body of that size without Content-Length
told   the same with a Content-Length
sse    one event of that size
bomb   a gzip body of that size, which decompresses to a thousand times as much
line   over stdio, one line of that size
"""

import argparse
import asyncio
import json
import sys
import zlib
from typing import Any

from tests.support.upstreams.answers import respond
from tests.support.upstreams.by_hand import serve, write_response

NAMES = ("ping", "json", "told", "sse", "bomb", "line")
TOOLS = json.dumps({"tools": [{"name": n, "inputSchema": {"type": "object"}} for n in NAMES]})
BLOCK = b"x" * 65536
MEGABYTE = 2**20
GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


def zeros() -> bytes:
    """Return 16 MB of zeros as a block of a deflate stream that can be repeated."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(b"\0" * 16 * MEGABYTE) + packer.flush(zlib.Z_FULL_FLUSH)


def result_frame(message: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return the bytes before and after the text of a result."""
    head = f'{{"jsonrpc": "2.0", "id": {json.dumps(message["id"])}, "result": '
    head += '{"resultType": "complete", "content": [{"type": "text", "text": "'
    return head.encode(), b'"}]}}'


def tool_name(message: dict[str, Any]) -> str:
    if message.get("method") != "tools/call":
        return ""
    return str(message["params"]["name"])


# --- Over HTTP --------------------------------------------------------------------------------


async def write_blocks(writer: asyncio.StreamWriter, block: bytes, size: int) -> None:
    for _ in range(max(1, size // len(block))):
        if writer.is_closing():
            raise ConnectionError
        writer.write(block)
        await writer.drain()


async def reply(message: dict[str, Any], writer: asyncio.StreamWriter, size: int) -> bool:
    """Respond to one message; return whether the connection stays open."""
    tool = tool_name(message)
    if tool not in ("json", "told", "sse", "bomb"):
        return write_response(writer, respond(message, TOOLS, "modern"))
    first, last = result_frame(message)
    kind = "text/event-stream" if tool == "sse" else "application/json"
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n"
    if tool == "told":
        length = size // len(BLOCK) * len(BLOCK)
        head += f"Content-Length: {len(first) + length + len(last)}\r\n"
    if tool == "bomb":
        writer.write(f"{head}Content-Encoding: gzip\r\n\r\n".encode() + GZIP_HEAD)
        await write_blocks(writer, zeros(), size)
        return False
    writer.write(f"{head}\r\n".encode() + (b"data: " if tool == "sse" else b"") + first)
    await write_blocks(writer, BLOCK, size)
    writer.write(last + (b"\n\n" if tool == "sse" else b""))
    await writer.drain()
    return False


async def serve_http(size: int) -> None:
    async def handle(
        method: str, path: str, message: dict[str, Any], writer: asyncio.StreamWriter
    ) -> bool:
        return (
            await reply(message, writer, size)
            if method == "POST"
            else write_response(writer, "{}", 405)
        )

    await serve(handle)


# --- Over stdin and stdout --------------------------------------------------------------------


def serve_stdio(size: int) -> None:
    out = sys.stdout.buffer
    for line in sys.stdin:
        message = json.loads(line)
        if tool_name(message) == "line":
            first, last = result_frame(message)
            out.write(first)
            for _ in range(size // len(BLOCK)):
                out.write(BLOCK)
            out.write(last + b"\n")
        else:
            text = respond(message, TOOLS, "modern")
            if text is not None:
                out.write(text.encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--http", action="store_true")
    options.add_argument("--megabytes", type=int, default=50)
    chosen = options.parse_args()
    if chosen.http:
        asyncio.run(serve_http(chosen.megabytes * MEGABYTE))
    else:
        serve_stdio(chosen.megabytes * MEGABYTE)
