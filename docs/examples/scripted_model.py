"""A model that needs no network: it follows a script, in the shapes of two providers' SDKs.

It stands where `anthropic.Anthropic()` or `openai.OpenAI()` would, as far as the examples use them:
search for a tool, load it, call it, then say what came of it.
"""

import json
from types import SimpleNamespace
from typing import Any

TOOL = "demo__convert_temperature"
SCRIPT: list[tuple[str, dict[str, Any]]] = [
    ("search_tools", {"query": "convert a temperature"}),
    ("load_tools", {"group_id": "mcp:demo", "tool_names": [TOOL]}),
    (
        "deferred_tool_call",
        {"name": TOOL, "arguments": {"value": 100, "scale": "celsius", "to": "fahrenheit"}},
    ),
]


class Said(dict[str, Any]):
    """JSON whose keys are attributes too, as the objects of an SDK have them."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class ScriptedModel:
    def __init__(self) -> None:
        self.turn = 0
        self.messages = SimpleNamespace(create=self._as_anthropic)
        completions = SimpleNamespace(create=self._as_openai)
        self.chat = SimpleNamespace(completions=completions)

    def _next(self) -> tuple[str, dict[str, Any]] | None:
        self.turn += 1
        return SCRIPT[self.turn - 1] if self.turn <= len(SCRIPT) else None

    def _as_anthropic(self, *, messages: list[Any], **_: Any) -> Said:
        call = self._next()
        if call is None:
            result = messages[-1]["content"][0]["content"][0]["text"]
            block = Said(type="text", text=f"It is done: {result}")
        else:
            block = Said(type="tool_use", id=f"toolu_{self.turn}", name=call[0], input=call[1])
        return Said(role="assistant", content=[block])

    def _as_openai(self, *, messages: list[Any], **_: Any) -> Said:
        call = self._next()
        if call is None:
            said = f"It is done: {messages[-1]['content']}"
            message = Said(role="assistant", content=said, tool_calls=None)
        else:
            function = Said(name=call[0], arguments=json.dumps(call[1]))
            asked = Said(id=f"call_{self.turn}", type="function", function=function)
            message = Said(role="assistant", content=None, tool_calls=[asked])
        return Said(choices=[Said(message=message)])
