"""Server with raw responses to tools/call, without the SDK; the tool name selects the response.

python -m tests.support.upstreams.raw_calls [--http | --sse] [--era modern|legacy]; stdio by
default.

say      responds with the text in `result` as the result, valid or not
line     writes the text in `line` verbatim, with ID replaced by the request id
error    responds with a JSON-RPC error: `code`, `message`
big      responds with `bytes` bytes of text
later    responds after `seconds`
drip     starts a response and sends one byte at a time, without end
hang     never responds
held     responds after a GET of /let-go
deaf     over stdio, stops reading and responds; with `until`, creates that file with the suffix
         .deaf, and resumes reading and responds once the file `until` exists;
         over HTTP+SSE, ignores all messages until the next stream is opened
die      exits; `cut` closes the connection in the middle of the response
status   responds with the HTTP status in `status`; over HTTP+SSE after `seconds`
seen     responds with the messages received so far

`sse`: over HTTP, respond with an event stream. `post`, over HTTP+SSE: `late` acknowledges the POST
after its response was sent, `never` does not acknowledge it.
"""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.upstreams.answers import ONE_TOOL, respond

Messages = list[dict[str, Any]]
RELEASED = asyncio.Event()


def result(message: dict[str, Any], text: str) -> str:
    return f'{{"jsonrpc": "2.0", "id": {json.dumps(message["id"])}, "result": {text}}}'


def text_result(value: object) -> str:
    return json.dumps({"content": [{"type": "text", "text": str(value)}], "resultType": "complete"})


async def reply_to(message: dict[str, Any], seen: Messages, era: str) -> str | None:
    """Return the response text, None for no response."""
    seen.append(message)
    if message.get("method") != "tools/call":
        return respond(message, ONE_TOOL, era)
    name, arguments = message["params"]["name"], message["params"].get("arguments", {})
    match name:
        case "say":
            return result(message, arguments["result"])
        case "line":
            return str(arguments["line"]).replace("ID", json.dumps(message["id"]))
        case "error":
            error = {"code": arguments.get("code", -32602), "message": arguments["message"]}
            return json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error})
        case "big":
            return result(message, text_result("x" * arguments["bytes"]))
        case "later":
            await asyncio.sleep(arguments["seconds"])
            return result(message, text_result("late"))
        case "held":
            await RELEASED.wait()
            return result(message, text_result("held"))
        case "seen" | "ping":  # the tool that it lists
            return result(message, text_result(json.dumps(seen)))
        case "die":
            os._exit(3)
    await asyncio.sleep(600)
    return None


# --- Over stdin and stdout --------------------------------------------------------------------


async def serve_stdio(era: str) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**26)
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    seen: Messages = []
    running = set()

    async def stop_reading(message: dict[str, Any]) -> str:
        pipe.pause_reading()
        if until := message["params"]["arguments"].get("until"):
            Path(f"{until}.deaf").touch()  # noqa: ASYNC240 - a test server
            while not Path(until).exists():  # noqa: ASYNC110, ASYNC240 - likewise
                await asyncio.sleep(0.01)
            pipe.resume_reading()
        return result(message, text_result("deaf"))

    async def handle(message: dict[str, Any]) -> None:
        is_deaf = message.get("params", {}).get("name") == "deaf"
        text = await (stop_reading(message) if is_deaf else reply_to(message, seen, era))
        if text is not None:
            sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass") + b"\n")
            sys.stdout.flush()

    while line := await reader.readline():
        task = asyncio.create_task(handle(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)


# --- Over HTTP --------------------------------------------------------------------------------


async def serve_http(era: str, *, sse: bool = False) -> None:
    seen: Messages = []
    stream = SseTransport(seen, era)
    sessions: set[str] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await request(reader, writer):
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        if "/let-go " in head:
            RELEASED.set()
            return reply(writer, "")
        if sse and head.startswith("get /sse "):
            return await stream.open(reader, writer)
        if not head.startswith("post"):
            return reply(writer, "", status=405)
        message = json.loads(body)
        if sse:
            return await stream.post(message, reader, writer)
        params = message.get("params", {})
        arguments = params.get("arguments", {})
        if era == "legacy" and message.get("method") == "server/discover":
            return reply(writer, "", status=400)
        if message.get("method") == "initialize":
            sessions.add("one")
            opened = await reply_to(message, seen, era) or ""
            return reply(writer, opened, extra="Mcp-Session-Id: one\r\n")
        if params.get("name") == "forget":
            sessions.clear()
        if era == "legacy" and fields.get("mcp-session-id") not in sessions:
            return reply(writer, "", status=404)
        if params.get("name") == "status":
            seen.append(message)
            return reply(writer, arguments.get("body", ""), status=arguments["status"])
        if params.get("name") in ("cut", "drip"):
            seen.append(message)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: 10000\r\n\r\n{")
            while params["name"] == "drip" and not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)
            return False
        text = await reply_to(message, seen, era)
        if text is None:
            return reply(writer, "", status=202)
        return reply(writer, text, sse=bool(arguments.get("sse")))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    sys.stdout.write(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


class SseTransport:
    """The HTTP+SSE transport of 2024: messages are POSTed, responses sent on one long GET."""

    def __init__(self, seen: Messages, era: str) -> None:
        self.seen, self.era, self.deaf = seen, era, False
        self.writer: Any = None
        self.running: set[asyncio.Task[None]] = set()

    async def open(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.deaf, self.writer = False, writer
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        writer.write(b"event: endpoint\ndata: /messages\n\n")
        await reader.read()
        return False

    async def post(self, message: Any, reader: asyncio.StreamReader, writer: Any) -> bool:
        params = message.get("params", {})
        arguments = params.get("arguments", {})
        self.deaf = self.deaf or params.get("name") == "deaf"
        if params.get("name") == "status":
            await asyncio.sleep(arguments.get("seconds", 0))
            return reply(writer, arguments.get("body", ""), status=arguments["status"])
        if arguments.get("post") == "late":
            await self.send_response(message)
        else:
            task = asyncio.create_task(self.send_response(message))
            self.running.add(task)
            task.add_done_callback(self.running.discard)
        if self.deaf or arguments.get("post") == "never":
            await reader.read()
            return False
        return reply(writer, "", status=202)

    async def send_response(self, message: dict[str, Any]) -> None:
        text = None if self.deaf else await reply_to(message, self.seen, self.era)
        if text is not None:
            self.writer.write(f"data: {text}\n\n".encode())


def reply(writer: Any, text: str, *, status: int = 200, sse: bool = False, extra: str = "") -> bool:
    kind = "text/event-stream" if sse else "application/json"
    body = (f"data: {text}\n\n" if sse else text).encode("utf-8", "surrogatepass")
    writer.write(
        f"HTTP/1.1 {status} Status\r\nContent-Type: {kind}\r\n{extra}"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return True


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--http", action="store_true")
    options.add_argument("--sse", action="store_true")
    options.add_argument("--era", choices=("legacy", "modern"), default="modern")
    chosen = options.parse_args()
    over_http = chosen.http or chosen.sse
    asyncio.run(serve_http(chosen.era, sse=chosen.sse) if over_http else serve_stdio(chosen.era))
