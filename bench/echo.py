"""Echo server behind bench/dispatch.py.

python bench/echo.py [--http PORT]; stdio by default. Uses the SDK's MCPServer, as most servers do,
so that the measured overhead is typical.
"""

import argparse
import asyncio
import socket

import uvicorn
from mcp.server import MCPServer
from mcp.server.transport_security import TransportSecuritySettings

server = MCPServer("echo")


@server.tool(structured_output=False)
def echo(text: str) -> str:
    """Say what you are told."""
    return text


@server.tool(structured_output=False)
def listed_echo(text: str) -> str:
    """Say what you are told; Toolcrib lists this tool to its clients."""
    return text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--http", type=int, metavar="PORT", help="streamable HTTP; 0: any port")
    options = parser.parse_args()
    if options.http is None:
        server.run("stdio")
        return
    app = server.streamable_http_app(
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False)
    )
    listener = socket.create_server(("127.0.0.1", options.http), backlog=256)
    # asyncio sets this only on sockets that it creates; without it each response waits 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print(f"listening on 127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, ws="none")
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


if __name__ == "__main__":
    main()
