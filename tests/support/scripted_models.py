"""Fake LLM provider on 127.0.0.1 that replays a script, in the formats of four providers.

The providers' own SDKs connect to it over HTTP, so requests and parsed responses are real. A
script is a list of turns: tool calls as (name, arguments), or the final text.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Turn = Sequence[tuple[str, dict[str, Any]]] | str


class ScriptedProvider:
    def __init__(self, *script: Turn) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []  # bodies, in order
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def reply(self, path: str) -> dict[str, Any]:
        turn = self.script[len(self.requests) - 1]
        number = len(self.requests)
        for end, make in (
            ("/messages", _anthropic),
            ("/chat/completions", _openai),
            ("/responses", _responses),
            (":generateContent", _gemini),
        ):
            if path.partition("?")[0].endswith(end):
                return make(turn, number)
        raise AssertionError(f"no provider has {path}")


def _anthropic(turn: Turn, number: int) -> dict[str, Any]:
    if isinstance(turn, str):
        content: list[dict[str, Any]] = [{"type": "text", "text": turn}]
    else:
        content = [
            {"type": "tool_use", "id": f"toolu_{number}_{at}", "name": name, "input": arguments}
            for at, (name, arguments) in enumerate(turn)
        ]
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": "scripted",
        "content": content,
        "stop_reason": "end_turn" if isinstance(turn, str) else "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }


def _openai(turn: Turn, number: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if isinstance(turn, str):
        message["content"] = turn
    else:
        message["tool_calls"] = [
            {
                "id": f"call_{number}_{at}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for at, (name, arguments) in enumerate(turn)
        ]
    reason = "stop" if isinstance(turn, str) else "tool_calls"
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1,
        "model": "scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
    }


def _responses(turn: Turn, number: int) -> dict[str, Any]:
    if isinstance(turn, str):
        part = {"type": "output_text", "text": turn, "annotations": []}
        output: list[dict[str, Any]] = [
            {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed",
             "content": [part]}
        ]  # fmt: skip
    else:
        output = [_responses_item(name, arguments, f"{number}_{at}") for at, (name, arguments) in
                  enumerate(turn)]  # fmt: skip
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": "scripted",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def _responses_item(name: str, arguments: dict[str, Any], number: str) -> dict[str, Any]:
    if name == "tool_search":
        return {"type": "tool_search_call", "id": f"tsc_{number}", "call_id": f"call_{number}",
                "arguments": arguments, "execution": "client", "status": "completed"}  # fmt: skip
    namespace, _, bare = name.rpartition(" ")
    named = {"namespace": namespace} if namespace else {}
    return {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}",
            "name": bare, "arguments": json.dumps(arguments), "status": "completed",
            **named}  # fmt: skip


def _gemini(turn: Turn, number: int) -> dict[str, Any]:
    if isinstance(turn, str):
        parts: list[dict[str, Any]] = [{"text": turn}]
    else:
        parts = [{"functionCall": {"name": name, "args": arguments}} for name, arguments in turn]
    content = {"role": "model", "parts": parts}
    return {"candidates": [{"content": content, "finishReason": "STOP", "index": 0}]}


@contextmanager
def scripted_provider(*script: Turn) -> Iterator[ScriptedProvider]:
    """Run a provider that replays this script."""
    provider = ScriptedProvider(*script)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            provider.requests.append(json.loads(self.rfile.read(length)))
            provider.headers.append({key.lower(): value for key, value in self.headers.items()})
            body = json.dumps(provider.reply(self.path)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
