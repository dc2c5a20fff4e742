"""The admin API of groups: make, edit, order, fill and undo, by the functions the pages use."""

from collections.abc import Sequence
from typing import Any

from django.db import models, transaction
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from ninja import Query, Router, Schema, Status

from catalog import cache
from catalog.cache import CachedGroup, is_preloaded
from catalog.groups import actions as group_actions
from catalog.groups import board
from catalog.groups import health as group_health
from catalog.groups import state as group_state
from catalog.groups import undo as group_undo
from catalog.groups.actions import Edit, GroupWrite
from catalog.groups.board import GroupCost
from catalog.groups.health import Drift
from catalog.groups.lints import Lint
from catalog.models import AuditEntry, Group, Membership
from toolcrib.lib.api_schemas import ERRORS, Strict
from toolcrib.lib.errors import Invalid, NotFound
from toolcrib.lib.pagination import cut_page
from toolcrib.lib.roles import key_actor

router = Router(tags=["groups"])
LARGEST = 2**31 - 1
NOTHING = GroupCost(0, 0, 0)


class Count(Schema):
    missing: int
    new: int


class GroupOut(Schema):
    group_id: str
    display_name: str
    description: str
    position: int
    follows: str | None
    preload_default: bool
    deferred: bool
    tools: int  # members, those that agents do not get included
    preloaded: int
    tokens: int
    preload_tokens: int
    drift: Count
    lints: int  # on the group as a whole


class GroupPage(Schema):
    items: list[GroupOut]
    next_cursor: str | None


class MemberOut(Schema):
    name: str
    source: str
    mcpServer: str | None
    state: str
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


class GroupDetail(GroupOut):
    members: list[MemberOut]
    drift: DriftOut  # type: ignore[assignment]
    lints: list[LintOut]  # type: ignore[assignment]
    undo: list[int] = []  # audit entries of this act, in the order to undo them


class Undoable(Schema):
    group_id: str
    undo: list[int]


class GroupIn(Strict):
    group_id: str
    display_name: str
    description: str = ""
    preload_default: bool = False
    follows: str | None = None


class GroupEdit(Strict):
    group_id: str | None = None
    display_name: str | None = None
    description: str | None = None
    preload_default: bool | None = None
    deferred: bool | None = None
    position: int | None = None
    follows: str | None = None  # null stops following


class OrderIn(Strict):
    group_ids: list[str]


class ToolsIn(Strict):
    tools: list[str]


class AssignIn(ToolsIn):
    position: int | None = None


class PreloadIn(ToolsIn):
    preload: bool | None


# --- Shapes -------------------------------------------------------------------------------------


def _find(group_id: str) -> Group:
    found = _rows().filter(group_id=group_id.replace("\0", "")).first()
    if found is None:
        raise NotFound("There is no group of this id.", hint="GET /api/v1/groups lists them.")
    return found


def _rows() -> QuerySet[Group]:
    """Groups in the order agents see them, with their members counted."""
    counted = Group.objects.select_related("follows").annotate(members=models.Count("memberships"))
    return counted.order_by("position", "group_id")


def _shown(
    group: Any, here: CachedGroup | None, drift: Drift, lints: Sequence[Lint]
) -> dict[str, Any]:
    """Shape a group of `_rows` with what it costs."""
    cost = board.definitions_cost(here) if here else NOTHING
    return {
        **{name: group_state.field(group, name) for name in group_state.FIELDS},
        "position": group.position,
        "tools": group.members,
        "preloaded": cost.preloaded,
        "tokens": cost.all,
        "preload_tokens": cost.preload,
        "drift": {"missing": len(drift.missing), "new": len(drift.new)},
        "lints": len(lints),
    }


def _detail(group_id: str, *done: GroupWrite | None) -> dict[str, Any]:
    group = _find(group_id)
    drift = group_health.drift(group)
    lints = [*group_health.group_lints([group])[group.pk], *group_health.tool_lints(group)]
    members = group.memberships.select_related(
        "tool", "tool__server", "tool__approved", "tool__latest"
    ).order_by("position", "tool__public_name")
    return {
        **_shown(group, board.cached_group(group), drift, lints),
        "members": [_member(group, member) for member in members],
        "drift": {"missing": drift.missing, "new": drift.new},
        "lints": [vars(lint) for lint in lints],
        "undo": _entries(*done),
    }


def _member(group: Group, member: Membership) -> dict[str, Any]:
    tool = member.tool
    return {
        "name": tool.public_name,
        "source": tool.source,
        "mcpServer": tool.server.slug if tool.server else None,
        "state": tool.state,
        "preload": member.preload,
        "preloaded": is_preloaded(group, tool, member.preload),
        "tokens": tool.definition.tokens if tool.definition else None,
    }


def _entries(*done: GroupWrite | None) -> list[int]:
    return [one.entry.pk for one in reversed(done) if one and one.entry]


# --- Groups -------------------------------------------------------------------------------------


