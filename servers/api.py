"""Admin API of servers: register, edit, test, sync, import, export.

Secrets are write-only: responses contain credential names, never values.
"""

import json
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Literal

from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponse
from ninja import Query, Router, Schema, Status
from pydantic import Field, StrictBool

from catalog import audit
from catalog.cache import features_of
from catalog.models import FeatureKind, ToolState
from servers.mcp_json import exporter, importer
from servers.mcp_json.exporter import Shape
from servers.models import (
    ConnectionPolicy,
    Credential,
    CredentialKind,
    Isolation,
    Server,
    ServerQuerySet,
    ServerState,
    SyncRun,
    Transport,
    Trigger,
    Trust,
)
from servers.registration import actions as server_actions
from servers.registration import confirmation
from servers.registration.confirmation import Program
from servers.registration.drafts import ServerDraft, make_slug
from servers.secret import Secret
from servers.sync import connection_test, scheduling
from servers.sync.connection_test import ConnectionTestResult
from toolcrib.lib.api_schemas import (
    CONFLICTS,
    ERRORS,
    Cursor,
    Integer,
    Limit,
    Strict,
    bounds,
    choices,
    set_location,
)
from toolcrib.lib.errors import Invalid
from toolcrib.lib.pagination import cut_page, parse_id
from toolcrib.lib.roles import key_actor

router = Router(tags=["servers"])


class CredentialOut(Schema):
    kind: Annotated[str, choices(CredentialKind)]
    name: str
    has_secret: bool
    set_at: datetime

    @staticmethod
    def resolve_has_secret(credential: Credential) -> bool:
        return not credential.voided


class ServerOut(Schema):
    slug: str
    name: str
    description: str
    transport: Annotated[str, choices(Transport)]
    command: str
    args: list[str]
    cwd: str
    url: str
    connection_policy: Annotated[str, choices(ConnectionPolicy)]
    isolation: Annotated[str, choices(Isolation)]
    trust: Annotated[str, choices(Trust)]
    call_timeout: int
    concurrency: int
    poll_seconds: int
    enabled: bool
    state: Annotated[str, choices(ServerState)]
    state_code: str
    state_reason: str
    state_since: datetime | None
    protocol_version: str
    server_info: dict[str, Any]
    capabilities: list[str] = Field(description="What it offers besides tools")
    last_synced_at: datetime | None
    tools: int
    credentials: list[CredentialOut]

    @staticmethod
    def resolve_tools(server: Server) -> int:
        return server.tool_count  # type: ignore[attr-defined,no-any-return]  # annotated below


class ServerPage(Schema):
    items: list[ServerOut]
    next_cursor: str | None


class FeatureOut(Schema):
    """A prompt, resource or resource template, as its server lists it."""

    kind: Annotated[str, choices(FeatureKind)]
    name: str = Field(description="Public name of a prompt, or public URI or template")
    key: str = Field(description="The server's own name, URI or template")
    item: dict[str, Any]


class FeaturePage(Schema):
    items: list[FeatureOut]
    next_cursor: str | None


class ConnectionIn(Strict):
    transport: Literal["stdio", "http", "sse"]
    command: str = ""
    args: list[str] = Field(default_factory=list)
    cwd: str = ""
    url: str = ""
    env: dict[str, str] = Field(default_factory=dict)
    headers: dict[str, str] = Field(default_factory=dict)
    variables: dict[str, str] = Field(default_factory=dict)
    # For stdio: repeats the exact command and arguments, with variables filled in, to confirm that
    # they may run; or their digest, as the response confirm_argv gives it.
    confirm_argv: list[str] | None = None
    confirm: str | None = None


class ServerIn(ConnectionIn):
    name: str = Field(min_length=1, max_length=120)
    slug: str | None = None
    description: str = ""


class ServerEdit(Strict):
    connection: ConnectionIn | None = None
    enabled: StrictBool | None = None
    name: str | None = None
    description: str | None = None
    connection_policy: Annotated[str, choices(ConnectionPolicy)] | None = None
    isolation: Annotated[str, choices(Isolation)] | None = None
    trust: Annotated[str, choices(Trust)] | None = None
    call_timeout: Annotated[Integer, bounds(1, 900)] | None = None
    concurrency: Annotated[Integer, bounds(1, 256)] | None = None
    poll_seconds: Annotated[Integer, bounds(5, 86400)] | None = None


class CredentialsIn(Strict):
    kind: Annotated[str, choices(CredentialKind)]
    values: dict[str, str | None]
    # For stdio: a changed variable or environment is confirmed as in ConnectionIn.
    confirm_argv: list[str] | None = None
    confirm: str | None = None


class ServerImportIn(Strict):
    text: str
    variables: dict[str, str] = Field(default_factory=dict)
    confirm: list[str] = Field(default_factory=list)  # digests from the check_only response
    check_only: StrictBool = False


class ExportIn(Schema):
    shape: Shape = Field(
        "claude",
        description="Whose format: claude (`${NAME}`), vscode (`servers`, `inputs`, "
        "`${input:NAME}`) or cursor (`${env:NAME}`)",
    )


