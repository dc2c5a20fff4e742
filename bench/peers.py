"""FastMCP proxy for bench/dispatch.py, run in its own environment under .cache/parts.

`python bench/peers.py PORT TARGET...` uses one connected client for all requests, the faster of
the two possible configurations.
"""

import sys


def fastmcp_proxy(port, target):
    """Serve a proxy. Runs in the environment of FastMCP."""
    import asyncio

    from fastmcp import Client
    from fastmcp.client.transports import StdioTransport
    from fastmcp.server import create_proxy

    transport = target[0] if len(target) == 1 else StdioTransport(target[0], target[1:])

    async def serve():
        async with Client(transport) as client:
            proxy = create_proxy(client, name="proxy")
            options = {"host": "127.0.0.1", "port": port, "show_banner": False}
            await proxy.run_async(transport="http", log_level="error", **options)

    asyncio.run(serve())


if __name__ == "__main__":
    fastmcp_proxy(int(sys.argv[1]), sys.argv[2:])
