"""Minimal responses of an MCP server in either protocol era, for servers without the SDK."""

import json
from pathlib import Path
from typing import Any

MODERN = "2026-07-28"
LEGACY = "2025-11-25"
UNKNOWN = "2099-01-01"
SERVER_INFO = {"name": "raw", "version": "1.0"}
ONE_TOOL = '{"tools": [{"name": "ping", "inputSchema": {"type": "object"}}]}'


def tool_list_json(path: str | None) -> str:
    """Return the JSON text of a tools/list result: the content of a file, or one tool."""
    if path is None:
        return ONE_TOOL
    text = Path(path).read_text()
    return f'{{"tools": {text}}}' if text.lstrip().startswith("[") else text


def respond(message: dict[str, Any], tools: str, era: str) -> str | None:
    """Return the JSON text of the response to a message, None for a notification."""
    if "id" not in message:
        return None
    method = message["method"]
    results = {"tools/list": tools}
    if era == "unknown":
        fields = {"capabilities": {"tools": {}}, "serverInfo": SERVER_INFO}
        results["initialize"] = json.dumps({"protocolVersion": UNKNOWN, **fields})
    elif era == "modern":
        results["server/discover"] = json.dumps(
            {
                "resultType": "complete",
                "supportedVersions": [MODERN],
                "capabilities": {"tools": {"listChanged": False}},
                "ttlMs": 0,
                "cacheScope": "private",
                "_meta": {"io.modelcontextprotocol/serverInfo": SERVER_INFO},
            }
        )
    else:
        results["initialize"] = json.dumps(
            {"protocolVersion": LEGACY, "capabilities": {"tools": {}}, "serverInfo": SERVER_INFO}
        )
    if method == "tools/call":
        results[method] = (
            '{"content": [{"type": "text", "text": "pong"}], "resultType": "complete"}'
        )
    head = f'{{"jsonrpc": "2.0", "id": {json.dumps(message["id"])}, '
    if method in results:
        return head + f'"result": {results[method]}}}'
    return head + '"error": {"code": -32601, "message": "no such method"}}'


def large_notification() -> dict[str, Any]:
    """Return a notification of eight megabytes that consists of many small values."""
    values = [{"text": "x" * 40}] * 150_000
    return {
        "jsonrpc": "2.0",
        "method": "notifications/message",
        "params": {"level": "info", "data": values},
    }
