"""Admin API of groups: create, edit, order, change members and undo. Uses the pages' actions."""

from collections.abc import Sequence
from typing import Annotated, Any

from django.db import models, transaction
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from ninja import Query, Router, Schema, Status
from pydantic import Field, StrictBool
from pydantic.json_schema import SkipJsonSchema

from catalog import cache
from catalog.cache import CachedGroup, is_preloaded
from catalog.groups import actions, board, preview
from catalog.groups import health as group_health
from catalog.groups import state as group_state
from catalog.groups import undo as group_undo
from catalog.groups.actions import GroupWrite
from catalog.groups.health import Drift
from catalog.groups.lints import Lint
from catalog.models import Group, Membership, ToolState
from toolcrib.lib.api_schemas import (
    CONFLICTS,
    ERRORS,
    Cursor,
    Integer,
    Limit,
    Renamed,
    Strict,
    choices,
    set_location,
)
from toolcrib.lib.errors import Invalid
from toolcrib.lib.pagination import MAX_LIMIT, cut_page, seal_cursor
from toolcrib.lib.roles import key_actor

router = Router(tags=["groups"])
MAX_POSITION = 2**31 - 1


class DriftCount(Schema):
    missing: int
    new: int


class GroupOut(Schema):
    group_id: str
    display_name: str
    description: str
    described_by_server: bool = Field(
        description="The description is the server's own, and no person has edited it"
    )
    position: int
    follows: str | None
    preload_default: bool
    deferred: bool
    tools: int  # members, including unavailable ones
    preloaded: int
    tokens: int
    preload_tokens: int
    catalog_tokens: int  # its lines of the catalog
    start_tokens: int  # preloads and catalog lines: its cost
    over_budget: int  # by how much the cost exceeds the budget of a group
    missing_count: int  # members that its server no longer has
    new_count: int  # tools of its server that are no members
    lint_count: int  # of the group itself
    drift: DriftCount = Field(deprecated=True)  # in lists
    lints: int = Field(deprecated=True)  # in lists


class GroupPage(Schema):
    items: list[GroupOut]
    next_cursor: str | None


class MemberOut(Schema):
    name: str
    source: Annotated[str, choices(("mcp", "custom"))]
    server: str | None = Field(description="Slug of its server; null: a custom tool")
    mcpServer: str | None = Field(deprecated=True)
    state: Annotated[str, choices(ToolState)]
    preload: bool | None  # null: the group's default
    preloaded: bool
    tokens: int | None


class LintOut(Schema):
    code: str
    subject: str
    sentence: str


class DriftOut(Schema):
    missing: list[str]
    new: list[str]


class MemberPage(Schema):
    items: list[MemberOut]
    next_cursor: str | None


class GroupDetail(GroupOut):
    members: list[MemberOut] = Field(description="The first 200; GET …/members lists all")
    members_next_cursor: str | None = Field(
        description="For the next page of GET …/members; null: `members` has all"
    )
    drift: DriftOut  # type: ignore[assignment]
    lints: list[LintOut]  # type: ignore[assignment]
    undo: list[int] = []  # audit entries of this write, in the order to undo them


class Undoable(Schema):
    group_id: str
    undo: list[int]


class GroupIn(Strict):
    group_id: str
    display_name: str
    description: str = ""
    preload_default: StrictBool = False
    follows: str | None = None


class GroupEdit(Strict):
    # Null is refused where it is not in the schema: it would not say what to change.
    group_id: str | SkipJsonSchema[None] = None
    display_name: str | SkipJsonSchema[None] = None
    description: str | SkipJsonSchema[None] = None
    preload_default: StrictBool | SkipJsonSchema[None] = None
    deferred: StrictBool | SkipJsonSchema[None] = None
    position: Integer | SkipJsonSchema[None] = None
    follows: str | None = None  # slug of the server to mirror; null stops mirroring


class GroupOrderIn(Strict):
    group_ids: list[str]


class ToolsIn(Renamed):
    ALIASES = {"tools": "tool_names"}

    tool_names: list[str]


class AssignIn(ToolsIn):
    position: Integer | None = None


class MemberPreloadIn(ToolsIn):
    preload: StrictBool | None


