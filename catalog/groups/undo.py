"""Offer to undo what was just done: kept in the person's session until a page shows it."""

from collections.abc import Iterable

from django.contrib import messages
from django.http import HttpRequest

from catalog import audit
from catalog.audit import Actor
from catalog.groups import state as states
from catalog.groups.actions import (
    GroupWrite,
    _refuse_followed,
    group_transaction,
    lock_all_groups,
    lock_group,
    record_write,
)
from catalog.groups.state import State
from catalog.models import AuditEntry, Group, Revision, Tool
from toolcrib.lib.errors import Conflict

UNDO_OFFER_KEY = "group_undo"  # the act this session may undo next
NO_CHANGES = "Nothing changed: it stood so already."

Offer = dict[str, object]


def undo_offer(sentence: str, *done: GroupWrite | None) -> Offer | None:
    """Return the offer to undo these acts, newest first, or nothing where nothing was written."""
    entries = [one.entry.pk for one in reversed(done) if one and one.entry]
    if not entries:
        return None
    return {"entry": entries[0], "also": entries[1:], "sentence": sentence}


def offer_undo(request: HttpRequest, sentence: str, *done: GroupWrite | None) -> None:
    found = undo_offer(sentence, *done)
    if found:
        request.session[UNDO_OFFER_KEY] = found
    else:
        messages.info(request, NO_CHANGES)


def show_messages(request: HttpRequest, sentences: Iterable[str]) -> None:
    for sentence in sentences:
        messages.info(request, sentence)


@group_transaction()
def undo(entry: AuditEntry, *, actor: Actor) -> GroupWrite:
    """Take back one act on a group, as a new act; refuse if the group moved on meanwhile.

    Undoing an undo does the act again.
    """
    # The lock makes two undos of one entry follow each other.
    entry = AuditEntry.objects.select_for_update().get(pk=entry.pk)
    if entry.target_kind != "group" or not entry.verb.startswith("group."):
        raise Conflict("Only an act on a group can be undone.", hint="Change it back by hand.")
    if AuditEntry.objects.filter(
        verb="group.undo", target_id=entry.target_id, after__undoes=entry.pk
    ).exists():
        raise Conflict("This was undone already.", hint="Reload to see what stands now.")
    mark: State = {"undoes": entry.pk}
    before, after = _parts(entry.before), _parts(entry.after)
    if "group" in before and "group" not in after:
        return _remake(entry, before["group"], mark, actor)
    group = _acted_on(entry, after)
    if "group" in after:
        return _unmake(group, after["group"], mark, actor)
    if states.read(group, after) != after:
        raise _moved_on(group)
    return record_write(group, "group.undo", _wanted_again(group, before), actor, mark)


def _acted_on(entry: AuditEntry, after: State) -> Group:
    if "groups" in after:
        lock_all_groups()
    group = Group.objects.filter(pk=entry.target_id or 0).first()
    if group is None:
        raise Conflict(f"{entry.target_label} was deleted meanwhile.", hint="Undo that first.")
    return lock_group(group)


def _wanted_again(group: Group, before: State) -> State:
    """Return what stood before, as far as following a server allows and demands."""
    now = states.field(group, "follows")
    followed = before.get("follows", now)
    if followed == now:
        leaving = [name for name, value in before.get("members", {}).items() if value is None]
        _refuse_followed(group, Tool.objects.in_bulk(leaving, field_name="public_name").values())
    elif followed:
        joined = states.joining(group, states.free_server(group, followed))
        return {**before, "members": {**joined, **before.get("members", {})}}
    return before


def _parts(state: State) -> State:
    return {part: value for part, value in state.items() if part != "undoes"}


def _remake(entry: AuditEntry, state: State, mark: State, actor: Actor) -> GroupWrite:
    if entry.target_id is None or Group.objects.filter(pk=entry.target_id).exists():
        raise Conflict(f"{entry.target_label} is there.", hint="Reload to see it.")
    group = states.restore(entry.target_id, state)
    after = {"group": states.snapshot(group), **mark}
    made = audit.record(actor, "group.undo", group, after=after)
    Revision.bump()
    return GroupWrite(group, made)


def _unmake(group: Group, state: State, mark: State, actor: Actor) -> GroupWrite:
    now = states.snapshot(group)
    if now != state:
        raise _moved_on(group)
    made = audit.record(actor, "group.undo", group, before={"group": now}, after=mark)
    group.delete()
    Revision.bump()
    return GroupWrite(group, made)


def _moved_on(group: Group) -> Conflict:
    return Conflict(
        f"{group.group_id} has changed since then.", hint="Reload, and change it back by hand."
    )
