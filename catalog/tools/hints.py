"""Every write to a tool's hints: the other names and the example queries it is found by.

Agents never read a hint. They find by it, so a change is one that they can see: each is audited
and raises the revision. Writing what already stands records nothing.
"""

from django.db import transaction

from catalog import audit
from catalog.audit import Actor
from catalog.models import HintKind, Revision, Tool, ToolHint
from catalog.models.search import LONGEST_HINT
from catalog.tools import actions as tool_actions
from catalog.tools.actions import UNKEEPABLE
from toolcrib.lib.errors import Conflict, Invalid, NotFound

MAX_HINTS_PER_TOOL = 50  # hints of one tool


@transaction.atomic
def add(tool: Tool, kind: str, text: str, *, actor: Actor) -> ToolHint:
    """Let a tool be found by another name or by an example of what is asked."""
    tool = tool_actions.lock_tool(tool)
    if kind not in HintKind.values:
        raise Invalid("A hint is an alias or an example.", hint="Use one of the two as its kind.")
    line = _one_line(text)
    held = {(hint.kind, hint.text): hint for hint in tool.hints.all()}
    if (kind, line) in held:
        return held[kind, line]
    if len(held) >= MAX_HINTS_PER_TOOL:
        raise Conflict(
            f"{tool.public_name} has {MAX_HINTS_PER_TOOL} hints, as many as a tool may have.",
            hint="Remove one that helps nobody.",
        )
    hint = ToolHint.objects.create(tool=tool, kind=kind, text=line, created_by=actor.label[:200])
    audit.record(actor, "tool.hint.add", tool, after={kind: line})
    Revision.bump()
    return hint


@transaction.atomic
def remove(hint: ToolHint, *, actor: Actor) -> None:
    """Take a hint away; one that is gone already is no error."""
    deleted, _ = ToolHint.objects.filter(pk=hint.pk).delete()
    if deleted:
        audit.record(actor, "tool.hint.remove", hint.tool, before={hint.kind: hint.text})
        Revision.bump()


def find(tool: Tool, hint_id: int) -> ToolHint:
    hint = tool.hints.select_related("tool").filter(pk=hint_id).first()
    if hint is None:
        raise NotFound(
            f"{tool.public_name} has no such hint.", hint="It may have been removed meanwhile."
        )
    return hint


def _one_line(text: str) -> str:
    if UNKEEPABLE.search(text):
        raise Invalid("A text cannot hold NUL or broken Unicode characters.", hint="Remove them.")
    line = " ".join(text.split())
    if not line:
        raise Invalid("A hint needs words.", hint="Write a name or a question people use.")
    if len(line) > LONGEST_HINT:
        raise Invalid(
            f"A hint has at most {LONGEST_HINT} characters; this one has {len(line)}.",
            hint="Shorten it, or make two of it.",
        )
    return line
