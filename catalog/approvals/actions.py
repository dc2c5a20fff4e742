"""Decide on a changed definition: approve it, or keep the approved one."""

from django.db import transaction
from django.utils import timezone

from catalog import audit
from catalog.audit import Actor
from catalog.models import (
    Definition,
    DefinitionChange,
    Revision,
    Tool,
)
from catalog.tools import actions as tool_actions
from catalog.tools.actions import lock_tool
from toolcrib.lib.errors import Conflict


@transaction.atomic
def approve(tool: Tool, *, actor: Actor, sha256: str = "") -> Tool:
    """Serve the latest definition from now on.

    `sha256` names the definition that was looked at: a newer one is not approved unseen.
    """
    tool = lock_tool(tool, sha256)
    if tool.latest_id is None or tool.latest_id == tool.approved_id:
        raise _already(tool)
    before = tool.approved
    tool.approved, tool.kept_against = tool.latest, None
    return _decided(tool, DefinitionChange.Outcome.APPROVED, "tool.approve", before, actor)


@transaction.atomic
def keep_old(tool: Tool, *, actor: Actor, sha256: str = "") -> Tool:
    """Go on serving the approved definition, and stop asking about the latest."""
    tool = lock_tool(tool, sha256)
    if tool.latest_id is None or tool.latest_id in (tool.approved_id, tool.kept_against_id):
        raise _already(tool)
    if tool.approved_id is None:
        raise Conflict(
            f"{tool.public_name} has no older definition to keep.",
            hint="Approve it, or hold the tool.",
        )
    tool.kept_against = tool.latest
    return _decided(tool, DefinitionChange.Outcome.KEPT_OLD, "tool.keep_old", tool.approved, actor)


def _decided(tool: Tool, outcome: str, verb: str, before: Definition | None, actor: Actor) -> Tool:
    tool.state = tool.settled_state()
    tool.save(update_fields=["approved", "kept_against", "state"])
    DefinitionChange.objects.filter(
        tool=tool, after=tool.latest, outcome=DefinitionChange.Outcome.WAITING
    ).update(outcome=outcome, decided_by=actor.label[:200], decided_at=timezone.now())
    audit.record(
        actor,
        verb,
        tool,
        before={"definition": before.sha256 if before else None},
        after={"definition": tool.latest.sha256 if tool.latest else None},
    )
    Revision.bump()
    return tool


def _already(tool: Tool) -> Conflict:
    last = tool.changes.exclude(decided_by="").first()
    who = f" {last.decided_by} chose {last.get_outcome_display().lower()}." if last else ""
    return Conflict(
        f"Nothing waits for a decision on {tool.public_name}.{who}",
        hint="Reload to see the definition it has now.",
        code="already_decided",
    )


@transaction.atomic
def hold(tool: Tool, *, actor: Actor, sha256: str = "") -> Tool:
    """Hold a tool because of the definition that was looked at; its change stays open."""
    tool = lock_tool(tool, sha256)
    if tool.held_at:
        raise Conflict(f"{tool.public_name} is held already.", code="already_decided")
    return tool_actions.hold(tool, "Held while its definition is reviewed.", actor=actor)