class RemovedOut(Schema):
    removed: int = Field(description="How many tools agents no longer get")


class SyncRunOut(Schema):
    id: int
    trigger: Annotated[str, choices(Trigger)]
    outcome: Annotated[str, choices(SyncRun.Outcome)]
    phase: str
    started_at: datetime
    finished_at: datetime | None
    added: int
    changed: int
    removed: int
    unchanged: int
    rejected: int
    pages: int
    code: str
    error: str
    names: dict[str, Any]
    warnings: list[str]


class SyncRunPage(Schema):
    items: list[SyncRunOut]
    next_cursor: str | None


def servers_with_tool_counts() -> ServerQuerySet:
    tool_count = Count("tools", filter=~Q(tools__state=ToolState.MISSING))
    return Server.objects.annotate(tool_count=tool_count).prefetch_related("credentials")


def find_server(slug: str) -> Server:
    return servers_with_tool_counts().get_by_slug(slug)


def parse_connection(
    body: ConnectionIn, *, name: str, slug: str, description: str = "", known: Server | None = None
) -> tuple[ServerDraft, str]:
    """Return the draft, and the digest of its program if the request confirms it."""
    is_program = body.transport == "stdio"
    other = body.url if is_program else body.command
    if other:
        raise Invalid("Set either command (stdio) or url (http, sse), not both.")
    names = ("command", "args", "env", "cwd") if is_program else ("url", "headers")
    fields = {name: value for name in names if (value := getattr(body, name))}
    entry = {"type": body.transport, **fields}
    text = json.dumps({"mcpServers": {name: entry}})
    draft = importer.parse_connection(text, variables=body.variables, known=known)
    draft = replace(draft, name=name, slug=slug, description=description)
    if not is_program:
        return draft, ""
    return draft, confirmed_digest(body, confirmation.draft_program(draft, known))


def confirmed_digest(body: ConnectionIn | CredentialsIn, program: Program) -> str:
    """Return the digest that the request confirms; empty if it confirms none or another command."""
    if body.confirm:
        return body.confirm
    return program.digest if body.confirm_argv == program.filled_argv else ""


@router.get("", response={200: ServerPage, **ERRORS})
def list_servers(
    request: HttpRequest,
    limit: Limit = 50,
    cursor: Cursor = "",
    state: Annotated[str, choices(ServerState, optional=True)] = "",
) -> dict[str, Any]:
    """List servers by slug."""
    if state and state not in ServerState.values:
        raise Invalid(f"state must be one of: {', '.join(ServerState.values)}.")
    servers = servers_with_tool_counts().filter(slug__gt=cursor)
    if state:
        servers = servers.filter(state=state)
    items, next_cursor = cut_page(servers, limit, lambda server: server.slug)
    return {"items": items, "next_cursor": next_cursor}


@router.post("", response={201: ServerOut, **ERRORS, **CONFLICTS})
def create_server(request: HttpRequest, response: HttpResponse, body: ServerIn) -> Status[Server]:
    """Register a server, and queue its first sync. A command needs its confirmation."""
    taken = set(Server.objects.values_list("slug", flat=True))
    draft, confirmed = parse_connection(
        body,
        name=body.name,
        slug=body.slug if body.slug is not None else make_slug(body.name, taken),
        description=body.description,
    )
    server = server_actions.add_server(draft, actor=key_actor(request), confirmed=confirmed)
    scheduling.request_sync(server.pk, Trigger.ADDED)
    set_location(response, "servers", server.slug)
    return Status(201, find_server(server.slug))


@router.post("/test", response={200: ConnectionTestResult, **ERRORS, **CONFLICTS})
def test_server_draft(request: HttpRequest, body: ServerIn) -> ConnectionTestResult:
    """Test a connection without registering the server. For stdio this runs the command."""
    slug = body.slug or make_slug(body.name, set())
    draft, confirmed = parse_connection(body, name=body.name, slug=slug)
    return connection_test.test_draft(draft, confirmed=confirmed, actor=key_actor(request))


@router.post("/import", response={200: dict[str, Any], **ERRORS})
def import_servers(request: HttpRequest, body: ServerImportIn) -> dict[str, Any]:
    """Check an mcp.json, or save its valid servers. Commands need their digest in `confirm`."""
    check = importer.check_import(body.text, body.variables)
    drafts = [
        draft.masked() | {"confirm": confirmation.draft_program(draft).digest if draft.argv else ""}
        for draft in check.drafts
    ]
    response: dict[str, Any] = {
        "shape": check.shape,
        "drafts": drafts,
        "problems": [vars(problem) for problem in check.problems],
        "inputs": [dict(item) for item in check.inputs],
    }
    if body.check_only:
        return response
    results = importer.save_drafts(check, actor=key_actor(request), confirmed=body.confirm)
    for result in results:
        if result.server:
            scheduling.request_sync(result.server.pk, Trigger.ADDED)
    return response | {
        "saved": [result.server.slug for result in results if result.server],
        "known": [result.known.slug for result in results if result.known],
        "failed": [
            {key: getattr(result, key) for key in ("name", "code", "message", "hint")}
            for result in results
            if not result.server and not result.known
        ],
    }


