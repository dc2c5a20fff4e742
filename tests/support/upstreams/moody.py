"""Servers at any path below /at/ whose failure mode can be switched, without the SDK.

python -m tests.support.upstreams.moody

GET  /_be/MODE   from now on: well | reset (close every connection) | STATUS (an HTTP status) |
                 same, cycle, new, empty (cursors that never end)
GET  /_asked     the times of the requests by path, on the monotonic clock of this process, as JSON
"""

import asyncio
import json
import time
from typing import Any

from tests.support.upstreams.answers import respond
from tests.support.upstreams.by_hand import serve, write_response

CURSORS = {
    "same": lambda page: "again",
    "cycle": lambda page: "AB"[page % 2],
    "new": lambda page: f"page {page}",
    "empty": lambda page: "",
}


class SwitchableServer:
    def __init__(self) -> None:
        self.mode = "well"
        self.pages = 0
        self.request_times: dict[str, list[float]] = {}

    async def handle(
        self, method: str, path: str, message: dict[str, Any], writer: asyncio.StreamWriter
    ) -> bool:
        if path.startswith("/_be/"):
            self.mode, self.pages = path.removeprefix("/_be/"), 0
            return write_response(writer, "{}")
        if path == "/_asked":
            return write_response(writer, json.dumps(self.request_times))
        self.request_times.setdefault(path, []).append(time.monotonic())
        if self.mode == "reset":
            writer.transport.abort()
            return False
        if self.mode.isdigit():
            return write_response(writer, "{}", int(self.mode))
        if method != "POST":
            return write_response(writer, "{}", 405)
        return write_response(writer, respond(message, self.tools(message), "modern"))

    def tools(self, message: dict[str, Any]) -> str:
        """Return a page with one tool; in the cursor modes, with a next cursor."""
        if message.get("method") != "tools/list":
            return ""
        if self.mode not in CURSORS:
            return '{"tools": [{"name": "ping", "inputSchema": {"type": "object"}}]}'
        self.pages += 1
        tool = {"name": f"ping-{self.pages}", "inputSchema": {"type": "object"}}
        return json.dumps({"tools": [tool], "nextCursor": CURSORS[self.mode](self.pages)})


if __name__ == "__main__":
    asyncio.run(serve(SwitchableServer().handle))
