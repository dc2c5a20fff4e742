"""Ingest of a server's tool list: stores definitions and updates tools and their states.

`storage.store_definitions` and `collect_findings` are slow and run outside any transaction;
`apply_listing` is short and runs inside the caller's transaction. Besides it, only approvals and
custom tools change which definition a tool points at.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from django.utils import timezone

from catalog.definitions import effective, public_names
from catalog.definitions.findings import KnownNames, definition_findings, is_severe
from catalog.definitions.parsing import Rejection, RemoteTool
from catalog.groups import expected
from catalog.groups.state import next_position
from catalog.models import (
    DefinitionChange,
    FormerName,
    Group,
    Membership,
    Revision,
    Tool,
    ToolState,
)

if TYPE_CHECKING:
    from servers.models import Server

BATCH_SIZE = 500  # rows per statement, within SQLite's limit of variables
TOOL_FIELDS = [
    "approved",
    "latest",
    "kept_against",
    "state",
    "rejected_reason",
    "missing_since",
    "findings",
    "changed_at",
    "needs",
    *effective.EFFECTIVE_FIELDS,
]


@dataclass
class IngestResult:
    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unchanged: int = 0
    removals_held: bool = False

    @property
    def has_changes(self) -> bool:
        return bool(self.added or self.changed or self.removed)


def collect_findings(
    server: "Server", remote: Sequence[RemoteTool], known: Collection[str]
) -> dict[str, list[dict[str, str]]]:
    """Return lint warnings by tool name, except for definitions whose digest is `known`."""
    others = Tool.objects.current().exclude(server=server).exclude(server=None)
    foreign = list(others.values_list("name", flat=True).distinct()[:50_000])
    names = KnownNames([tool.name for tool in remote], foreign)
    return {
        tool.name: [finding._asdict() for finding in definition_findings(tool.tool, names)]
        for tool in remote
        if tool.sha256 not in known
    }


def known_digests(server: "Server") -> set[str]:
    """Return the digests of the server's latest definitions, which are already checked."""
    rows = Tool.objects.filter(server=server).exclude(latest=None)
    return set(rows.values_list("latest__sha256", flat=True))


def needing_tools(server: "Server", capability: str) -> dict[str, dict[str, Any]]:
    """Return the tools of a server that need a capability of clients, by name, as it sent them."""
    rows = Tool.objects.current().filter(server=server, needs=capability).exclude(latest=None)
    bodies = rows.values_list("name", "latest__body")
    return {name: json.loads(body) for name, body in bodies}


class ListingUpdate:
    """Update of one server's tools from one tool list, inside one transaction."""

    def __init__(self, server: "Server", definition_ids: dict[str, int], now: datetime) -> None:
        self.server = server
        self.ids = definition_ids
        self.now = now
        self.result = IngestResult()
        # Locked: a concurrent review decision must not be overwritten.
        rows = Tool.objects.select_for_update().filter(server=server)
        self.tools = {tool.name: tool for tool in rows}
        self.visible_before = {name: _visible_facts(tool) for name, tool in self.tools.items()}
        self.new_tools: list[Tool] = []
        self.updated: dict[str, Tool] = {}
        self.changes: list[DefinitionChange] = []
        self.closed: dict[int, str] = {}  # outcomes for pending changes, by tool id

    def add_or_update(
        self, remote: RemoteTool, findings: list[dict[str, str]], public: str
    ) -> None:
        tool = self.tools.get(remote.name)
        definition = self.ids[remote.sha256]
        if tool is None:
            self._add(self._new_tool(remote.name, public), definition, findings)
            return
        was_unusable = tool.missing_since is not None or bool(tool.rejected_reason)
        tool.missing_since, tool.rejected_reason = None, ""
        if tool.latest_id is None:  # was invalid from the start, so only its name is known
            self._add(tool, definition, findings)
        elif tool.latest_id != definition:
            self._change(tool, definition, findings)
            self.result.changed.append(tool.name)
        elif was_unusable:
            self.result.added.append(tool.name)
        else:
            self.result.unchanged += 1
            return
        self.updated[tool.name] = tool

    def set_needs(self, needs: Mapping[str, str]) -> None:
        for tool in self.new_tools:
            tool.needs = needs.get(tool.name, "")
        for name, tool in self.tools.items():
            if tool.needs != needs.get(name, "") and tool.missing_since is None:
                tool.needs = needs.get(name, "")
                self.updated[name] = tool

    def _new_tool(self, name: str, public: str) -> Tool:
        tool = Tool(server=self.server, name=name, public_name=public)
        self.new_tools.append(tool)
        return tool

    def _add(self, tool: Tool, definition: int, findings: list[dict[str, str]]) -> None:
        tool.latest_id, tool.findings = definition, findings
        waits = self.server.trust == "strict" or (
            self.server.trust != "auto" and is_severe(findings)
        )
        if waits:
            self._record_change(tool, None, definition, DefinitionChange.Outcome.WAITING)
        else:
            tool.approved_id = definition
        self.result.added.append(tool.name)

    def _change(self, tool: Tool, definition: int, findings: list[dict[str, str]]) -> None:
        before, tool.latest_id = tool.latest_id, definition
        tool.findings, tool.changed_at = findings, self.now
        outcome = DefinitionChange.Outcome.WAITING
        if definition == tool.approved_id:
            # Reverted to the approved definition: the review is no longer needed.
            outcome, tool.kept_against_id = DefinitionChange.Outcome.WITHDRAWN, None
        elif self.server.trust == "auto":
            outcome, tool.approved_id = DefinitionChange.Outcome.APPROVED, definition
        elif definition == tool.kept_against_id:
            outcome = DefinitionChange.Outcome.KEPT_OLD  # this definition was rejected before
        withdrawn = outcome == DefinitionChange.Outcome.WITHDRAWN
        self.closed[tool.pk] = outcome if withdrawn else DefinitionChange.Outcome.SUPERSEDED
        self._record_change(tool, before, definition, outcome)

    def _record_change(self, tool: Tool, before: int | None, after: int, outcome: str) -> None:
        self.changes.append(
            DefinitionChange(
                tool=tool, before_id=before, after_id=after, at=self.now, outcome=outcome
            )
        )

    def reject(self, rejection: Rejection, public: str) -> None:
        tool = self.tools.get(rejection.name)
        if tool is None:
            self._new_tool(rejection.name, public).rejected_reason = rejection.reason
        elif (tool.rejected_reason, tool.missing_since) != (rejection.reason, None):
            tool.rejected_reason, tool.missing_since = rejection.reason, None
            self.updated[tool.name] = tool

    def save(self) -> None:
        """Write all rows, and bump the revision if agents can see a difference."""
        for tool in (*self.new_tools, *self.updated.values()):
            tool.state = tool.derive_state()
            if tool.is_overridden:
                effective.refresh(tool)
        Tool.objects.bulk_create(self.new_tools, batch_size=BATCH_SIZE)
        # Upsert: bulk_update builds a CASE per value and takes twenty times as long.
        Tool.objects.bulk_create(
            self.updated.values(),
            batch_size=BATCH_SIZE,
            update_conflicts=True,
            unique_fields=["id"],
            update_fields=TOOL_FIELDS,
        )
        self._close_pending_changes()
        DefinitionChange.objects.bulk_create(self.changes, batch_size=BATCH_SIZE)
        expected.claim(self.new_tools)
        _add_to_mirror_group(self.server, self.new_tools)
        if any(_visible_facts(tool) for tool in self.new_tools) or any(
            _visible_facts(tool) != self.visible_before[name] for name, tool in self.updated.items()
        ):
            Revision.bump()

    def _close_pending_changes(self) -> None:
        for outcome in set(self.closed.values()):
            ids = [tool_id for tool_id, closed_as in self.closed.items() if closed_as == outcome]
            for start in range(0, len(ids), BATCH_SIZE):
                DefinitionChange.objects.filter(
                    tool__in=ids[start : start + BATCH_SIZE],
                    outcome=DefinitionChange.Outcome.WAITING,
                ).update(outcome=outcome, decided_at=self.now)


