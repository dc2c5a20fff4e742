"""Write the catalog an agent reads: one line a group, names under it, within a budget. Pure.

The API and every preview use these functions, so that what a person is shown is what an agent
gets. The same groups give the same bytes in any process.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolcrib.lib.text import is_hidden
from toolcrib.lib.token_counter import count

FIRST_NAMES = 5
LONGEST_DESCRIPTION = 160
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
    """One group as the catalog shows it; names are public and in canonical order."""

    group_id: str
    display_name: str
    description: str
    names: tuple[str, ...]
    remaining: bool = False  # part of it is loaded already: these are the rest


@dataclass(frozen=True)
class Catalog:
    text: str
    tokens: int
    left_out: dict[str, Any] | None


@dataclass
class _Draft:
    """A group's line while the budget decides how much of it is said."""

    line: GroupLine
    shown: int  # how many names
    described: bool = True
    kept: bool = True

    def render(self) -> str:
        prefix = shared_prefix(self.line.names)
        total = len(self.line.names)
        noun = f"{'remaining ' if self.line.remaining else ''}tool{'' if total == 1 else 's'}"
        label = one_line(self.line.display_name)
        said = one_line(self.line.description)[:LONGEST_DESCRIPTION] if self.described else ""
        text = f"- `{self.line.group_id}` — {label}{': ' + said if said else ''} ({total} {noun}"
        text += f", {prefix}…)\n" if prefix else ")\n"
        if self.shown:
            names = [name[len(prefix) :] for name in self.line.names[: self.shown]]
            more = total - self.shown
            text += f"  {', '.join(names)}{f', … {more} more' if more else ''}\n"
        return text


def catalog(groups: Sequence[GroupLine], *, header: str, budget: int) -> Catalog:
    """Say all names if the budget allows; else fewer, the largest groups first."""
    drafts = [_Draft(group, len(group.names)) for group in groups if group.names]
    if not drafts:
        return Catalog("", 0, None)
    head = header.rstrip() + "\n\n"
    _fit(drafts, budget - count(head))
    text = head + "".join(draft.render() for draft in drafts if draft.kept)
    dropped = sum(not draft.kept for draft in drafts)
    if dropped:
        text += f"- … {dropped} more groups: use search_tools\n"
    return Catalog(text, count(text), _left_out(drafts))


def group_lines_after(groups: Sequence[GroupLine], most: int) -> str:
    """The groups' lines without names: as many as `most` bytes hold, then how many are left."""
    lines = [_Draft(group, 0).render() for group in groups if group.names]
    sizes = [len(line.encode()) for line in lines]
    if sum(sizes) <= most:
        return "".join(lines)
    more = "- … {} more groups\n"
    room, shown = most - len(more.format(len(lines)).encode()), 0
    while sizes[shown] <= room:
        room -= sizes[shown]
        shown += 1
    return "".join(lines[:shown]) + more.format(len(lines) - shown)


def _fit(drafts: list[_Draft], budget: int) -> None:
    """Shorten drafts in place until they fit, always in the same order.

    Lines are counted one by one: tokens hardly ever span a line's end, and whole texts of
    large catalogs would take seconds to count again at every step.
    """
    costs = [count(draft.render()) for draft in drafts]
    total = sum(costs)
    order = sorted(range(len(drafts)), key=lambda at: -len(drafts[at].line.names))
    steps: list[tuple[int, dict[str, Any]]] = [
        *((at, {"shown": FIRST_NAMES}) for at in order if drafts[at].shown > FIRST_NAMES + 1),
        *((at, {"shown": 0}) for at in order),
        *((at, {"described": False}) for at in order if drafts[at].line.description),
        *((at, {"kept": False}) for at in reversed(range(len(drafts)))),
    ]
    for at, change in steps:
        if total <= budget:
            return
        drafts[at] = replace(drafts[at], **change)
        cost = count(drafts[at].render()) if drafts[at].kept else 0
        total += cost - costs[at]
        costs[at] = cost


def _left_out(drafts: Sequence[_Draft]) -> dict[str, Any] | None:
    names = sum(len(draft.line.names) - draft.shown for draft in drafts)
    if not names:
        return None
    return {
        "names": names,
        "groups": [
            draft.line.group_id
            for draft in drafts
            if draft.shown < len(draft.line.names) or not draft.kept
        ],
        "descriptions": sum(
            1 for draft in drafts if draft.line.description and not draft.described
        ),
        "lines": sum(not draft.kept for draft in drafts),
    }


def shared_prefix(names: Sequence[str]) -> str:
    """Return `github__` where every name starts with it, so that it is printed once."""
    slug, marks, _ = names[0].partition("__")
    prefix = slug + marks
    same = marks and all(name.startswith(prefix) and len(name) > len(prefix) for name in names)
    return prefix if same else ""


def one_line(text: str) -> str:
    if not (text.isascii() and text.isprintable()):
        text = "".join(" " if is_hidden(char) else char for char in text)
    return SPACES.sub(" ", text).strip()


def summary(text: str, longest: int = 150) -> str:
    """Return a description's first sentence, cut with a mark where it is longer."""
    line = one_line(text)
    first = re.split(r"(?<=[.!?])\s", line, maxsplit=1)[0]
    return first if len(first) <= longest else first[: longest - 1].rstrip() + "…"


# --- Tools ------------------------------------------------------------------------------------


def tool_object(
    name: str, description: str, schema: object, *, source: str, server: str = ""
) -> dict[str, Any]:
    """A tool as loads, the tools array and details give it."""
    made: dict[str, Any] = {
        "name": name,
        "description": description,
        "parameters": schema,
        "source": source,
    }
    return made | {"mcpServer": server} if server else made


def _object(properties: dict[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return schema | {"required": list(required)} if required else schema


def meta_tools(strategy: str, groups: str = "") -> list[dict[str, Any]]:
    """The few tools that stand for all the others. `groups`: lines to say what is behind them."""
    text = {"type": "string"}
    search = "Find tools by words, by a regular expression, or one by its exact name."
    tools = [
        (
            "search_tools",
            search + (f" Behind it:\n{groups}" if groups else ""),
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
            "Run a tool that is not in your tools. Give tool_name first.",
            _object({"tool_name": text, "arguments": {"type": "object"}}, ["tool_name"]),
        ),
    ]
    kept = tools if strategy == "dispatch" else tools[:3]
    return [tool_object(name, said, schema, source="builtin") for name, said, schema in kept]


def remaining(groups: Sequence[GroupLine], loaded: Collection[str]) -> list[GroupLine]:
    """What is left to load, for sessions whose loaded tools join the tools array."""
    rest = []
    for group in groups:
        names = tuple(name for name in group.names if name not in loaded)
        if names:
            part = len(names) < len(group.names)
            rest.append(replace(group, names=names, remaining=part))
    return rest
