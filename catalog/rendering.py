"""Rendering of the catalog text: one line per group, tool names below, within a token budget. Pure.

Sessions and previews call these functions; the same groups render to the same bytes everywhere.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from toolcrib.lib.text import is_hidden
from toolcrib.lib.token_counter import count

NAMES_IF_SHORTENED = 5
MAX_DESCRIPTION_LENGTH = 160
SPACES = re.compile(r"\s+")

DISPATCH_HEADER = (
    "Most of your tools are not listed in full. Find one with search_tools, or load a group "
    "below with load_tools to read its schemas; then run a tool with deferred_tool_call. "
    "If you know the arguments you may call at once: a mistake comes back with the schema."
)
INJECT_HEADER = (
    "More tools can be added to yours. Find one with search_tools, or load a group below, whole "
    "or by names, with load_tools; then call it like any other tool."
)


@dataclass(frozen=True)
class GroupLine:
    """One group in the catalog; tool names are public and in canonical order."""

    group_id: str
    display_name: str
    description: str
    names: tuple[str, ...]
    remaining: bool = False  # some tools are already loaded; `names` has only the others

    @cached_property
    def prefix(self) -> str:
        """The server prefix (`github__`) if all names share it, so that it is printed once."""
        slug, separator, _ = self.names[0].partition("__")
        prefix = slug + separator
        shared = separator and all(
            name.startswith(prefix) and len(name) > len(prefix) for name in self.names
        )
        return prefix if shared else ""


@dataclass(frozen=True)
class Catalog:
    """Rendered catalog text, its cost, and what the budget made it omit."""

    text: str
    tokens: int
    left_out: dict[str, Any] | None


@dataclass
class _Draft:
    """One group's entry while it is shortened to fit the budget."""

    line: GroupLine
    name_count: int  # names rendered
    described: bool = True
    included: bool = True

    def render(self) -> str:
        prefix = self.line.prefix
        total = len(self.line.names)
        noun = f"{'remaining ' if self.line.remaining else ''}tool{'' if total == 1 else 's'}"
        label = one_line(self.line.display_name)
        description = ""
        if self.described:
            description = one_line(self.line.description)[:MAX_DESCRIPTION_LENGTH]
        head = f"{label}: {description}" if description else label
        text = f"- `{self.line.group_id}` — {head} ({total} {noun}"
        text += f", {prefix}…)\n" if prefix else ")\n"
        if self.name_count:
            names = [name[len(prefix) :] for name in self.line.names[: self.name_count]]
            more = total - self.name_count
            text += f"  {', '.join(names)}{f', … {more} more' if more else ''}\n"
        return text


def catalog(groups: Sequence[GroupLine], *, header: str, budget: int) -> Catalog:
    """Render all names if the budget allows, otherwise shorten the largest groups first."""
    drafts = [_Draft(group, len(group.names)) for group in groups if group.names]
    if not drafts:
        return Catalog("", 0, None)
    head = header.rstrip() + "\n\n"
    _fit(drafts, budget - count(head))
    text = head + "".join(draft.render() for draft in drafts if draft.included)
    dropped = sum(not draft.included for draft in drafts)
    if dropped:
        text += f"- … {dropped} more groups: use search_tools\n"
    return Catalog(text, count(text), _left_out(drafts))


def group_lines(groups: Sequence[GroupLine], max_bytes: int) -> str:
    """Render the groups' lines without names, within `max_bytes`, then the number omitted."""
    lines = [_Draft(group, 0).render() for group in groups if group.names]
    sizes = [len(line.encode()) for line in lines]
    if sum(sizes) <= max_bytes:
        return "".join(lines)
    more = "- … {} more groups\n"
    free, included = max_bytes - len(more.format(len(lines)).encode()), 0
    while sizes[included] <= free:
        free -= sizes[included]
        included += 1
    return "".join(lines[:included]) + more.format(len(lines) - included)


