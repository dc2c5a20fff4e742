"""Rows and filter options of tool lists."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from catalog.models import Group, Tool, ToolState
from catalog.tools.queries import ToolCounts, ToolFilter
from sessions_app.usage.call_stats import ToolCalls

Facet = dict[str, object]
NO_CALLS = ToolCalls()
STATE_LABELS: Mapping[str, str] = {ToolState.WAITING: "pending review", ToolState.HELD: "hidden"}


@dataclass(frozen=True)
class ToolRow:
    """One tool in a list, with its definition parsed once."""

    tool: Tool
    description: str
    annotations: Mapping[str, Any]
    tokens: int | None
    groups: Sequence[Group]
    calls: ToolCalls = NO_CALLS

    @property
    def is_missing(self) -> bool:
        return self.tool.state == ToolState.MISSING


def tool_row(tool: Tool, calls: ToolCalls | None = None) -> ToolRow:
    definition = tool.definition
    body = definition.tool if definition else {}
    annotations = body.get("annotations")
    groups = list(tool.groups.all()) if "groups" in _prefetched(tool) else []
    return ToolRow(
        tool=tool,
        description=tool.description_override or str(body.get("description") or ""),
        annotations=annotations if isinstance(annotations, dict) else {},
        tokens=definition.tokens if definition else None,
        groups=groups,
        calls=calls or NO_CALLS,
    )


def _prefetched(tool: Tool) -> Mapping[str, object]:
    prefetched: Mapping[str, object] = getattr(tool, "_prefetched_objects_cache", {})
    return prefetched


def tool_facets(filters: ToolFilter, counts: ToolCounts) -> list[Facet]:
    """Return the filters of the tool list; options without any tools are omitted."""
    return [
        _pick("server", "Server", counts.servers, filters.server),
        _pick("group", "Group", counts.groups, filters.group),
        _chips("state", "State", counts.states.items(), filters.states, STATE_LABELS),
        _chips("badge", "Annotations (from server)", counts.badges.items(), filters.badges),
        _chips("source", "Source", counts.sources.items(), filters.sources),
        {
            "name": "unused",
            "label": "Usage",
            "options": [
                {"value": "1", "label": "never called", "count": None, "selected": filters.unused}
            ],
        },
        {
            "name": "findings",
            "label": "Lint",
            "options": [
                {
                    "value": "1",
                    "label": "has warnings",
                    "count": counts.findings,
                    "selected": filters.findings,
                }
            ],
        },
    ]


def _pick(name: str, label: str, options: Iterable[tuple[str, int | None]], chosen: str) -> Facet:
    listed = list(options)
    if chosen and chosen not in dict(listed):
        listed.append((chosen, 0))  # the current filter must stay visible
    return {"name": name, "label": label, "pick": True, "options": _options(listed, (chosen,))}


def _chips(
    name: str,
    label: str,
    options: Iterable[tuple[str, int]],
    chosen: Sequence[str],
    labels: Mapping[str, str] | None = None,
) -> Facet:
    shown = [(value, count) for value, count in options if count or value in chosen]
    return {"name": name, "label": label, "options": _options(shown, chosen, labels)}


def _options(
    options: Iterable[tuple[str, int | None]],
    chosen: Sequence[str],
    labels: Mapping[str, str] | None = None,
) -> list[dict[str, object]]:
    return [
        {
            "value": value,
            "label": (labels or {}).get(value, value),
            "count": count,
            "selected": value in chosen,
        }
        for value, count in options
    ]
