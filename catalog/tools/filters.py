"""Filter options of the tool list."""

from collections.abc import Iterable, Mapping, Sequence

from catalog.models import ToolState
from catalog.tools.queries import ToolCounts, ToolFilter

Facet = dict[str, object]
STATE_LABELS: Mapping[str, str] = {ToolState.WAITING: "pending review", ToolState.HELD: "hidden"}


def tool_facets(filters: ToolFilter, counts: ToolCounts) -> list[Facet]:
    """Return the filters of the tool list; options without any tools are omitted."""
    return [
        _pick("server", "Server", counts.servers, filters.server),
        _pick("group", "Group", counts.groups, filters.group),
        _chips("state", "State", counts.states.items(), filters.states, STATE_LABELS),
        _chips("badge", "Annotations (from server)", counts.badges.items(), filters.badges),
        _chips("source", "Source", counts.sources.items(), filters.sources),
        _flag("unused", "Usage", "never called", None, filters.unused),
        _flag("findings", "Lint", "has warnings", counts.findings, filters.findings),
    ]


def _pick(name: str, label: str, options: Iterable[tuple[str, int | None]], chosen: str) -> Facet:
    listed = list(options)
    if chosen and chosen not in dict(listed):
        listed.append((chosen, 0))  # the current filter must stay visible
    shown = [_option(value, value, count, value == chosen) for value, count in listed]
    return {"name": name, "label": label, "pick": True, "options": shown}


def _chips(
    name: str,
    label: str,
    options: Iterable[tuple[str, int]],
    chosen: Sequence[str],
    labels: Mapping[str, str] | None = None,
) -> Facet:
    shown = [
        _option(value, (labels or {}).get(value, value), count, value in chosen)
        for value, count in options
        if count or value in chosen
    ]
    return {"name": name, "label": label, "options": shown}


def _flag(name: str, label: str, text: str, count: int | None, selected: bool) -> Facet:
    return {"name": name, "label": label, "options": [_option("1", text, count, selected)]}


def _option(value: str, label: str, count: int | None, selected: bool) -> Facet:
    return {"value": value, "label": label, "count": count, "selected": selected}
