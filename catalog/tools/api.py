"""Admin API: tools, definitions, approvals, search hints and the audit log."""

from datetime import datetime
from typing import Any, Literal

from django.http import HttpRequest
from ninja import Body, Router, Schema, Status

from catalog.approvals import actions as approval_actions
from catalog.audit.queries import serialize_entry
from catalog.models import AuditEntry, Definition, Tool, ToolHint
from catalog.tools import actions as tool_actions
from catalog.tools import hints
from catalog.tools.queries import find_tool
from toolcrib.lib.api_schemas import ERRORS, Strict
from toolcrib.lib.errors import Invalid
from toolcrib.lib.pagination import cut_page
from toolcrib.lib.roles import key_actor

router = Router()


class ToolOut(Schema):
    name: str
    original_name: str
    source: str
    mcpServer: str | None = None
    description: str
    server_description: str
    overridden: bool
    state: str
    reason: str
    call_policy: str
    tokens: int | None
    findings: list[dict[str, str]]
    annotations_claimed: dict[str, Any]
    groups: list[str]
    changed_at: datetime | None


class ToolDetail(ToolOut):
    definition: dict[str, Any] | None
    waiting_definition: dict[str, Any] | None
    # Pass it to approve or keep-old to decide on exactly this definition.
    waiting_sha256: str | None


class ToolPage(Schema):
    items: list[ToolOut]
    next_cursor: str | None


class ToolEdit(Strict):
    description_override: str | None = None
    call_policy: str | None = None


class HoldIn(Strict):
    reason: str = ""


class ChangeOut(Schema):
    at: datetime
    outcome: str
    decided_by: str
    before: dict[str, Any] | None
    after: dict[str, Any]


class AuditOut(Schema):
    id: int
    at: datetime
    actor: str
    verb: str
    target: str
    sentence: str
    before: dict[str, Any]
    after: dict[str, Any]


class AuditPage(Schema):
    items: list[AuditOut]
    next_cursor: str | None


def serialize_tool(tool: Tool, *, shape: str = "") -> dict[str, Any]:
    """Return a tool as JSON; with a `shape`, add its definitions in that format."""
    definition = tool.definition
    body: dict[str, Any] = {
        "name": tool.public_name,
        "original_name": tool.name,
        "source": tool.source,
        "mcpServer": tool.server.slug if tool.server else None,
        "description": tool.description,
        "server_description": definition.description if definition else "",
        "overridden": bool(tool.description_override),
        "state": tool.state,
        "reason": tool.held_reason if tool.held_at else tool.rejected_reason,
        "call_policy": tool.call_policy,
        "tokens": tool.tokens,
        "findings": tool.findings,
        "annotations_claimed": tool.annotations,
        "groups": [group.group_id for group in tool.groups.all()],
        "changed_at": tool.changed_at,
    }
    if shape:
        pending = tool.latest if tool.latest_id != tool.approved_id else None
        body["definition"] = _definition(tool.approved, shape)
        body["waiting_definition"] = _definition(pending, shape)
        body["waiting_sha256"] = pending.sha256 if pending else None
    return body


def _serialize_detail(name: str) -> dict[str, Any]:
    return serialize_tool(find_tool(name), shape="mcp")


def _definition(definition: Definition | None, shape: str) -> dict[str, Any] | None:
    return tool_actions.to_provider_format(definition.tool, shape) if definition else None


@router.get("/tools", response={200: ToolPage, **ERRORS}, tags=["tools"])
def list_tools(
    request: HttpRequest,
    limit: int = 50,
    cursor: str = "",
    server: str = "",
    state: str = "",
    q: str = "",
) -> dict[str, Any]:
    rows = Tool.objects.with_definitions().prefetch_related("groups")
    rows = rows.filter(public_name__gt=cursor).order_by("public_name")
    q = q.replace("\0", "")
    filters = {"server__slug": server, "state": state, "public_name__icontains": q}
    rows = rows.filter(**{name: value for name, value in filters.items() if value})
    items, next_cursor = cut_page(rows, limit, lambda row: row.public_name)
    return {"items": [serialize_tool(tool) for tool in items], "next_cursor": next_cursor}


@router.post("/tools", response={201: ToolDetail, **ERRORS}, tags=["tools"])
def add_custom_tool(request: HttpRequest, body: Body[dict[str, Any]]) -> Status[dict[str, Any]]:
    """Create a custom tool from a definition in MCP, OpenAI or Anthropic format."""
    tool = tool_actions.save_custom_tool(body, actor=key_actor(request))
    return Status(201, _serialize_detail(tool.public_name))


@router.get("/tools/{name}", response={200: ToolDetail, **ERRORS}, tags=["tools"])
def get_tool(request: HttpRequest, name: str, shape: str = "mcp") -> dict[str, Any]:
    if shape not in ("mcp", "openai", "anthropic"):
        raise Invalid("shape must be mcp, openai or anthropic.")
    return serialize_tool(find_tool(name), shape=shape)


