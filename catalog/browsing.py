"""Read the catalog for people: tools by filter, groups by cost.

Reads only, each page in a fixed number of queries however many tools there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from django.db.models import Count, F, Q, QuerySet, Sum
from django.db.models.functions import Coalesce
from django.http import QueryDict

from catalog.models import Group, Membership, Tool, ToolState

T = TypeVar("T")
PAGE = 50
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
class Page(Generic[T]):
    """Some rows of a list, and the cursors of the pages beside it."""

    rows: Sequence[T]
    total: int
    first: int
    previous_cursor: str
    next_cursor: str

    def says(self, what: str) -> str:
        """Say which part of the list this is: 51 to 100 of 214 tools."""
        noun = what if self.total == 1 else f"{what}s"
        if len(self.rows) == self.total:
            return f"{self.total:,} {noun}"
        last = self.first + len(self.rows)
        return f"{self.first + 1:,} to {last:,} of {self.total:,} {noun}"


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
    sort: str = "name"

    @classmethod
    def read(cls, query: QueryDict) -> "ToolFilter":
        sort = query.get("sort", "")
        return cls(
            query=query.get("q", "").replace("\0", "").strip()[:500],
            server=query.get("server", "").replace("\0", ""),
            group=query.get("group", "").replace("\0", ""),
            states=tuple(one for one in query.getlist("state") if one in ToolState.values),
            badges=tuple(one for one in query.getlist("badge") if one in HINTS),
            sources=tuple(one for one in query.getlist("source") if one in SOURCES),
            findings=bool(query.get("findings")),
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
            wanted &= claimed(HINTS[badge])
        if len(self.sources) == 1:
            wanted &= Q(server__isnull=self.sources[0] == "custom")
        if self.findings:
            wanted &= ~Q(findings=[])
        return wanted


def _mentions(text: str) -> Q:
    return (
        Q(public_name__icontains=text)
        | Q(description_override__icontains=text)
        | Q(approved__search_text__icontains=text)
        | Q(approved=None, latest__search_text__icontains=text)
    )


def claimed(hint: str) -> Q:
    """Match tools whose server sets this annotation to true.

    Bodies are canonical JSON kept as text, since jsonb would refuse some of them.
    """
    pattern = rf'"annotations":\{{[^{{}}]*"{hint}":true'
    return Q(approved__body__regex=pattern) | Q(approved=None, latest__body__regex=pattern)


def tools(wanted: ToolFilter, *, offset: int, size: int = PAGE) -> Page[Tool]:
    rows = (
        Tool.objects.with_definitions()
        .prefetch_related("groups")
        .filter(wanted.condition())
        .annotate(cost=COST)
        .order_by(*SORTS[wanted.sort])
    )
    return page(rows, offset, size)


def page(rows: QuerySet[T], offset: int, size: int) -> "Page[T]":  # type: ignore[type-var]
    total = rows.count()
    offset = max(0, min(offset, (total - 1) // size * size if total else 0))
    shown = list(rows[offset : offset + size])
    return Page(
        rows=shown,
        total=total,
        first=offset,
        previous_cursor=str(offset) if offset else "",
        next_cursor=str(offset + size) if offset + size < total else "",
    )


def offset_of(query: QueryDict, size: int = PAGE) -> int:
    """Read where a page starts: `after` counts the rows before it, `before` those up to its end."""
    for name, step in (("after", 0), ("before", size)):
        text = query.get(name, "")
        if text.isdecimal() and len(text) < 10:
            return max(0, int(text) - step)
    return 0


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
        **{f"badge_{hint}": Count("pk", filter=current & claimed(hint)) for hint in HINTS.values()},
        custom=Count("pk", filter=current & Q(server=None)),
        findings=Count("pk", filter=current & ~Q(findings=[])),
        current=Count("pk", filter=current),
        new=Count("pk", filter=Q(state=ToolState.WAITING, approved=None)),
    )
    servers = Tool.objects.filter(current).exclude(server=None).values_list("server__slug")
    groups = Membership.objects.exclude(tool__state=ToolState.MISSING).values_list(
        "group__group_id"
    )
    return Counts(
        states={state: found[f"state_{state}"] for state in ToolState.values},
        badges={badge: found[f"badge_{hint}"] for badge, hint in HINTS.items()},
        sources={"mcp": found["current"] - found["custom"], "custom": found["custom"]},
        findings=found["findings"],
        current=found["current"],
        new_waiting=found["new"],
        servers=list(servers.annotate(Count("pk")).order_by("server__slug")),
        groups=list(groups.annotate(Count("pk")).order_by("group__group_id")),
    )


# --- Groups -------------------------------------------------------------------------------------

SERVABLE = Q(
    Q(memberships__tool__server=None) | Q(memberships__tool__server__enabled=True),
    memberships__tool__approved__isnull=False,
    memberships__tool__state__in=[ToolState.AVAILABLE, ToolState.WAITING],
)
PRELOADED = (
    Q(deferred=False)
    | Q(memberships__preload=True)
    | Q(memberships__preload=None, preload_default=True)
)


def groups() -> QuerySet[Group]:
    """Return every group with what it holds and costs: tool_count, all_tokens, preload_tokens."""
    return (
        Group.objects.select_related("follows")
        .annotate(
            tool_count=Count("memberships", filter=SERVABLE),
            other_count=Count("memberships", filter=~SERVABLE & Q(memberships__isnull=False)),
            preload_count=Count("memberships", filter=SERVABLE & PRELOADED),
            all_tokens=_tokens(SERVABLE),
            preload_tokens=_tokens(SERVABLE & PRELOADED),
        )
        .annotate(rest_tokens=F("all_tokens") - F("preload_tokens"))
        .order_by("position", "group_id")
    )


def _tokens(condition: Q) -> Coalesce:
    return Coalesce(Sum("memberships__tool__approved__tokens", filter=condition), 0)


def members(group: Group, *, offset: int, size: int = PAGE) -> Page[Membership]:
    """Return a page of a group's members in the order agents see them."""
    rows = group.memberships.select_related(
        "tool", "tool__server", "tool__approved", "tool__latest"
    ).order_by("position", "tool__public_name")
    return page(rows, offset, size)
