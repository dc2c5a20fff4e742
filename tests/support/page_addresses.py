"""Every page there is, by the URL conf: nothing has to be listed by hand but example ids.

An address that is asked with GET and answers 405 is an act; one that answers a whole document is
a page; the rest are fragments and downloads. An unknown part of an address fails until EXAMPLES
has one.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.urls import URLPattern, get_resolver, reverse
from playwright.sync_api import BrowserContext

from tests.support.installation import Installation

# Pages for those who are not signed in, and what no person looks at.
OUTSIDE = {"sign-in", "sign-out", "setup", "join", "livez", "readyz"}
# What a part stands for where the name alone does not say: (address's name, part) or part.
EXAMPLES: dict[str, str | int] = {
    "key_id": 1,
    "entry_id": 1,
    "hint_id": 1,
    "golden_id": 1,
    "person_id": 1,
    "act": "approve",
    "settings-section.name": "sync",
    "tool-edit.public_name": "house_rules",  # only a custom tool is edited
    "usage-csv.table": "tools",
    "code": "x",
    "uid": "x",
    "token": "x",
}
# More addresses of pages that have more than one face.
FACES = {
    "tools": ["?q=nothing-like-it", "?sort=-tokens"],
    "servers": ["?q=nothing-like-it"],
    "sessions": ["?agent=nobody"],
    "audit": ["?q=nothing-like-it"],
    "palette": ["?q=e", "?q=nothing-like-it"],
    "playground": ["?q=forecast", "?q=zzzqqq", "?q=%28&mode=regex"],
}


@dataclass(frozen=True)
class Answer:
    name: str
    path: str
    status: int
    kind: str  # page, fragment, download, act, redirect or wrong
    text: str = ""


def patterns() -> list[URLPattern]:
    """List the named addresses outside the API."""

    def walk(entries: list[Any], inside: str = "") -> Iterator[URLPattern]:
        for entry in entries:
            if isinstance(entry, URLPattern):
                yield entry
            elif not str(entry.pattern).startswith("api/"):
                yield from walk(entry.url_patterns)

    return [pattern for pattern in walk(get_resolver().url_patterns) if pattern.name]


def path_of(pattern: URLPattern, examples: Mapping[str, str | int]) -> str:
    """Fill an address with examples; KeyError names the part that has none."""
    known = {**EXAMPLES, **examples}
    parts = {}
    for part in pattern.pattern.converters:
        special = f"{pattern.name}.{part}"
        parts[part] = known[special] if special in known else known[part]
    return reverse(str(pattern.name), kwargs=parts)


def ask(context: BrowserContext, examples: Mapping[str, str | int]) -> list[Answer]:
    """GET every address as the person of this context, and sort the answers."""
    found = []
    for pattern in patterns():
        if pattern.name in OUTSIDE:
            continue
        path = path_of(pattern, examples)
        for address in (path, *(path + face for face in FACES.get(str(pattern.name), ()))):
            answer = context.request.get(address, max_redirects=0)
            text = answer.text() if "text/html" in answer.headers.get("content-type", "") else ""
            kind = _kind(answer.status, text)
            found.append(Answer(str(pattern.name), address, answer.status, kind, text))
    return found


def _kind(status: int, text: str) -> str:
    if status == 405:
        return "act"
    if status in (301, 302, 303):
        return "redirect"
    if status not in (200, 204):
        return "wrong"
    if not text:
        return "download"
    return "page" if "<html" in text else "fragment"


def pages(answers: list[Answer]) -> list[str]:
    return [answer.path for answer in answers if answer.kind == "page"]


CUSTOM_TOOL = {
    "name": "house_rules",
    "description": "Read the rules of the house.",
    "inputSchema": {"type": "object"},
}


def run_an_agent(
    toolcrib: Installation, name: str, tool: str, *, query: str = "rain", **call: Any
) -> str:
    """Make an agent whose session searches, loads, calls well and badly, and is forked."""
    done = toolcrib.command("create_agent", name, "--all-groups", "--json")
    assert done.returncode == 0, done.stderr
    key = json.loads(done.stdout)["key"]
    toolcrib.api("POST", "/tools", CUSTOM_TOOL)

    def send(path: str, body: object) -> Any:
        status, told = toolcrib.api("POST", path, body, key)
        assert status < 300, told
        return told

    opened = send("/sessions", {"mode": "deferred", "metadata": {"task": query}})
    session = f"/sessions/{opened['id']}"
    send(f"{session}/search", {"query": query})
    send(f"{session}/search", {"query": f"zzzqqq {query}"})
    group = f"mcp:{tool.partition('__')[0]}"
    send(f"{session}/load", {"group_id": group, "tool_names": [tool.partition("__")[2]]})
    send(f"{session}/call", {"tool_name": tool, "arguments": call})
    send(f"{session}/call", {"tool_name": tool, "arguments": {"no-such": query}})
    send(f"{session}/call", {"tool_name": "nowhere__tool", "arguments": {"a": query}})
    send(f"{session}/fork", {})
    return str(opened["id"])
