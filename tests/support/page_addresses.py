"""Enumerate all pages from the URL conf, with example values for the URL parameters.

A URL that answers GET with 405 is an action, one that returns a complete HTML document is a page;
the others are fragments and downloads. A URL parameter without a value in EXAMPLES raises KeyError.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.urls import URLPattern, get_resolver, reverse
from playwright.sync_api import BrowserContext

from tests.support.installation import Installation

# Pages for signed-out users, and probes.
EXCLUDED_PAGES = {"sign-in", "sign-out", "setup", "join", "live", "livez", "metrics", "readyz"}
# Values of URL parameters, by parameter or by "url-name.parameter".
EXAMPLES: dict[str, str | int] = {
    "key_id": 1,
    "entry_id": 1,
    "hint_id": 1,
    "golden_id": 1,
    "rule_name": "House rule",
    "person_id": 1,
    "webhook_id": 1,
    "act": "approve",
    "settings-section.name": "sync",
    "tool-edit.public_name": "house_rules",  # only custom tools can be edited
    "usage-csv.table": "tools",
    "code": "x",
    "uid": "x",
    "token": "x",
}
# Query strings of pages with more than one state.
QUERY_STRINGS = {
    "tools": ["?q=nothing-like-it", "?sort=-tokens"],
    "servers": ["?q=nothing-like-it"],
    "sessions": ["?agent=nobody"],
    "audit": ["?q=nothing-like-it"],
    "palette": ["?q=e", "?q=nothing-like-it"],
    "playground": ["?q=forecast", "?q=zzzqqq", "?q=%28&mode=regex"],
}


@dataclass(frozen=True)
class PageResponse:
    name: str
    path: str
    status: int
    kind: str  # page, fragment, download, act, redirect or wrong
    text: str = ""


def named_patterns() -> list[URLPattern]:
    """List the named URL patterns outside the API."""

    def walk(entries: list[Any]) -> Iterator[URLPattern]:
        for entry in entries:
            if isinstance(entry, URLPattern):
                yield entry
            elif not str(entry.pattern).startswith("api/"):
                yield from walk(entry.url_patterns)

    return [pattern for pattern in walk(get_resolver().url_patterns) if pattern.name]


def example_path(pattern: URLPattern, examples: Mapping[str, str | int]) -> str:
    """Return the path of a pattern with example values; KeyError names a parameter without one."""
    values = {**EXAMPLES, **examples}
    parameters = {}
    for name in pattern.pattern.converters:
        qualified = f"{pattern.name}.{name}"
        parameters[name] = values[qualified] if qualified in values else values[name]
    return reverse(str(pattern.name), kwargs=parameters)


def fetch_all(context: BrowserContext, examples: Mapping[str, str | int]) -> list[PageResponse]:
    """GET every URL with the cookies of this context, and classify the responses."""
    responses = []
    for pattern in named_patterns():
        if pattern.name in EXCLUDED_PAGES:
            continue
        path = example_path(pattern, examples)
        for url in (path, *(path + query for query in QUERY_STRINGS.get(str(pattern.name), ()))):
            response = context.request.get(url, max_redirects=0)
            text = (
                response.text() if "text/html" in response.headers.get("content-type", "") else ""
            )
            kind = _kind(response.status, text)
            responses.append(PageResponse(str(pattern.name), url, response.status, kind, text))
    return responses


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


def page_paths(responses: list[PageResponse]) -> list[str]:
    return [response.path for response in responses if response.kind == "page"]


CUSTOM_TOOL = {
    "name": "house_rules",
    "description": "Read the rules of the house.",
    "inputSchema": {"type": "object"},
}


def run_agent(
    toolcrib: Installation, name: str, tool: str, *, query: str = "rain", **call: Any
) -> dict[str, str]:
    """Create an agent with a session that searches, loads, calls, runs a script and forks.

    Returns the ids for the URLs of their pages. Some of the calls fail.
    """
    done = toolcrib.command("create_agent", name, "--all-groups", "--json")
    assert done.returncode == 0, done.stderr
    key = json.loads(done.stdout)["key"]
    toolcrib.api("POST", "/tools", CUSTOM_TOOL)
    toolcrib.api("POST", "/rules", {"name": "House rule", "effect": "allow"})

    def send(path: str, body: object) -> Any:
        status, response = toolcrib.api("POST", path, body, key)
        assert status < 300, response
        return response

    opened = send("/sessions", {"mode": "deferred", "metadata": {"task": query}})
    session = f"/sessions/{opened['id']}"
    send(f"{session}/search", {"query": query})
    send(f"{session}/search", {"query": f"zzzqqq {query}"})
    group = f"mcp:{tool.partition('__')[0]}"
    send(f"{session}/load", {"group_id": group, "tool_names": [tool.partition("__")[2]]})
    send(f"{session}/call", {"tool_name": tool, "arguments": call})
    send(f"{session}/call", {"tool_name": tool, "arguments": {"no-such": query}})
    send(f"{session}/call", {"tool_name": "nowhere__tool", "arguments": {"a": query}})
    status, changed = toolcrib.api("PATCH", f"/agents/{name}", {"code_mode": True})
    assert status == 200, changed
    code = f"print({query!r})\nraise ValueError({query!r})"
    run = send(f"{session}/scripts", {"code": code, "input": query})
    assert run["error"]["type"] == "ValueError", run
    send(f"{session}/fork", {})
    return {"session_id": str(opened["id"]), "run_id": run["run_id"]}
