"""Writes to groups and their members, each with one audit entry that can be undone.

The `before` and `after` of an entry contain the same parts of a group (see `catalog.groups.state`),
so `catalog.groups.undo` handles all verbs alike. A write that changes nothing records nothing.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict, Unpack

from django.db import IntegrityError, transaction

from catalog import audit
from catalog.groups import expected
from catalog.groups import state as group_state
from catalog.groups.state import State
from catalog.models import AuditEntry, Group, Revision, Tool
from catalog.tools.actions import check_storable
from toolcrib.lib.errors import Conflict, Invalid, NotFound
from toolcrib.lib.roles import Actor

# The audit verb of an edit of one field; an edit of several is `group.settings`.
VERBS = {
    "display_name": "group.rename",
    "group_id": "group.rename",
    "description": "group.describe",
    "preload_default": "group.preload_default",
    "deferred": "group.deferred",
    "follows": "group.follow",
}
GROUP_ID = re.compile(r"[a-z0-9][a-z0-9:._-]{0,79}")
MAX_LENGTHS = {"display_name": 120, "description": 500}
NAMES_IN_ERROR = 5
MAX_CHECKED_ENTRIES = 200


# --- Shared by all writes -----------------------------------------------------------------------


@dataclass(frozen=True)
class GroupWrite:
    """A group after a write, with its audit entry; None if nothing changed."""

    group: Group
    entry: AuditEntry | None


@contextmanager
def group_transaction() -> Iterator[None]:
    """Run a write in a transaction; report a constraint violation as a conflict."""
    try:
        with transaction.atomic():
            yield
    except IntegrityError as error:
        raise Conflict(
            "The group was changed at the same time by someone else.", hint="Reload and retry."
        ) from error


def record_write(
    group: Group, verb: str, target: State, actor: Actor, extra: State | None = None
) -> GroupWrite:
    """Apply a target state and record it; `extra` is added to `after` of the audit entry."""
    before, after = group_state.diff_states(group_state.read_state(group, target), target)
    if not after:
        return GroupWrite(group, None)
    group_state.write_state(group, after)
    return record(group, verb, actor, before=before, after={**after, **(extra or {})})


def record(
    group: Group, verb: str, actor: Actor, before: State | None = None, after: State | None = None
) -> GroupWrite:
    entry = audit.record(actor, verb, group, before=before, after=after)
    Revision.bump()
    return GroupWrite(group, entry)


def lock_group(group: Group) -> Group:
    rows = Group.objects.select_for_update(of=("self",)).select_related("follows")
    locked = rows.filter(pk=group.pk).first()
    if locked is None:
        raise deleted_error(group)
    return locked


def lock_all_groups() -> list[Group]:
    """Lock all groups, ordered by key to avoid deadlocks, and return them in canonical order."""
    rows = list(Group.objects.select_for_update().order_by("pk"))
    return sorted(rows, key=lambda group: (group.position, group.group_id))


def check_unchanged(group: Group, names: Collection[str], since: int, *, actor: Actor) -> None:
    """Lock a group and raise Conflict if another actor changed these tools after entry `since`."""
    group = lock_group(group)
    entries = group_state.list_edits(group, since)
    by_others = entries.exclude(actor_kind=actor.kind, actor_id=actor.id)
    for entry in by_others[:MAX_CHECKED_ENTRIES]:
        changed = sorted(group_state.affected_tools(entry.after) & set(names))
        if changed:
            raise Conflict(
                f"{entry.actor_label} changed {join_names(changed)} in the meantime.",
                hint="Check the current state and retry if needed.",
                code="changed_meanwhile",
            )


def deleted_error(group: Group) -> NotFound:
    return NotFound(
        f"{group.group_id} was deleted in the meantime.", hint="The deletion can be undone."
    )


def complete_order(names: Sequence[str], current: Sequence[str], noun: str) -> list[str]:
    """Return the names followed by all others in their current order."""
    if len(set(names)) != len(names):
        raise Invalid("The order contains a name twice.", hint="Send each name once.")
    unknown = [name for name in names if name not in current]
    if unknown:
        raise Invalid(f"{join_names(unknown)} is not a {noun}.", hint="Send existing names only.")
    return [*names, *(name for name in current if name not in set(names))]


def check_new_id(group_id: str) -> str:
    if not GROUP_ID.fullmatch(group_id):
        raise Invalid(
            "A group id has 1 to 80 lower-case letters, digits and : . _ - and starts with a "
            "letter or digit.",
            hint="For example, mcp:github or research.",
        )
    if Group.objects.filter(group_id=group_id).exists():
        raise Conflict(f"Group {group_id} already exists.", hint="Choose another id.")
    return group_id


def normalize_text(field: str, text: str) -> str:
    """Return a text on one line, as the catalog renders it, or raise Invalid."""
    line = " ".join(check_storable(text, "A text").split())
    if len(line) > MAX_LENGTHS[field]:
        label = field.replace("_", " ")
        raise Invalid(
            f"The {label} has at most {MAX_LENGTHS[field]} characters.", hint="Shorten it."
        )
    if field == "display_name" and not line:
        raise Invalid("A group needs a display name.", hint="Agents and people read it.")
    return line


def join_names(names: Sequence[str]) -> str:
    text = ", ".join(name[:80] for name in names[:NAMES_IN_ERROR])
    remaining = len(names) - NAMES_IN_ERROR
    return f"{text} and {remaining} more" if remaining > 0 else text


def find_group(group_id: str) -> Group:
    groups = Group.objects.select_related("follows")
    group = groups.filter(group_id=group_id.replace("\0", "")).first()
    if group is None:
        raise NotFound("Group not found.", hint="Check the id in the list of groups.")
    return group


def find_tools(names: Sequence[str]) -> list[Tool]:
    tools = Tool.objects.select_related("server").by_name(names)
    unknown = [name for name in names if name not in tools]
    if unknown:
        raise Invalid(
            f"Tool not found: {join_names(unknown)}.",
            hint="Check the name in the list of tools.",
            code="unknown_tool",
        )
    return list(dict.fromkeys(tools[name] for name in names))


# --- Groups -------------------------------------------------------------------------------------


class GroupFields(TypedDict, total=False):
    display_name: str
    group_id: str
    description: str
    preload_default: bool
    deferred: bool
    follows: str | None  # slug of a server


@group_transaction()
def create(
    group_id: str,
    display_name: str,
    description: str = "",
    *,
    actor: Actor,
    preload_default: bool = False,
    follows: str | None = None,
) -> GroupWrite:
    """Create a group, last in the order; with `follows`, with all current tools of that server."""
    last = Group.objects.order_by("-position").values_list("position", flat=True).first()
    group = Group(
        group_id=check_new_id(group_id),
        display_name=normalize_text("display_name", display_name),
        description=normalize_text("description", description),
        position=0 if last is None else last + 1,
        preload_default=preload_default,
    )
    if follows:
        group.follows = group_state.find_unfollowed_server(group, follows)
    group.save(force_insert=True)
    if group.follows:
        group_state.upsert_members(group, group_state.new_members_of(group, group.follows))
    return record(group, "group.add", actor, after={"group": group_state.snapshot(group)})


@group_transaction()
def edit(group: Group, *, actor: Actor, **fields: Unpack[GroupFields]) -> GroupWrite:
    """Change some fields of a group as one write. Following a server adds its tools."""
    group = lock_group(group)
    target: State = {
        name: fields[name] for name in ("preload_default", "deferred") if name in fields
    }
    for name in ("display_name", "description"):
        if name in fields and fields[name] != getattr(group, name):
            target[name] = normalize_text(name, fields[name])
    if "group_id" in fields and fields["group_id"] != group.group_id:
        target["group_id"] = check_new_id(fields["group_id"])
    if "follows" in fields:
        target["follows"] = slug = fields["follows"] or None
        if slug and slug != group_state.field_value(group, "follows"):
            server = group_state.find_unfollowed_server(group, slug)
            target["members"] = group_state.new_members_of(group, server)
    verbs = {
        VERBS[name]
        for name in target.keys() & VERBS
        if group_state.field_value(group, name) != target[name]
    }
    verb = verbs.pop() if len(verbs) == 1 else "group.settings"
    if verb == "group.follow" and target["follows"] is None:
        verb = "group.unfollow"
    return record_write(group, verb, target, actor)


@group_transaction()
def delete(group: Group, *, actor: Actor) -> GroupWrite:
    group = lock_group(group)
    write = record(group, "group.delete", actor, before={"group": group_state.snapshot(group)})
    group.delete()
    return write


@group_transaction()
def order(group_ids: Sequence[str], *, actor: Actor) -> GroupWrite | None:
    """Put these groups first, in this order; the others keep their order."""
    rows = lock_all_groups()
    names = complete_order(group_ids, [group.group_id for group in rows], "group")
    if not names:
        return None
    target = {"groups": {name: position for position, name in enumerate(names)}}
    first = next(group for group in rows if group.group_id == names[0])
    return record_write(first, "group.order", target, actor)


@group_transaction()
def move(group: Group, position: int | None = None, *, by: int = 0, actor: Actor) -> GroupWrite:
    """Move a group to a position, counted from 0, or up (-1) or down (1); past the end is last."""
    if position is not None and position < 0:
        raise Invalid("The position must be 0 or more.")
    rows = lock_all_groups()
    current = next((at for at, row in enumerate(rows) if row.pk == group.pk), None)
    if current is None:
        raise deleted_error(group)
    moved = rows.pop(current)
    rows.insert(max(0, current + by) if position is None else position, moved)
    target = {"groups": {row.group_id: at for at, row in enumerate(rows)}}
    return record_write(moved, "group.move", target, actor)


# --- Members ------------------------------------------------------------------------------------


@group_transaction()
def assign(
    group: Group,
    tools: Collection[Tool],
    position: int | None = None,
    *,
    actor: Actor,
    preload: bool | None = None,
) -> GroupWrite:
    """Add the tools that are not members yet, at a position counted from 0, or last."""
    group = lock_group(group)
    current = list(group_state.read_members(group))
    new = [
        name for name in dict.fromkeys(tool.public_name for tool in tools) if name not in current
    ]
    if position is None or not new:
        last = group_state.next_position(group)
        target: State = {"members": {name: {"position": last, "preload": preload} for name in new}}
        return record_write(group, "group.assign", target, actor)
    if position < 0:
        raise Invalid("The position must be 0 or more.")
    positions = {
        name: at for at, name in enumerate([*current[:position], *new, *current[position:]])
    }
    target = {
        "members": {name: {"position": positions[name], "preload": preload} for name in new},
        "order": {name: positions[name] for name in current},
    }
    return record_write(group, "group.assign", target, actor)


@group_transaction()
def remove(group: Group, tools: Collection[Tool], *, actor: Actor) -> GroupWrite:
    group = lock_group(group)
    names = _check_members(group, tools)
    check_removable(group, tools)
    return record_write(group, "group.remove", {"members": dict.fromkeys(names)}, actor)


@group_transaction()
def order_members(group: Group, public_names: Sequence[str], *, actor: Actor) -> GroupWrite:
    """Put these members first, in this order; the others keep their order."""
    group = lock_group(group)
    current = list(group_state.read_members(group))
    names = complete_order(public_names, current, "tool of this group")
    return record_write(group, "group.order_members", _order_state(names), actor)


@group_transaction()
def shift_member(
    group: Group, tool: Tool, by: int, *, actor: Actor, among: Collection[str] | None = None
) -> GroupWrite:
    """Move a member up (-1) or down (1): past its neighbour, or past the next one of `among`."""
    group = lock_group(group)
    [name] = _check_members(group, [tool])
    names = list(group_state.read_members(group))
    position = names.index(name)
    following = names[position + 1 :] if by > 0 else names[:position][::-1]
    step = next((at for at, other in enumerate(following) if among is None or other in among), None)
    if step is not None:
        names.insert(position + (step + 1) * by, names.pop(position))
    return record_write(group, "group.order_members", _order_state(names), actor)


@group_transaction()
def set_preload(
    group: Group, tools: Collection[Tool], on: bool | None, *, actor: Actor
) -> GroupWrite:
    """Preload members always (true), never (false), or by the group's default (None)."""
    group = lock_group(group)
    target = {"preload": dict.fromkeys(_check_members(group, tools), on)}
    return record_write(group, "group.preload", target, actor)


