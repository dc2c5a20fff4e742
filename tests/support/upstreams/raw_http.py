"""HTTP server without the SDK; the URL path selects the behaviour. Records requests.

python -m tests.support.upstreams.raw_http [--tools-file FILE] [--tls CERT KEY]

GET  /_seen         the requests so far, as JSON
     /tools         a valid MCP server with the tools of the file; /tools?era=legacy
     /list/WHAT     a valid server that does WHAT on tools/list
     /WHAT          does WHAT on every request: see `misbehave`
"""

import argparse
import asyncio
import gzip
import json
import ssl
import struct
import sys
from socket import SO_LINGER, SOL_SOCKET
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.upstreams.answers import large_notification, respond, tool_list_json

FIFTY_MB = 50 * 1024 * 1024
BLOCK = b"x" * 65536
BOMB = gzip.compress(b"0" * FIFTY_MB, 1)


class RawServer:
    def __init__(self, tools: str) -> None:
        self.tools = tools
        self.seen: list[dict[str, object]] = []
        self.connections = 0
        self.listens = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self.request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass
        finally:
            writer.close()

    async def request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {}
        for line in head[1:-2]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path == "/_seen":
            seen = {"connections": self.connections - 1, "requests": self.seen}
            return reply(writer, json.dumps(seen).encode())
        self.seen.append({"method": method, "path": target, "headers": headers})
        message = json.loads(body) if body else {}
        path = unquote(url.path)
        if path.startswith("/list/"):
            if message.get("method") != "tools/list":
                return self.mcp(writer, method, message, query)
            path = path.removeprefix("/list")
        if path == "/tools":
            return self.mcp(writer, method, message, query)
        keep_alive = await misbehave(path.strip("/"), writer, message, query, self)
        await writer.drain()
        return keep_alive

    def mcp(self, writer, method, message, query, extra: str = "") -> bool:
        era = query.get("era", "modern")
        if method == "DELETE" and "session" in query:
            return False  # without a response
        if method == "GET" and query.get("session") == "eager":
            start(writer, "text/event-stream")
            writer.write(b"retry: 0\nid: 1\ndata:\n\n")
            return False
        if method != "POST":
            return reply(writer, b"", 404 if "session" in query else 405)
        if query.get("session") and message.get("method") == "initialize":
            extra = "Mcp-Session-Id: 1\r\n"
        if query.get("session") == "forgotten" and message.get("method") == "tools/list":
            return reply(writer, b"who?", 404, "text/plain")
        if era == "legacy" and message.get("method") == "server/discover":
            return reply(writer, b"unknown", 400, "text/plain")
        text = respond(message, self.tools, era)
        if text is None:
            return reply(writer, b"", 202)
        return reply(writer, text.encode(), extra=extra)


