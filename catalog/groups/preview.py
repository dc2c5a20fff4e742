"""What an agent with one group sees, by the agents' own renderer; and what it saw before an edit.

Shows a session in deferred mode, the strategy being dispatch: what a new agent is given.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from catalog import cache, rendering
from catalog.cache import CachedTool
from catalog.definitions import diff as definition_diff
from catalog.groups import board
from catalog.groups import state as states
from catalog.groups.state import State
from catalog.models import AuditEntry, Group
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.token_counter import count

BUDGET = 2_000  # tokens of the catalog's text, an agent's default
IN_JSON = 20  # tools the JSON view holds
IN_LIST = 100  # tools whose signatures are listed
ARGUMENTS = 6
PAUSE = timedelta(minutes=30)  # acts nearer to each other than this are one edit
MOST_ACTS = 100


@dataclass(frozen=True)
class GroupPreview:
    """The catalog's text and the tools array of a session that opens now."""

    line: rendering.GroupLine
    preloads: Sequence[CachedTool]

    @cached_property
    def catalog(self) -> rendering.Catalog:
        return rendering.catalog([self.line], header=rendering.DISPATCH_HEADER, budget=BUDGET)

    @property
    def meta(self) -> list[dict[str, Any]]:
        return rendering.meta_tools("dispatch") if self.line.names else []

    @property
    def meta_tokens(self) -> int:
        return count(canonical(self.meta)) if self.meta else 0

    @property
    def preload_tokens(self) -> int:
        return sum(board.tokens_of(item) or 0 for item in self.preloads)

    @property
    def tokens(self) -> int:
        return self.catalog.tokens + self.meta_tokens + self.preload_tokens

    @property
    def loadable(self) -> int:
        return len(self.line.names) - len(self.preloads)

    @property
    def signatures(self) -> list[str]:
        return [signature(item) for item in self.preloads[:IN_LIST]]

    @property
    def left_out(self) -> int:
        return max(len(self.preloads) - IN_JSON, 0)

    @property
    def json(self) -> str:
        """The parts of an opened session that the group decides."""
        body = {
            "strategy": "dispatch",
            "mode": "deferred",
            "catalog": {
                "text": self.catalog.text,
                "etag": digest(self.catalog.text),
                "tokens": self.catalog.tokens,
                "left_out": self.catalog.left_out,
            },
            "tools": [*self.meta, *(tool_object(item) for item in self.preloads[:IN_JSON])],
        }
        return json.dumps(body, indent=2, ensure_ascii=False)

    @property
    def text(self) -> str:
        """All of it in a few lines, to compare with another time."""
        given = "".join(f"- {signature(item)}\n" for item in self.preloads)
        return f"{self.catalog.text}\nIn full from the start:\n{given or '- nothing' + chr(10)}"


def tool_object(item: CachedTool) -> dict[str, Any]:
    schema = item.approved.input_schema if item.approved else {}
    return rendering.tool_object(
        item.name, item.description, schema, source=item.source, server=item.server
    )


def signature(item: CachedTool) -> str:
    schema = item.approved.input_schema if item.approved else {}
    found = schema.get("properties")
    names = [str(name)[:60] for name in found] if isinstance(found, Mapping) else []
    more = ", …" if len(names) > ARGUMENTS else ""
    return f"{item.name}({', '.join(names[:ARGUMENTS])}{more})"


def preview_group(group: Group) -> GroupPreview:
    here = board.cached_group(group)
    if here is None:
        return GroupPreview(rendering.GroupLine(group.group_id, group.display_name, "", ()), ())
    given = [member.tool for member in here.offered if member.preload]
    return GroupPreview(board.line_of(here), given)


def curl(group: Group, base_url: str) -> str:
    """The request that gives an agent what the board shows."""
    body = json.dumps({"groups": [group.group_id], "mode": "deferred"})
    return (
        f"curl -sS {base_url.rstrip('/')}/api/v1/sessions \\\n"
        '  -H "Authorization: Bearer $TOOLCRIB_KEY" \\\n'
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d '{body}'\n"
    )


# --- Before the edit ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What the last edit of a group changed for agents: its acts, who did them, the two texts."""

    acts: int
    since: datetime
    people: Sequence[str]
    before: str
    after: str

    @property
    def differs(self) -> bool:
        return self.before != self.after

    @property
    def spans(self) -> tuple[definition_diff.Span, ...]:
        return definition_diff.words(self.before, self.after)


def change(group: Group, now: GroupPreview) -> Change | None:
    """Compare with what agents had before the last edit: acts with no long pause between them."""
    edit = _last_edit(group)
    if not edit:
        return None
    before = _seen_before(group, edit)
    people = list(dict.fromkeys(entry.actor_label for entry in reversed(edit)))
    text = before.text if before else ""
    return Change(len(edit), edit[-1].at, people, text, now.text)


def _last_edit(group: Group) -> list[AuditEntry]:
    found: list[AuditEntry] = []
    for entry in board.edits(group)[:MOST_ACTS]:
        if found and found[-1].at - entry.at > PAUSE:
            break
        found.append(entry)
    return found


def _seen_before(group: Group, edit: Iterable[AuditEntry]) -> GroupPreview | None:
    """Take the acts back, newest first, in memory. None where the group was not there."""
    fields: State = {name: states.field(group, name) for name in states.FIELDS}
    members: dict[str, State | None] = dict(states.members(group))
    for entry in edit:
        if "group" in entry.after:
            return None
        before: State = entry.before
        fields |= {name: before[name] for name in states.FIELDS if name in before}
        members |= before.get("members", {})
        for part, key in (("order", "position"), ("preload", "preload")):
            for name, value in before.get(part, {}).items():
                members[name] = {**(members.get(name) or {}), key: value}
    return _as_it_was(fields, members)


def _as_it_was(fields: State, members: Mapping[str, State | None]) -> GroupPreview:
    there = [(one.get("position", 0), name) for name, one in members.items() if one]
    by_name = {item.name: item for item in cache.current().tools.values() if item.offered}
    items = [by_name[name] for _, name in sorted(there) if name in by_name]
    line = rendering.GroupLine(
        fields["group_id"],
        fields["display_name"],
        fields["description"],
        tuple(item.name for item in items),
    )
    was = Group(deferred=fields["deferred"], preload_default=fields["preload_default"])
    own = {name: one.get("preload") for name, one in members.items() if one}
    return GroupPreview(
        line, [item for item in items if cache.is_preloaded(was, item, own[item.name])]
    )
