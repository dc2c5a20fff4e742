"""Every write to groups and their members, each with its audit entry and its way back.

An entry's `before` and `after` hold the same parts of a group (see `catalog.group_states`), so
that `undo` is one function for all verbs. Writing what already stands records nothing.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, Unpack

from django.db import IntegrityError, transaction

from catalog import audit
from catalog.audit import Actor
from catalog.groups import state as states
from catalog.groups.state import State
from catalog.models import AuditEntry, Group, Revision, Tool
from catalog.tools.actions import UNKEEPABLE
from toolcrib.lib.errors import Conflict, Invalid, NotFound

if TYPE_CHECKING:
    from servers.models import Server

# The verb of an edit that touches one kind of thing only; several at once are the settings.
VERBS = {
    "display_name": "group.rename",
    "group_id": "group.rename",
    "description": "group.describe",
    "preload_default": "group.preload_default",
    "deferred": "group.deferred",
    "follows": "group.follow",
}


# --- Shared by all writes -------------------------------------------------------------------------

GROUP_ID = re.compile(r"[a-z0-9][a-z0-9:._-]{0,79}")
LONGEST = {"display_name": 120, "description": 500}
WHAT = {"display_name": "display name", "description": "description"}


@dataclass(frozen=True)
class GroupWrite:
    """A group after a write, with the entry to undo it by; no entry where it stood so already."""

    group: Group
    entry: AuditEntry | None


@contextmanager
def group_transaction() -> Iterator[None]:
    try:
        with transaction.atomic():
            yield
    except IntegrityError as error:
        raise Conflict(
            "Somebody changed the same group at the same moment.", hint="Reload and try again."
        ) from error


def record_write(
    group: Group, verb: str, wanted: State, actor: Actor, mark: State | None = None
) -> GroupWrite:
    before, after = states.difference(states.read(group, wanted), wanted)
    if not after:
        return GroupWrite(group, None)
    states.write(group, after)
    entry = audit.record(actor, verb, group, before=before, after={**after, **(mark or {})})
    Revision.bump()
    return GroupWrite(group, entry)


def lock_group(group: Group) -> Group:
    found = (
        Group.objects.select_for_update(of=("self",))
        .select_related("follows")
        .filter(pk=group.pk)
        .first()
    )
    if found is None:
        raise deleted_meanwhile(group)
    return found


def lock_all_groups() -> list[Group]:
    """Lock every group, always in the order of their keys, and return them in canonical order."""
    rows = list(Group.objects.select_for_update().order_by("pk"))
    return sorted(rows, key=lambda group: (group.position, group.group_id))


def check_unchanged(group: Group, names: Collection[str], seen: int, *, actor: Actor) -> None:
    """Lock a group and refuse what somebody else decided about these tools after entry `seen`."""
    group = lock_group(group)
    acts = AuditEntry.objects.filter(target_kind="group", target_id=group.pk, pk__gt=seen)
    for entry in acts.exclude(actor_kind=actor.kind, actor_id=actor.id)[:200]:
        both = sorted(states.touched(entry.after) & set(names))
        if both:
            raise Conflict(
                f"{entry.actor_label} changed {join_names(both)} meanwhile.",
                hint="Look at what stands now, and do it again if you still want it.",
                code="changed_meanwhile",
            )


def deleted_meanwhile(group: Group) -> NotFound:
    return NotFound(f"{group.group_id} was deleted meanwhile.", hint="Its deletion can be undone.")


def in_order(chosen: Sequence[str], standing: Sequence[str], what: str) -> list[str]:
    if len(set(chosen)) != len(chosen):
        raise Invalid("A name stands twice in the order.", hint="Send each once.")
    unknown = [name for name in chosen if name not in standing]
    if unknown:
        raise Invalid(f"{join_names(unknown)} is no {what}.", hint="Send names that are listed.")
    return [*chosen, *(name for name in standing if name not in set(chosen))]


def check_new_id(text: str) -> str:
    if not GROUP_ID.fullmatch(text):
        raise Invalid(
            "A group's id has 1 to 80 lower-case letters, digits and : . _ - and starts with a "
            "letter or digit.",
            hint="Such as mcp:github or research.",
        )
    if Group.objects.filter(group_id=text).exists():
        raise Conflict(f"There is a group called {text} already.", hint="Choose another id.")
    return text


def one_line(name: str, text: str) -> str:
    """Return the text on one line, as the catalog has it, if it can be kept."""
    if UNKEEPABLE.search(text):
        raise Invalid("A text cannot hold NUL or broken Unicode characters.", hint="Remove them.")
    line = " ".join(text.split())
    if len(line) > LONGEST[name]:
        raise Invalid(f"A {WHAT[name]} has at most {LONGEST[name]} characters.", hint="Shorten it.")
    if name == "display_name" and not line:
        raise Invalid("A group needs a display name.", hint="Agents and people read it.")
    return line


def join_names(names: Sequence[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


# --- Groups -------------------------------------------------------------------------------------


class Edit(TypedDict, total=False):
    display_name: str
    group_id: str
    description: str
    preload_default: bool
    deferred: bool
    follows: "Server | None"


def find_group(group_id: str) -> Group:
    group = Group.objects.filter(group_id=group_id.replace("\0", "")).first()
    if group is None:
        raise NotFound("There is no group of this name.", hint="The list of groups has them all.")
    return group


def find_tools(names: Sequence[str]) -> list[Tool]:
    """Return the tools of these public names, in this order."""
    askable = [name for name in names if name.isascii() and "\0" not in name]
    found = Tool.objects.select_related("server").in_bulk(askable, field_name="public_name")
    unknown = [name for name in names if name not in found]
    if unknown:
        raise NotFound(
            f"There is no tool called {join_names(unknown)}.",
            hint="The list of tools has them all.",
        )
    return [found[name] for name in dict.fromkeys(names)]


# --- The group itself ---------------------------------------------------------------------------


@group_transaction()
def create(
    group_id: str,
    display_name: str,
    description: str = "",
    *,
    actor: Actor,
    preload_default: bool = False,
    follows: "Server | None" = None,
) -> GroupWrite:
    """Make a group, last in the order; following a server, with all its present tools."""
    last = Group.objects.order_by("-position").values_list("position", flat=True).first()
    group = Group(
        group_id=check_new_id(group_id),
        display_name=one_line("display_name", display_name),
        description=one_line("description", description),
        position=0 if last is None else last + 1,
        preload_default=preload_default,
    )
    if follows:
        group.follows = states.free_server(group, follows.slug)
    group.save(force_insert=True)
    if follows:
        states.put(group, states.joining(group, follows))
    entry = audit.record(actor, "group.add", group, after={"group": states.snapshot(group)})
    Revision.bump()
    return GroupWrite(group, entry)


@group_transaction()
def edit(group: Group, *, actor: Actor, **fields: Unpack[Edit]) -> GroupWrite:
    """Change some of a group's fields as one act. Following a server brings in its tools."""
    group = lock_group(group)
    wanted: State = {
        name: fields[name] for name in ("preload_default", "deferred") if name in fields
    }
    for name in ("display_name", "description"):
        if name in fields and fields[name] != getattr(group, name):
            wanted[name] = one_line(name, fields[name])
    if "group_id" in fields and fields["group_id"] != group.group_id:
        wanted["group_id"] = check_new_id(fields["group_id"])
    if "follows" in fields:
        server = fields["follows"]
        wanted["follows"] = server.slug if server else None
        if server and server.pk != group.follows_id:
            wanted["members"] = states.joining(group, server)
    verbs = {VERBS[name] for name in wanted if name in VERBS and _differs(group, name, wanted)}
    verb = verbs.pop() if len(verbs) == 1 else "group.settings"
    if verb == "group.follow" and wanted["follows"] is None:
        verb = "group.unfollow"
    return record_write(group, verb, wanted, actor)