@router.get("/export", response={200: dict[str, Any], **ERRORS})
def export_servers(request: HttpRequest, options: Query[ExportIn]) -> dict[str, Any]:
    """Export all servers as mcp.json, with a reference for each secret."""
    exported: dict[str, Any] = json.loads(exporter.export_servers(options.shape))
    audit.record_installation(key_actor(request), "server.export")
    return exported


@router.get("/{slug}", response={200: ServerOut, **ERRORS})
def get_server(request: HttpRequest, slug: str) -> Server:
    """Get a server with the state of its connection."""
    return find_server(slug)


@router.get("/{slug}/features", response={200: FeaturePage, **ERRORS})
def list_server_features(
    request: HttpRequest, slug: str, limit: Limit = 50, cursor: Cursor = ""
) -> dict[str, Any]:
    """List a server's prompts, resources and resource templates."""
    server = find_server(slug)
    rows = server.features.order_by("pk")
    if cursor:
        rows = rows.filter(pk__gt=parse_id(cursor))
    page, next_cursor = cut_page(rows, limit, lambda row: str(row.pk))
    return {"items": list(features_of(server.slug, page)), "next_cursor": next_cursor}


@router.patch("/{slug}", response={200: ServerOut, **ERRORS, **CONFLICTS})
def edit_server(request: HttpRequest, slug: str, body: ServerEdit) -> Server:
    """Change the fields in the request. A new connection is synced at once."""
    server, actor = find_server(slug), key_actor(request)
    changes = body.model_dump(exclude_none=True, exclude={"connection", "enabled"})
    if changes:
        server_actions.change_settings(server, changes, actor=actor)
    if body.connection is not None:
        draft, confirmed = parse_connection(
            body.connection, name=server.name, slug=server.slug, known=server
        )
        server_actions.edit_connection(server, draft, actor=actor, confirmed=confirmed)
        scheduling.request_sync(server.pk, Trigger.MANUAL)
    if body.enabled is not None:
        server_actions.set_enabled(server, body.enabled, actor=actor)
        if body.enabled:
            scheduling.request_sync(server.pk, Trigger.MANUAL)
    return find_server(slug)


@router.delete("/{slug}", response={204: None, **ERRORS})
def delete_server(request: HttpRequest, slug: str) -> Status[None]:
    """Delete a server with its tools and credentials."""
    server_actions.delete_server(find_server(slug), actor=key_actor(request))
    return Status(204, None)


@router.delete("/{slug}/tools", response={200: RemovedOut, **ERRORS})
def delete_server_tools(request: HttpRequest, slug: str) -> dict[str, int]:
    """Remove a server's tools from agents until its next sync, which restores the listed ones.

    They keep their groups, descriptions and reviews.
    """
    return {"removed": server_actions.remove_tools(find_server(slug), actor=key_actor(request))}


@router.put("/{slug}/credentials", response={200: ServerOut, **ERRORS, **CONFLICTS})
def set_server_credentials(request: HttpRequest, slug: str, body: CredentialsIn) -> Server:
    """Set credentials; null deletes one. Values are never returned.

    A variable or environment variable of a stdio server changes what runs: without a confirmation
    the response is 409 `confirm_argv`, and nothing changes.
    """
    values = {
        name: Secret(text) if text is not None else None for name, text in body.values.items()
    }
    server = find_server(slug)
    confirmed = ""
    if server.transport == Transport.STDIO and body.kind in CredentialKind.values:
        program = confirmation.stored_program(server, body.kind, values)
        confirmed = confirmed_digest(body, program)
    server_actions.set_credentials(
        server, body.kind, values, actor=key_actor(request), confirmed=confirmed
    )
    scheduling.request_sync(server.pk, Trigger.MANUAL)
    return find_server(slug)


@router.post("/{slug}/sync", response={202: dict[str, str], **ERRORS})
def sync_server(request: HttpRequest, slug: str) -> Status[dict[str, str]]:
    """Queue a sync, which runs in a worker. `/sync-runs` has its outcome."""
    scheduling.request_manual_sync(find_server(slug), actor=key_actor(request))
    return Status(202, {"status": "asked"})


@router.post("/{slug}/test", response={200: ConnectionTestResult, **ERRORS, **CONFLICTS})
def test_server(request: HttpRequest, slug: str) -> ConnectionTestResult:
    """Connect to a server and list its tools, without saving anything."""
    return connection_test.test_server(find_server(slug), actor=key_actor(request))


@router.get("/{slug}/sync-runs", response={200: SyncRunPage, **ERRORS})
def list_server_syncs(
    request: HttpRequest, slug: str, limit: Limit = 50, cursor: Cursor = ""
) -> dict[str, Any]:
    """List the syncs of a server, newest first."""
    runs = SyncRun.objects.filter(server=find_server(slug)).order_by("-id")
    if cursor:
        runs = runs.filter(id__lt=parse_id(cursor))
    items, next_cursor = cut_page(runs, limit, lambda run: str(run.pk))
    return {"items": items, "next_cursor": next_cursor}
