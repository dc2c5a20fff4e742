"""Admin API: tools, definitions, approvals and the audit log."""

from datetime import datetime
from typing import Annotated, Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from ninja import Body, Router, Schema, Status
from pydantic import Field, StrictBool

from catalog.approvals import actions as approval_actions
from catalog.audit.log import as_record
from catalog.groups import custom_tools
from catalog.groups import lints as lint_rules
from catalog.models import (
    AuditEntry,
    CallPolicy,
    Definition,
    DefinitionChange,
    PayloadStorage,
    ReadOnly,
    Tool,
    ToolState,
)
from catalog.tools import actions as tool_actions
from catalog.tools import overrides
from catalog.tools.detail import effective_tool
from catalog.tools.queries import find_tool
from toolcrib.lib.api_schemas import CONFLICTS, ERRORS, Cursor, Limit, Strict, choices, set_location
from toolcrib.lib.errors import Invalid
from toolcrib.lib.pagination import cut_page, parse_id
from toolcrib.lib.roles import Actor, key_actor

router = Router()
SHAPES = ("mcp", "openai", "anthropic")
SOURCES = ("mcp", "custom")


class ToolOut(Schema):
    name: str
    original_name: str
    alias: str  # empty: none
    source: Annotated[str, choices(SOURCES)]
    server: str | None = Field(description="Slug of its server; null: a custom tool")
    mcpServer: str | None = Field(None, deprecated=True)
    description: str
    server_description: str
    overridden: bool
    state: Annotated[str, choices(ToolState)]
    reason: str
    call_policy: Annotated[str, choices(CallPolicy)]
    payload_storage: Annotated[str, choices(PayloadStorage)]  # default, nothing, masked, all
    read_only: Annotated[str, choices(ReadOnly)]  # claimed, yes, no
    input_examples: list[dict[str, Any]]  # arguments that agents get as examples
    needs: str  # a capability of clients, without which they do not see it; empty: none
    tokens: int | None
    findings: list[dict[str, str]]
    annotations_claimed: dict[str, Any]
    groups: list[str]
    changed_at: datetime | None


class ToolDetail(ToolOut):
    former_names: list[str]  # still accepted
    parameters: dict[str, dict[str, Any]]  # overrides: description, hidden, fixed
    dropped_overrides: list[dict[str, Any]]  # of parameters that an approved change removed
    definition: dict[str, Any] | None
    effective_definition: dict[str, Any] | None  # with all overrides: what agents get
    waiting_definition: dict[str, Any] | None
    # Pass it to approve or keep-old to decide on exactly this definition.
    waiting_sha256: str | None


class ToolPage(Schema):
    items: list[ToolOut]
    next_cursor: str | None


class ParameterOverride(Strict):
    """What agents get of one parameter instead of the server's."""

    description: str = ""
    hidden: StrictBool = False
    fixed: Any = None  # set: Toolcrib puts this value in


class ToolEdit(Strict):
    alias: str | None = None  # a new public name; empty: the original one
    parameters: dict[str, ParameterOverride] | None = None  # replaces all; {}: none
    description_override: str | None = None
    call_policy: Annotated[str, choices(CallPolicy)] | None = None
    payload_storage: Annotated[str, choices(PayloadStorage)] | None = None
    read_only: Annotated[str, choices(ReadOnly)] | None = None
    input_examples: list[dict[str, Any]] | None = None


class HoldIn(Strict):
    reason: str = ""


class ChangeOut(Schema):
    at: datetime
    outcome: Annotated[str, choices(DefinitionChange.Outcome)]
    decided_by: str
    before: dict[str, Any] | None
    after: dict[str, Any]


class ChangePage(Schema):
    items: list[ChangeOut]
    next_cursor: str | None


class ToolLint(Schema):
    code: str
    subject: str
    sentence: str


class LintReport(Schema):
    tool_name: str
    lints: list[ToolLint]


class AuditOut(Schema):
    id: int
    position: int | None  # in the chain; null: not chained yet, 0: recorded before it began
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
        "alias": tool.alias,
        "source": tool.source,
        "server": tool.server.slug if tool.server else None,
        "mcpServer": tool.server.slug if tool.server else None,
        "description": tool.description,
        "server_description": definition.description if definition else "",
        "overridden": tool.is_overridden,
        "state": tool.state,
        "reason": tool.held_reason if tool.held_at else tool.rejected_reason,
        "call_policy": tool.call_policy,
        "payload_storage": tool.payload_storage,
        "read_only": tool.read_only,
        "input_examples": tool.input_examples,
        "needs": tool.needs,
        "tokens": tool.tokens,
        "findings": tool.findings,
        "annotations_claimed": tool.annotations,
        "groups": [group.group_id for group in tool.groups.all()],
        "changed_at": tool.changed_at,
    }
    if shape:
        pending = tool.latest if tool.latest_id != tool.approved_id else None
        examples = tool.input_examples
        body["former_names"] = [row.name for row in tool.former_names.all()]
        body["parameters"] = tool.parameter_overrides
        body["dropped_overrides"] = tool.dropped_overrides
        body["definition"] = _definition(tool.approved, shape, examples)
        effective = effective_tool(tool)
        body["effective_definition"] = (
            tool_actions.to_provider_format(effective, shape) if effective else None
        )
        body["waiting_definition"] = _definition(pending, shape, examples)
        body["waiting_sha256"] = pending.sha256 if pending else None
    return body