def _differs(group: Group, name: str, wanted: State) -> bool:
    return bool(states.field(group, name) != wanted[name])


def rename(
    group: Group, display_name: str | None = None, group_id: str | None = None, *, actor: Actor
) -> GroupWrite:
    wanted: Edit = {}
    if display_name is not None:
        wanted["display_name"] = display_name
    if group_id is not None:
        wanted["group_id"] = group_id
    return edit(group, actor=actor, **wanted)


def describe(group: Group, text: str, *, actor: Actor) -> GroupWrite:
    return edit(group, actor=actor, description=text)


def set_default_preload(group: Group, on: bool, *, actor: Actor) -> GroupWrite:
    """Preload every member that does not say otherwise, or none of them."""
    return edit(group, actor=actor, preload_default=on)


def set_deferred(group: Group, on: bool, *, actor: Actor) -> GroupWrite:
    return edit(group, actor=actor, deferred=on)


def follow(group: Group, server: "Server", *, actor: Actor) -> GroupWrite:
    """Give the group every tool of a server, those to come included."""
    return edit(group, actor=actor, follows=server)


def unfollow(group: Group, *, actor: Actor) -> GroupWrite:
    """Let the group keep the tools it has, and take no new ones by itself."""
    return edit(group, actor=actor, follows=None)


@group_transaction()
def delete(group: Group, *, actor: Actor) -> GroupWrite:
    group = lock_group(group)
    state = {"group": states.snapshot(group)}
    entry = audit.record(actor, "group.delete", group, before=state)
    group.delete()
    Revision.bump()
    return GroupWrite(group, entry)


