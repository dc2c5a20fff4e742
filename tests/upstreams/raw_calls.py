"""Answers to tools/call written by hand: the tool's name says how. No SDK needed.

python -m tests.upstreams.raw_calls [--http] [--era modern|legacy]; stdio by default.

say      answers with the text in `result`, whatever it is, as the result
line     writes the text in `line` as it is, with ID for the request's id
error    answers with an error of the protocol: `code`, `message`
big      answers with `bytes` bytes of text
later    answers after `seconds`
drip     begins an answer and goes on with a byte at a time, for ever
hang     never answers
held     answers when someone GETs /let-go
die      exits; `cut` closes the connection in the middle of the answer
status   answers with the HTTP status in `status`
seen     answers with the messages that came so far

`sse`: over HTTP, answer with an event stream.
"""

import argparse
import asyncio
import json
import os
import sys
from typing import Any

from tests.upstreams.answers import ONE_TOOL, answer

Messages = list[dict[str, Any]]
LET_GO = asyncio.Event()


def result(message: dict[str, Any], text: str) -> str:
    return f'{{"jsonrpc": "2.0", "id": {json.dumps(message["id"])}, "result": {text}}}'


def text_of(value: object) -> str:
    return json.dumps({"content": [{"type": "text", "text": str(value)}], "resultType": "complete"})


async def reply_to(message: dict[str, Any], seen: Messages, era: str) -> str | None:
    """Return what to send back, None for nothing."""
    seen.append(message)
    if message.get("method") != "tools/call":
        return answer(message, ONE_TOOL, era)
    how, given = message["params"]["name"], message["params"].get("arguments", {})
    match how:
        case "say":
            return result(message, given["result"])
        case "line":
            return str(given["line"]).replace("ID", json.dumps(message["id"]))
        case "error":
            error = {"code": given.get("code", -32602), "message": given["message"]}
            return json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error})
        case "big":
            return result(message, text_of("x" * given["bytes"]))
        case "later":
            await asyncio.sleep(given["seconds"])
            return result(message, text_of("late"))
        case "held":
            await LET_GO.wait()
            return result(message, text_of("held"))
        case "seen":
            return result(message, text_of(json.dumps(seen)))
        case "die":
            os._exit(3)
    await asyncio.sleep(600)
    return None


# --- Over stdin and stdout --------------------------------------------------------------------


async def serve_stdio(era: str) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    seen: Messages = []
    running = set()

    async def respond(message: dict[str, Any]) -> None:
        text = await reply_to(message, seen, era)
        if text is not None:
            sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass") + b"\n")
            sys.stdout.flush()

    while line := await reader.readline():
        task = asyncio.create_task(respond(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)


# --- Over HTTP --------------------------------------------------------------------------------


async def serve_http(era: str) -> None:
    seen: Messages = []
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
            LET_GO.set()
            return reply(writer, "")
        if not head.startswith("post"):
            return reply(writer, "", status=405)
        message = json.loads(body)
        params = message.get("params", {})
        given = params.get("arguments", {})
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
            return reply(writer, given.get("body", ""), status=given["status"])
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
        return reply(writer, text, sse=bool(given.get("sse")))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    sys.stdout.write(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


def reply(writer: Any, text: str, *, status: int = 200, sse: bool = False, extra: str = "") -> bool:
    kind = "text/event-stream" if sse else "application/json"
    body = (f"data: {text}\n\n" if sse else text).encode("utf-8", "surrogatepass")
    writer.write(
        f"HTTP/1.1 {status} Said\r\nContent-Type: {kind}\r\n{extra}"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return True


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--http", action="store_true")
    options.add_argument("--era", choices=("legacy", "modern"), default="modern")
    given = options.parse_args()
    asyncio.run(serve_http(given.era) if given.http else serve_stdio(given.era))
