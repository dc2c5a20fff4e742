"""Fake LLM provider on 127.0.0.1 that replays a script, in the formats of four providers.

The providers' own SDKs connect to it over HTTP, so requests and parsed responses are real. A
script is a list of turns: tool calls as (name, arguments), or the final text.

An agent program makes requests of its own besides, and gives tools names of its own: with
`is_agent`, the turn is chosen by the tool results that a request contains, and a tool by the end
of its name. A request without tools is answered with a text. Such programs want event streams.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Turn = Sequence[tuple[str, dict[str, Any]]] | str


class ScriptedProvider:
    def __init__(
        self,
        *script: Turn,
        is_agent: bool = False,
        before: Mapping[int, Callable[[], None]] | None = None,
    ) -> None:
        self.script, self.is_agent = list(script), is_agent
        self._before = dict(before or {})
        self._names: dict[str, str] = {}  # of tools, as the program has them
        self._results: dict[object, int] = {}  # tool results up to a response, by its id
        self.requests: list[dict[str, Any]] = []  # bodies, in order
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def _turn(self) -> Turn:
        """Return the turn that answers the last request."""
        body = self.requests[-1]
        if not self.is_agent:
            return self.script[len(self.requests) - 1]
        if not body.get("tools"):
            return "A text."
        # Some programs send only what is new, after the response that they have.
        before = self._results.get(body.get("previous_response_id"), 0)
        results = self._results[f"resp_{len(self.requests)}"] = before + len(tool_results(body))
        number = min(results, len(self.script) - 1)
        self._before.pop(number, _do_nothing)()
        turn = self.script[number]
        if isinstance(turn, str):
            return turn
        # A program that connects again may leave a tool out for a while.
        for name, _ in turn:
            if (found := _full_name(body["tools"], name)) is not None:
                self._names[name] = found
        return [(self._names.get(name, name), arguments) for name, arguments in turn]

    def reply(self, path: str) -> dict[str, Any]:
        if path.endswith(":countTokens"):
            return {"totalTokens": 1}
        turn, number = self._turn(), len(self.requests)
        for end, make in (
            ("/messages", _anthropic),
            ("/chat/completions", _openai),
            ("/responses", _responses),
            (":generateContent", _gemini),
            (":streamGenerateContent", _gemini),
        ):
            if path.partition("?")[0].endswith(end):
                return make(turn, number)
        raise AssertionError(f"no provider has {path}")


def tool_results(body: dict[str, Any]) -> list[str]:
    """Return the tool results in a request's conversation, in order, as JSON."""
    items = body.get("messages") or body.get("input") or body.get("contents") or []
    found = []
    for item in items:
        parts = (item, *_parts(item.get("content")), *_parts(item.get("parts")))
        found += [json.dumps(part) for part in parts if _is_result(part)]
    return found


def _is_result(part: dict[str, Any]) -> bool:
    kinds = ("tool_result", "function_call_output")
    return part.get("type") in kinds or part.get("role") == "tool" or "functionResponse" in part


def _parts(content: object) -> list[dict[str, Any]]:
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _full_name(tools: list[dict[str, Any]], end: str) -> str | None:
    """Return the name of a tool in a request; of one in a namespace, after that and a space."""
    names = []
    for tool in tools:
        if tool.get("type") == "namespace":
            names += [f"{tool['name']} {member['name']}" for member in tool["tools"]]
        elif "functionDeclarations" in tool:
            names += [member["name"] for member in tool["functionDeclarations"]]
        else:
            names.append(tool.get("name") or tool.get("function", {}).get("name", ""))
    return next((name for name in names if name.endswith(end)), None)


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


def _as_events(path: str, reply: dict[str, Any]) -> bytes:
    """Return a reply as the events of a stream, in the format of its provider."""
    if path.endswith("/messages"):
        events = _anthropic_events(reply)
    elif path.endswith("/responses"):
        events = _responses_events(reply)
    elif path.endswith(":streamGenerateContent"):
        return f"data: {json.dumps(reply)}\n\n".encode()
    else:
        return _openai_events(reply)
    lines = (f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    return "".join(lines).encode()


def _anthropic_events(reply: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "message_start", "message": {**reply, "content": [], "stop_reason": None}}
    for index, block in enumerate(reply["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            text = json.dumps(block["input"])
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": text}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": reply["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": reply["usage"]}
    yield {"type": "message_stop"}


def _responses_events(reply: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "response.created", "response": {**reply, "output": []}}
    for index, item in enumerate(reply["output"]):
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": reply}


def _openai_events(reply: dict[str, Any]) -> bytes:
    (choice,) = reply["choices"]
    calls = choice["message"].get("tool_calls") or []
    indexed = [{**call, "index": index} for index, call in enumerate(calls)]
    delta = {**choice["message"], **({"tool_calls": indexed} if indexed else {})}
    common = {**reply, "object": "chat.completion.chunk"}
    chunks = (
        {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {
            **common,
            "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}],
        },
    )
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join((*lines, "data: [DONE]\n\n")).encode()


def _do_nothing() -> None:
    pass


@contextmanager
def scripted_provider(
    *script: Turn, is_agent: bool = False, before: Mapping[int, Callable[[], None]] | None = None
) -> Iterator[ScriptedProvider]:
    """Run a provider that replays this script; of an agent's, do something before a turn, once."""
    provider = ScriptedProvider(*script, is_agent=is_agent, before=before)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            provider.requests.append(json.loads(self.rfile.read(length)))
            provider.headers.append({key.lower(): value for key, value in self.headers.items()})
            path, reply = self.path.partition("?")[0], provider.reply(self.path)
            is_stream = provider.requests[-1].get("stream") is True or ":stream" in path
            body = _as_events(path, reply) if is_stream else json.dumps(reply).encode()
            kind = "text/event-stream" if is_stream else "application/json"
            self.send_response(200)
            self.send_header("Content-Type", kind)
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