@group_transaction()
def order(group_ids: Sequence[str], *, actor: Actor) -> GroupWrite | None:
    """Put these groups first, in this order; the others follow as they stood."""
    rows = lock_all_groups()
    names = in_order(group_ids, [group.group_id for group in rows], "group")
    if not names:
        return None
    positions = {"groups": {name: place for place, name in enumerate(names)}}
    top = next(group for group in rows if group.group_id == names[0])
    return record_write(top, "group.order", positions, actor)


@group_transaction()
def move(group: Group, position: int, *, actor: Actor) -> GroupWrite:
    """Put a group at a place of the order, counted from 0; past the end is last."""
    if position < 0:
        raise Invalid("A position is 0 or more.")
    rows = lock_all_groups()
    return _place(rows, group, position, actor)


@group_transaction()
def shift(group: Group, by: int, *, actor: Actor) -> GroupWrite:
    """Move a group up (-1) or down (1) among the others."""
    rows = lock_all_groups()
    place = next((at for at, one in enumerate(rows) if one.pk == group.pk), 0)
    return _place(rows, group, max(0, place + by), actor)


def _place(rows: list[Group], group: Group, position: int, actor: Actor) -> GroupWrite:
    moved = next((one for one in rows if one.pk == group.pk), None)
    if moved is None:
        raise deleted_meanwhile(group)
    rows.remove(moved)
    rows.insert(position, moved)
    wanted = {"groups": {one.group_id: place for place, one in enumerate(rows)}}
    return record_write(moved, "group.move", wanted, actor)


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
    """Add the tools the group does not hold yet: at a place counted from 0, or last."""
    group = lock_group(group)
    standing = list(states.members(group))
    new = [
        name for name in dict.fromkeys(tool.public_name for tool in tools) if name not in standing
    ]
    if position is None or not new:
        place = states.next_position(group)
        wanted: State = {"members": {name: {"position": place, "preload": preload} for name in new}}
        return record_write(group, "group.assign", wanted, actor)
    if position < 0:
        raise Invalid("A position is 0 or more.")
    numbered = {
        name: at for at, name in enumerate([*standing[:position], *new, *standing[position:]])
    }
    wanted = {
        "members": {name: {"position": numbered[name], "preload": preload} for name in new},
        "order": {name: numbered[name] for name in standing},
    }
    return record_write(group, "group.assign", wanted, actor)


@group_transaction()
def remove(group: Group, tools: Collection[Tool], *, actor: Actor) -> GroupWrite:
    group = lock_group(group)
    names = _present(group, tools)
    _refuse_followed(group, tools)
    return record_write(group, "group.remove", {"members": dict.fromkeys(names)}, actor)


@group_transaction()
def order_members(group: Group, public_names: Sequence[str], *, actor: Actor) -> GroupWrite:
    """Put these members first, in this order; the others follow as they stood."""
    group = lock_group(group)
    names = in_order(public_names, list(states.members(group)), "tool of this group")
    return record_write(group, "group.order_members", _numbered(names), actor)


@group_transaction()
def shift_member(
    group: Group, tool: Tool, by: int, *, actor: Actor, among: Collection[str] | None = None
) -> GroupWrite:
    """Move a member up (-1) or down (1) among the others, or past the next of those named."""
    group = lock_group(group)
    [name] = _present(group, [tool])
    names = list(states.members(group))
    place = names.index(name)
    beyond = names[place + 1 :] if by > 0 else names[:place][::-1]
    step = next((at for at, one in enumerate(beyond) if among is None or one in among), None)
    if step is not None:
        names.insert(place + (step + 1) * by, names.pop(place))
    return record_write(group, "group.order_members", _numbered(names), actor)


@group_transaction()
def set_preload(
    group: Group, tools: Collection[Tool], on: bool | None, *, actor: Actor
) -> GroupWrite:
    """Preload members always (true), never (false), or as the group's default says (null)."""
    group = lock_group(group)
    wanted = {"preload": dict.fromkeys(_present(group, tools), on)}
    return record_write(group, "group.preload", wanted, actor)


def _numbered(names: Sequence[str]) -> State:
    return {"order": {name: place for place, name in enumerate(names)}}


def _present(group: Group, tools: Collection[Tool]) -> list[str]:
    names = [tool.public_name for tool in tools]
    standing = states.members(group)
    strangers = [name for name in names if name not in standing]
    if strangers:
        raise Invalid(f"{join_names(strangers)} is not in {group.group_id}.", hint="Add it first.")
    return names


def _refuse_followed(group: Group, tools: Collection[Tool]) -> None:
    bound = [
        tool.public_name for tool in tools if tool.server_id and tool.server_id == group.follows_id
    ]
    if bound and group.follows:
        slug = group.follows.slug
        raise Conflict(
            f"{group.group_id} follows {slug}, so that {join_names(bound)} belongs to it.",
            hint=f"Let the group stop following {slug}, or hold the tool.",
            code="followed",
        )


# --- Undo ---------------------------------------------------------------------------------------
