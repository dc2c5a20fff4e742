"""Preview of a group: what a new session of an agent gets, now and before the last edit.

Renders as real sessions do, with a new agent's defaults: deferred mode, dispatch strategy.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from catalog import cache, rendering
from catalog.cache import CachedGroup, CachedTool
from catalog.definitions import diff as definition_diff
from catalog.definitions.validation import fitting_examples
from catalog.groups import state as group_state
from catalog.groups.state import State
from catalog.models import AuditEntry, Group
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.token_counter import count

BUDGET = 2_000  # tokens of the catalog text: an agent's default
MAX_TOOLS_IN_JSON = 20
MAX_SIGNATURES = 100
MAX_ARGUMENTS = 6
EDIT_PAUSE = timedelta(minutes=30)  # changes with shorter pauses belong to one edit
MAX_EDIT_ENTRIES = 100


def cached_group(group: Group) -> CachedGroup:
    return cache.current().group(group)


@cache.memoize_per_revision
def group_line(group: CachedGroup) -> rendering.GroupLine:
    names = tuple(member.tool.name for member in group.offered)
    return rendering.GroupLine(group.group_id, group.display_name, group.description, names)


@dataclass(frozen=True)
class GroupPreview:
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
        return sum(tool.tokens or 0 for tool in self.preloads)

    @property
    def tokens(self) -> int:
        return self.catalog.tokens + self.meta_tokens + self.preload_tokens

    @property
    def loadable(self) -> int:
        return len(self.line.names) - len(self.preloads)

    @property
    def signatures(self) -> list[str]:
        return [signature(tool) for tool in self.preloads[:MAX_SIGNATURES]]

    @property
    def omitted(self) -> int:
        return max(len(self.preloads) - MAX_TOOLS_IN_JSON, 0)

    @property
    def json(self) -> str:
        """The parts of the session response that depend on the group."""
        body = {
            "strategy": "dispatch",
            "mode": "deferred",
            "catalog": {
                "text": self.catalog.text,
                "etag": digest(self.catalog.text),
                "tokens": self.catalog.tokens,
                "left_out": self.catalog.left_out,
            },
            "tools": [
                *self.meta,
                *(tool_object(tool) for tool in self.preloads[:MAX_TOOLS_IN_JSON]),
            ],
        }
        return json.dumps(body, indent=2, ensure_ascii=False)

    @property
    def text(self) -> str:
        """A compact text form, to compare with another revision."""
        preloads = "".join(f"- {signature(tool)}\n" for tool in self.preloads) or "- none\n"
        return f"{self.catalog.text}\nPreloaded definitions:\n{preloads}"


def tool_object(tool: CachedTool) -> dict[str, Any]:
    schema = tool.approved.input_schema if tool.approved else {}
    examples = fitting_examples(tool.approved, tool.input_examples) if tool.approved else ()
    return rendering.tool_object(
        tool.name,
        tool.description,
        schema,
        source=tool.source,
        server=tool.server,
        examples=examples,
    )


def signature(tool: CachedTool) -> str:
    schema = tool.approved.input_schema if tool.approved else {}
    properties = schema.get("properties")
    names = [str(name)[:60] for name in properties] if isinstance(properties, Mapping) else []
    more = ", …" if len(names) > MAX_ARGUMENTS else ""
    return f"{tool.name}({', '.join(names[:MAX_ARGUMENTS])}{more})"


def preview_group(group: Group) -> GroupPreview:
    cached = cached_group(group)
    preloads = [member.tool for member in cached.offered if member.preload]
    return GroupPreview(group_line(cached), preloads)


def curl_command(group: Group, base_url: str) -> str:
    body = json.dumps({"groups": [group.group_id], "mode": "deferred"})
    return (
        f"curl -sS {base_url.rstrip('/')}/api/v1/sessions \\\n"
        '  -H "Authorization: Bearer $TOOLCRIB_KEY" \\\n'
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d '{body}'\n"
    )


@dataclass(frozen=True)
class LastEdit:
    """The last edit of a group: its changes, their actors, and the preview before and after."""

    changes: int
    since: datetime
    actors: Sequence[str]
    before: str
    after: str

    @property
    def spans(self) -> tuple[definition_diff.Span, ...]:
        return definition_diff.diff_words(self.before, self.after)


def last_edit(group: Group, current: GroupPreview) -> LastEdit | None:
    """Compare with the preview before the last edit: changes without a long pause between them."""
    entries = _last_entries(group)
    if not entries:
        return None
    before = _preview_before(group, entries)
    actors = list(dict.fromkeys(entry.actor_label for entry in reversed(entries)))
    text = before.text if before else ""
    return LastEdit(len(entries), entries[-1].at, actors, text, current.text)


def _last_entries(group: Group) -> list[AuditEntry]:
    entries: list[AuditEntry] = []
    for entry in group_state.list_edits(group)[:MAX_EDIT_ENTRIES]:
        if entries and entries[-1].at - entry.at > EDIT_PAUSE:
            break
        entries.append(entry)
    return entries


def _preview_before(group: Group, entries: Iterable[AuditEntry]) -> GroupPreview | None:
    """Revert the entries in memory, newest first. None if the group did not exist before."""
    fields = group_state.read_fields(group)
    members: dict[str, State | None] = dict(group_state.read_members(group))
    for entry in entries:
        if "group" in entry.after:
            return None
        before: State = entry.before
        fields |= {name: before[name] for name in group_state.FIELDS if name in before}
        members |= before.get("members", {})
        for part, key in group_state.MEMBER_PARTS:
            for name, value in before.get(part, {}).items():
                members[name] = {**(members.get(name) or {}), key: value}
    return _preview_of(fields, members)


def _preview_of(fields: State, members: Mapping[str, State | None]) -> GroupPreview:
    ordered = sorted((row.get("position", 0), name) for name, row in members.items() if row)
    by_name = {tool.name: tool for tool in cache.current().tools.values() if tool.offered}
    tools = [by_name[name] for _, name in ordered if name in by_name]
    line = rendering.GroupLine(
        fields["group_id"],
        fields["display_name"],
        fields["description"],
        tuple(tool.name for tool in tools),
    )
    group = Group(deferred=fields["deferred"], preload_default=fields["preload_default"])
    own_preload = {name: row.get("preload") for name, row in members.items() if row}
    return GroupPreview(
        line, [tool for tool in tools if cache.is_preloaded(group, tool, own_preload[tool.name])]
    )
