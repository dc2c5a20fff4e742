"""Shape what was read for the catalog's lists: rows of tools, options of filters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from catalog.models import Group, Tool, ToolState
from catalog.tools.queries import Counts, ToolFilter
from sessions_app.usage.call_stats import ToolCalls

Facet = dict[str, object]
NO_CALLS = ToolCalls()


@dataclass(frozen=True)
class ToolRow:
    """One tool in a list, its definition read once."""

    tool: Tool
    description: str
    annotations: Mapping[str, Any]
    tokens: int | None
    groups: Sequence[Group]
    calls: ToolCalls = NO_CALLS

    @property
    def gone(self) -> bool:
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
    found: Mapping[str, object] = getattr(tool, "_prefetched_objects_cache", {})
    return found


def facets_of_tools(wanted: ToolFilter, counts: Counts) -> list[Facet]:
    """List the filters of tools; an option nobody could choose is left out."""
    return [
        _pick("server", "Server", counts.servers, wanted.server),
        _pick("group", "Group", counts.groups, wanted.group),
        _chips("state", "State", counts.states.items(), wanted.states),
        _chips("badge", "Says the server", counts.badges.items(), wanted.badges),
        _chips("source", "Source", counts.sources.items(), wanted.sources),
        {
            "name": "unused",
            "label": "Use",
            "options": [
                {"value": "1", "label": "never used", "count": None, "selected": wanted.unused}
            ],
        },
        {
            "name": "findings",
            "label": "Advice",
            "options": [
                {
                    "value": "1",
                    "label": "has findings",
                    "count": counts.findings,
                    "selected": wanted.findings,
                }
            ],
        },
    ]


def _pick(name: str, label: str, options: Iterable[tuple[str, int | None]], chosen: str) -> Facet:
    listed = list(options)
    if chosen and chosen not in dict(listed):
        listed.append((chosen, 0))  # keep what the address asks for visible
    return {"name": name, "label": label, "pick": True, "options": _options(listed, (chosen,))}


def _chips(
    name: str, label: str, options: Iterable[tuple[str, int]], chosen: Sequence[str]
) -> Facet:
    used = [(value, count) for value, count in options if count or value in chosen]
    return {"name": name, "label": label, "options": _options(used, chosen)}


def _options(
    options: Iterable[tuple[str, int | None]], chosen: Sequence[str]
) -> list[dict[str, object]]:
    return [
        {"value": value, "label": value, "count": count, "selected": value in chosen}
        for value, count in options
    ]
