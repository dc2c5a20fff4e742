"""Context of a tool's page: definitions, pending change, availability and history."""

from dataclasses import dataclass
from typing import Any

from catalog.definitions import diff as definition_diff
from catalog.definitions.effective import unfit_values
from catalog.definitions.findings import change_findings
from catalog.models import AuditEntry, CallPolicy, Definition, DefinitionChange, Tool, ToolState
from catalog.tools import actions as tool_actions

MAX_CHANGES = 100
FORMATS = (("mcp", "MCP"), ("openai", "OpenAI"), ("anthropic", "Anthropic"))
CALLS_DURING_REVIEW = {  # by the server's trust
    "strict": "Calls are rejected until the review.",
    "review_changes": "Calls are accepted if their arguments also match the new input schema.",
}


@dataclass(frozen=True)
class Change:
    sections: list[definition_diff.Section]
    before: dict[str, Any] | None
    after: dict[str, Any]
    warnings: list[str]

    @classmethod
    def between(
        cls, old: Definition | None, new: Definition, findings: list[dict[str, str]]
    ) -> "Change":
        before, after = old.tool if old else None, new.tool
        on_change = change_findings(before, after) if before else ()
        warnings = [finding.text for finding in on_change] + [row["text"] for row in findings]
        return cls(definition_diff.compare(before, after), before, after, warnings)


def describe(tool: Tool, *, change_id: str = "") -> dict[str, Any]:
    definition = tool.latest or tool.approved
    holds = AuditEntry.objects.filter(target_kind="tool", target_id=tool.pk, verb="tool.hold")
    trust = tool.server.trust if tool.server else ""
    changes = list(tool.changes.select_related("before", "after")[: MAX_CHANGES + 1])
    return {
        "tool": tool,
        "server_definition": definition,
        "body": definition.tool if definition else {},
        "annotations": definition.annotations if definition else {},
        "effective": _effective_definition(tool),
        "unfit_values": unfit_values(tool),
        "is_servable": tool.approved_id and tool.state in (ToolState.AVAILABLE, ToolState.WAITING),
        "answer": describe_availability(tool),
        "is_pending": _is_pending(tool),
        "is_rejected": tool.latest_id is not None and tool.latest_id == tool.kept_against_id,
        "calls_during_review": CALLS_DURING_REVIEW.get(trust, ""),
        "change": Change.between(tool.approved, tool.latest, tool.findings)
        if tool.latest and tool.latest_id != tool.approved_id
        else None,
        "last_decision": next((change for change in changes if change.decided_by), None),
        "hidden_by": holds.first() if tool.held_at else None,
        "memberships": list(tool.memberships.select_related("group")),
        "hints": list(tool.hints.active().select_related("agent")),
        "last_change": changes[0].at if changes else None,
        "former_names": [row.name for row in tool.former_names.all()],
        "changes": changes[:MAX_CHANGES],
        "more_changes": len(changes) > MAX_CHANGES,
        "selected_change": _selected_change(changes, change_id),
    }


def effective_tool(tool: Tool) -> dict[str, Any] | None:
    """Return the tool object as agents get it; None before it is approved."""
    served = tool.effective or tool.approved
    if served is None:
        return None
    return served.tool | {"name": tool.public_name, "description": tool.description}


def _effective_definition(tool: Tool) -> dict[str, Any] | None:
    """Return the approved definition as agents get it, in each format, and its cost."""
    if tool.approved is None:
        return None
    effective = effective_tool(tool) or {}
    return {
        # Counted with the original name, so that the two costs differ by the overrides alone.
        "tokens": tool.tokens,
        "formats": [
            (label, tool_actions.to_provider_format(effective, name, tool.input_examples))
            for name, label in FORMATS
        ],
    }


def describe_availability(tool: Tool) -> str:
    """Describe in one line whether agents can find and call a tool."""
    if tool.server is not None and not tool.server.enabled:
        return "Server disabled: agents cannot find or call this tool."
    if tool.state == ToolState.AVAILABLE and tool.call_policy == CallPolicy.DENY:
        return "Visible but blocked: agents can find this tool, but its calls are refused."
    if tool.state == ToolState.WAITING and tool.approved_id is None:
        return "New tool: not available to agents until approved."
    return {
        ToolState.AVAILABLE: "Agents can find and call this tool.",
        ToolState.WAITING: "The definition changed and is pending review.",
        ToolState.HELD: "Hidden: agents cannot find or call this tool.",
        ToolState.MISSING: "The server no longer lists this tool.",
        ToolState.REJECTED: "Invalid definition: agents cannot find or call this tool.",
    }[ToolState(tool.state)]


def _is_pending(tool: Tool) -> bool:
    """Return whether a review is pending, also while the tool is hidden or missing."""
    reviewed = (tool.approved_id, tool.kept_against_id)
    return tool.latest_id is not None and tool.latest_id not in reviewed


def _selected_change(changes: list[DefinitionChange], change_id: str) -> dict[str, Any] | None:
    selected = next((change for change in changes if str(change.pk) == change_id), None)
    if selected is None:
        return None
    return {"id": selected.pk, "change": Change.between(selected.before, selected.after, [])}
