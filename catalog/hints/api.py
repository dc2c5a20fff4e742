"""Admin API: search hints of a tool, and export and import of hints for all tools."""

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema, Status
from pydantic import Field

from catalog.hints import actions, exchange
from catalog.models import HintKind, HintSource, ToolHint
from catalog.tools.queries import find_tool
from toolcrib.lib.api_schemas import CONFLICTS, ERRORS, Cursor, Limit, Strict, choices, set_location
from toolcrib.lib.errors import Invalid
from toolcrib.lib.pagination import cut_page, parse_id
from toolcrib.lib.roles import key_actor

router = Router(tags=["search"])


class HintIn(Strict):
    kind: Literal["alias", "example"]
    text: str


class HintEdit(Strict):
    text: str


class HintOut(Schema):
    id: int
    kind: Annotated[str, choices(HintKind)]
    text: str
    source: Annotated[str, choices(HintSource)] = Field(description="admin, use, model or bundled")
    agent: str | None = Field(None, description="The only agent whose searches it affects")
    created_by: str
    created_at: datetime

    @staticmethod
    def resolve_agent(hint: ToolHint) -> str | None:
        return hint.agent.name if hint.agent else None


class ToolHintPage(Schema):
    items: list[HintOut]
    next_cursor: str | None


class ListedHint(HintOut):
    tool_name: str

    @staticmethod
    def resolve_tool_name(hint: ToolHint) -> str:
        return hint.tool.public_name


class HintPage(Schema):
    items: list[ListedHint]
    next_cursor: str | None


class ExportedTool(Schema):
    name: str
    server: str
    description: str
    parameters: list[str]


class ExportPage(Schema):
    prompt: str
    items: list[ExportedTool]
    next_cursor: str | None


class WrittenHints(Strict):
    name: Annotated[str, Field(max_length=200, description="Public name of the tool")]
    hints: Annotated[list[str], Field(max_length=20)]


class HintImportIn(Strict):
    items: Annotated[list[WrittenHints], Field(min_length=1, max_length=10_000)]


class HintImportOut(Schema):
    changed: int
    unchanged: int
    rejected: int
    unknown: list[str]


@router.get("/tools/{name}/hints", response={200: ToolHintPage, **ERRORS})
def list_tool_hints(
    request: HttpRequest, name: str, limit: Limit = 50, cursor: Cursor = ""
) -> dict[str, Any]:
    """List the search aliases and example queries of a tool. They are not shown to agents."""
    rows = find_tool(name).hints.active().select_related("agent").order_by("pk")
    if cursor:
        rows = rows.filter(pk__gt=parse_id(cursor))
    items, next_cursor = cut_page(rows, limit, lambda row: str(row.pk))
    return {"items": items, "next_cursor": next_cursor}


@router.post("/tools/{name}/hints", response={201: HintOut, **ERRORS, **CONFLICTS})
def create_tool_hint(
    request: HttpRequest, response: HttpResponse, name: str, body: HintIn
) -> Status[ToolHint]:
    """Add an alias or an example query, or return the existing one."""
    hint = actions.add(find_tool(name), body.kind, body.text, actor=key_actor(request))
    set_location(response, "tools", hint.tool.public_name, "hints", hint.pk)
    return Status(201, hint)


@router.get("/tools/{name}/hints/{hint_id}", response={200: HintOut, **ERRORS})
def get_tool_hint(request: HttpRequest, name: str, hint_id: int) -> ToolHint:
    """Get one search alias or example query of a tool."""
    return actions.find(find_tool(name), hint_id)


@router.patch("/tools/{name}/hints/{hint_id}", response={200: HintOut, **ERRORS, **CONFLICTS})
def edit_tool_hint(request: HttpRequest, name: str, hint_id: int, body: HintEdit) -> ToolHint:
    """Change the text of a hint, whose source is then admin."""
    hint = actions.find(find_tool(name), hint_id)
    return actions.edit(hint, body.text, actor=key_actor(request))


@router.delete("/tools/{name}/hints/{hint_id}", response={204: None, **ERRORS})
def delete_tool_hint(request: HttpRequest, name: str, hint_id: int) -> Status[None]:
    """Delete a hint."""
    actions.remove(actions.find(find_tool(name), hint_id), actor=key_actor(request))
    return Status(204, None)


@router.post("/tools/{name}/hints/{hint_id}/accept", response={200: HintOut, **ERRORS, **CONFLICTS})
def accept_tool_hint(request: HttpRequest, name: str, hint_id: int) -> ToolHint:
    """Apply a hint from one agent's use to the searches of all agents."""
    return actions.accept(actions.find(find_tool(name), hint_id), actor=key_actor(request))


@router.get("/hints", response={200: HintPage, **ERRORS})
def list_hints(
    request: HttpRequest,
    limit: Limit = 50,
    cursor: Cursor = "",
    source: str = "",
    pending: bool = False,
) -> dict[str, Any]:
    """List the hints of all tools, oldest first; `pending`: those that await acceptance."""
    if source and source not in HintSource.values:
        raise Invalid(f"source must be one of: {', '.join(HintSource.values)}.")
    rows = ToolHint.objects.pending() if pending else ToolHint.objects.active()
    rows = rows.select_related("tool", "agent").order_by("pk")
    if cursor:
        rows = rows.filter(pk__gt=parse_id(cursor))
    if source:
        rows = rows.filter(source=source)
    items, next_cursor = cut_page(rows, limit, lambda row: str(row.pk))
    return {"items": items, "next_cursor": next_cursor}


@router.get("/hints/export", response={200: ExportPage, **ERRORS})
def export_hints(
    request: HttpRequest,
    limit: Limit = 50,
    cursor: Cursor = "",
    server: str = "",
    all: bool = False,
) -> dict[str, Any]:
    """List tools for a language model to write hints for, with the prompt.

    By default those that have no hints from a model or from the phrasebook.
    """
    tools = exchange.tools_to_describe(server=server, everything=all)
    after = [tool for tool in tools if f"{tool.server} {tool.name}" > cursor]
    items, next_cursor = cut_page(after, limit, lambda tool: f"{tool.server} {tool.name}")
    rows = [exchange.export_tool(tool) for tool in items]
    return {"prompt": exchange.PROMPT, "items": rows, "next_cursor": next_cursor}


@router.post("/hints/import", response={200: HintImportOut, **ERRORS})
def import_hints(request: HttpRequest, body: HintImportIn) -> dict[str, Any]:
    """Replace the hints that a model wrote, for the tools listed."""
    rows = [item.model_dump() for item in body.items]
    return asdict(exchange.import_hints(rows, actor=key_actor(request)))
