"""Fold a server's definitions into tools, and decide what agents are served.

`prepare` keeps definitions and `judge` looks at them (slow, outside any transaction); `apply`
points tools at them (short, inside the caller's transaction). Approving and keeping old are the
only other writers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from django.utils import timezone

from catalog.definitions import public_names
from catalog.definitions.findings import Neighbours, findings_of
from catalog.definitions.parsing import Rejection, RemoteTool, search_text
from catalog.groups.state import next_position
from catalog.models import (
    Definition,
    DefinitionChange,
    Group,
    Membership,
    Revision,
    Tool,
    ToolState,
)
from toolcrib.lib.token_counter import count_definition

if TYPE_CHECKING:
    from servers.models import Server

CHUNK = 500  # rows a statement, under SQLite's limit of variables
TOOL_FIELDS = [
    "approved",
    "latest",
    "kept_against",
    "state",
    "rejected_reason",
    "missing_since",
    "findings",
    "changed_at",
]


@dataclass
class IngestResult:
    """What one list did to the catalog."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unchanged: int = 0
    removals_held: bool = False

    @property
    def quiet(self) -> bool:
        return not (self.added or self.changed or self.removed)


def store_definitions(remote: Sequence[RemoteTool]) -> dict[str, int]:
    """Keep every definition not kept yet; return ids by digest.

    Definitions never change and nothing points at a new one until `apply`, so that what is left
    behind by a crash is harmless.
    """
    ids = _known([tool.sha256 for tool in remote])
    new = {tool.sha256: tool for tool in remote if tool.sha256 not in ids}
    rows = [
        Definition(
            sha256=tool.sha256,
            name=tool.name,
            body=tool.body,
            tokens=count_definition(tool.tool),
            search_text=search_text(tool.tool).replace("\0", " "),
        )
        for tool in new.values()
    ]
    if rows:
        Definition.objects.bulk_create(rows, batch_size=CHUNK, ignore_conflicts=True)
        ids |= _known(list(new))
    return ids


def find_findings(
    server: "Server", remote: Sequence[RemoteTool]
) -> dict[str, list[dict[str, str]]]:
    """Look for what deserves advice in definitions that are new for this server, by tool."""
    seen = known_digests(server)
    neighbours = Neighbours([tool.name for tool in remote], _foreign_names(server))
    return {
        tool.name: [finding.as_json() for finding in findings_of(tool.tool, neighbours)]
        for tool in remote
        if tool.sha256 not in seen
    }


def known_digests(server: "Server") -> set[str]:
    """Digests of the definitions this server offered last, all of them judged then."""
    rows = Tool.objects.filter(server=server).exclude(latest=None)
    return set(rows.values_list("latest__sha256", flat=True))


