"""Small makers of what the tests are about. Every one takes only what the test says."""

from itertools import count
from typing import Any

from django.db import transaction

from catalog import ingest
from catalog.definitions import RemoteTool, read_tool, read_tools
from catalog.ingest import Ingested
from catalog.models import Group, Tool
from servers.checks import argv_digest
from servers.models import Server
from tests.upstreams.running import ROOT, stdio_argv

CAPS: dict[str, Any] = {"max_bytes": 64 * 1024, "max_description": 32 * 1024}
_numbers = count(1)


def make_server(**fields: Any) -> Server:
    """An HTTP server that nothing listens for, unless told otherwise, with its group."""
    slug = fields.setdefault("slug", f"server-{next(_numbers)}")
    fields.setdefault("name", slug.title())
    if not fields.get("command"):
        fields.setdefault("transport", "http")
        fields.setdefault("url", "http://127.0.0.1:9/mcp")
    server = Server.objects.create(**fields)
    Group.objects.create(group_id=f"mcp:{slug}", display_name=server.name, follows=server)
    return server


def make_program(module: str, *args: str, **fields: Any) -> Server:
    """A stdio server of tests/upstreams, its argv confirmed."""
    command, *rest = stdio_argv(module, *args)
    digest = argv_digest([command, *rest], str(ROOT))
    return make_server(
        transport="stdio",
        command=command,
        args=rest,
        cwd=str(ROOT),
        **{"confirmed_argv": digest, **fields},
    )


def tool_object(name: str = "search", **fields: Any) -> dict[str, Any]:
    """A tool as a server would send it."""
    return {"name": name, "inputSchema": {"type": "object"}, **fields}


def make_remote_tool(name: str = "search", **fields: Any) -> RemoteTool:
    return read_tool(tool_object(name, **fields), **CAPS)


def fold(server: Server, *items: object, allow_removals: bool = False) -> Ingested:
    """Do to the catalog what a sync does with this list."""
    server.refresh_from_db()
    tools, rejections = read_tools(items, **CAPS)
    ids = ingest.prepare(tools)
    findings = ingest.judge(server, tools)
    with transaction.atomic():
        return ingest.apply(
            server, tools, rejections, ids, findings=findings, allow_removals=allow_removals
        )


def make_tool(server: Server | None = None, name: str = "search", **fields: Any) -> Tool:
    """A tool of a server, approved unless the server's trust says otherwise."""
    server = server or make_server()
    present = Tool.objects.filter(server=server, missing_since=None).select_related("latest")
    others = [tool.latest.tool for tool in present if tool.latest and tool.name != name]
    fold(server, *others, tool_object(name, **fields))
    return Tool.objects.get(server=server, name=name)