def _group_out(
    group: Group, members: int, cached: CachedGroup, drift: Drift, lints: Sequence[Lint]
) -> dict[str, Any]:
    cost = board.group_cost(cached)
    return {
        **group_state.read_fields(group),
        "described_by_server": group.is_described_by_server,
        "position": group.position,
        "tools": members,
        "preloaded": cost.preloaded,
        "tokens": cost.definitions,
        "preload_tokens": cost.preload,
        "catalog_tokens": cost.stub,
        "start_tokens": cost.at_start,
        "over_budget": cost.over_budget,
        "missing_count": len(drift.missing),
        "new_count": len(drift.new),
        "lint_count": len(lints),
        "drift": {"missing": len(drift.missing), "new": len(drift.new)},
        "lints": len(lints),
    }


def _detail(group_id: str, *writes: GroupWrite | None) -> dict[str, Any]:
    group = actions.find_group(group_id)
    drift = group_health.drift(group)
    own_lints = group_health.group_lints([group])[group.pk]
    lints = [*own_lints, *group_health.tool_lints(group)]
    members, cursor = cut_page(_members(group), MAX_LIMIT, _member_cursor)
    count = group.memberships.count()
    return {
        **_group_out(group, count, preview.cached_group(group), drift, own_lints),
        "members": [_member_out(group, member) for member in members],
        "members_next_cursor": seal_cursor("list_group_members", cursor) if cursor else None,
        "drift": {"missing": drift.missing, "new": drift.new},
        "lints": [vars(lint) for lint in lints],
        "undo": _undo_ids(*writes),
    }


def _members(group: Group) -> models.QuerySet[Membership]:
    return group.memberships.select_related(
        "tool", "tool__server", "tool__approved", "tool__latest"
    ).order_by("position", "tool__public_name")


def _member_cursor(member: Membership) -> str:
    return f"{member.position}:{member.tool.public_name}"


def _parse_cursor(cursor: str) -> tuple[int, str]:
    """Return the position and name of the last item of a page."""
    position, _, name = cursor.partition(":")
    if not position.isdecimal() or len(position) > 10 or int(position) > MAX_POSITION:
        raise Invalid("Invalid cursor.", hint="Send next_cursor unchanged.")
    return int(position), name


def _member_out(group: Group, member: Membership) -> dict[str, Any]:
    tool = member.tool
    return {
        "name": tool.public_name,
        "source": tool.source,
        "server": tool.server.slug if tool.server else None,
        "mcpServer": tool.server.slug if tool.server else None,
        "state": tool.state,
        "preload": member.preload,
        "preloaded": is_preloaded(group, tool, member.preload),
        "tokens": tool.tokens,
    }


def _undo_ids(*writes: GroupWrite | None) -> list[int]:
    return [write.entry.pk for write in reversed(writes) if write and write.entry]


@router.get("", response={200: GroupPage, **ERRORS})
def list_groups(request: HttpRequest, limit: Limit = 50, cursor: Cursor = "") -> dict[str, Any]:
    """List groups in the order agents see them."""
    rows = Group.objects.select_related("follows").order_by("position", "group_id")
    if cursor:
        position, name = _parse_cursor(cursor)
        rows = rows.filter(Q(position__gt=position) | Q(position=position, group_id__gt=name))
    groups, next_cursor = cut_page(rows, limit, lambda row: f"{row.position}:{row.group_id}")
    drifts, lints = group_health.drifts(groups), group_health.group_lints(groups)
    memberships = Membership.objects.filter(group__in=groups).order_by().values_list("group_id")
    members: dict[int, int] = dict(memberships.annotate(models.Count("pk")))
    catalog = cache.current()
    items = []
    for group in groups:
        count, issues = members.get(group.pk, 0), (drifts[group.pk], lints[group.pk])
        items.append(_group_out(group, count, catalog.group(group), *issues))
    return {"items": items, "next_cursor": next_cursor}


@router.post("", response={201: GroupDetail, **ERRORS, **CONFLICTS})
def create_group(
    request: HttpRequest, response: HttpResponse, body: GroupIn
) -> Status[dict[str, Any]]:
    """Create a group, last in order."""
    write = actions.create(**body.model_dump(), actor=key_actor(request))
    set_location(response, "groups", write.group.group_id)
    return Status(201, _detail(write.group.group_id, write))


@router.put("", response={200: Undoable, **ERRORS, **CONFLICTS})
def order_groups(request: HttpRequest, body: GroupOrderIn) -> dict[str, Any]:
    """Put these groups first, in this order; the others keep their order."""
    write = actions.order(body.group_ids, actor=key_actor(request))
    return {"group_id": write.group.group_id if write else "", "undo": _undo_ids(write)}


@router.get("/{group_id}", response={200: GroupDetail, **ERRORS})
def get_group(request: HttpRequest, group_id: str) -> dict[str, Any]:
    """Get a group with its members, warnings and difference from its server."""
    return _detail(group_id)