def _serialize_detail(name: str) -> dict[str, Any]:
    return serialize_tool(find_tool(name), shape="mcp")


def _definition(
    definition: Definition | None, shape: str, examples: list[dict[str, Any]]
) -> dict[str, Any] | None:
    if definition is None:
        return None
    return tool_actions.to_provider_format(definition.tool, shape, examples)


@router.get("/tools", response={200: ToolPage, **ERRORS}, tags=["tools"])
def list_tools(
    request: HttpRequest,
    limit: Limit = 50,
    cursor: Cursor = "",
    server: str = "",
    state: Annotated[str, choices(ToolState, optional=True)] = "",
    source: Annotated[str, choices(SOURCES, optional=True)] = "",
    group: str = "",
    q: str = "",
) -> dict[str, Any]:
    """List tools by name, filtered by server, state, source (mcp or custom), group and words."""
    if state and state not in ToolState.values:
        raise Invalid(f"state must be one of: {', '.join(ToolState.values)}.")
    if source not in ("", *SOURCES):
        raise Invalid("source must be mcp or custom.")
    rows = Tool.objects.with_definitions().prefetch_related("groups")
    rows = rows.filter(public_name__gt=cursor).order_by("public_name")
    q = q.replace("\0", "")
    filters: dict[str, Any] = {
        "server__slug": server,
        "state": state,
        "memberships__group__group_id": group,
        "public_name__icontains": q,
    }
    rows = rows.filter(**{name: value for name, value in filters.items() if value})
    if source:
        rows = rows.filter(server__isnull=source == "custom")
    items, next_cursor = cut_page(rows, limit, lambda row: row.public_name)
    return {"items": [serialize_tool(tool) for tool in items], "next_cursor": next_cursor}


@router.post("/tools", response={201: ToolDetail, **ERRORS, **CONFLICTS}, tags=["tools"])
def create_custom_tool(
    request: HttpRequest, response: HttpResponse, body: Body[dict[str, Any]]
) -> Status[dict[str, Any]]:
    """Create a custom tool from a definition in MCP, OpenAI or Anthropic format.

    `group_id` beside it is the tool's group, `custom:tools` by default; `preload` (true) says
    whether sessions have its schema from the start.
    """
    definition, options = custom_tools.split_request(body)
    tool = custom_tools.create_custom_tool(definition, actor=key_actor(request), **options)
    set_location(response, "tools", tool.public_name)
    return Status(201, _serialize_detail(tool.public_name))


@router.get("/tools/{name}", response={200: ToolDetail, **ERRORS}, tags=["tools"])
def get_tool(
    request: HttpRequest, name: str, shape: Annotated[str, choices(SHAPES)] = "mcp"
) -> dict[str, Any]:
    """Get a tool with its definitions and overrides."""
    if shape not in SHAPES:
        raise Invalid("shape must be mcp, openai or anthropic.")
    return serialize_tool(find_tool(name), shape=shape)


@router.get("/tools/{name}/lint", response={200: LintReport, **ERRORS}, tags=["tools"])
def lint_tool(request: HttpRequest, name: str) -> dict[str, Any]:
    """Get the warnings about a tool's name and description, each with a recommended change."""
    tool = find_tool(name)
    lints = lint_rules.lint_tool(tool.public_name, tool.name, tool.description)
    return {"tool_name": tool.public_name, "lints": [vars(lint) for lint in lints]}


@router.patch("/tools/{name}", response={200: ToolDetail, **ERRORS, **CONFLICTS}, tags=["tools"])
def edit_tool(request: HttpRequest, name: str, body: ToolEdit) -> dict[str, Any]:
    """Change the fields in the request: overrides, policies and examples."""
    tool, actor = find_tool(name), key_actor(request)
    _override(tool, body, actor)
    if body.description_override is not None:
        tool_actions.override_description(tool, body.description_override, actor=actor)
    if body.call_policy is not None:
        tool_actions.set_call_policy(tool, body.call_policy, actor=actor)
    if body.payload_storage is not None:
        tool_actions.set_payload_storage(tool, body.payload_storage, actor=actor)
    if body.read_only is not None:
        tool_actions.set_read_only(tool, body.read_only, actor=actor)
    if body.input_examples is not None:
        tool_actions.set_input_examples(tool, body.input_examples, actor=actor)
    return _serialize_detail(name)


