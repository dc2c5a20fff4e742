"""FastMCP proxy for bench/dispatch.py, run in its own environment under .cache/parts.

`python bench/peers.py PORT [--search] TARGET...` uses one connected client for all requests, the
faster of the two possible configurations. With --search it lists only its search tool and its
call tool, as Toolcrib's deferred mode does.
"""

import sys


def fastmcp_proxy(port, search, target):
    """Serve a proxy. Runs in the environment of FastMCP."""
    import asyncio

    from fastmcp import Client
    from fastmcp.client.transports import StdioTransport
    from fastmcp.server import create_proxy
    from fastmcp.server.transforms.search import BM25SearchTransform

    transport = target[0] if len(target) == 1 else StdioTransport(target[0], target[1:])

    async def serve():
        async with Client(transport) as client:
            proxy = create_proxy(client, name="proxy")
            if search:
                proxy.add_transform(BM25SearchTransform())
            options = {"host": "127.0.0.1", "port": port, "show_banner": False}
            await proxy.run_async(transport="http", log_level="error", **options)

    asyncio.run(serve())


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--search"]
    fastmcp_proxy(int(arguments[0]), "--search" in sys.argv, arguments[1:])
