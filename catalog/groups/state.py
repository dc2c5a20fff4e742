"""Group state as plain values: read, compare, write and restore parts of a group.

A state maps part names to values: fields of the group; `members` (position and preload by public
name, or None for absent); `order` and `preload` of members; `groups`, the positions of several
groups; `group`, a complete snapshot including the agents that have the group. Audit entries store
the same parts before and after, so undo writes `before` if `after` is still current.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.db.models import QuerySet

from catalog.models import AuditEntry, Group, Membership, Tool
from toolcrib.lib.errors import Conflict, Invalid, NotFound

if TYPE_CHECKING:
    from servers.models import Server

State = dict[str, Any]
FIELDS = ("group_id", "display_name", "description", "preload_default", "deferred", "follows")
MEMBER_PARTS = (("order", "position"), ("preload", "preload"))
BATCH_SIZE = 500


def read_state(group: Group, parts: Mapping[str, Any]) -> State:
    """Return the current values of the parts and names that `parts` contains."""
    state: State = {name: field_value(group, name) for name in FIELDS if name in parts}
    if parts.keys() & {"members", "order", "preload"}:
        members = read_members(group)
        for part, key in (("members", ""), *MEMBER_PARTS):
            if part in parts:
                state[part] = {name: _member_value(members.get(name), key) for name in parts[part]}
    if "groups" in parts:
        positions = dict(Group.objects.values_list("group_id", "position"))
        state["groups"] = {name: positions.get(name) for name in parts["groups"]}
    return state


def _member_value(member: State | None, key: str) -> Any:
    return member[key] if member and key else member


def field_value(group: Group, name: str) -> Any:
    """Return a field as stored in a state: a server is its slug."""
    if name == "follows":
        return group.follows.slug if group.follows else None
    return getattr(group, name)


def read_fields(group: Group) -> State:
    return {name: field_value(group, name) for name in FIELDS}


def read_members(group: Group) -> dict[str, State]:
    """Return every member by public name, in canonical order."""
    rows = group.memberships.order_by("position", "tool__public_name")
    return {
        name: {"position": position, "preload": preload}
        for name, position, preload in rows.values_list("tool__public_name", "position", "preload")
    }


def diff_states(current: State, target: State) -> tuple[State, State]:
    before: State = {}
    after: State = {}
    for part, value in target.items():
        if isinstance(value, dict):
            changed = [name for name in value if current[part][name] != value[name]]
            if changed:
                before[part] = {name: current[part][name] for name in changed}
                after[part] = {name: value[name] for name in changed}
        elif current[part] != value:
            before[part], after[part] = current[part], value
    return before, after


def affected_tools(state: Mapping[str, Any]) -> set[str]:
    """Return the tools whose membership or preload setting a state contains; order is ignored."""
    return {name for part in ("members", "preload") for name in state.get(part, {})}


def list_edits(group: Group, since: int = 0) -> QuerySet[AuditEntry]:
    """Return the audit entries of a group after entry `since`, newest first."""
    entries = AuditEntry.objects.filter(target_kind="group", target_id=group.pk, pk__gt=since)
    return entries.order_by("-pk")


def write_state(group: Group, target: State) -> None:
    """Set the group's parts to the target. Tools deleted in the meantime are skipped."""
    changed = [name for name in FIELDS if name in target]
    for name in changed:
        value = target[name]
        if name == "follows" and value:
            value = find_unfollowed_server(group, value)
        setattr(group, name, value)
    if changed:
        group.save(update_fields=changed)
    if target.keys() & {"members", "order", "preload"}:
        _write_members(group, target)
    for name, position in target.get("groups", {}).items():
        Group.objects.filter(group_id=name).update(position=position)


def _write_members(group: Group, target: State) -> None:
    current = read_members(group)
    rows: dict[str, State] = {}
    for part, key in MEMBER_PARTS:
        for name, value in target.get(part, {}).items():
            if name in current:
                rows[name] = {**current[name], **rows.get(name, {}), key: value}
    members = target.get("members", {})
    rows |= {name: value for name, value in members.items() if value is not None}
    removed = {name for name, value in members.items() if value is None}
    if removed:
        ids = group.memberships.values_list("pk", "tool__public_name")
        group.memberships.filter(pk__in=[pk for pk, name in ids if name in removed]).delete()
    upsert_members(group, rows)


def upsert_members(group: Group, rows: Mapping[str, State]) -> None:
    tools = Tool.objects.in_bulk(rows, field_name="public_name")
    Membership.objects.bulk_create(
        [
            Membership(group=group, tool=tool, **rows[name])
            for name, tool in sorted(tools.items(), key=lambda item: item[0])
        ],
        batch_size=BATCH_SIZE,
        update_conflicts=True,
        unique_fields=["group", "tool"],
        update_fields=["position", "preload"],
    )


def find_unfollowed_server(group: Group, slug: str) -> "Server":
    """Return a server that no other group follows; this app may not import `servers`."""
    model: Any = Group._meta.get_field("follows").related_model
    try:
        server: Server = model.objects.get_by_slug(slug)
    except NotFound as error:
        raise Invalid(error.message, hint=error.hint, code="unknown_server") from None
    other = Group.objects.filter(follows=server).exclude(pk=group.pk).first()
    if other:
        raise Conflict(
            f"{other.group_id} already mirrors {slug}.",
            hint="A server can be mirrored by one group only. Stop mirroring it there first.",
            code="followed",
        )
    return server


def new_members_of(group: Group, server: "Server") -> dict[str, State]:
    """Return the members that following a server adds: its current tools not in the group."""
    missing = Tool.objects.current().filter(server=server).exclude(memberships__group=group)
    position = next_position(group)
    names = missing.order_by("public_name").values_list("public_name", flat=True)
    return {name: {"position": position, "preload": None} for name in names}


def next_position(group: Group) -> int:
    """Return the position of a new member: last, or 0 (ordered by name) if none was moved."""
    last = group.memberships.order_by("-position").values_list("position", flat=True).first()
    return last + 1 if last else 0


def snapshot(group: Group) -> State:
    links = group.agent_links.order_by("position", "agent_id")
    return {
        **read_fields(group),
        "position": group.position,
        "members": read_members(group),
        "agents": list(links.values("agent_id", "position")),
    }


def restore(pk: int, state: State) -> Group:
    """Recreate a deleted group under its old key, for the agents that still exist."""
    if Group.objects.filter(group_id=state["group_id"]).exists():
        raise Conflict(
            f"Another group is now called {state['group_id']}.", hint="Rename that group first."
        )
    group = Group(pk=pk, position=state["position"])
    for name in FIELDS:
        if name != "follows":
            setattr(group, name, state[name])
    if state["follows"]:
        with suppress(NotFound):  # the server may have been deleted as well
            group.follows = find_unfollowed_server(group, state["follows"])
    group.save(force_insert=True)
    upsert_members(group, state["members"])
    if group.follows:
        upsert_members(group, new_members_of(group, group.follows))
    agents = group.agents.model.objects.in_bulk([link["agent_id"] for link in state["agents"]])
    links = group.agent_links
    links.bulk_create(
        [links.model(group=group, **link) for link in state["agents"] if link["agent_id"] in agents]
    )
    return group
