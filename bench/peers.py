"""The peers of bench/dispatch.py, each in an environment of its own under .cache/parts.

python bench/peers.py PORT TARGET...  runs FastMCP's proxy (in its environment), with one connected
client for all requests: the faster of the two ways it can be set up.
"""

import sys


def fastmcp_proxy(port, target):
    """Serve a proxy. Runs in FastMCP's own environment."""
    import asyncio

    from fastmcp import Client
    from fastmcp.client.transports import StdioTransport
    from fastmcp.server import create_proxy

    where = target[0] if len(target) == 1 else StdioTransport(target[0], target[1:])

    async def serve():
        async with Client(where) as client:
            proxy = create_proxy(client, name="proxy")
            options = {"host": "127.0.0.1", "port": port, "show_banner": False}
            await proxy.run_async(transport="http", log_level="error", **options)

    asyncio.run(serve())


if __name__ == "__main__":
    fastmcp_proxy(int(sys.argv[1]), sys.argv[2:])