@router.patch("/{group_id}", response={200: GroupDetail, **ERRORS, **CONFLICTS})
def edit_group(request: HttpRequest, group_id: str, body: GroupEdit) -> dict[str, Any]:
    """Change the fields that are sent; `follows: null` stops mirroring a server."""
    values = body.model_dump(exclude_unset=True)
    nulls = [name for name, value in values.items() if value is None and name != "follows"]
    if nulls:
        raise Invalid(
            f"{', '.join(nulls)} cannot be null.", hint="Omit fields that should not change."
        )
    position = values.pop("position", None)
    with transaction.atomic():
        edited = actions.edit(actions.find_group(group_id), actor=key_actor(request), **values)
        moved = None
        if position is not None:
            position = min(position, MAX_POSITION)
            moved = actions.move(edited.group, position, actor=key_actor(request))
    return _detail(edited.group.group_id, edited, moved)


@router.delete("/{group_id}", response={200: Undoable, **ERRORS, **CONFLICTS})
def delete_group(request: HttpRequest, group_id: str) -> dict[str, Any]:
    """Delete a group. Undo restores it with its members and agents."""
    write = actions.delete(actions.find_group(group_id), actor=key_actor(request))
    return {"group_id": group_id, "undo": _undo_ids(write)}


@router.get("/{group_id}/members", response={200: MemberPage, **ERRORS})
def list_group_members(
    request: HttpRequest, group_id: str, limit: Limit = 50, cursor: Cursor = ""
) -> dict[str, Any]:
    """List the members of a group in their order."""
    group = actions.find_group(group_id)
    rows = _members(group)
    if cursor:
        position, name = _parse_cursor(cursor)
        after = Q(position__gt=position) | Q(position=position, tool__public_name__gt=name)
        rows = rows.filter(after)
    members, next_cursor = cut_page(rows, limit, _member_cursor)
    return {
        "items": [_member_out(group, member) for member in members],
        "next_cursor": next_cursor,
    }


@router.post("/{group_id}/members", response={200: GroupDetail, **ERRORS, **CONFLICTS})
def add_group_members(request: HttpRequest, group_id: str, body: AssignIn) -> dict[str, Any]:
    """Add tools by public name; existing members stay unchanged."""
    group, tools = actions.find_group(group_id), actions.find_tools(body.tool_names)
    write = actions.assign(group, tools, body.position, actor=key_actor(request))
    return _detail(group_id, write)


@router.delete("/{group_id}/members", response={200: GroupDetail, **ERRORS, **CONFLICTS})
def remove_group_members(
    request: HttpRequest,
    group_id: str,
    tool_names: Annotated[list[str], Query([])],
    tool: Annotated[list[str], Query([], deprecated=True)],
) -> dict[str, Any]:
    """Remove tools from a group."""
    group, names = actions.find_group(group_id), tool_names or tool
    if not names:
        raise Invalid("tool_names is missing.", hint="Name the members to remove.")
    write = actions.remove(group, actions.find_tools(names), actor=key_actor(request))
    return _detail(group_id, write)


@router.put("/{group_id}/members", response={200: GroupDetail, **ERRORS, **CONFLICTS})
def order_group_members(request: HttpRequest, group_id: str, body: ToolsIn) -> dict[str, Any]:
    """Put these members first, in this order; the others keep their order."""
    group = actions.find_group(group_id)
    write = actions.order_members(group, body.tool_names, actor=key_actor(request))
    return _detail(group_id, write)


@router.patch("/{group_id}/members", response={200: GroupDetail, **ERRORS, **CONFLICTS})
def edit_group_members(
    request: HttpRequest, group_id: str, body: MemberPreloadIn
) -> dict[str, Any]:
    """Preload members always (true), on demand (false), or by the group's default (null)."""
    group, tools = actions.find_group(group_id), actions.find_tools(body.tool_names)
    write = actions.set_preload(group, tools, body.preload, actor=key_actor(request))
    return _detail(group_id, write)


# Declared last, so that a group may have the id `undo`.
@router.post("/undo/{audit_id}", response={200: Undoable, **ERRORS, **CONFLICTS})
def undo_group_write(request: HttpRequest, audit_id: int) -> dict[str, Any]:
    """Undo one write to a group by the id of its audit entry."""
    write = group_undo.undo(group_undo.find_entry(audit_id), actor=key_actor(request))
    return {"group_id": write.group.group_id, "undo": _undo_ids(write)}