@transaction.atomic
def _override(tool: Tool, body: ToolEdit, actor: Actor) -> None:
    if body.alias is not None:
        overrides.set_alias(tool, body.alias, actor=actor)
    if body.parameters is not None:
        rows = {
            name: override.model_dump(exclude_unset=True)
            for name, override in body.parameters.items()
        }
        overrides.override_parameters(tool, rows, actor=actor)


@router.put("/tools/{name}", response={200: ToolDetail, **ERRORS, **CONFLICTS}, tags=["tools"])
def replace_custom_tool(
    request: HttpRequest, name: str, body: Body[dict[str, Any]]
) -> dict[str, Any]:
    """Replace the definition of a custom tool."""
    tool = find_tool(name)
    if tool.server_id is not None:
        raise Invalid(
            "Only custom tools can be replaced.", hint="Tools of a server are updated by its syncs."
        )
    tool_actions.save_custom_tool(body, actor=key_actor(request), tool=tool)
    return _serialize_detail(name)


@router.delete("/tools/{name}", response={204: None, **ERRORS, **CONFLICTS}, tags=["tools"])
def delete_custom_tool(request: HttpRequest, name: str) -> Status[None]:
    """Delete a custom tool."""
    tool_actions.delete_custom_tool(find_tool(name), actor=key_actor(request))
    return Status(204, None)


@router.post(
    "/tools/{name}/approve", response={200: ToolDetail, **ERRORS, **CONFLICTS}, tags=["tools"]
)
def approve_tool(request: HttpRequest, name: str, sha256: str = "") -> dict[str, Any]:
    """Approve the definition that awaits review. Agents get it from now on."""
    approval_actions.approve(find_tool(name), actor=key_actor(request), sha256=sha256)
    return _serialize_detail(name)


@router.post(
    "/tools/{name}/undo-approval",
    response={200: ToolDetail, **ERRORS, **CONFLICTS},
    tags=["tools"],
)
def undo_tool_approval(request: HttpRequest, name: str) -> dict[str, Any]:
    """Withdraw the approval of the current definition, until the first call under it.

    The definition is pending review again, and agents get the one that was approved before.
    """
    approval_actions.undo_approval(find_tool(name), actor=key_actor(request))
    return _serialize_detail(name)


@router.post(
    "/tools/{name}/keep-old", response={200: ToolDetail, **ERRORS, **CONFLICTS}, tags=["tools"]
)
def reject_tool_change(request: HttpRequest, name: str, sha256: str = "") -> dict[str, Any]:
    """Reject the definition that awaits review. Agents keep the approved one."""
    approval_actions.keep_old(find_tool(name), actor=key_actor(request), sha256=sha256)
    return _serialize_detail(name)


@router.post("/tools/{name}/hold", response={200: ToolDetail, **ERRORS}, tags=["tools"])
def hold_tool(request: HttpRequest, name: str, body: HoldIn) -> dict[str, Any]:
    """Hide a tool from agents until it is released."""
    tool_actions.hold(find_tool(name), body.reason, actor=key_actor(request))
    return _serialize_detail(name)


@router.post("/tools/{name}/release", response={200: ToolDetail, **ERRORS}, tags=["tools"])
def release_tool(request: HttpRequest, name: str) -> dict[str, Any]:
    """Make a hidden tool available again."""
    tool_actions.release(find_tool(name), actor=key_actor(request))
    return _serialize_detail(name)


@router.get("/tools/{name}/history", response={200: ChangePage, **ERRORS}, tags=["tools"])
def list_tool_changes(
    request: HttpRequest, name: str, limit: Limit = 50, cursor: Cursor = ""
) -> dict[str, Any]:
    """List the changes of the definition, newest first."""
    rows = find_tool(name).changes.select_related("before", "after").order_by("-pk")
    if cursor:
        rows = rows.filter(pk__lt=parse_id(cursor))
    changes, next_cursor = cut_page(rows, limit, lambda row: str(row.pk))
    items = [
        {
            "at": change.at,
            "outcome": change.outcome,
            "decided_by": change.decided_by,
            "before": change.before.tool if change.before else None,
            "after": change.after.tool,
        }
        for change in changes
    ]
    return {"items": items, "next_cursor": next_cursor}


@router.get("/audit", response={200: AuditPage, **ERRORS}, tags=["audit"])
def list_audit_entries(
    request: HttpRequest, limit: Limit = 50, cursor: Cursor = ""
) -> dict[str, Any]:
    """List audit entries, newest first."""
    rows = AuditEntry.objects.order_by("-id")
    if cursor:
        rows = rows.filter(id__lt=parse_id(cursor))
    items, next_cursor = cut_page(rows, limit, lambda row: str(row.pk))
    return {"items": [as_record(entry) for entry in items], "next_cursor": next_cursor}
