"""Tool queries for pages: filtered lists and counts per filter option.

Every page needs a constant number of queries, however many tools there are.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django.db.models import Count, F, Q
from django.db.models.functions import Coalesce
from django.http import QueryDict

from catalog import cache
from catalog.cache import CachedGroup, CatalogCache
from catalog.models import Tool, ToolState
from sessions_app.usage import call_stats
from toolcrib.lib.errors import NotFound
from toolcrib.lib.pagination import PAGE_SIZE, Page, page_by_offset
from toolcrib.lib.request import text

MAX_PARAMETERS = 30_000  # per statement, accepted by SQLite and PostgreSQL
ANNOTATION_BADGES = {
    "read-only": "readOnlyHint",
    "destructive": "destructiveHint",
    "open-world": "openWorldHint",
}
SOURCES = ("mcp", "custom")
SORTS = {
    "name": [F("public_name").asc()],
    "-name": [F("public_name").desc()],
    "tokens": [F("cost").asc(nulls_first=True), F("public_name").asc()],
    "-tokens": [F("cost").desc(nulls_last=True), F("public_name").asc()],
    "changed": [F("changed_at").asc(nulls_first=True), F("public_name").asc()],
    "-changed": [F("changed_at").desc(nulls_last=True), F("public_name").asc()],
}
COST = Coalesce("effective__tokens", "approved__tokens", "latest__tokens")


@dataclass(frozen=True)
class ToolFilter:
    """Filter from the query string. Unknown states, badges and sources are ignored."""

    query: str = ""
    server: str = ""
    group: str = ""
    states: tuple[str, ...] = ()
    badges: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    findings: bool = False
    unused: bool = False
    sort: str = "name"

    @classmethod
    def read(cls, query: QueryDict) -> "ToolFilter":
        sort = query.get("sort", "")
        return cls(
            query=text(query, "q", max_length=500),
            server=text(query, "server"),
            group=text(query, "group"),
            states=tuple(value for value in query.getlist("state") if value in ToolState.values),
            badges=tuple(value for value in query.getlist("badge") if value in ANNOTATION_BADGES),
            sources=tuple(value for value in query.getlist("source") if value in SOURCES),
            findings=bool(query.get("findings")),
            unused=bool(query.get("unused")),
            sort=sort if sort in SORTS else "name",
        )

    @property
    def narrows(self) -> bool:
        return self != ToolFilter(sort=self.sort)

    def condition(self) -> Q:
        # Missing tools are listed only on request.
        condition = Q(state__in=self.states) if self.states else ~Q(state=ToolState.MISSING)
        if self.query:
            condition &= _mentions(self.query)
        if self.server:
            condition &= Q(server__slug=self.server)
        if self.group:
            condition &= Q(memberships__group__group_id=self.group)
        for badge in self.badges:
            condition &= with_annotation(ANNOTATION_BADGES[badge])
        if len(self.sources) == 1:
            condition &= Q(server__isnull=self.sources[0] == "custom")
        if self.findings:
            condition &= ~Q(findings=[])
        if self.unused:
            condition &= call_stats.never_called()
        return condition


def _mentions(text: str) -> Q:
    return (
        Q(public_name__icontains=text)
        | Q(description_override__icontains=text)
        | Q(approved__search_text__icontains=text)
        | Q(approved=None, latest__search_text__icontains=text)
    )


@cache.memoize_per_revision
def _tools_by_annotation(catalog: CatalogCache) -> dict[str, list[int]]:
    """Return the ids of the tools that have each annotation set to true, missing ones included."""
    tools: dict[str, list[int]] = {name: [] for name in ANNOTATION_BADGES.values()}
    for tool in catalog.tools.values():
        definition = tool.approved or tool.latest
        for name in definition.true_annotations if definition else ():
            if name in tools:
                tools[name].append(tool.tool_id)
    return tools


def with_annotation(name: str) -> Q:
    """Match tools with an annotation, read from the cache: bodies are stored as text, not jsonb."""
    tools = _tools_by_annotation(cache.current())[name]
    if len(tools) <= MAX_PARAMETERS:
        return Q(pk__in=tools)
    pattern = rf'"annotations":\{{[^{{}}]*"{name}":true'
    return Q(approved__body__regex=pattern) | Q(approved=None, latest__body__regex=pattern)


def find_tool(name: str) -> Tool:
    """Return the tool with this public name, or one that it had before."""
    rows = Tool.objects.with_definitions().prefetch_related("groups")
    tool = rows.by_name([name]).get(name)
    if tool is None:
        raise NotFound("Tool not found.", hint="Check the name; the tool may have been deleted.")
    return tool


def find_defined_tool(public_name: str) -> Tool:
    """Return a tool that has a definition and can therefore be called."""
    tool = find_tool(public_name)
    if tool.definition is None:
        raise NotFound(
            "This tool has no valid definition.", hint="Sync the server once it is corrected."
        )
    return tool


def list_tools(filters: ToolFilter, *, offset: int, size: int = PAGE_SIZE) -> Page[Tool]:
    matches = Tool.objects.filter(filters.condition())
    rows = matches.with_definitions().prefetch_related("groups").annotate(cost=COST)
    ordered = rows.order_by(*SORTS[filters.sort])
    return page_by_offset(ordered, offset, size, total=matches.count())


@dataclass(frozen=True)
class ToolCounts:
    """Number of tools per filter option, over the whole catalog, whatever the active filters."""

    states: Mapping[str, int]
    badges: Mapping[str, int]
    sources: Mapping[str, int]
    findings: int
    current: int
    new_waiting: int
    servers: Sequence[tuple[str, int]]
    groups: Sequence[tuple[str, int]]

    @property
    def changed_waiting(self) -> int:
        return self.states[ToolState.WAITING] - self.new_waiting


def count_tools() -> ToolCounts:
    current = ~Q(state=ToolState.MISSING)
    totals = Tool.objects.aggregate(
        **{f"state_{state}": Count("pk", filter=Q(state=state)) for state in ToolState.values},
        custom=Count("pk", filter=current & Q(server=None)),
        findings=Count("pk", filter=current & ~Q(findings=[])),
        current=Count("pk", filter=current),
        new=Count("pk", filter=Q(state=ToolState.WAITING, approved=None)),
    )
    servers = Tool.objects.filter(current).exclude(server=None).values_list("server__slug")
    catalog = cache.current()
    return ToolCounts(
        states={state: totals[f"state_{state}"] for state in ToolState.values},
        badges=_count_badges(catalog),
        sources={"mcp": totals["current"] - totals["custom"], "custom": totals["custom"]},
        findings=totals["findings"],
        current=totals["current"],
        new_waiting=totals["new"],
        servers=list(servers.annotate(Count("pk")).order_by("server__slug")),
        groups=_group_sizes(catalog),
    )


@cache.memoize_per_revision
def _count_badges(catalog: CatalogCache) -> dict[str, int]:
    annotated, tools = _tools_by_annotation(catalog), catalog.tools
    return {
        badge: sum(tools[pk].state != ToolState.MISSING for pk in annotated[name])
        for badge, name in ANNOTATION_BADGES.items()
    }


def _group_sizes(catalog: CatalogCache) -> list[tuple[str, int]]:
    sizes = Counter({group.group_id: _count_current(group) for group in catalog.groups})
    # The cache does not contain tools that never had a definition.
    rows = Tool.objects.current().filter(latest=None).filter(memberships__isnull=False)
    sizes.update(rows.values_list("memberships__group__group_id", flat=True))
    return sorted((name, size) for name, size in sizes.items() if size)


@cache.memoize_per_revision
def _count_current(group: CachedGroup) -> int:
    return sum(member.tool.state != ToolState.MISSING for member in group.members)