def _visible_facts(tool: Tool) -> tuple[object, ...] | None:
    """Return what agents can observe of a tool. Calls depend on a pending definition too."""
    if tool.approved_id is None:
        return None
    if tool.state not in (ToolState.AVAILABLE, ToolState.WAITING):
        return (tool.state,)
    return (tool.state, tool.approved_id, tool.latest_id, tool.needs)


def apply_listing(
    server: "Server",
    remote: Sequence[RemoteTool],
    rejections: Sequence[Rejection],
    definition_ids: dict[str, int],
    *,
    findings: dict[str, list[dict[str, str]]],
    allow_removals: bool,
    needs: Mapping[str, str] = MappingProxyType({}),
) -> IngestResult:
    """Update a server's tools from its current list. Call inside a transaction.

    If over half of the tools are missing and `allow_removals` is false, they are kept and
    `removals_held` is set: a restarting server may answer with an empty list. `needs` has, by the
    tool's name, the capability without which clients do not get it.
    """
    update = ListingUpdate(server, definition_ids, timezone.now())
    storable = [rejection for rejection in rejections if rejection.storable]
    names = {tool.name for tool in remote} | {rejection.name for rejection in storable}
    prefix = f"{server.slug}__"
    taken = Tool.objects.filter(public_name__startswith=prefix)
    former = FormerName.objects.filter(name__startswith=prefix)
    used = {*taken.values_list("public_name", flat=True), *former.values_list("name", flat=True)}
    public = public_names.public_names(server.slug, names - update.tools.keys(), used)
    for item in remote:
        update.add_or_update(item, findings.get(item.name, []), public.get(item.name, ""))
    update.set_needs(needs)
    for rejection in storable:
        update.reject(rejection, public.get(rejection.name, ""))

    present = [tool for tool in update.tools.values() if tool.missing_since is None]
    missing = [tool for tool in present if tool.name not in names]
    if missing and len(missing) * 2 > len(present) and not allow_removals:
        update.result.removals_held = True
    else:
        for tool in missing:
            tool.missing_since = update.now
            update.result.removed.append(tool.name)
            update.updated[tool.name] = tool
    update.save()
    return update.result


def _add_to_mirror_group(server: "Server", new_tools: Sequence[Tool]) -> None:
    group = Group.objects.filter(follows=server).first()
    if group and new_tools:
        position = next_position(group)
        Membership.objects.bulk_create(
            [Membership(group=group, tool=tool, position=position) for tool in new_tools],
            batch_size=BATCH_SIZE,
            ignore_conflicts=True,
        )
