"""Read the catalog for people: tools by filter, and how many there are of each kind.

Reads only, each page in a fixed number of queries however many tools there are.
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
from toolcrib.lib.pagination import PAGE, Page, page_by_offset
from toolcrib.lib.request import text

MAX_PARAMETERS = 30_000  # values that a statement takes on every database
HINTS = {
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
COST = Coalesce("approved__tokens", "latest__tokens")


@dataclass(frozen=True)
class ToolFilter:
    """What a person asked for in the address. Unknown words ask for nothing that exists."""

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
            query=text(query, "q", longest=500),
            server=text(query, "server"),
            group=text(query, "group"),
            states=tuple(one for one in query.getlist("state") if one in ToolState.values),
            badges=tuple(one for one in query.getlist("badge") if one in HINTS),
            sources=tuple(one for one in query.getlist("source") if one in SOURCES),
            findings=bool(query.get("findings")),
            unused=bool(query.get("unused")),
            sort=sort if sort in SORTS else "name",
        )

    @property
    def narrows(self) -> bool:
        return self != ToolFilter(sort=self.sort)

    def condition(self) -> Q:
        # Gone tools are listed only when asked for: they can do nothing any more.
        wanted = Q(state__in=self.states) if self.states else ~Q(state=ToolState.MISSING)
        if self.query:
            wanted &= _mentions(self.query)
        if self.server:
            wanted &= Q(server__slug=self.server)
        if self.group:
            wanted &= Q(memberships__group__group_id=self.group)
        for badge in self.badges:
            wanted &= with_annotation(HINTS[badge])
        if len(self.sources) == 1:
            wanted &= Q(server__isnull=self.sources[0] == "custom")
        if self.findings:
            wanted &= ~Q(findings=[])
        if self.unused:
            wanted &= call_stats.never_called()
        return wanted


def _mentions(text: str) -> Q:
    return (
        Q(public_name__icontains=text)
        | Q(description_override__icontains=text)
        | Q(approved__search_text__icontains=text)
        | Q(approved=None, latest__search_text__icontains=text)
    )


@cache.memoize_per_revision
def _claims(whole: CatalogCache) -> dict[str, list[int]]:
    """List the tools whose server sets each annotation to true, gone ones included."""
    found: dict[str, list[int]] = {hint: [] for hint in HINTS.values()}
    for item in whole.tools.values():
        definition = item.approved or item.latest
        for hint in definition.true_annotations if definition else ():
            if hint in found:
                found[hint].append(item.tool_id)
    return found


def with_annotation(hint: str) -> Q:
    """Match tools whose server sets this annotation to true.

    Bodies are kept as text, since jsonb would refuse some of them: the shelf has read them.
    """
    tools = _claims(cache.current())[hint]
    if len(tools) <= MAX_PARAMETERS:
        return Q(pk__in=tools)
    pattern = rf'"annotations":\{{[^{{}}]*"{hint}":true'
    return Q(approved__body__regex=pattern) | Q(approved=None, latest__body__regex=pattern)


def find_tool(public_name: str) -> Tool:
    """Return a tool with its definitions and groups, by its public name."""
    rows = Tool.objects.with_definitions().prefetch_related("groups")
    tool = rows.filter(public_name=public_name.replace("\0", "")).first()
    if tool is None:
        raise NotFound("Tool not found.", hint="Check the name; the tool may have been deleted.")
    return tool


def find_defined_tool(public_name: str) -> Tool:
    """Return a tool that has a definition, and so can be called."""
    tool = find_tool(public_name)
    if tool.definition is None:
        raise NotFound(
            "This tool has no usable definition.", hint="It cannot be called until it has one."
        )
    return tool


def tools(wanted: ToolFilter, *, offset: int, size: int = PAGE) -> Page[Tool]:
    found = Tool.objects.filter(wanted.condition())
    rows = (
        found.with_definitions()
        .prefetch_related("groups")
        .annotate(cost=COST)
        .order_by(*SORTS[wanted.sort])
    )
    return page_by_offset(rows, offset, size, total=found.count())


@dataclass(frozen=True)
class Counts:
    """How many tools each facet's option has, over the whole catalog.

    Not narrowed by the other filters, so that nothing moves while a person is choosing.
    """

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


def counts() -> Counts:
    current = ~Q(state=ToolState.MISSING)
    found = Tool.objects.aggregate(
        **{f"state_{state}": Count("pk", filter=Q(state=state)) for state in ToolState.values},
        custom=Count("pk", filter=current & Q(server=None)),
        findings=Count("pk", filter=current & ~Q(findings=[])),
        current=Count("pk", filter=current),
        new=Count("pk", filter=Q(state=ToolState.WAITING, approved=None)),
    )
    servers = Tool.objects.filter(current).exclude(server=None).values_list("server__slug")
    whole = cache.current()
    return Counts(
        states={state: found[f"state_{state}"] for state in ToolState.values},
        badges=_badges(whole),
        sources={"mcp": found["current"] - found["custom"], "custom": found["custom"]},
        findings=found["findings"],
        current=found["current"],
        new_waiting=found["new"],
        servers=list(servers.annotate(Count("pk")).order_by("server__slug")),
        groups=_group_sizes(whole),
    )


@cache.memoize_per_revision
def _badges(whole: CatalogCache) -> dict[str, int]:
    claims, items = _claims(whole), whole.tools
    return {
        badge: sum(items[pk].state != ToolState.MISSING for pk in claims[hint])
        for badge, hint in HINTS.items()
    }


def _group_sizes(whole: CatalogCache) -> list[tuple[str, int]]:
    sizes = Counter({group.group_id: _current(group) for group in whole.groups})
    # The shelf has no tool that never had a definition.
    rows = Tool.objects.current().filter(latest=None).filter(memberships__isnull=False)
    sizes.update(rows.values_list("memberships__group__group_id", flat=True))
    return sorted((name, size) for name, size in sizes.items() if size)


@cache.memoize_per_revision
def _current(group: CachedGroup) -> int:
    return sum(member.tool.state != ToolState.MISSING for member in group.members)
