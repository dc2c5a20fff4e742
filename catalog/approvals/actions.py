"""Review decisions on pending definitions: approve, reject, or hide the tool."""

from django.db import transaction
from django.utils import timezone

from catalog import audit
from catalog.definitions import effective
from catalog.models import AuditEntry, Definition, DefinitionChange, Revision, Tool
from catalog.tools import actions as tool_actions
from catalog.tools.actions import lock_tool
from toolcrib.lib.errors import Conflict
from toolcrib.lib.roles import Actor


@transaction.atomic
def approve(tool: Tool, *, actor: Actor, sha256: str = "") -> Tool:
    """Make the latest definition the approved one.

    With `sha256`, raise Conflict unless that is still the latest definition, so that nobody
    approves a definition they have not seen.
    """
    tool = lock_tool(tool, sha256)
    if tool.latest_id is None or tool.latest_id == tool.approved_id:
        raise _already_decided(tool)
    before = tool.approved
    tool.approved, tool.kept_against = tool.latest, None
    return _save_decision(tool, DefinitionChange.Outcome.APPROVED, "tool.approve", before, actor)


@transaction.atomic
def keep_old(tool: Tool, *, actor: Actor, sha256: str = "") -> Tool:
    """Reject the latest definition: agents keep the approved one."""
    tool = lock_tool(tool, sha256)
    if tool.latest_id is None or tool.latest_id in (tool.approved_id, tool.kept_against_id):
        raise _already_decided(tool)
    if tool.approved_id is None:
        raise Conflict(
            f"{tool.public_name} is new: there is no approved definition to keep.",
            hint="Approve it, or hide the tool.",
        )
    tool.kept_against = tool.latest
    return _save_decision(
        tool, DefinitionChange.Outcome.KEPT_OLD, "tool.keep_old", tool.approved, actor
    )


@transaction.atomic
def undo_approval(tool: Tool, *, actor: Actor) -> Tool:
    """Withdraw the approval of the current definition, which is then pending review again.

    Only while no call was made under it: afterwards agents have acted by it. Overrides that the
    approval dropped are restored.
    """
    tool = lock_tool(tool)
    change = find_undoable(tool)
    if change is None:
        raise Conflict(
            f"The approval of {tool.public_name} can no longer be undone.",
            hint="It was used in a call, or the definition has changed again. Hide the tool.",
            code="already_decided",
        )
    before, tool.approved = tool.approved, _approved_before(tool)
    tool.state = tool.derive_state()
    if before is not None:
        effective.restore_dropped(tool, before)
    effective.refresh(tool)
    tool.save(update_fields=["approved", "state", *effective.EFFECTIVE_FIELDS])
    change.outcome, change.decided_by, change.decided_at = (
        DefinitionChange.Outcome.WAITING,
        "",
        None,
    )
    change.save(update_fields=["outcome", "decided_by", "decided_at"])
    old, new = ({"definition": one.sha256 if one else None} for one in (before, tool.approved))
    audit.record(actor, "tool.undo_approval", tool, before=old, after=new)
    Revision.bump()
    return tool


def find_undoable(tool: Tool) -> DefinitionChange | None:
    """Return the approved change of a tool under which no call was made yet, if any."""
    if tool.approved_id is None or tool.approved_id != tool.latest_id:
        return None
    rows = tool.changes.filter(outcome=DefinitionChange.Outcome.APPROVED, after=tool.approved_id)
    change = rows.exclude(decided_by="").first()
    if change is None:
        return None
    used = {tool.approved_id, tool.effective_id} - {None}
    calls = tool.call_set.filter(definition__in=used, accepted_at__gte=change.decided_at)
    return None if calls.exists() else change


def _approved_before(tool: Tool) -> Definition | None:
    """Return what was approved before: not always the definition that the server sent before."""
    entries = AuditEntry.objects.filter(verb="tool.approve", target_kind="tool", target_id=tool.pk)
    entry = entries.first()
    sha256 = entry.before.get("definition") if entry else None
    return Definition.objects.get(sha256=sha256) if sha256 else None


def _save_decision(
    tool: Tool, outcome: str, verb: str, before: Definition | None, actor: Actor
) -> Tool:
    tool.state = tool.derive_state()
    effective.refresh(tool)
    tool.save(update_fields=["approved", "kept_against", "state", *effective.EFFECTIVE_FIELDS])
    DefinitionChange.objects.filter(
        tool=tool, after=tool.latest, outcome=DefinitionChange.Outcome.WAITING
    ).update(outcome=outcome, decided_by=actor.label[:200], decided_at=timezone.now())
    old, new = ({"definition": one.sha256 if one else None} for one in (before, tool.latest))
    audit.record(actor, verb, tool, before=old, after=new)
    Revision.bump()
    return tool


def _already_decided(tool: Tool) -> Conflict:
    last = tool.changes.exclude(decided_by="").first()
    message = f"{tool.public_name} has no pending review."
    if last:
        decision = "approved" if last.outcome == DefinitionChange.Outcome.APPROVED else "rejected"
        message += f" Already reviewed by {last.decided_by}: {decision}."
    return Conflict(message, hint="Reload to see the current definition.", code="already_decided")


@transaction.atomic
def hold(tool: Tool, *, actor: Actor, sha256: str = "") -> Tool:
    """Hide a tool during the review of its latest definition, which stays pending."""
    tool = lock_tool(tool, sha256)
    if tool.held_at:
        raise Conflict(f"{tool.public_name} is already hidden.", code="already_decided")
    return tool_actions.hold(tool, "Hidden during the review of its definition.", actor=actor)
