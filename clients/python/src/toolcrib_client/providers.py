"""Parse tool calls from model replies and format results, per provider. No I/O.

Replies may be SDK objects or JSON: a complete response, its message, a list of calls or one call.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
ADDED_UNDERSCORE = re.compile(r"^_(?=[0-9-])")  # prefix of names that Gemini rejects


@dataclass(frozen=True)
class ToolCall:
    """A tool call of a model. `search`: from the provider's own client-side tool search."""

    id: str
    name: str
    arguments: Any
    search: bool = False


@dataclass(frozen=True)
class ToolResult:
    """Result of a call. `asked` is the model's call, `call` the resolved call of the real tool."""

    asked: ToolCall
    call: ToolCall
    content: list[Json]  # MCP content: text, image, …
    is_error: bool = False
    structured: Any = None
    state: str = ""
    ready: Json | None = field(default=None, repr=False)  # a result in the provider's own format

    @property
    def text(self) -> str:
        """Return the content as text, or the structured content if there is none."""
        texts = [_as_text(item) for item in self.content]
        if not texts and self.structured is not None:
            return compact(self.structured)
        return "\n".join(texts)


def compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _as_text(item: Json) -> str:
    match item.get("type"):
        case "text":
            return str(item.get("text", ""))
        case "image" | "audio":
            return f"[{item['type']}, {item.get('mimeType', 'of an unknown type')}]"
    return compact(item)


def plain(value: Any) -> Any:
    """Return an SDK object as JSON; JSON unchanged."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    dump = getattr(value, "model_dump", None)
    return dump() if dump else value


def parsed(arguments: Any) -> Any:
    """Return arguments with JSON text parsed; invalid JSON unchanged."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except ValueError:
            return arguments
    return arguments


def _objects(reply: Any, *path: str) -> list[Mapping[str, Any]]:
    """Follow the path as far as it exists and return the objects there."""
    for part in path:
        if isinstance(reply, Mapping) and part in reply:
            reply = reply[part]
            if part in ("choices", "candidates"):
                reply = reply[0] if reply else None
    items = reply if isinstance(reply, list) else [reply]
    return [item for item in items if isinstance(item, Mapping)]


# --- Anthropic ----------------------------------------------------------------------------------


def _anthropic_calls(reply: Any) -> list[ToolCall]:
    # Tools that the provider runs itself have other block types and need no result.
    return [
        ToolCall(block["id"], block["name"], parsed(block["input"]))
        for block in _objects(reply, "content")
        if block.get("type") == "tool_use"
    ]


def _anthropic_block(item: Json) -> Json:
    if item.get("type") == "image" and "data" in item:
        source = {"type": "base64", "media_type": item.get("mimeType", ""), "data": item["data"]}
        return {"type": "image", "source": source}
    return {"type": "text", "text": _as_text(item)}


def _anthropic_messages(results: Iterable[ToolResult]) -> list[Json]:
    return [{"role": "user", "content": [_anthropic_result(result) for result in results]}]


def _anthropic_result(result: ToolResult) -> Json:
    if result.ready is not None:
        return result.ready
    blocks = [_anthropic_block(item) for item in result.content]
    block: Json = {
        "type": "tool_result",
        "tool_use_id": result.asked.id,
        "content": blocks or [{"type": "text", "text": result.text or "(no content)"}],
    }
    return block | {"is_error": True} if result.is_error else block


# --- OpenAI -------------------------------------------------------------------------------------


def _openai_calls(reply: Any) -> list[ToolCall]:
    calls = _objects(reply, "choices", "message", "tool_calls")
    return [
        ToolCall(call["id"], call["function"]["name"], parsed(call["function"]["arguments"]))
        for call in calls
        if isinstance(call.get("function"), Mapping)
    ]


def _text_with_error(result: ToolResult) -> str:
    """Return the text, prefixed for errors: OpenAI has no error flag."""
    return f"Error: {result.text}" if result.is_error else result.text


def _openai_messages(results: Iterable[ToolResult]) -> list[Json]:
    return [
        {"role": "tool", "tool_call_id": result.asked.id, "content": _text_with_error(result)}
        for result in results
    ]


