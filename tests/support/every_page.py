"""GET requests for every page: filtered variants, htmx fragments and downloads included.

The paths come from the URL conf, so new pages are included without being listed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.test import Client

from tests.support import page_addresses as addresses

# Query strings of filters, sort orders, tabs and later result pages.
QUERY_STRINGS: dict[str, tuple[str, ...]] = {
    "tools": (
        "?q=forecast",
        "?badge=destructive",
        "?badge=read-only&state=available&sort=-tokens",
        "?group={group_id}",
        "?server={slug}",
        "?source=custom",
        "?findings=1",
        "?sort=-changed&after=150",
    ),
    "groups-compare": ("?group={group_id}&group={other_group}",),
    "group": (
        "?q=forecast",
        "?in=yes&after=60",
        "?server={slug}",
        "?p=50&d=100",
        "?tab=json",
        "?tab=curl",
        "?tab=change",
    ),
    "approvals": ("?server={slug}", "?after=20"),
    "audit": ("?verb=tool.hold", "?q=forecast", "?actor=ada@example.org&since=2026-01-01"),
    "servers": ("?state=failing", "?sort=-tokens"),
    "server-syncs": ("?after=100000",),
    "sessions": ("?agent={name}", "?tool={public_name}", "?errors=1&state=closed", "?after=100"),
    "session": ("?step=1", "?step=400", "?after=100"),
    "sessions-new": ("?since=1",),
    "usage": (
        "?range=24h",
        "?range=7d",
        "?range=90d",
        "?agent={name}",
        "?group={group_id}",
        "?group={other_group}&range=90d",
        "?sort=-p95&after=25",
    ),
    "playground": ("?q=forecast", "?q=get+the+forecast&agent={name}", "?q=^get&mode=regex"),
    "missed": ("?range=90d", "?agent={name}", "?group={group_id}"),
    "palette": ("?q=get", "?q=sync+server", "?q=ses_", "?q=agent"),
}
# Targets of htmx requests for a part of a page, by page.
HTMX_TARGETS: dict[str, tuple[str, ...]] = {
    "tools": ("tools",),
    "group": ("board-list", "board-preview"),
    "session": ("step",),
    "sessions": ("sessions",),
    "usage": ("usage",),
    "playground": ("found",),
    "palette": ("palette",),
}
# URLs that only scripts of a page request.
FRAGMENTS = {"tool-use", "sessions-new", "group-changes", "server-status"}
HTMX_HEADERS = {"HX-Request": "true"}
TABLES = ("days", "tools", "unused", "often", "lost", "astray", "funnel", "old", "scripts")


@dataclass(frozen=True)
class PageRequest:
    """One GET request: label for reports, path, and the headers of htmx requests."""

    label: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def send(self, client: Client) -> Any:
        return client.get(self.path, headers=dict(self.headers))


def page_requests(examples: Mapping[str, Any]) -> Iterator[PageRequest]:
    """List the requests, including POST-only URLs, which answer 405."""
    for pattern in addresses.named_patterns():
        name = str(pattern.name)
        if name in addresses.EXCLUDED_PAGES:
            continue
        path = addresses.example_path(pattern, examples)
        yield PageRequest(name, path, HTMX_HEADERS if name in FRAGMENTS else {})
        queries = dict.fromkeys(
            (*addresses.QUERY_STRINGS.get(name, ()), *QUERY_STRINGS.get(name, ()))
        )
        for query in queries:
            yield PageRequest(
                name + query,
                path + query.format(**examples),
                HTMX_HEADERS if name in FRAGMENTS else {},
            )
        for target in HTMX_TARGETS.get(name, ()):
            headers = {**HTMX_HEADERS, "HX-Target": target}
            query = "?q=get" if name in ("palette", "group") else ""
            yield PageRequest(f"{name} #{target}", path + query, headers)
        if name == "usage-csv":
            for table in TABLES:
                yield PageRequest(f"{name} {table}", path.replace("tools.csv", f"{table}.csv"))
