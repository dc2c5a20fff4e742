"""Undo of writes to groups, and the undo offer in the user's session.

An undo is a write of its own with the verb `group.undo`; undoing it redoes the change.
"""

from django.contrib import messages
from django.http import HttpRequest

from catalog.groups import state as group_state
from catalog.groups.actions import (
    GroupWrite,
    check_removable,
    group_transaction,
    lock_all_groups,
    lock_group,
    record,
    record_write,
)
from catalog.groups.state import State
from catalog.models import AuditEntry, Group, Tool
from toolcrib.lib.errors import Conflict, NotFound
from toolcrib.lib.roles import Actor

UNDO_OFFER_KEY = "group_undo"  # session key of the next undo offer
NO_CHANGES = "No changes: already set."
UNDONE, REDONE = "Undone.", "Redone."
MAX_ID = 2**63 - 1

Offer = dict[str, object]


def make_offer(sentence: str, *writes: GroupWrite | None, redo: bool = False) -> Offer | None:
    """Return the offer to undo these writes, newest first, or None if nothing changed."""
    entries = [write.entry.pk for write in reversed(writes) if write and write.entry]
    if not entries:
        return None
    return {"entry": entries[0], "also": entries[1:], "sentence": sentence, "redo": redo}


def offer_undo(request: HttpRequest, sentence: str, *writes: GroupWrite | None) -> None:
    """Store an undo offer for the next page, or a message that nothing changed."""
    offer = make_offer(sentence, *writes)
    if offer:
        request.session[UNDO_OFFER_KEY] = offer
    else:
        messages.info(request, NO_CHANGES)


def find_entry(entry_id: int) -> AuditEntry:
    entry = AuditEntry.objects.filter(pk=min(entry_id, MAX_ID)).first()
    if entry is None:
        raise NotFound("Audit entry not found.", hint="Check the id in the audit log.")
    return entry


@group_transaction()
def undo(entry: AuditEntry, *, actor: Actor) -> GroupWrite:
    """Undo one write, or redo it if it is an undo; raise Conflict if its parts changed since."""
    # The lock serializes two undos of one entry.
    entry = AuditEntry.objects.select_for_update().get(pk=entry.pk)
    if entry.target_kind != "group" or not entry.verb.startswith("group."):
        raise Conflict("Only changes to groups can be undone.", hint="Revert it manually.")
    if AuditEntry.objects.filter(
        verb="group.undo", target_id=entry.target_id, after__undoes=entry.pk
    ).exists():
        raise Conflict("This was already undone.", hint="Reload to see the current state.")
    reference: State = {"undoes": entry.pk}
    before: State = entry.before
    after = {part: value for part, value in entry.after.items() if part not in reference}
    if "group" in before and "group" not in after:
        return _undo_delete(entry, before["group"], reference, actor)
    group = _lock_target(entry, after)
    if "group" in after:
        return _undo_create(group, after["group"], reference, actor)
    if group_state.read_state(group, after) != after:
        raise _changed_error(group)
    return record_write(group, "group.undo", _target_state(group, before), actor, reference)


def _lock_target(entry: AuditEntry, after: State) -> Group:
    if "groups" in after:
        lock_all_groups()
    group = Group.objects.filter(pk=entry.target_id or 0).first()
    if group is None:
        raise Conflict(
            f"{entry.target_label} was deleted in the meantime.", hint="Undo the deletion first."
        )
    return lock_group(group)


def _target_state(group: Group, before: State) -> State:
    """Return the state to restore, adjusted to the server that the group follows.

    Tools of the followed server stay members, and following a server again adds its new tools.
    """
    current = group_state.field_value(group, "follows")
    followed = before.get("follows", current)
    if followed == current:
        removed = [name for name, value in before.get("members", {}).items() if value is None]
        check_removable(group, Tool.objects.in_bulk(removed, field_name="public_name").values())
    elif followed:
        server = group_state.find_unfollowed_server(group, followed)
        new = group_state.new_members_of(group, server)
        return {**before, "members": {**new, **before.get("members", {})}}
    return before


def _undo_delete(entry: AuditEntry, state: State, reference: State, actor: Actor) -> GroupWrite:
    if entry.target_id is None or Group.objects.filter(pk=entry.target_id).exists():
        raise Conflict(f"{entry.target_label} already exists.", hint="Reload to see it.")
    group = group_state.restore(entry.target_id, state)
    after = {"group": group_state.snapshot(group), **reference}
    return record(group, "group.undo", actor, after=after)


def _undo_create(group: Group, state: State, reference: State, actor: Actor) -> GroupWrite:
    current = group_state.snapshot(group)
    if current != state:
        raise _changed_error(group)
    write = record(group, "group.undo", actor, before={"group": current}, after=reference)
    group.delete()
    return write


def _changed_error(group: Group) -> Conflict:
    return Conflict(
        f"{group.group_id} has changed since then.", hint="Reload, and revert it manually."
    )
