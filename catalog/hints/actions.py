"""Writes to a tool's search hints: aliases and example queries, by people and automatic ones.

Agents never see hints, but hints affect their search results: each change bumps the revision.
"""

from collections.abc import Mapping, Sequence

from django.db import transaction

from catalog import audit
from catalog.cache import HINT_PRIORITY
from catalog.models import HintKind, HintSource, Revision, Tool, ToolHint
from catalog.models.search import MAX_AUTOMATIC_HINTS, MAX_HINT_LENGTH
from catalog.tools import actions as tool_actions
from toolcrib.lib.errors import Conflict, Invalid, NotFound
from toolcrib.lib.roles import Actor

MAX_HINTS_PER_TOOL = 50
MAX_HINTS_FROM_USE = 2
TOOLS_PER_QUERY = 500


@transaction.atomic
def add(tool: Tool, kind: str, text: str, *, actor: Actor) -> ToolHint:
    """Add an alias or an example query to a tool; return the existing hint if there is one."""
    tool = tool_actions.lock_tool(tool)
    if kind not in HintKind.values:
        raise Invalid("Unknown kind of hint.", hint="Use alias or example.")
    line = _one_line(text)
    rows = list(tool.hints.filter(agent=None))
    existing = next((row for row in rows if (row.kind, row.text) == (kind, line)), None)
    if existing is not None and not existing.is_removed:
        return existing
    if existing is None and sum(row.source == HintSource.ADMIN for row in rows) >= (
        MAX_HINTS_PER_TOOL
    ):
        raise Conflict(
            f"{tool.public_name} already has {MAX_HINTS_PER_TOOL} search aliases, the maximum.",
            hint="Remove one first.",
        )
    label = actor.label[:200]
    hint = existing or ToolHint(tool=tool, kind=kind, text=line, created_by=label)
    hint.is_removed = False
    hint.save()
    audit.record(actor, "tool.hint.add", tool, after={kind: line})
    Revision.bump()
    return hint


@transaction.atomic
def remove(hint: ToolHint, *, actor: Actor) -> None:
    """Remove a hint; do nothing if it is already removed. An automatic one does not come back."""
    rows = ToolHint.objects.active().filter(pk=hint.pk)
    by_person = hint.source == HintSource.ADMIN
    if rows.delete()[0] if by_person else rows.update(is_removed=True):
        audit.record(actor, "tool.hint.remove", hint.tool, before={hint.kind: hint.text})
        Revision.bump()


@transaction.atomic
def edit(hint: ToolHint, text: str, *, actor: Actor) -> ToolHint:
    """Replace a hint by the text of a person; the new one counts as theirs."""
    line = _one_line(text)
    if line == hint.text:
        return hint
    remove(hint, actor=actor)
    return add(hint.tool, hint.kind, line, actor=actor)


@transaction.atomic
def accept(hint: ToolHint, *, actor: Actor) -> ToolHint:
    """Apply a hint from one agent's use to the searches of all agents."""
    tool = tool_actions.lock_tool(hint.tool)
    shared = list(tool.hints.filter(agent=None))
    same = next((row for row in shared if (row.kind, row.text) == (hint.kind, hint.text)), None)
    accepted = [row for row in shared if row.source == HintSource.USE and not row.is_removed]
    if (same is None or same.is_removed) and len(accepted) >= MAX_HINTS_FROM_USE:
        raise Conflict(
            f"{tool.public_name} already has {MAX_HINTS_FROM_USE} hints from use, the maximum.",
            hint="Remove one first.",
        )
    others = tool.hints.exclude(agent=None).filter(kind=hint.kind, text=hint.text)
    if same is None:
        others.exclude(pk=hint.pk).delete()
        ToolHint.objects.filter(pk=hint.pk).update(agent=None)
    else:
        others.delete()
        ToolHint.objects.filter(pk=same.pk).update(is_removed=False)
    audit.record(actor, "tool.hint.accept", tool, after={hint.kind: hint.text})
    _drop_excess([tool.pk])
    Revision.bump()
    return find(tool, same.pk if same else hint.pk)


@transaction.atomic
def replace(
    texts: Mapping[int, Sequence[str]], source: HintSource, *, actor: Actor | None = None
) -> int:
    """Set the hints of one automatic source, by tool id, and return how many tools changed.

    Texts that a tool already has are left as they are, also those that a person removed. With an
    actor, each changed tool is audited.
    """
    changed = []
    ids = sorted(texts)
    for start in range(0, len(ids), TOOLS_PER_QUERY):
        chunk = ids[start : start + TOOLS_PER_QUERY]
        tools = Tool.objects.select_for_update().filter(pk__in=chunk).order_by("pk")
        rows: dict[int, list[ToolHint]] = {}
        for row in ToolHint.objects.filter(tool__in=chunk, agent=None, kind=HintKind.EXAMPLE):
            rows.setdefault(row.tool_id, []).append(row)
        for tool in tools:
            if _replace(tool, rows.get(tool.pk, []), texts[tool.pk], source, actor):
                changed.append(tool.pk)
    if changed:
        _drop_excess(changed)
        Revision.bump()
    return len(changed)


def _replace(
    tool: Tool,
    rows: Sequence[ToolHint],
    texts: Sequence[str],
    source: HintSource,
    actor: Actor | None,
) -> bool:
    wanted = list(dict.fromkeys(texts))[:MAX_AUTOMATIC_HINTS]
    known = {row.text for row in rows}
    new = [text for text in wanted if text not in known]
    old = [row for row in rows if row.source == source and row.text not in wanted]
    visible = [row.text for row in old if not row.is_removed]
    if not new and not visible:
        return False
    ToolHint.objects.filter(pk__in=[row.pk for row in old]).delete()
    label = actor.label[:200] if actor else ""
    ToolHint.objects.bulk_create(
        ToolHint(tool=tool, kind=HintKind.EXAMPLE, text=text, source=source, created_by=label)
        for text in new
    )
    if actor is not None:
        audit.record(actor, "tool.hint.import", tool, before={source: visible}, after={source: new})
    return True


def _drop_excess(tool_ids: Sequence[int]) -> None:
    """Delete automatic hints beyond the limit: bundled ones first, those from use last."""
    by_tool: dict[int, list[ToolHint]] = {}
    for start in range(0, len(tool_ids), TOOLS_PER_QUERY):
        chunk = tool_ids[start : start + TOOLS_PER_QUERY]
        rows = ToolHint.objects.for_all_agents().filter(tool__in=chunk)
        for row in rows.exclude(source=HintSource.ADMIN):
            by_tool.setdefault(row.tool_id, []).append(row)
    excess = [
        row.pk
        for rows in by_tool.values()
        for row in sorted(rows, key=lambda row: (HINT_PRIORITY[row.source], row.pk))[
            MAX_AUTOMATIC_HINTS:
        ]
    ]
    ToolHint.objects.filter(pk__in=excess).delete()


def find(tool: Tool, hint_id: int) -> ToolHint:
    hint = tool.hints.active().select_related("tool").filter(pk=hint_id).first()
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
