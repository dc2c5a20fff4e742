"""`weather` with a tool that floods every client with notifications.

python -m tests.support.upstreams.noisy [--http PORT] [--legacy] ...
"""

import asyncio
import time

from mcp.server.mcpserver import Context

from tests.support.upstreams.healthy import weather
from tests.support.upstreams.serving import parser, serve


def noisy():
    server = weather()
    notify_clients = server.notify_clients

    @server.tool()
    async def flood(count: int, seconds: float, ctx: Context, last_tool: str = "") -> int:
        """Notify many times, evenly over some seconds; with the last one, add a tool.

        A machine too slow for all of them sends fewer: the time is kept.
        """
        started = time.monotonic()
        sent = 0
        while sent < count - 1 and time.monotonic() - started < seconds:
            await notify_clients(ctx)
            sent += 1
            ahead = started + seconds * sent / count - time.monotonic()
            if ahead > 0:
                await asyncio.sleep(ahead)
        if last_tool:
            server.add_tool(lambda: "", name=last_tool, description="Came with the last.")
        await notify_clients(ctx)
        return sent + 1

    return server


if __name__ == "__main__":
    serve(noisy(), parser().parse_args())
