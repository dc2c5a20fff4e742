"""Serve an SDK server over stdio, HTTP or SSE; the first line of stdout contains the port."""

import argparse
import asyncio
import contextlib
import socket
import sys
from typing import Any

import anyio
import uvicorn
from mcp.server import MCPServer, Server
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.message import SessionMessage
from mcp_types import METHOD_NOT_FOUND, ErrorData, JSONRPCError

MODERN = b"2026-07-28"


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser()
    options.add_argument("--http", type=int, metavar="PORT", help="streamable HTTP; 0: any port")
    options.add_argument("--sse", type=int, metavar="PORT", help="HTTP+SSE; 0: any port")
    options.add_argument("--legacy", action="store_true", help="support the handshake era only")
    return options


def serve(server: MCPServer | Server, options: argparse.Namespace) -> None:
    if options.http is None and options.sse is None:
        asyncio.run(_serve_stdio(server, options.legacy))
        return
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app: Any
    if options.sse is not None:
        if not isinstance(server, MCPServer):
            raise SystemExit("Only MCPServer supports SSE.")
        app = server.sse_app(transport_security=security)
    else:
        app = server.streamable_http_app(transport_security=security)
        if options.legacy:
            app = _without_discover(app)
    listener = socket.create_server(("127.0.0.1", options.http or options.sse or 0))
    sys.stdout.write(f"listening on 127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, ws="none")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


async def _serve_stdio(server: MCPServer | Server, legacy: bool) -> None:
    low = server._lowlevel_server if isinstance(server, MCPServer) else server
    async with stdio_server() as (read, write):
        if not legacy:
            await low.run(read, write, low.create_initialization_options())
            return
        forward, filtered = anyio.create_memory_object_stream[Any](0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_refuse_discover, read, forward, write)
            await low.run(filtered, write, low.create_initialization_options())
            tasks.cancel_scope.cancel()


async def _refuse_discover(read, forward, write) -> None:
    """Filter the probe, which the SDK's stdio server would take as a client of the new era."""
    async with forward:
        async for item in read:
            message: Any = getattr(item, "message", None)
            if getattr(message, "method", "") == "server/discover":
                error = ErrorData(code=METHOD_NOT_FOUND, message="no such method")
                refusal = JSONRPCError(jsonrpc="2.0", id=message.id, error=error)
                await write.send(SessionMessage(refusal))
            else:
                await forward.send(item)


def _without_discover(app):
    """Answer requests of the modern era with HTTP 400, as servers of the handshake era do."""

    async def legacy_only(scope, receive, send):
        if scope["type"] == "http" and (b"mcp-protocol-version", MODERN) in scope["headers"]:
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"unknown protocol version"})
            return
        await app(scope, receive, send)

    return legacy_only
