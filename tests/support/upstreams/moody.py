"""Servers at any path below /at/, all well until somebody says otherwise. No SDK needed.

python -m tests.support.upstreams.moody

GET  /_be/MOOD   from now on: well | reset (hang up on everybody) | STATUS (an HTTP status) |
                 same, cycle, new, empty (pages whose cursors lead nowhere)
GET  /_asked     when each path was asked for anything, by a clock of its own, as JSON
"""

import asyncio
import json
import time
from typing import Any

from tests.support.upstreams.answers import answer
from tests.support.upstreams.by_hand import say, serve

CURSORS = {
    "same": lambda page: "again",
    "cycle": lambda page: "AB"[page % 2],
    "new": lambda page: f"page {page}",
    "empty": lambda page: "",
}


class Moody:
    def __init__(self) -> None:
        self.mood = "well"
        self.pages = 0
        self.asked: dict[str, list[float]] = {}

    async def answer(
        self, method: str, path: str, message: dict[str, Any], writer: asyncio.StreamWriter
    ) -> bool:
        if path.startswith("/_be/"):
            self.mood, self.pages = path.removeprefix("/_be/"), 0
            return say(writer, "{}")
        if path == "/_asked":
            return say(writer, json.dumps(self.asked))
        self.asked.setdefault(path, []).append(time.monotonic())
        if self.mood == "reset":
            writer.transport.abort()
            return False
        if self.mood.isdigit():
            return say(writer, "{}", int(self.mood))
        if method != "POST":
            return say(writer, "{}", 405)
        return say(writer, answer(message, self.tools(message), "modern"))

    def tools(self, message: dict[str, Any]) -> str:
        """A page of one tool; with cursors that lead nowhere, always another page."""
        if message.get("method") != "tools/list":
            return ""
        if self.mood not in CURSORS:
            return '{"tools": [{"name": "ping", "inputSchema": {"type": "object"}}]}'
        self.pages += 1
        tool = {"name": f"ping-{self.pages}", "inputSchema": {"type": "object"}}
        return json.dumps({"tools": [tool], "nextCursor": CURSORS[self.mood](self.pages)})


if __name__ == "__main__":
    asyncio.run(serve(Moody().answer))