def _responses_calls(reply: Any) -> list[ToolCall]:
    calls = []
    for item in _objects(reply, "output"):
        kind = item.get("type")
        if kind == "function_call":
            # The namespace is ignored: names are unique without it.
            calls.append(ToolCall(item["call_id"], item["name"], parsed(item["arguments"])))
        elif kind == "tool_search_call" and item.get("execution") == "client":
            arguments = parsed(item["arguments"])
            calls.append(ToolCall(item["call_id"] or "", "search_tools", arguments, search=True))
    return calls


def _responses_messages(results: Iterable[ToolResult]) -> list[Json]:
    return [result.ready or _responses_output(result) for result in results]


def _responses_output(result: ToolResult) -> Json:
    output: Any = _text_with_error(result)
    if any(item.get("type") == "image" for item in result.content):
        output = [_responses_part(item) for item in result.content]
    return {"type": "function_call_output", "call_id": result.asked.id, "output": output}


def _responses_part(item: Json) -> Json:
    if item.get("type") == "image" and "data" in item:
        url = f"data:{item.get('mimeType', 'image/png')};base64,{item['data']}"
        return {"type": "input_image", "image_url": url}
    return {"type": "input_text", "text": _as_text(item)}


# --- Gemini and plain ---------------------------------------------------------------------------


def _gemini_calls(reply: Any) -> list[ToolCall]:
    calls = []
    for part in _objects(reply, "candidates", "content", "parts"):
        call = part.get("function_call") or part.get("functionCall") or part
        if isinstance(call, Mapping) and call.get("name"):
            name = ADDED_UNDERSCORE.sub("", call["name"])
            calls.append(ToolCall(call.get("id") or "", name, parsed(call.get("args"))))
    return calls


def _gemini_messages(results: Iterable[ToolResult]) -> list[Json]:
    return [{"role": "user", "parts": [_gemini_part(result) for result in results]}]


def _gemini_part(result: ToolResult) -> Json:
    key = "error" if result.is_error else "output"
    value = result.text
    if not result.is_error and result.structured is not None:
        value = result.structured
    name = result.asked.name
    valid_name = name if name[:1].isalpha() or name[:1] == "_" else f"_{name}"
    response: Json = {"name": valid_name, "response": {key: value}}
    if result.asked.id:
        response["id"] = result.asked.id
    return {"function_response": response}


def _plain_calls(reply: Any) -> list[ToolCall]:
    return [
        ToolCall(str(call.get("id", "")), call["name"], parsed(call.get("arguments")))
        for call in _objects(reply)
    ]


def _plain_messages(results: Iterable[ToolResult]) -> list[Json]:
    return [
        {
            "id": result.asked.id,
            "name": result.asked.name,
            "content": result.content,
            "structured_content": result.structured,
            "is_error": result.is_error,
        }
        for result in results
    ]


def _part(reply: Any, name: str) -> Any:
    return reply[name] if isinstance(reply, Mapping) else getattr(reply, name)


@dataclass(frozen=True)
class Provider:
    """Functions that parse a provider's replies, add them to the history, and format results."""

    calls: Callable[[Any], list[ToolCall]]
    messages: Callable[[Iterable[ToolResult]], list[Json]]
    history: Callable[[Any], list[Any]]  # messages of a complete reply, unchanged


PROVIDERS = {
    "anthropic": Provider(
        _anthropic_calls,
        _anthropic_messages,
        lambda reply: [{"role": "assistant", "content": _part(reply, "content")}],
    ),
    "openai": Provider(
        _openai_calls,
        _openai_messages,
        lambda reply: [_part(_part(reply, "choices")[0], "message")],
    ),
    "openai-responses": Provider(
        _responses_calls, _responses_messages, lambda reply: list(_part(reply, "output"))
    ),
    "gemini": Provider(
        _gemini_calls,
        _gemini_messages,
        lambda reply: [_part(_part(reply, "candidates")[0], "content")],
    ),
    "json": Provider(_plain_calls, _plain_messages, list),
}
