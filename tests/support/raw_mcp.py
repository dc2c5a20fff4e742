"""Low-level MCP over HTTP, for messages that a correct client never sends."""

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tests.support.agents import HttpResponse
from tests.support.mcp_clients import LEGACY, MODERN

ENVELOPE = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
}
ACCEPT = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


def open_connection(agent: Any, timeout: float = 30) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(agent.url).netloc, timeout=timeout)


def build_headers(agent: Any, more: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return valid headers, updated by `more`; None removes a header."""
    merged = {"Authorization": f"Bearer {agent.key}", **ACCEPT, **(more or {})}
    return {name: value for name, value in merged.items() if value is not None}


def send(
    agent: Any,
    body: Any = None,
    more: Mapping[str, Any] | None = None,
    *,
    method: str = "POST",
    path: str = "",
) -> HttpResponse:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    conn = open_connection(agent)
    try:
        conn.request(method, f"/mcp{path}", data, build_headers(agent, more))
        response = conn.getresponse()
        lowered = {name.lower(): value for name, value in response.getheaders()}
        return HttpResponse(response.status, lowered, response.read())
    finally:
        conn.close()


def build_request(method: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Build a request of the 2026 protocol with its `_meta` envelope."""
    all_params = {"_meta": ENVELOPE, **(params or {})}
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": all_params}


def send_modern(
    agent: Any,
    method: str,
    params: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
    *,
    path: str = "",
) -> HttpResponse:
    routing = {"MCP-Protocol-Version": MODERN, "Mcp-Method": method}
    if params and "name" in params:
        routing["Mcp-Name"] = params["name"]
    return send(agent, build_request(method, params), {**routing, **(more or {})}, path=path)


def parse_result(response: HttpResponse) -> Any:
    """Return the JSON-RPC message of a response: a JSON body or the last event of a stream."""
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in response.body.splitlines() if line.startswith(b"data:")]
        return json.loads(lines[-1][5:])
    return response.json


def initialize(agent: Any, *, path: str = "") -> str:
    """Do the handshake of the 2025 protocol and return the MCP session id."""
    params = {
        "protocolVersion": LEGACY,
        "capabilities": {},
        "clientInfo": {"name": "raw", "version": "0"},
    }
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    response = send(agent, message, path=path)
    assert response.status == 200, response.body
    session_id = response.headers["mcp-session-id"]
    initialized = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    assert send(agent, initialized, {"Mcp-Session-Id": session_id}, path=path).status == 202
    return session_id


def open_stream(agent: Any, more: Mapping[str, Any], body: Any = None, *, path: str = "") -> Any:
    """Open a stream and return the connection and the unread response."""
    conn = open_connection(agent)
    data = None if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    conn.request(method, f"/mcp{path}", data, build_headers(agent, more))
    return conn, conn.getresponse()


def subscribe(agent: Any) -> Any:
    """Open a subscription of the 2026 protocol."""
    body = build_request("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
    routing = {"MCP-Protocol-Version": MODERN, "Mcp-Method": "subscriptions/listen"}
    return open_stream(agent, routing, body)
