"""What a group is, as plain values: read parts of it, compare them, put them back.

A state names its parts: fields of the group; `members` (by public name: position and preload, or
None for absent); `order` and `preload` of members; `groups`, the positions of several; `group`,
all of one with the agents that have it. An audit entry holds the same parts before and after, so
that undoing is writing the one where the other still stands. Writes no audit entry itself.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from django.apps import apps
from django.db.models import Model, Q

from catalog.models import Group, Membership, Tool
from toolcrib.lib.errors import Conflict, NotFound

if TYPE_CHECKING:
    from servers.models import Server

State = dict[str, Any]
FIELDS = ("group_id", "display_name", "description", "preload_default", "deferred", "follows")
CHUNK = 500


def read(group: Group, parts: Mapping[str, Any]) -> State:
    """Return the parts that `parts` names, as they are now."""
    now: State = {name: field(group, name) for name in FIELDS if name in parts}
    if parts.keys() & {"members", "order", "preload"}:
        standing = members(group)
        for part, key in (("members", ""), ("order", "position"), ("preload", "preload")):
            if part in parts:
                now[part] = {name: _value(standing.get(name), key) for name in parts[part]}
    if "groups" in parts:
        positions = dict(Group.objects.values_list("group_id", "position"))
        now["groups"] = {name: positions.get(name) for name in parts["groups"]}
    return now


def _value(member: State | None, key: str) -> Any:
    return member[key] if member and key else member


def field(group: Group, name: str) -> Any:
    if name == "follows":
        return group.follows.slug if group.follows else None
    return getattr(group, name)


def members(group: Group) -> dict[str, State]:
    """Return every member by public name, in canonical order."""
    rows = group.memberships.order_by("position", "tool__public_name")
    return {
        name: {"position": position, "preload": preload}
        for name, position, preload in rows.values_list("tool__public_name", "position", "preload")
    }


def difference(now: State, wanted: State) -> tuple[State, State]:
    """Cut two states of the same parts down to what differs."""
    before: State = {}
    after: State = {}
    for part, value in wanted.items():
        if isinstance(value, dict):
            named = [name for name in value if now[part][name] != value[name]]
            if named:
                before[part] = {name: now[part][name] for name in named}
                after[part] = {name: value[name] for name in named}
        elif now[part] != value:
            before[part], after[part] = now[part], value
    return before, after


def touched(state: Mapping[str, Any]) -> set[str]:
    """Name the tools whose membership or setting a state is about; a mere order is nobody's."""
    return {name for part in ("members", "preload") for name in state.get(part, {})}


def write(group: Group, wanted: State) -> None:
    """Put the group's parts as wanted. Tools that are gone meanwhile are left out."""
    changed = [name for name in FIELDS if name in wanted]
    for name in changed:
        value = wanted[name]
        setattr(group, name, free_server(group, value) if name == "follows" and value else value)
    if changed:
        group.save(update_fields=changed)
    if wanted.keys() & {"members", "order", "preload"}:
        _write_members(group, wanted)
    for name, position in wanted.get("groups", {}).items():
        Group.objects.filter(group_id=name).update(position=position)


def _write_members(group: Group, wanted: State) -> None:
    standing = members(group)
    rows: dict[str, State] = {}
    for part, key in (("order", "position"), ("preload", "preload")):
        for name, value in wanted.get(part, {}).items():
            if name in standing:
                rows[name] = {**standing[name], **rows.get(name, {}), key: value}
    given = wanted.get("members", {})
    rows |= {name: value for name, value in given.items() if value is not None}
    leaving = {name for name, value in given.items() if value is None}
    if leaving:
        ids = group.memberships.values_list("pk", "tool__public_name")
        group.memberships.filter(pk__in=[pk for pk, name in ids if name in leaving]).delete()
    put(group, rows)


def put(group: Group, rows: Mapping[str, State]) -> None:
    """Add members, or set the position and preload of those there are."""
    tools = Tool.objects.in_bulk(rows, field_name="public_name")
    Membership.objects.bulk_create(
        [
            Membership(group=group, tool=tool, **rows[name])
            for name, tool in sorted(tools.items(), key=lambda item: item[0])
        ],
        batch_size=CHUNK,
        update_conflicts=True,
        unique_fields=["group", "tool"],
        update_fields=["position", "preload"],
    )


# --- Servers ------------------------------------------------------------------------------------


def find_server(slug: str) -> "Server":
    """Return the server, or raise NotFound. `catalog` cannot import the model."""
    server: Server = apps.get_model("servers", "Server").objects.get_by_slug(slug)
    return server


def followable(group: Group | None) -> list[str]:
    """List the servers, by slug, that a group may follow: no other group does."""
    free = Q(group=None) | Q(group=group.pk) if group else Q(group=None)
    rows = apps.get_model("servers", "Server").objects.filter(free).order_by("slug")
    return list(rows.values_list("slug", flat=True))


def free_server(group: Group, slug: str) -> "Server":
    """Return a server that this group may follow: no other group does."""
    server = find_server(slug)
    other = Group.objects.filter(follows=server).exclude(pk=group.pk).first()
    if other:
        raise Conflict(
            f"{other.group_id} follows {slug} already.",
            hint="A server has one group that follows it: let that one stop first.",
            code="followed",
        )
    return server


def joining(group: Group, server: "Server") -> dict[str, State]:
    """Return the members that following a server adds: its present tools not in the group yet."""
    fresh = Tool.objects.current().filter(server=server).exclude(memberships__group=group)
    place = next_position(group)
    names = fresh.order_by("public_name").values_list("public_name", flat=True)
    return {name: {"position": place, "preload": None} for name in names}


def next_position(group: Group) -> int:
    """Return where a new member goes: last, or among the others by name where none was moved."""
    last = group.memberships.order_by("-position").values_list("position", flat=True).first()
    return last + 1 if last else 0


# --- All of a group -----------------------------------------------------------------------------


def snapshot(group: Group) -> State:
    links = _links().filter(group_id=group.pk).order_by("position", "agent_id")
    return {
        **{name: field(group, name) for name in FIELDS},
        "position": group.position,
        "members": members(group),
        "agents": list(links.values("agent_id", "position")),
    }


def restore(pk: int, state: State) -> Group:
    """Make a deleted group again, under its old key, for the agents that are still there."""
    if Group.objects.filter(group_id=state["group_id"]).exists():
        raise Conflict(
            f"There is a group called {state['group_id']} again.", hint="Rename that one first."
        )
    group = Group(pk=pk, position=state["position"])
    for name in FIELDS:
        if name != "follows":
            setattr(group, name, state[name])
    if state["follows"]:
        group.follows = _still_there(group, state["follows"])
    group.save(force_insert=True)
    put(group, state["members"])
    if group.follows:
        put(group, joining(group, group.follows))
    links = _links()
    agents = cast(type[Model], links.model._meta.get_field("agent").related_model)
    here = agents._default_manager.in_bulk([link["agent_id"] for link in state["agents"]])
    links.bulk_create(
        [links.model(group=group, **link) for link in state["agents"] if link["agent_id"] in here]
    )
    return group


def _still_there(group: Group, slug: str) -> "Server | None":
    try:
        return free_server(group, slug)
    except NotFound:
        return None


def _links() -> Any:
    """The agents that have a group. The model is of another app, known by its relation only."""
    return Group._meta.get_field("agent_links").related_model._default_manager.get_queryset()
