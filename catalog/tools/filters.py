"""Filter options of the tool list."""

from collections.abc import Iterable, Mapping

from catalog.models import ToolState
from catalog.tools.queries import ToolCounts, ToolFilter
from toolcrib.lib.request import facet

Facet = dict[str, object]
STATE_LABELS: Mapping[str, str] = {ToolState.WAITING: "pending review", ToolState.HELD: "hidden"}


def tool_facets(filters: ToolFilter, counts: ToolCounts) -> list[Facet]:
    """Return the filters of the tool list; options without any tools are omitted."""
    return [
        _pick("server", "Server", counts.servers, filters.server),
        _pick("group", "Group", counts.groups, filters.group),
        facet("state", "State", counts.states, filters.states, label_of=_state_label),
        facet("badge", "Annotations (from server)", counts.badges, filters.badges),
        facet("source", "Source", counts.sources, filters.sources),
        _flag("unused", "Usage", "never called", None, filters.unused),
        _flag("findings", "Lint", "has warnings", counts.findings, filters.findings),
    ]


def _state_label(state: str) -> str:
    return STATE_LABELS.get(state, state)


def _pick(name: str, label: str, options: Iterable[tuple[str, int]], chosen: str) -> Facet:
    counts = dict(options)
    if chosen:
        counts.setdefault(chosen, 0)  # the current filter must stay visible
    return facet(name, label, counts, [chosen], pick=True)


def _flag(name: str, label: str, text: str, count: int | None, selected: bool) -> Facet:
    option = {"value": "1", "label": text, "count": count, "selected": selected}
    return {"name": name, "label": label, "options": [option]}
