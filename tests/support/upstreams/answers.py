"""The least an MCP server must answer, in either era, for servers written by hand."""

import json
from pathlib import Path
from typing import Any

MODERN = "2026-07-28"
LEGACY = "2025-11-25"
UNKNOWN = "2099-01-01"
INFO = {"name": "raw", "version": "1.0"}
ONE_TOOL = '{"tools": [{"name": "ping", "inputSchema": {"type": "object"}}]}'


def listing(path: str | None) -> str:
    """Return the JSON text of a tools/list result: a file's own text, or one harmless tool."""
    if path is None:
        return ONE_TOOL
    text = Path(path).read_text()
    return f'{{"tools": {text}}}' if text.lstrip().startswith("[") else text


def answer(message: dict[str, Any], tools: str, era: str) -> str | None:
    """Return the JSON text that answers a message, None when none is due."""
    if "id" not in message:
        return None
    method = message["method"]
    results = {"tools/list": tools}
    if era == "unknown":
        capable = {"capabilities": {"tools": {}}, "serverInfo": INFO}
        results["initialize"] = json.dumps({"protocolVersion": UNKNOWN, **capable})
    elif era == "modern":
        results["server/discover"] = json.dumps(
            {
                "resultType": "complete",
                "supportedVersions": [MODERN],
                "capabilities": {"tools": {"listChanged": False}},
                "ttlMs": 0,
                "cacheScope": "private",
                "_meta": {"io.modelcontextprotocol/serverInfo": INFO},
            }
        )
    else:
        results["initialize"] = json.dumps(
            {"protocolVersion": LEGACY, "capabilities": {"tools": {}}, "serverInfo": INFO}
        )
    if method == "tools/call":
        results[method] = (
            '{"content": [{"type": "text", "text": "pong"}], "resultType": "complete"}'
        )
    head = f'{{"jsonrpc": "2.0", "id": {json.dumps(message["id"])}, '
    if method in results:
        return head + f'"result": {results[method]}}}'
    return head + '"error": {"code": -32601, "message": "no such method"}}'


def large_notice() -> dict[str, Any]:
    """A notification of eight megabytes, in as many small values as fit."""
    said = [{"text": "x" * 40}] * 150_000
    return {
        "jsonrpc": "2.0",
        "method": "notifications/message",
        "params": {"level": "info", "data": said},
    }
