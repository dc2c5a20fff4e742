"""Put together what a person should know about one tool before deciding. Reads only."""

from dataclasses import dataclass, field
from typing import Any

from catalog.definitions import diff as definition_diff
from catalog.definitions.findings import change_findings
from catalog.models import AuditEntry, CallPolicy, Definition, DefinitionChange, Tool, ToolState
from catalog.tools import actions as tool_actions
from toolcrib.lib.token_counter import count_definition

HISTORY = 100
SHAPES = (("mcp", "MCP"), ("openai", "OpenAI"), ("anthropic", "Anthropic"))
HELD_CALLS = {
    "strict": "Calls to it are stopped until someone decides.",
    "review_changes": "Calls go on as long as their arguments satisfy the new input schema too.",
}


@dataclass(frozen=True)
class Change:
    """A definition beside the one before it, with advice."""

    sections: list[definition_diff.Section]
    before: dict[str, Any] | None
    after: dict[str, Any]
    advice: list[str] = field(default_factory=list)

    @classmethod
    def between(
        cls, old: Definition | None, new: Definition, findings: list[dict[str, str]]
    ) -> "Change":
        before, after = old.tool if old else None, new.tool
        turned = [found.text for found in change_findings(before, after)] if before else []
        return cls(
            sections=definition_diff.compare(before, after),
            before=before,
            after=after,
            advice=turned + [found["text"] for found in findings],
        )


@dataclass(frozen=True)
class EffectiveDefinition:
    """A tool as agents get it: the approved definition under its public name and our text."""

    tool: dict[str, Any]
    tokens: int

    @classmethod
    def of(cls, tool: Tool) -> "EffectiveDefinition | None":
        if tool.approved is None:
            return None
        approved = tool.approved.tool
        # Counted under the server's own name, so that the two costs differ by the text alone.
        cost = count_definition(approved | {"description": tool.description})
        shown = approved | {"name": tool.public_name, "description": tool.description}
        return cls(shown, cost)

    @property
    def shapes(self) -> list[tuple[str, dict[str, Any]]]:
        return [(label, tool_actions.in_shape(self.tool, shape)) for shape, label in SHAPES]


def describe(tool: Tool, *, change_id: str = "") -> dict[str, Any]:
    """Return what the page of a tool shows."""
    said = tool.latest or tool.approved
    body = said.tool if said else {}
    annotations = body.get("annotations")
    changes = list(tool.changes.select_related("before", "after")[: HISTORY + 1])
    return {
        "tool": tool,
        "said": said,
        "body": body,
        "annotations": annotations if isinstance(annotations, dict) else {},
        "given": EffectiveDefinition.of(tool),
        "served": tool.approved_id and tool.state in (ToolState.AVAILABLE, ToolState.WAITING),
        "answer": describe_availability(tool),
        "waiting": _waits(tool),
        "declined": tool.latest_id is not None and tool.latest_id == tool.kept_against_id,
        "held_calls": HELD_CALLS.get(tool.server.trust, "") if tool.server else "",
        "change": _open_change(tool),
        "decided": next((one for one in changes if one.decided_by), None),
        "held_by": _last_act(tool, "tool.hold") if tool.held_at else None,
        "memberships": list(tool.memberships.select_related("group")),
        "hints": list(tool.hints.all()),
        "last_change": changes[0].at if changes else None,
        "changes": changes[:HISTORY],
        "more_changes": len(changes) > HISTORY,
        "shown_change": _shown(changes, change_id),
    }


def describe_availability(tool: Tool) -> str:
    """Say in one line where a tool stands."""
    if tool.server is not None and not tool.server.enabled:
        return "Its server is disabled: agents cannot find or call it."
    if tool.state == ToolState.AVAILABLE and tool.call_policy == CallPolicy.DENY:
        return "Agents can find it, and every call to it is denied."
    if tool.state == ToolState.WAITING and tool.approved_id is None:
        return "New: agents do not see it before someone approves it."
    return {
        ToolState.AVAILABLE: "Agents can find and call it.",
        ToolState.WAITING: "Its definition changed and waits for a decision.",
        ToolState.HELD: "Held: agents cannot find or call it.",
        ToolState.MISSING: "The server no longer offers it.",
        ToolState.REJECTED: "Its definition cannot be used.",
    }[ToolState(tool.state)]


def _waits(tool: Tool) -> bool:
    """Whether a decision is open, also while the tool is held or missing."""
    known = (tool.approved_id, tool.kept_against_id)
    return tool.latest_id is not None and tool.latest_id not in known


def _open_change(tool: Tool) -> Change | None:
    if tool.latest is None or tool.latest_id == tool.approved_id:
        return None
    return Change.between(tool.approved, tool.latest, tool.findings)


def _shown(changes: list[DefinitionChange], change_id: str) -> dict[str, Any] | None:
    chosen = next((one for one in changes if str(one.pk) == change_id), None)
    if chosen is None:
        return None
    return {"id": chosen.pk, "change": Change.between(chosen.before, chosen.after, [])}


def _last_act(tool: Tool, verb: str) -> AuditEntry | None:
    acts = AuditEntry.objects.filter(target_kind="tool", target_id=tool.pk, verb=verb)
    return acts.order_by("-id").first()
