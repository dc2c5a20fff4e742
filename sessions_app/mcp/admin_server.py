"""MCP server at `/mcp/admin` for the agents of admins: two tools that write search hints.

It takes keys of scope `admin` and nothing else, has no sessions, and shares no path with agents.
"""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import mcp_types as types
from django.conf import settings
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings

from catalog.hints import exchange
from sessions_app.agents import api_keys
from sessions_app.ledger import writer as ledger_writer
from sessions_app.models import KeyScope
from toolcrib.lib.errors import Forbidden, Invalid, ToolcribError
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.protocols.asgi import (
    Receive,
    Scope,
    Send,
    bearer_digest,
    read_headers,
    send_response,
)
from toolcrib.lib.roles import Actor

PATH = "/mcp/admin"
ACTOR_KEY = "toolcrib.actor"  # key of the actor in the ASGI scope
DEFAULT_TOOLS = 40  # per export
MAX_TOOLS = 100
INSTRUCTIONS = (
    "Search finds tools better with hints: everyday requests for each. Call export_hints, write "
    "hints as its prompt says, send them with import_hints, and repeat until no tools remain."
)
TEXT = {"type": "string"}
TOOLS = [
    {
        "name": "export_hints",
        "title": "Export tools without search hints",
        "description": "Return tools that have no search hints yet, and the prompt to write them.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "server": {**TEXT, "description": "Only tools of this server"},
                "all": {"type": "boolean", "description": "Also tools that have hints"},
                "limit": {"type": "integer", "minimum": 1, "maximum": MAX_TOOLS},
                "after": {**TEXT, "description": "Name of the last tool of the previous export"},
            },
        },
        "annotations": {"readOnlyHint": True, "openWorldHint": False},
    },
    {
        "name": "import_hints",
        "title": "Import search hints",
        "description": "Store the hints that were written, replacing earlier ones by a model.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "items": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"name": TEXT, "hints": {"type": "array", "items": TEXT}},
                        "required": ["name", "hints"],
                    },
                }
            },
            "required": ["items"],
        },
        "annotations": {
            "readOnlyHint": False,
            "destructiveHint": False,
            "idempotentHint": True,
            "openWorldHint": False,
        },
    },
]


def export_hints(arguments: dict[str, Any], actor: Actor) -> dict[str, Any]:
    server, after = (_text(arguments, name) for name in ("server", "after"))
    limit = arguments.get("limit") or DEFAULT_TOOLS
    if not isinstance(limit, int) or not 1 <= limit <= MAX_TOOLS:
        raise Invalid(f"limit must be an integer from 1 to {MAX_TOOLS}.")
    tools = exchange.tools_to_describe(server=server, everything=arguments.get("all") is True)
    names = [tool.name for tool in tools]
    rest = tools[names.index(after) + 1 :] if after in names else tools
    return {
        "prompt": exchange.PROMPT,
        "tools": [exchange.export_tool(tool) for tool in rest[:limit]],
        "remaining": max(0, len(rest) - limit),
    }


def import_hints(arguments: dict[str, Any], actor: Actor) -> dict[str, Any]:
    items = arguments.get("items")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise Invalid("items must be a list of objects.", hint=exchange.ROW_HINT)
    result = exchange.import_hints(items, actor=actor)
    return {**asdict(result), "remaining": len(exchange.tools_to_describe())}


def _text(arguments: dict[str, Any], name: str) -> str:
    value = arguments.get(name) or ""
    if not isinstance(value, str):
        raise Invalid(f"{name} must be a text.")
    return value


OPERATIONS: dict[str, Callable[[dict[str, Any], Actor], dict[str, Any]]] = {
    "export_hints": export_hints,
    "import_hints": import_hints,
}


class AdminEndpoint:
    """ASGI application of `/mcp/admin`, served by the SDK."""

    def __init__(self) -> None:
        self.server: Server[Any] = Server(
            "toolcrib-admin",
            title="Toolcrib administration",
            version=settings.VERSION,
            instructions=INSTRUCTIONS,
            on_list_tools=_list_tools,
            on_call_tool=_call_tool,
        )
        self.manager: StreamableHTTPSessionManager | None = None

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        self.manager = StreamableHTTPSessionManager(
            app=self.server,
            json_response=True,
            # The router checks the host.
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            stateless=True,
            max_request_body_size=settings.MAX_BODY_BYTES,
        )
        async with self.manager.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. Raises ToolcribError for a key that is not an admin's."""
        assert self.manager is not None  # noqa: S101 - set by run
        actor = await ledger_writer.run_off_loop(_authenticate, bearer_digest(read_headers(scope)))
        if scope["method"] != "POST":  # there are no sessions, and so no streams
            await send_response(send, 405, "text/plain", b"Use POST.\n", {"allow": "POST"})
            return
        headers = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
        inner = {**scope, "headers": headers, ACTOR_KEY: actor}
        await self.manager.handle_request(inner, receive, send)


def _authenticate(digest: str) -> Actor:
    key = api_keys.find_key_by_digest(digest) if digest else None
    if key is None:
        raise api_keys.Unauthorized
    if key.scope != KeyScope.ADMIN:
        raise Forbidden("This endpoint is for admins.", hint="Use a key with the scope admin.")
    return Actor("token", key.name, key.pk)


async def _list_tools(
    ctx: ServerRequestContext[Any, Any], params: types.PaginatedRequestParams | None
) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[types.Tool.model_validate(tool) for tool in TOOLS])


async def _call_tool(
    ctx: ServerRequestContext[Any, Any], params: types.CallToolRequestParams
) -> types.CallToolResult:
    assert ctx.request is not None  # noqa: S101 - the transport is HTTP
    actor: Actor = ctx.request.scope[ACTOR_KEY]
    try:
        operation = OPERATIONS.get(params.name)
        if operation is None:
            names = ", ".join(OPERATIONS)
            raise Invalid(f"{params.name[:100]!r} is not a tool.", hint=f"Tools: {names}.")
        body = await ledger_writer.run_off_loop(operation, dict(params.arguments or {}), actor)
        return _result(canonical(body), is_error=False)
    except ToolcribError as error:
        return _result(json.dumps(error.as_json()), is_error=True)


def _result(text: str, *, is_error: bool) -> types.CallToolResult:
    text_content = types.TextContent(type="text", text=text)
    return types.CallToolResult(content=[text_content], is_error=is_error)
