"""What to paste to connect an agent: the same short run in each language, filled in.

Open a session, search, load, call. Everything shown works as it stands; the documents are tested
against these texts.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

NO_KEY = "tcb_…"


@dataclass(frozen=True)
class Snippet:
    title: str
    language: str
    text: str


@dataclass(frozen=True)
class Example:
    """The tool that the run searches for, loads and calls."""

    query: str = "weather forecast"
    group_id: str = "mcp:weather"
    tool_name: str = "weather__get_forecast"
    arguments: Mapping[str, object] = field(default_factory=lambda: {"city": "Oslo"})


def for_agent(base_url: str, key: str = NO_KEY, *, example: Example | None = None) -> list[Snippet]:
    """Return the snippets for an agent that reaches Toolcrib at this address with this key."""
    example = example or Example()
    address = base_url.rstrip("/") + "/api/v1"
    return [
        Snippet("curl", "sh", _curl(address, key, example)),
        Snippet("Python", "python", _python(address, key, example)),
    ]


CURL = """\
export TOOLCRIB_KEY={key}
TOOLCRIB={address}

ask() {{
  curl -sS "$TOOLCRIB$1" -H "Authorization: Bearer $TOOLCRIB_KEY" \\
    -H 'Content-Type: application/json' -d "$2"
  echo
}}

# Open a session. Its catalog.text belongs in the system prompt.
SESSION=$(ask /sessions '{{}}' | grep -oE 'ses_[0-9a-f]{{32}}' | head -n 1)

# Find a tool, load its schema, call it.
ask "/sessions/$SESSION/search" {search}
ask "/sessions/$SESSION/load" {load}
ask "/sessions/$SESSION/call" {call}
ask "/sessions/$SESSION/close" '{{}}'
"""


def _curl(address: str, key: str, example: Example) -> str:
    search, load, call = (shlex.quote(json.dumps(body)) for body in _bodies(example))
    return CURL.format(
        address=shlex.quote(address), key=shlex.quote(key), search=search, load=load, call=call
    )


PYTHON = """\
import json
import os
import urllib.request

TOOLCRIB = {address}
KEY = os.environ.get("TOOLCRIB_KEY", {key})


def ask(path, body):
    request = urllib.request.Request(
        TOOLCRIB + path,
        data=json.dumps(body).encode(),
        headers={{"Authorization": f"Bearer {{KEY}}", "Content-Type": "application/json"}},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


session = ask("/sessions", {{}})
print(session["catalog"]["text"])  # belongs in the system prompt
here = "/sessions/" + session["id"]

found = ask(here + "/search", {search})
loaded = ask(here + "/load", {load})
result = ask(here + "/call", {call})
print(result["content"])
ask(here + "/close", {{}})
"""


def _python(address: str, key: str, example: Example) -> str:
    search, load, call = (_literal(body) for body in _bodies(example))
    return PYTHON.format(
        address=_literal(address), key=_literal(key), search=search, load=load, call=call
    )


def _literal(value: object) -> str:
    """Write a JSON value as Python, with double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_literal(one) for one in value) + "]"
    return repr(value)


def _bodies(example: Example) -> tuple[dict[str, object], ...]:
    name = example.tool_name
    return (
        {"query": example.query},
        {"group_id": example.group_id, "tool_names": [name]},
        {"tool_name": name, "arguments": dict(example.arguments)},
    )


SAMPLES: dict[str, object] = {
    "string": "text",
    "integer": 1,
    "number": 1,
    "boolean": True,
    "array": [],
    "object": {},
}


def sample(schema: Mapping[str, object]) -> dict[str, object]:
    """Fill in the arguments a schema requires, for a person to change."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return {}
    return {str(name): _value(properties.get(name)) for name in required[:20]}


def _value(schema: object) -> object:
    if not isinstance(schema, Mapping):
        return "text"
    for key in ("examples", "enum"):
        if isinstance(given := schema.get(key), list) and given:
            return given[0]
    if "default" in schema:
        return schema["default"]
    return SAMPLES.get(str(schema.get("type")), "text")
