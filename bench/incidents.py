"""Two servers behind bench/scripts.py: a log store, and a ticket system.

    python bench/incidents.py logs|tickets

Over stdio, with the SDK's MCPServer and output schemas. The log store answers the same 400 error
lines with eight different messages in every run.
"""

import itertools
import sys

from mcp.server import MCPServer
from pydantic import BaseModel

LINES, MESSAGES = 400, 8
PROBLEMS = ("timeout", "connection refused", "out of memory", "disk full")


class LogLine(BaseModel):
    at: str
    level: str
    service: str
    host: str
    message: str


class Logs(BaseModel):
    lines: list[LogLine]


class Ticket(BaseModel):
    id: str
    title: str
    state: str


def serve_logs() -> MCPServer:
    server = MCPServer("logs")

    @server.tool()
    def search_logs(level: str, minutes: int) -> Logs:
        """Find the log lines of a level in the last minutes."""
        messages = [
            f"Request to backend {number} failed: {PROBLEMS[number % len(PROBLEMS)]}"
            for number in range(MESSAGES)
        ]
        return Logs(
            lines=[
                LogLine(
                    at=f"2026-11-18T12:{number * 60 // LINES:02}:{number % 60:02}Z",
                    level=level,
                    service=f"shop-{number % 5}",
                    host=f"node-{number % 11}.internal",
                    message=messages[number % MESSAGES],
                )
                for number in range(LINES)
            ]
        )

    return server


def serve_tickets() -> MCPServer:
    server, numbers = MCPServer("tickets"), itertools.count(1)

    @server.tool()
    def create_ticket(title: str, description: str) -> Ticket:
        """Open a ticket."""
        return Ticket(id=f"OPS-{next(numbers)}", title=title, state="open")

    @server.tool()
    def get_state(ticket_id: str) -> Ticket:
        """Get the state of a ticket."""
        return Ticket(id=ticket_id, title="One of many", state="open")

    return server


if __name__ == "__main__":
    {"logs": serve_logs, "tickets": serve_tickets}[sys.argv[1]]().run("stdio")