@router.patch("/tools/{name}", response={200: ToolDetail, **ERRORS}, tags=["tools"])
def edit_tool(request: HttpRequest, name: str, body: ToolEdit) -> dict[str, Any]:
    tool, actor = find_tool(name), key_actor(request)
    if body.description_override is not None:
        tool_actions.override_description(tool, body.description_override, actor=actor)
    if body.call_policy is not None:
        tool_actions.set_call_policy(tool, body.call_policy, actor=actor)
    return _serialize_detail(name)


@router.put("/tools/{name}", response={200: ToolDetail, **ERRORS}, tags=["tools"])
def replace_custom_tool(
    request: HttpRequest, name: str, body: Body[dict[str, Any]]
) -> dict[str, Any]:
    tool = find_tool(name)
    if tool.server_id is not None:
        raise Invalid(
            "Only custom tools can be replaced.", hint="Tools of a server are updated by its syncs."
        )
    tool_actions.save_custom_tool(body, actor=key_actor(request), tool=tool)
    return _serialize_detail(name)


@router.delete("/tools/{name}", response={204: None, **ERRORS}, tags=["tools"])
def delete_custom_tool(request: HttpRequest, name: str) -> Status[None]:
    tool_actions.delete_custom_tool(find_tool(name), actor=key_actor(request))
    return Status(204, None)


@router.post("/tools/{name}/approve", response={200: ToolDetail, **ERRORS}, tags=["tools"])
def approve(request: HttpRequest, name: str, sha256: str = "") -> dict[str, Any]:
    approval_actions.approve(find_tool(name), actor=key_actor(request), sha256=sha256)
    return _serialize_detail(name)


@router.post("/tools/{name}/keep-old", response={200: ToolDetail, **ERRORS}, tags=["tools"])
def keep_old(request: HttpRequest, name: str, sha256: str = "") -> dict[str, Any]:
    approval_actions.keep_old(find_tool(name), actor=key_actor(request), sha256=sha256)
    return _serialize_detail(name)


@router.post("/tools/{name}/hold", response={200: ToolDetail, **ERRORS}, tags=["tools"])
def hold(request: HttpRequest, name: str, body: HoldIn) -> dict[str, Any]:
    tool_actions.hold(find_tool(name), body.reason, actor=key_actor(request))
    return _serialize_detail(name)


@router.post("/tools/{name}/release", response={200: ToolDetail, **ERRORS}, tags=["tools"])
def release(request: HttpRequest, name: str) -> dict[str, Any]:
    tool_actions.release(find_tool(name), actor=key_actor(request))
    return _serialize_detail(name)


@router.get("/tools/{name}/history", response={200: list[ChangeOut], **ERRORS}, tags=["tools"])
def history(request: HttpRequest, name: str) -> list[dict[str, Any]]:
    changes = find_tool(name).changes.select_related("before", "after")[:100]
    return [
        {
            "at": change.at,
            "outcome": change.outcome,
            "decided_by": change.decided_by,
            "before": change.before.tool if change.before else None,
            "after": change.after.tool,
        }
        for change in changes
    ]


@router.get("/audit", response={200: AuditPage, **ERRORS}, tags=["audit"])
def list_audit(request: HttpRequest, limit: int = 50, cursor: int | None = None) -> dict[str, Any]:
    rows = AuditEntry.objects.order_by("-id")
    if cursor is not None:
        rows = rows.filter(id__lt=cursor)
    items, next_cursor = cut_page(rows, limit, lambda row: str(row.pk))
    return {"items": [serialize_entry(entry) for entry in items], "next_cursor": next_cursor}


class HintIn(Strict):
    kind: Literal["alias", "example"]
    text: str


class HintOut(Schema):
    id: int
    kind: str
    text: str
    created_by: str
    created_at: datetime


@router.get("/tools/{name}/hints", response={200: list[HintOut], **ERRORS}, tags=["search"])
def list_hints(request: HttpRequest, name: str) -> list[ToolHint]:
    """List the search aliases and example queries of a tool. They are not shown to agents."""
    return list(find_tool(name).hints.all())


@router.post("/tools/{name}/hints", response={201: HintOut, **ERRORS}, tags=["search"])
def add_hint(request: HttpRequest, name: str, body: HintIn) -> Status[ToolHint]:
    """Add an alias or an example query, or return the existing one."""
    return Status(201, hints.add(find_tool(name), body.kind, body.text, actor=key_actor(request)))


@router.delete("/tools/{name}/hints/{hint_id}", response={204: None, **ERRORS}, tags=["search"])
def remove_hint(request: HttpRequest, name: str, hint_id: int) -> Status[None]:
    hints.remove(hints.find(find_tool(name), hint_id), actor=key_actor(request))
    return Status(204, None)