@router.get("", response={200: GroupPage, **ERRORS})
def list_groups(request: HttpRequest, limit: int = 50, cursor: str = "") -> dict[str, Any]:
    """List groups in the order agents see them."""
    rows = _rows()
    if cursor:
        place, _, name = cursor.partition(":")
        if not place.isdecimal() or len(place) > 10 or int(place) > LARGEST:
            raise Invalid("This is no cursor of this list.", hint="Send next_cursor as it came.")
        after = Q(position__gt=int(place)) | Q(position=int(place), group_id__gt=name)
        rows = rows.filter(after)
    items, following = cut_page(rows, limit, lambda row: f"{row.position}:{row.group_id}")
    drifts, lints = group_health.drifts(items), group_health.group_lints(items)
    here = cache.current().by_pk
    return {
        "items": [
            _shown(group, here.get(group.pk), drifts[group.pk], lints[group.pk]) for group in items
        ],
        "next_cursor": following,
    }


@router.post("", response={201: GroupDetail, **ERRORS})
def create_group(request: HttpRequest, body: GroupIn) -> Status[dict[str, Any]]:
    done = group_actions.create(
        body.group_id,
        body.display_name,
        body.description,
        preload_default=body.preload_default,
        follows=group_state.find_server(body.follows) if body.follows else None,
        actor=key_actor(request),
    )
    return Status(201, _detail(done.group.group_id, done))


@router.put("", response={200: Undoable, **ERRORS})
def order_groups(request: HttpRequest, body: OrderIn) -> dict[str, Any]:
    """Put these groups first, in this order; the others follow as they stood."""
    done = group_actions.order(body.group_ids, actor=key_actor(request))
    return {"group_id": done.group.group_id if done else "", "undo": _entries(done)}


@router.get("/{group_id}", response={200: GroupDetail, **ERRORS})
def get_group(request: HttpRequest, group_id: str) -> dict[str, Any]:
    return _detail(group_id)


@router.patch("/{group_id}", response={200: GroupDetail, **ERRORS})
def edit_group(request: HttpRequest, group_id: str, body: GroupEdit) -> dict[str, Any]:
    """Change what is given; `follows: null` stops following."""
    given = body.dict(exclude_unset=True)
    nulls = [name for name, value in given.items() if value is None and name != "follows"]
    if nulls:
        raise Invalid(f"{', '.join(nulls)} cannot be null.", hint="Leave out what should stay.")
    position = given.pop("position", None)
    wanted: Edit = given  # type: ignore[assignment]
    if given.get("follows"):
        wanted["follows"] = group_state.find_server(given["follows"])
    elif "follows" in given:
        wanted["follows"] = None
    with transaction.atomic():
        edited = group_actions.edit(
            group_actions.find_group(group_id), actor=key_actor(request), **wanted
        )
        moved = None
        if position is not None:
            moved = group_actions.move(
                edited.group, min(position, LARGEST), actor=key_actor(request)
            )
    return _detail(edited.group.group_id, edited, moved)


@router.delete("/{group_id}", response={200: Undoable, **ERRORS})
def delete_group(request: HttpRequest, group_id: str) -> dict[str, Any]:
    """Delete a group; undoing brings it back with its members and agents."""
    done = group_actions.delete(group_actions.find_group(group_id), actor=key_actor(request))
    return {"group_id": group_id, "undo": _entries(done)}


# --- Members ------------------------------------------------------------------------------------


@router.post("/{group_id}/members", response={200: GroupDetail, **ERRORS})
def add_members(request: HttpRequest, group_id: str, body: AssignIn) -> dict[str, Any]:
    """Add tools by public name; those already in stay as they are."""
    group, place = group_actions.find_group(group_id), body.position
    done = group_actions.assign(
        group, group_actions.find_tools(body.tools), place, actor=key_actor(request)
    )
    return _detail(group_id, done)


@router.delete("/{group_id}/members", response={200: GroupDetail, **ERRORS})
def remove_members(request: HttpRequest, group_id: str, tool: Query[list[str]]) -> dict[str, Any]:
    group = group_actions.find_group(group_id)
    done = group_actions.remove(group, group_actions.find_tools(tool), actor=key_actor(request))
    return _detail(group_id, done)


@router.put("/{group_id}/members", response={200: GroupDetail, **ERRORS})
def order_members(request: HttpRequest, group_id: str, body: ToolsIn) -> dict[str, Any]:
    """Put these members first, in this order; the others follow as they stood."""
    done = group_actions.order_members(
        group_actions.find_group(group_id), body.tools, actor=key_actor(request)
    )
    return _detail(group_id, done)


@router.patch("/{group_id}/members", response={200: GroupDetail, **ERRORS})
def set_preload(request: HttpRequest, group_id: str, body: PreloadIn) -> dict[str, Any]:
    """Preload members always (true), on demand (false), or by the group's default (null)."""
    group = group_actions.find_group(group_id)
    done = group_actions.set_preload(
        group, group_actions.find_tools(body.tools), body.preload, actor=key_actor(request)
    )
    return _detail(group_id, done)


# Last, so that a group may be called undo.
@router.post("/undo/{audit_id}", response={200: Undoable, **ERRORS})
def undo(request: HttpRequest, audit_id: int) -> dict[str, Any]:
    """Take back one act on a group, by its entry in the audit log."""
    entry = AuditEntry.objects.filter(pk=min(audit_id, 2**63 - 1)).first()
    if entry is None:
        raise NotFound("There is no such audit entry.", hint="GET /api/v1/audit lists them.")
    done = group_undo.undo(entry, actor=key_actor(request))
    return {"group_id": done.group.group_id, "undo": _entries(done)}
