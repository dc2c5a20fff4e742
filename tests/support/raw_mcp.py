"""MCP as bytes over HTTP, for what no client would send."""

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tests.support.agents import Answer
from tests.support.mcp_clients import LEGACY, MODERN

ENVELOPE = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
}
ACCEPT = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


def connection(agent: Any, timeout: float = 30) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(agent.url).netloc, timeout=timeout)


def headers(agent: Any, more: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Headers that are all in order; None in `more` leaves one out."""
    given = {"Authorization": f"Bearer {agent.key}", **ACCEPT, **(more or {})}
    return {name: value for name, value in given.items() if value is not None}


def send(
    agent: Any,
    body: Any = None,
    more: Mapping[str, Any] | None = None,
    *,
    method: str = "POST",
    path: str = "",
) -> Answer:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    asking = connection(agent)
    try:
        asking.request(method, f"/mcp{path}", data, headers(agent, more))
        response = asking.getresponse()
        named = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, named, response.read())
    finally:
        asking.close()


def request(method: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A request of the newer era, envelope and all."""
    whole = {"_meta": ENVELOPE, **(params or {})}
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": whole}


def modern(
    agent: Any,
    method: str,
    params: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
    *,
    path: str = "",
) -> Answer:
    routing = {"MCP-Protocol-Version": MODERN, "Mcp-Method": method}
    if params and "name" in params:
        routing["Mcp-Name"] = params["name"]
    return send(agent, request(method, params), {**routing, **(more or {})}, path=path)


def result(answer: Answer) -> Any:
    """What a request was answered with, by JSON or as the last event of a stream."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in answer.body.splitlines() if line.startswith(b"data:")]
        return json.loads(lines[-1][5:])
    return answer.json


def shake(agent: Any, *, path: str = "") -> str:
    """Do the handshake of the older era; return the id of the connection."""
    params = {
        "protocolVersion": LEGACY,
        "capabilities": {},
        "clientInfo": {"name": "raw", "version": "0"},
    }
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    answer = send(agent, hello, path=path)
    assert answer.status == 200, answer.body
    known = answer.headers["mcp-session-id"]
    done = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    assert send(agent, done, {"Mcp-Session-Id": known}, path=path).status == 202
    return known


def stream(agent: Any, more: Mapping[str, Any], body: Any = None, *, path: str = "") -> Any:
    """Open a stream and return its connection and its response, unread."""
    asking = connection(agent)
    data = None if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    asking.request(method, f"/mcp{path}", data, headers(agent, more))
    return asking, asking.getresponse()


def listen(agent: Any) -> Any:
    """Open a subscription of the newer era."""
    body = request("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
    routing = {"MCP-Protocol-Version": MODERN, "Mcp-Method": "subscriptions/listen"}
    return stream(agent, routing, body)