def _fit(drafts: list[_Draft], budget: int) -> None:
    """Shorten drafts in place, in a fixed order, until they fit the budget.

    Tokens are counted per line: they rarely span a line break, and counting the full text of a
    large catalog again at every step would take seconds. While the least possible cost exceeds
    the budget, nothing is counted: the names of 100,000 tools take half a second.
    """
    measure = _least_cost
    costs = [measure(draft) for draft in drafts]
    total = sum(costs)
    largest_first = sorted(range(len(drafts)), key=lambda i: -len(drafts[i].line.names))
    steps: list[tuple[int, dict[str, Any]]] = [
        *(
            (i, {"name_count": NAMES_IF_SHORTENED})
            for i in largest_first
            if drafts[i].name_count > NAMES_IF_SHORTENED + 1
        ),
        *((i, {"name_count": 0}) for i in largest_first),
        *((i, {"described": False}) for i in largest_first if drafts[i].line.description),
        *((i, {"included": False}) for i in reversed(range(len(drafts)))),
    ]
    for i, change in steps:
        if total <= budget and measure is _least_cost:
            measure = _cost
            costs = [measure(draft) for draft in drafts]
            total = sum(costs)
        if total <= budget:
            return
        drafts[i] = replace(drafts[i], **change)
        cost = measure(drafts[i])
        total += cost - costs[i]
        costs[i] = cost


def _cost(draft: _Draft) -> int:
    return count(draft.render()) if draft.included else 0


def _least_cost(draft: _Draft) -> int:
    """Return a lower bound: a name and its comma are at least half a token."""
    return draft.name_count // 2


def _left_out(drafts: Sequence[_Draft]) -> dict[str, Any] | None:
    names = sum(len(draft.line.names) - draft.name_count for draft in drafts)
    if not names:
        return None
    return {
        "names": names,
        "groups": [
            draft.line.group_id
            for draft in drafts
            if draft.name_count < len(draft.line.names) or not draft.included
        ],
        "descriptions": sum(
            1 for draft in drafts if draft.line.description and not draft.described
        ),
        "lines": sum(not draft.included for draft in drafts),
    }


def one_line(text: str) -> str:
    """Collapse whitespace and replace hidden characters, so the text stays on its line."""
    if not (text.isascii() and text.isprintable()):
        text = "".join(" " if is_hidden(char) else char for char in text)
    return SPACES.sub(" ", text).strip()


def summary(text: str, max_length: int = 150) -> str:
    """Return the first sentence of a description, truncated with an ellipsis."""
    line = one_line(text)
    sentence = re.split(r"(?<=[.!?])\s", line, maxsplit=1)[0]
    if len(sentence) <= max_length:
        return sentence
    return sentence[: max_length - 1].rstrip() + "…"


def tool_object(
    name: str, description: str, schema: object, *, source: str, server: str = ""
) -> dict[str, Any]:
    """Return a tool in the format of loads, the tools array and tool details."""
    tool: dict[str, Any] = {"name": name, "description": description, "parameters": schema}
    tool["source"] = source
    return tool | {"mcpServer": server} if server else tool


def _object(properties: dict[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return schema | {"required": list(required)} if required else schema


def meta_tools(strategy: str) -> list[dict[str, Any]]:
    """Return the tools that give access to all others."""
    text = {"type": "string"}
    tools = [
        (
            "search_tools",
            "Find tools by words, by a regular expression, or one by its exact name.",
            _object(
                {
                    "query": {**text, "description": "What you want to do, in words"},
                    "pattern": {**text, "description": "RE2 pattern on names and descriptions"},
                    "name": {**text, "description": "Exact name: loads the tool, with schema"},
                    "server": {**text, "description": "Only tools of this server"},
                    "limit": {"type": "integer", "description": "1 to 50, default 10"},
                }
            ),
        ),
        (
            "load_tools",
            "Load a group's tools, all or those named, and read their schemas."
            if strategy == "dispatch"
            else "Add a group's tools to yours, all or those named.",
            _object(
                {
                    "group_id": {**text, "description": "As in the catalog, e.g. mcp:github"},
                    "tool_names": {
                        "type": "array",
                        "items": text,
                        "description": "Leave out for all",
                    },
                },
                ["group_id"],
            ),
        ),
        (
            "get_tool_details",
            "Read one tool's whole definition, its output included.",
            _object({"name": text}, ["name"]),
        ),
        (
            "deferred_tool_call",
            "Run a tool that is not in your tools. Give its name first.",
            _object({"name": text, "arguments": {"type": "object"}}, ["name"]),
        ),
    ]
    included = tools if strategy == "dispatch" else tools[:3]
    return [
        tool_object(name, description, schema, source="builtin")
        for name, description, schema in included
    ]


def remaining_groups(groups: Sequence[GroupLine], loaded: Collection[str]) -> list[GroupLine]:
    """Return the groups without loaded tools, for sessions that add loaded tools to their array."""
    remaining = []
    for group in groups:
        names = tuple(name for name in group.names if name not in loaded)
        if names:
            is_partial = len(names) < len(group.names)
            remaining.append(replace(group, names=names, remaining=is_partial))
    return remaining
