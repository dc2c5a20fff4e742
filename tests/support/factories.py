"""Factories of database rows for tests; every field that a test does not set has a default."""

from datetime import timedelta
from itertools import count
from typing import Any

from django.db import transaction
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.definitions import ingest, storage
from catalog.definitions.ingest import IngestResult
from catalog.definitions.parsing import RemoteTool, read_tool, read_tools
from catalog.models import CatalogSnapshot, Group, Tool
from servers.models import Server
from servers.registration import actions as server_actions
from servers.registration import confirmation
from servers.registration.validation import argv_digest
from servers.secret import Secret
from sessions_app.models import Agent, AgentSession, Call, Event, ScriptRun
from tests.support.upstreams.running import ROOT, stdio_argv
from toolcrib.lib.json_codec import canonical, digest

DEFINITION_LIMITS: dict[str, Any] = {"max_bytes": 64 * 1024, "max_description": 32 * 1024}
_numbers = count(1)


def make_server(**fields: Any) -> Server:
    """Create a server with its group; by default over HTTP, at a port without a listener."""
    slug = fields.setdefault("slug", f"server-{next(_numbers)}")
    fields.setdefault("name", slug.title())
    if not fields.get("command"):
        fields.setdefault("transport", "http")
        fields.setdefault("url", "http://127.0.0.1:9/mcp")
    server = Server.objects.create(**fields)
    Group.objects.create(group_id=f"mcp:{slug}", display_name=server.name, follows=server)
    return server


def make_program(module: str, *args: str, **fields: Any) -> Server:
    """Create a stdio server of tests/support/upstreams with a confirmed command."""
    command, *rest = stdio_argv(module, *args)
    digest = argv_digest([command, *rest], str(ROOT))
    return make_server(
        transport="stdio",
        command=command,
        args=rest,
        cwd=str(ROOT),
        **{"confirmed_argv": digest, **fields},
    )


def set_confirmed_credentials(server: Server, kind: str, values: dict[str, Secret | None]) -> None:
    """Set credentials, and confirm the program that runs with them."""
    program = confirmation.stored_program(server, kind, values)
    digest = program.digest if server.transport == "stdio" else ""
    server_actions.set_credentials(server, kind, values, actor=SYSTEM, confirmed=digest)


def tool_object(name: str = "search", **fields: Any) -> dict[str, Any]:
    """Return a tool as servers send it in tools/list."""
    return {"name": name, "inputSchema": {"type": "object"}, **fields}


def make_remote_tool(name: str = "search", **fields: Any) -> RemoteTool:
    return read_tool(tool_object(name, **fields), **DEFINITION_LIMITS)


def ingest_tools(server: Server, *items: object, allow_removals: bool = False) -> IngestResult:
    """Apply a tool list to the catalog as a sync does."""
    server.refresh_from_db()
    tools, rejections = read_tools(items, **DEFINITION_LIMITS)
    ids = storage.store_definitions(tools)
    findings = ingest.collect_findings(server, tools, ingest.known_digests(server))
    with transaction.atomic():
        return ingest.apply_listing(
            server, tools, rejections, ids, findings=findings, allow_removals=allow_removals
        )


def make_tool(server: Server | None = None, name: str = "search", **fields: Any) -> Tool:
    """Create a tool of a server; the server's trust level decides on its approval."""
    server = server or make_server()
    present = Tool.objects.filter(server=server, missing_since=None).select_related("latest")
    others = [tool.latest.tool for tool in present if tool.latest and tool.name != name]
    ingest_tools(server, *others, tool_object(name, **fields))
    return Tool.objects.get(server=server, name=name)


def make_agent(name: str = "", **fields: Any) -> Agent:
    """Create an agent, by default with all groups."""
    return Agent.objects.create(
        name=name or f"agent-{next(_numbers)}", **{"all_groups": True, **fields}
    )


def make_session(agent: Agent | None = None, *, started: Any = None, **fields: Any) -> AgentSession:
    """Create a session, by default one minute old; all share a catalog snapshot."""
    text = fields.pop("catalog", "Tools are in groups.")
    snapshot, _ = CatalogSnapshot.objects.get_or_create(
        sha256=digest(text), defaults={"text": text, "body": "{}", "tokens": len(text) // 4}
    )
    started = started or timezone.now() - timedelta(minutes=1)
    defaults = {
        "strategy": "dispatch",
        "mode": "deferred",
        "auto_deferred": True,
        "decided_by": "count",
        "revision": 1,
        "last_used_at": started,
    }
    session = AgentSession.objects.create(
        agent=agent or make_agent(), snapshot=snapshot, **{**defaults, **fields}
    )
    AgentSession.objects.filter(pk=session.pk).update(created_at=started)
    session.refresh_from_db()
    return session


def make_call(session: AgentSession | None = None, tool: Tool | None = None, **fields: Any) -> Call:
    """Create a call, by default one that succeeded in 420 ms at the last use of the session."""
    accepted = fields.pop("at", None) or (session.last_used_at if session else timezone.now())
    duration = timedelta(milliseconds=fields.pop("ms", 420))
    for name in ("arguments", "result_copy"):
        if name in fields and not isinstance(fields[name], str):
            fields[name] = canonical(fields[name])
    defaults: dict[str, Any] = {
        "agent": session.agent if session else None,
        "tool": tool,
        "tool_name": tool.public_name if tool else "nowhere__tool",
        "server": tool.server if tool else None,
        "server_slug": tool.server.slug if tool and tool.server else "",
        "definition": tool.approved if tool else None,
        "state": "succeeded",
        "accepted_at": accepted,
        "sent_at": accepted,
        "finished_at": accepted + duration,
        "deadline": accepted + timedelta(minutes=1),
    }
    return Call.objects.create(session=session, **{**defaults, **fields})


def make_run(session: AgentSession, **fields: Any) -> ScriptRun:
    """Create a run of a script, by default one that completed at the last use of the session."""
    started = fields.pop("at", session.last_used_at)
    for name in ("input", "result", "error"):
        if name in fields and not isinstance(fields[name], str):
            fields[name] = canonical(fields[name])
    defaults: dict[str, Any] = {
        "agent": session.agent,
        "language": "python",
        "engine": "monty 1",
        "code": "await weather.get_forecast(city='Oslo')",
        "state": "completed",
        "started_at": started,
        "finished_at": started + timedelta(seconds=2),
        "timeout": 60,
        "deadline": started + timedelta(minutes=1),
        "tokens_given": 12,
        "tokens_spared": 900,
    }
    return ScriptRun.objects.create(session=session, **{**defaults, **fields})


def make_event(session: AgentSession, kind: str, **fields: Any) -> Event:
    """Create a timeline event; fields that are not columns go into its details."""
    columns = {field.attname for field in Event._meta.fields} | {"call"}
    values = {name: fields.pop(name) for name in list(fields) if name in columns}
    call = values.get("call")
    if call is not None:
        values.setdefault("tool_name", call.tool_name)
        values.setdefault("at", call.accepted_at)
        values.setdefault("tokens", call.tokens)
    values.setdefault("at", session.last_used_at)
    values.setdefault("details", canonical(fields))
    return Event.objects.create(session=session, kind=kind, **values)
