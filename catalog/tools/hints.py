"""Writes to a tool's search hints: aliases and example queries.

Agents never see hints, but hints affect their search results: each change bumps the revision.
"""

from django.db import transaction

from catalog import audit
from catalog.models import HintKind, Revision, Tool, ToolHint
from catalog.models.search import MAX_HINT_LENGTH
from catalog.tools import actions as tool_actions
from toolcrib.lib.errors import Conflict, Invalid, NotFound
from toolcrib.lib.roles import Actor

MAX_HINTS_PER_TOOL = 50


@transaction.atomic
def add(tool: Tool, kind: str, text: str, *, actor: Actor) -> ToolHint:
    """Add an alias or an example query to a tool; return the existing hint if there is one."""
    tool = tool_actions.lock_tool(tool)
    if kind not in HintKind.values:
        raise Invalid("Unknown kind of hint.", hint="Use alias or example.")
    line = _one_line(text)
    existing = {(hint.kind, hint.text): hint for hint in tool.hints.all()}
    if (kind, line) in existing:
        return existing[kind, line]
    if len(existing) >= MAX_HINTS_PER_TOOL:
        raise Conflict(
            f"{tool.public_name} already has {MAX_HINTS_PER_TOOL} search aliases, the maximum.",
            hint="Remove one first.",
        )
    hint = ToolHint.objects.create(tool=tool, kind=kind, text=line, created_by=actor.label[:200])
    audit.record(actor, "tool.hint.add", tool, after={kind: line})
    Revision.bump()
    return hint


@transaction.atomic
def remove(hint: ToolHint, *, actor: Actor) -> None:
    """Remove a hint; do nothing if it is already removed."""
    deleted, _ = ToolHint.objects.filter(pk=hint.pk).delete()
    if deleted:
        audit.record(actor, "tool.hint.remove", hint.tool, before={hint.kind: hint.text})
        Revision.bump()


def find(tool: Tool, hint_id: int) -> ToolHint:
    hint = tool.hints.select_related("tool").filter(pk=hint_id).first()
    if hint is None:
        raise NotFound(
            "Search alias not found.", hint=f"It may have been removed from {tool.public_name}."
        )
    return hint


def _one_line(text: str) -> str:
    line = " ".join(tool_actions.check_storable(text).split())
    if not line:
        raise Invalid("The search alias is empty.", hint="Enter an alias or an example query.")
    if len(line) > MAX_HINT_LENGTH:
        raise Invalid(
            f"The search alias has {len(line)} characters; the limit is {MAX_HINT_LENGTH}.",
            hint="Shorten it, or split it in two.",
        )
    return line