@group_transaction()
def set_members(group: Group, members: Mapping[str, bool | None], *, actor: Actor) -> GroupWrite:
    """Set all members with their preload flags, in this order; sorted by name means unordered.

    Names of tools that do not exist yet are kept as expected. Tools of a mirrored server that are
    not named stay members, after the others.
    """
    group = lock_group(group)
    current = group_state.read_members(group)
    found = Tool.objects.by_name(list(members))
    is_ordered = list(members) != sorted(members)
    names = {name: found[name].public_name if name in found else name for name in members}
    members = {names[name]: preload for name, preload in members.items()}
    tools = {tool.public_name for tool in found.values()}
    rows = {
        name: {"position": at if is_ordered else 0, "preload": preload}
        for at, (name, preload) in enumerate(members.items())
    }
    target: State = {name: row for name, row in rows.items() if name in tools}
    mirrored = set(
        Tool.objects.filter(server=group.follows, memberships__group=group).values_list(
            "public_name", flat=True
        )
        if group.follows
        else ()
    )
    last = {"position": len(rows) if is_ordered else 0, "preload": None}
    target |= {name: last if name in mirrored else None for name in current if name not in target}
    missing = {name: row for name, row in rows.items() if name not in tools}
    expected.set_expected_members(group, missing)
    write = record_write(group, "group.members", {"members": target}, actor)
    if write.entry is None and missing:
        return record(group, "group.members", actor, after={"expected": sorted(missing)})
    return write


def _order_state(names: Sequence[str]) -> State:
    return {"order": {name: position for position, name in enumerate(names)}}


def _check_members(group: Group, tools: Collection[Tool]) -> list[str]:
    """Return the public names of the tools; raise Invalid if one is not a member."""
    names = [tool.public_name for tool in tools]
    members = group_state.read_members(group)
    missing = [name for name in names if name not in members]
    if missing:
        raise Invalid(f"{join_names(missing)} is not in {group.group_id}.", hint="Add it first.")
    return names


def check_removable(group: Group, tools: Collection[Tool]) -> None:
    """Raise Conflict if the group follows the server of one of the tools."""
    mirrored = [
        tool.public_name for tool in tools if tool.server_id and tool.server_id == group.follows_id
    ]
    if mirrored and group.follows:
        slug = group.follows.slug
        raise Conflict(
            f"{group.group_id} mirrors {slug}, so {join_names(mirrored)} cannot be removed.",
            hint=f"Stop mirroring {slug}, or hide the tool.",
            code="followed",
        )