def _known(digests: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for start in range(0, len(digests), CHUNK):
        rows = Definition.objects.filter(sha256__in=digests[start : start + CHUNK])
        found.update(rows.values_list("sha256", "id"))
    return found


class ListingUpdate:
    """One list being folded into one server's tools. Lives inside one transaction."""

    def __init__(self, server: "Server", definition_ids: dict[str, int], now: datetime) -> None:
        self.server = server
        self.ids = definition_ids
        self.now = now
        self.result = IngestResult()
        # Locked: a decision made meanwhile must not be written over.
        rows = Tool.objects.select_for_update().filter(server=server)
        self.tools = {tool.name: tool for tool in rows}
        self.seen_before = {name: _seen_by_agents(tool) for name, tool in self.tools.items()}
        self.fresh: list[Tool] = []
        self.touched: dict[str, Tool] = {}
        self.changes: list[DefinitionChange] = []
        self.settled: dict[int, str] = {}  # what became of changes that waited, by tool

    def take(self, remote: RemoteTool, findings: list[dict[str, str]], public: str) -> None:
        tool = self.tools.get(remote.name)
        definition = self.ids[remote.sha256]
        if tool is None:
            tool = Tool(server=self.server, name=remote.name, public_name=public)
            self._add(tool, definition, findings)
            tool.state = tool.settled_state()
            self.fresh.append(tool)
            return
        back = tool.missing_since is not None or bool(tool.rejected_reason)
        tool.missing_since, tool.rejected_reason = None, ""
        if tool.latest_id is None:  # known by name only, since it was rejected from the start
            self._add(tool, definition, findings)
        elif tool.latest_id != definition:
            self._change(tool, definition, findings)
            self.result.changed.append(tool.name)
        elif back:
            self.result.added.append(tool.name)
        else:
            self.result.unchanged += 1
            return
        self._touch(tool)

    def _add(self, tool: Tool, definition: int, findings: list[dict[str, str]]) -> None:
        tool.latest_id, tool.findings = definition, findings
        if self.server.trust == "strict":
            self._note(tool, None, definition, DefinitionChange.Outcome.WAITING)
        else:
            tool.approved_id = definition
        self.result.added.append(tool.name)

    def _change(self, tool: Tool, definition: int, findings: list[dict[str, str]]) -> None:
        before, tool.latest_id = tool.latest_id, definition
        tool.findings, tool.changed_at = findings, self.now
        outcome = DefinitionChange.Outcome.WAITING
        if definition == tool.approved_id:
            # Back to what was approved: nothing waits any more.
            outcome, tool.kept_against_id = DefinitionChange.Outcome.WITHDRAWN, None
        elif self.server.trust == "auto":
            outcome, tool.approved_id = DefinitionChange.Outcome.APPROVED, definition
        elif definition == tool.kept_against_id:
            outcome = DefinitionChange.Outcome.KEPT_OLD  # as was decided about it before
        withdrawn = outcome == DefinitionChange.Outcome.WITHDRAWN
        self.settled[tool.pk] = outcome if withdrawn else DefinitionChange.Outcome.SUPERSEDED
        self._note(tool, before, definition, outcome)

    def _note(self, tool: Tool, before: int | None, after: int, outcome: str) -> None:
        self.changes.append(
            DefinitionChange(
                tool=tool, before_id=before, after_id=after, at=self.now, outcome=outcome
            )
        )

    def refuse(self, rejection: Rejection, public: str) -> None:
        tool = self.tools.get(rejection.name)
        if tool is None:
            tool = Tool(server=self.server, name=rejection.name, public_name=public)
            tool.rejected_reason = rejection.reason
            tool.state = tool.settled_state()
            self.fresh.append(tool)
        elif (tool.rejected_reason, tool.missing_since) != (rejection.reason, None):
            tool.rejected_reason, tool.missing_since = rejection.reason, None
            self._touch(tool)

    def miss(self, tool: Tool) -> None:
        tool.missing_since = self.now
        self.result.removed.append(tool.name)
        self._touch(tool)

    def _touch(self, tool: Tool) -> None:
        tool.state = tool.settled_state()
        self.touched[tool.name] = tool

    def save(self) -> None:
        Tool.objects.bulk_create(self.fresh, batch_size=CHUNK)
        # An upsert: bulk_update builds a CASE for each value, twenty times slower under the lock.
        Tool.objects.bulk_create(
            self.touched.values(),
            batch_size=CHUNK,
            update_conflicts=True,
            unique_fields=["id"],
            update_fields=TOOL_FIELDS,
        )
        self._settle()
        DefinitionChange.objects.bulk_create(self.changes, batch_size=CHUNK)
        _follow(self.server, self.fresh)
        if any(_seen_by_agents(tool) for tool in self.fresh) or any(
            _seen_by_agents(tool) != self.seen_before[name] for name, tool in self.touched.items()
        ):
            Revision.bump()

    def _settle(self) -> None:
        for outcome in set(self.settled.values()):
            ids = [tool_id for tool_id, what in self.settled.items() if what == outcome]
            for start in range(0, len(ids), CHUNK):
                DefinitionChange.objects.filter(
                    tool__in=ids[start : start + CHUNK], outcome=DefinitionChange.Outcome.WAITING
                ).update(outcome=outcome, decided_at=self.now)


def _seen_by_agents(tool: Tool) -> tuple[object, ...] | None:
    """What an agent could tell about a tool; calls also look at a definition that waits."""
    if tool.approved_id is None:
        return None
    if tool.state not in (ToolState.AVAILABLE, ToolState.WAITING):
        return (tool.state,)
    return (tool.state, tool.approved_id, tool.latest_id)


def apply_listing(
    server: "Server",
    remote: Sequence[RemoteTool],
    rejections: Sequence[Rejection],
    definition_ids: dict[str, int],
    *,
    findings: dict[str, list[dict[str, str]]],
    allow_removals: bool,
) -> IngestResult:
    """Replace a server's list by this one. Call inside a transaction.

    Where over half the tools are gone and `allow_removals` is false, they are kept and
    `removals_held` is set: a restarting server answers with an empty list.
    """
    fold = ListingUpdate(server, definition_ids, timezone.now())
    usable = [rejection for rejection in rejections if rejection.usable]
    names = {tool.name for tool in remote} | {rejection.name for rejection in usable}
    public = _public_names(server, names - fold.tools.keys())
    for item in remote:
        fold.take(item, findings.get(item.name, []), public.get(item.name, ""))
    for rejection in usable:
        fold.refuse(rejection, public.get(rejection.name, ""))

    present = [tool for tool in fold.tools.values() if tool.missing_since is None]
    gone = [tool for tool in present if tool.name not in names]
    if gone and len(gone) * 2 > len(present) and not allow_removals:
        fold.result.removals_held = True
    else:
        for tool in gone:
            fold.miss(tool)
    fold.save()
    return fold.result


def _public_names(server: "Server", new: Iterable[str]) -> dict[str, str]:
    taken = Tool.objects.filter(public_name__startswith=f"{server.slug}__")
    return public_names.public_names(
        server.slug, new, set(taken.values_list("public_name", flat=True))
    )


def _foreign_names(server: "Server") -> list[str]:
    others = Tool.objects.current().exclude(server=server).exclude(server=None)
    return list(others.values_list("name", flat=True).distinct()[:50_000])


def _follow(server: "Server", fresh: Sequence[Tool]) -> None:
    group = Group.objects.filter(follows=server).first()
    if group and fresh:
        position = next_position(group)
        Membership.objects.bulk_create(
            [Membership(group=group, tool=tool, position=position) for tool in fresh],
            batch_size=CHUNK,
            ignore_conflicts=True,
        )
