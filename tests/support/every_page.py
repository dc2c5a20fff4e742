"""Everything a person's browser asks for: pages, their filtered faces, fragments and downloads.

The addresses come from the URL conf, so a new page is here without being written down.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.test import Client

from tests.support import page_addresses as addresses

# More addresses of the same page, as filters, sorts, tabs and further pages make them.
FACES: dict[str, tuple[str, ...]] = {
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
# The part of a page that is asked for alone: by page, the element it is put into.
PARTS: dict[str, tuple[str, ...]] = {
    "tools": ("tools",),
    "group": ("board-list", "board-preview"),
    "session": ("step",),
    "sessions": ("sessions",),
    "usage": ("usage",),
    "playground": ("found",),
    "palette": ("palette",),
}
# What no person asks for but a page does.
FRAGMENTS = {"tool-use", "sessions-new", "group-changes", "server-status"}
PART = {"HX-Request": "true"}
TABLES = ("days", "tools", "unused", "often", "lost", "astray", "funnel", "old")


@dataclass(frozen=True)
class Ask:
    """One request: what it is called in a report, its address, and the headers of a fragment."""

    label: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def of(self, client: Client) -> Any:
        return client.get(self.path, headers=dict(self.headers))


def asks(examples: Mapping[str, Any]) -> Iterator[Ask]:
    """List what there is to ask, acts (which answer 405) among it."""
    for pattern in addresses.patterns():
        name = str(pattern.name)
        if name in addresses.OUTSIDE:
            continue
        path = addresses.path_of(pattern, examples)
        yield Ask(name, path, PART if name in FRAGMENTS else {})
        faces = dict.fromkeys((*addresses.FACES.get(name, ()), *FACES.get(name, ())))
        for face in faces:
            yield Ask(
                name + face, path + face.format(**examples), PART if name in FRAGMENTS else {}
            )
        for target in PARTS.get(name, ()):
            headers = {**PART, "HX-Target": target}
            face = "?q=get" if name in ("palette", "group") else ""
            yield Ask(f"{name} #{target}", path + face, headers)
        if name == "usage-csv":
            for table in TABLES:
                yield Ask(f"{name} {table}", path.replace("tools.csv", f"{table}.csv"))
