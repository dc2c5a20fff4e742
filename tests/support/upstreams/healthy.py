"""`weather`: well-behaved server with tools that change its own tool list.

python -m tests.support.upstreams.healthy [--http PORT] [--sse PORT] [--legacy]; stdio by default.
"""

import weakref
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp_types import ToolAnnotations
from pydantic import BaseModel

from tests.support.upstreams.serving import parser, serve

READING = ToolAnnotations(read_only_hint=True, open_world_hint=False)


class Forecast(BaseModel):
    city: str
    days: int
    summary: str


def weather() -> MCPServer:
    """Build the server. Also usable in memory: `client.over(weather())`."""
    initialized: weakref.WeakSet[Any] = weakref.WeakSet()

    async def record_connection(ctx, call_next):
        if ctx.method == "notifications/initialized":
            initialized.add(ctx.session._connection)
        return await call_next(ctx)

    server = MCPServer(
        "weather",
        title="Weather",
        version="1.2.0",
        instructions="Ask for forecasts by city.",
        log_level="ERROR",
        middleware=[record_connection],
        warn_on_duplicate_tools=False,
    )

    async def notify_clients(ctx: Context) -> None:
        await ctx.notify_tools_changed()
        for connection in list(initialized):
            await connection.send_tool_list_changed()

    server.notify_clients = notify_clients  # type: ignore[attr-defined] # for noisy.py

    @server.tool(annotations=READING)
    def get_forecast(city: str, days: int = 3) -> Forecast:
        """Return the weather forecast for a city."""
        return Forecast(city=city, days=days, summary="sunny")

    @server.tool(annotations=READING)
    def get_temperature(city: str) -> float:
        """Return the current temperature in a city, in degrees Celsius."""
        return 21.5

    @server.tool(annotations=READING)
    def list_stations(country: str, limit: int = 10) -> list[str]:
        """List weather stations of a country."""
        return [f"{country}-{number}" for number in range(min(limit, 3))]

    @server.tool(annotations=ToolAnnotations(read_only_hint=False, destructive_hint=False))
    def report_weather(city: str, text: str) -> str:
        """Report the weather you see."""
        return f"Noted for {city}."

    @server.tool()
    async def add_tool(name: str, ctx: Context, description: str = "Added later.") -> str:
        """Register another tool and tell every client."""

        def added(text: str = "") -> str:
            return text

        server.add_tool(added, name=name, description=description)
        await notify_clients(ctx)
        return f"Added {name}."

    @server.tool()
    async def rename_description(name: str, text: str, ctx: Context) -> str:
        """Change the description of a tool and tell every client."""
        tool = server._tool_manager.get_tool(name)
        if tool is None:
            raise ValueError(f"There is no tool {name}.")
        tool.description = text
        await notify_clients(ctx)
        return f"Changed {name}."

    @server.tool()
    async def remove_tool(name: str, ctx: Context) -> str:
        """Remove a tool and tell every client."""
        server.remove_tool(name)
        await notify_clients(ctx)
        return f"Removed {name}."

    return server


if __name__ == "__main__":
    serve(weather(), parser().parse_args())