def reply(writer, body: bytes, status=200, kind="application/json", extra: str = "") -> bool:
    """Write a complete response, and return True: the connection stays open.

    Closing it without `Connection: close` is a race: the client may already be sending its next
    request on it, such as one that follows a redirect.
    """
    writer.write(
        f"HTTP/1.1 {status} Status\r\nContent-Type: {kind}\r\n{extra}"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return True


def start(writer, kind: str, extra: str = "") -> None:
    writer.write(
        f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{extra}Connection: close\r\n\r\n".encode()
    )


async def write_large(writer, prefix: bytes, suffix: bytes) -> None:
    """Write fifty megabytes between a prefix and a suffix."""
    writer.write(prefix)
    for _ in range(FIFTY_MB // len(BLOCK)):
        if writer.is_closing():
            raise ConnectionError
        writer.write(BLOCK)
        await writer.drain()
    writer.write(suffix)
    await writer.drain()


async def misbehave(behaviour: str, writer, message, query, server: RawServer) -> bool:
    """Send the selected response; return whether the connection stays open."""
    result_prefix = f'{{"jsonrpc": "2.0", "id": {json.dumps(message.get("id"))}, "result": {{"x": "'
    if behaviour.isdigit():
        return reply(writer, b"secret body", int(behaviour), "text/plain")
    elif behaviour == "html":
        return reply(writer, b"<html>secret body</html>", kind="text/html; charset=utf-8")
    elif behaviour == "plain-json":
        return reply(writer, b'{"hello": "secret body"}')
    elif behaviour == "not-json":
        return reply(writer, b"secret body {")
    elif behaviour == "redirect-out":
        to = query.get("to", "http://169.254.169.254/latest?key=secret")
        return reply(writer, b"", 307, extra=f"Location: {to}\r\n")
    elif behaviour == "redirect-loop":
        return reply(writer, b"", 307, extra="Location: /redirect-loop\r\n")
    elif behaviour == "redirect-in":
        return reply(writer, b"", 307, extra="Location: /tools\r\n")
    elif behaviour == "redirect-302":
        return reply(writer, b"", 302, extra="Location: /tools\r\n")
    elif behaviour == "drip":
        start(writer, "application/json")
        while not writer.is_closing():
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.05)
    elif behaviour == "drip-sse":
        start(writer, "text/event-stream")
        while not writer.is_closing():
            writer.write(b": still here\n\n")
            await writer.drain()
            await asyncio.sleep(0.05)
    elif behaviour == "hang":
        await asyncio.sleep(600)
    elif behaviour == "big-json":
        start(writer, "application/json")
        await write_large(writer, result_prefix.encode(), b'"}}')
    elif behaviour == "big-sse":
        start(writer, "text/event-stream")
        await write_large(writer, b"event: message\ndata: " + result_prefix.encode(), b'"}}\n\n')
    elif behaviour == "gzip-bomb":
        start(writer, "application/json", "Content-Encoding: gzip\r\n")
        writer.write(BOMB)
        await writer.drain()
    elif behaviour == "gzip":
        text = respond(message, server.tools, query.get("era", "modern")) or ""
        return reply(writer, gzip.compress(text.encode()), extra="Content-Encoding: gzip\r\n")
    elif behaviour == "huge-header":
        return reply(writer, b"{}", extra=f"X-Long: {'x' * 1_000_000}\r\n")
    elif behaviour == "cookies":
        cookies = "".join(f"Set-Cookie: c{number}=secret; Path=/\r\n" for number in range(100))
        return server.mcp(writer, "POST", message, query, cookies)
    elif behaviour == "reset":
        writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    elif behaviour == "cut":
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: 1000\r\n\r\n{")
    elif behaviour == "not-http":
        writer.write(b"220 mail.example ESMTP ready\r\n\r\n")
    elif behaviour == "many-events":
        start(writer, "text/event-stream")
        for number in range(500):
            log = {"method": "notifications/message", "params": {"level": "info", "data": number}}
            writer.write(b"data: " + json.dumps({"jsonrpc": "2.0", **log}).encode() + b"\n\n")
        text = respond(message, server.tools, query.get("era", "modern")) or ""
        writer.write(b"data: " + text.encode() + b"\n\n")
    elif behaviour in ("flaky-listen", "large-listen"):
        return await listen_badly(writer, message, server, large=behaviour == "large-listen")
    elif behaviour == "bomb-call":
        if message.get("method") != "tools/call":
            return server.mcp(writer, "POST", message, query)
        start(writer, "application/json", "Content-Encoding: gzip\r\n")
        writer.write(BOMB)
    elif behaviour == "sse-elsewhere":
        start(writer, "text/event-stream")
        writer.write(b"event: endpoint\ndata: http://192.0.2.1/messages\n\n")
    elif behaviour == "sse-nowhere":
        start(writer, "text/event-stream")
        writer.write(b"event: endpoint\ndata: http://[::bad/\n\n")
    elif behaviour == "sse-deaf":
        start(writer, "text/event-stream")
        writer.write(b"event: endpoint\ndata: /500\n\n")
        await writer.drain()
        await asyncio.sleep(600)
    else:
        return reply(writer, b"", 404)
    return False


async def listen_badly(writer, message, server: RawServer, *, large: bool) -> bool:
    """Acknowledge a subscription; close the first one, or send it a large notification."""
    if message.get("method") != "subscriptions/listen":
        return server.mcp(writer, "POST", message, {})
    server.listens += 1
    start(writer, "text/event-stream")
    acknowledged = {
        "jsonrpc": "2.0",
        "method": "notifications/subscriptions/acknowledged",
        "params": {
            "notifications": {"toolsListChanged": True},
            "_meta": {"io.modelcontextprotocol/subscriptionId": message["id"]},
        },
    }
    writer.write(b"data: " + json.dumps(acknowledged).encode() + b"\n\n")
    await writer.drain()
    if large and server.listens == 1:
        writer.write(b"data: " + json.dumps(large_notification()).encode() + b"\n\n")
        await writer.drain()
    if large or server.listens > 1:
        await asyncio.sleep(600)
    return False


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tools-file")
    parser.add_argument("--tls", nargs=2, metavar=("CERT", "KEY"))
    options = parser.parse_args()
    context = None
    if options.tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*options.tls)
    raw = RawServer(tool_list_json(options.tools_file))
    server = await asyncio.start_server(raw.connected, "127.0.0.1", 0, ssl=context)
    sys.stdout.write(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
