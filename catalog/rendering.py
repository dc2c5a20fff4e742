"""Rendering of the catalog text: one line per group, tool names below, within a token budget. Pure.

Sessions and previews call these functions; the same groups render to the same bytes everywhere.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

from toolcrib.lib.json_codec import canonical
from toolcrib.lib.text import is_hidden
from toolcrib.lib.token_counter import count

NAMES_IF_SHORTENED = 5  # at least; more where the budget has room
MIN_NAMES_SHARING_WORDS = 5  # so many names that begin with the same words have them in the prefix
# Of a group that omits this many names, the rest is counted by the first word of the names.
MIN_COUNTED_BY_WORD, MAX_WORDS = 20, 40
FIRST_WORD = re.compile(r"[a-z0-9]+|[A-Z]+[a-z0-9]*|.")
MAX_FITS = 10
MAX_DESCRIPTION_LENGTH = 160
SUMMARY_LENGTHS = (150, 110, 80, 55, 35, 20)  # characters of a hit's sentence, tried in order
NEXT_STEP = "Call one at once, or load its schema."
SPACES = re.compile(r"\s+")
NAME_LIST = "Tools: "  # begins a description that only lists names
LISTED_MORE = re.compile(r", and \d+ more$")

DISPATCH_HEADER = (
    "You have more tools. Find one with search_tools, or read a group's schemas with load_tools; "
    "run it with call_read_only_tool if it only reads, else deferred_tool_call. "
    "If you know the arguments, call at once: a mistake returns the schema."
)
INJECT_HEADER = (
    "More tools can be added to yours. Find one with search_tools, or load a group below, whole "
    "or by names, with load_tools; then call it like any other tool."
)

# The gaps are those that models run into; docs/scripts.md lists all.
SCRIPT_DESCRIPTION = (
    "Run a Python script that calls many tools, of which only what it prints and its last "
    "expression come back. The tool github__create_issue is `await github.create_issue(title=…)`: "
    "arguments by name; its value is the structured content, else the text. At the same time: "
    "`await asyncio.gather(…)`. A tool's error raises RuntimeError, a refused call "
    "PermissionError, a late one TimeoutError. Types are checked first. No network, files or "
    "environment. Missing in this Python: yield, inheritance (no own exceptions), del, property, "
    "async with, create_task, gather(return_exceptions), io, statistics, string, urllib. At most "
    "60 seconds and 50 calls. If the status is running or held, ask check_call with the run_id."
)
TYPESCRIPT_DESCRIPTION = (
    "Default python. In typescript: `await github.create_issue({title: …})`, `Promise.all`, "
    "`return` the result; no imports, types are not checked; a tool's error is a ToolError"
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
    def server_prefix(self) -> str:
        """The server prefix (`github__`) if all names share it."""
        slug, separator, _ = next(iter(self.names), "").partition("__")
        prefix = slug + separator
        shared = separator and all(
            name.startswith(prefix) and len(name) > len(prefix) for name in self.names
        )
        return prefix if shared else ""

    @cached_property
    def prefix(self) -> str:
        """What all names begin with, printed once: the server prefix and whole words after it."""
        return shared_prefix(self.names, self.server_prefix)

    @cached_property
    def by_short_name(self) -> dict[str, str]:
        """The names by what the catalog prints of them, where that is less than the bare name."""
        if self.prefix == self.server_prefix:
            return {}
        return {name[len(self.prefix) :]: name for name in self.names}

    @cached_property
    def described_names(self) -> int:
        """How many of the first names a description lists that says nothing else, or 0."""
        if not self.description.startswith(NAME_LIST):
            return 0
        listed = LISTED_MORE.sub("", self.description.removeprefix(NAME_LIST)).split(", ")
        start = len(self.server_prefix)
        bare = [name_in_words(name[start:]) for name in self.names[: len(listed)]]
        return len(listed) if listed == bare else 0

    @cached_property
    def first_words(self) -> list[str]:
        """The first word of each name: `create` of `github__create_issue`."""
        found = (FIRST_WORD.match(name, len(self.prefix)) for name in self.names)
        return [match[0] if match else "" for match in found]

    @cached_property
    def word_counts(self) -> Counter[str]:
        return Counter(self.first_words)


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
    word_count: int = 0  # first words of other names rendered
    prefix: str = ""  # of all names, printed once

    def render(self) -> str:
        # Words that the names share are of use only before names.
        prefix = self.prefix if self.name_count or not self.prefix else self.line.server_prefix
        total = len(self.line.names)
        noun = f"{'remaining ' if self.line.remaining else ''}tool{'' if total == 1 else 's'}"
        label = one_line(self.line.display_name)
        description = ""
        repeats_names = 0 < self.line.described_names <= self.name_count
        if self.described and not repeats_names:
            description = one_line(self.line.description)[:MAX_DESCRIPTION_LENGTH]
        if f"mcp:{label}" == self.line.group_id:  # the id says it already
            label = ""
        head = f" — {': '.join(filter(None, (label, description)))}" if label or description else ""
        text = f"- `{self.line.group_id}`{head} ({total} {noun}"
        text += f", {prefix}…)\n" if prefix else ")\n"
        if self.name_count:
            names = [name[len(prefix) :] for name in self.line.names[: self.name_count]]
            more = total - self.name_count
            text += f"  {', '.join(names)}{f', … {more} more' if more else ''}"
            text += f"{self._render_words(prefix)}\n"
        return text

    def _render_words(self, prefix: str) -> str:
        """Return the most frequent first words of the other names, with their numbers."""
        if not self.word_count:
            return ""
        counts = self.line.word_counts - Counter(self.line.first_words[: self.name_count])
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        shown = [(word, number) for word, number in ranked[: self.word_count] if number > 1]
        if len(ranked) < 2 or not shown:  # it would say nothing
            return ""
        full = self.line.prefix.removeprefix(prefix)
        listed = ", ".join(f"{full}{word}* ({number})" for word, number in shown)
        return f": {listed}{', …' if len(shown) < len(ranked) else ''}"


def catalog(groups: Sequence[GroupLine], *, header: str, budget: int) -> Catalog:
    """Render all names if the budget allows, otherwise shorten the largest groups first."""
    groups = [group for group in groups if group.names]
    if not groups:
        return Catalog("", 0, None)
    head = header.rstrip() + "\n\n"
    free = budget - count(head)
    prefixes = _safe_prefixes(groups)
    for _ in range(MAX_FITS):
        drafts = [
            _Draft(group, len(group.names), prefix=prefix)
            for group, prefix in zip(groups, prefixes, strict=True)
        ]
        _fit(drafts, free)
        text = head + "".join(draft.render() for draft in drafts if draft.included)
        dropped = sum(not draft.included for draft in drafts)
        if dropped:
            text += f"- … {dropped} more groups: use search_tools\n"
        tokens = count(text)
        if tokens <= budget or dropped == len(drafts):
            break
        free -= tokens - budget  # of the line above, and of tokens that span lines
    return Catalog(text, tokens, _left_out(drafts))


def shared_prefix(names: Sequence[str], server_prefix: str) -> str:
    """Return the server prefix and the words that all names begin with after it, if many do."""
    if not server_prefix or len(names) < MIN_NAMES_SHARING_WORDS:
        return server_prefix
    first, last = min(names), max(names)
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    common = first[: sum(1 for _ in pairs)]
    end = max(common.rfind("_"), common.rfind("-")) + 1
    if end <= len(server_prefix) or any(len(name) == end for name in names):
        return server_prefix
    return common[:end]


def _safe_prefixes(groups: Sequence[GroupLine]) -> list[str]:
    """Return the prefix that each group prints once: its longest, the server prefix, or none.

    A name without its prefix is never the name of another tool: a call by it runs that other tool.
    """
    full = {name for group in groups if not group.server_prefix for name in group.names}
    own = {name[len(group.server_prefix) :] for group in groups for name in group.names}
    return [_safe_prefix(group, full, own) for group in groups]


def _safe_prefix(group: GroupLine, full: Collection[str], own: Collection[str]) -> str:
    server_prefix, prefix = group.server_prefix, group.prefix
    if prefix != server_prefix and not any(name[len(prefix) :] in own for name in group.names):
        return prefix
    if server_prefix and any(name[len(server_prefix) :] in full for name in group.names):
        return ""
    return server_prefix


def group_lines(groups: Sequence[GroupLine], max_bytes: int) -> str:
    """Render the groups' lines without names, within `max_bytes`, then the number omitted."""
    lines = [_Draft(group, 0, prefix=group.prefix).render() for group in groups if group.names]
    sizes = [len(line.encode()) for line in lines]
    if sum(sizes) <= max_bytes:
        return "".join(lines)
    more = "- … {} more groups\n"
    free, included = max_bytes - len(more.format(len(lines)).encode()), 0
    while sizes[included] <= free:
        free -= sizes[included]
        included += 1
    return "".join(lines[:included]) + more.format(len(lines) - included)


def group_names(groups: Sequence[GroupLine], max_bytes: int) -> str:
    """Render the ids of the groups in one line, within `max_bytes`, then the number omitted."""
    names = [group.group_id for group in groups if group.names]
    for included in range(len(names), -1, -1):
        more = len(names) - included
        text = ", ".join([*names[:included], *([f"… {more} more"] if more else [])])
        if len(text.encode()) <= max_bytes:
            return text
    return ""


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
            break
        drafts[i] = replace(drafts[i], **change)
        cost = measure(drafts[i])
        total += cost - costs[i]
        costs[i] = cost
    _fill(drafts, largest_first, budget - sum(map(_cost, drafts)))


def _fill(drafts: list[_Draft], order: Sequence[int], free: int) -> None:
    """Give shortened groups more of their names, the smallest first, while they fit."""
    for i in reversed(order):
        draft = drafts[i]
        total = len(draft.line.names)
        if not draft.name_count or draft.name_count == total or free <= 0:
            continue
        filled = _fill_names(draft, free)
        if total - filled.name_count >= MIN_COUNTED_BY_WORD:
            filled = _fill_names(_fill_words(draft, free // 2), free, since=draft)
        drafts[i] = filled
        free -= _cost(filled) - _cost(draft)


def _fill_names(draft: _Draft, free: int, since: _Draft | None = None) -> _Draft:
    """Return the draft with as many names as fit into `free` tokens more than `since` has."""
    # A name and its comma are at least half a token.
    most = min(len(draft.line.names) - 1, draft.name_count + 2 * free)
    return _largest(draft, "name_count", most, free + _cost(since or draft))


def _fill_words(draft: _Draft, free: int) -> _Draft:
    most = min(MAX_WORDS, len(draft.line.word_counts))
    return _largest(draft, "word_count", most, free + _cost(draft))


def _largest(draft: _Draft, field: str, most: int, budget: int) -> _Draft:
    """Return the draft with the largest value of a field, up to `most`, that fits the budget."""
    low, high = getattr(draft, field), most
    while low < high:
        middle = (low + high + 1) // 2
        changes: dict[str, Any] = {field: middle}
        if _cost(replace(draft, **changes)) <= budget:
            low = middle
        else:
            high = middle - 1
    changes = {field: low}
    return replace(draft, **changes)


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


def name_in_words(name: str) -> str:
    """Return a tool's name as words: `create issue` of `create_issue`."""
    return one_line(name.replace("_", " ").replace("-", " "))


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


def shorten_search_response(response: dict[str, Any], max_tokens: int) -> None:
    """Shorten the sentences of a search response, then drop what is last, until it fits.

    All features but the first go before the names of further tools, the first one after them.
    """
    tools, more = response["tools"], response.get("more", [])
    features = response.get("features", [])
    sentences = [tool.get("description", "") for tool in tools]
    for length in SUMMARY_LENGTHS:
        if length < SUMMARY_LENGTHS[0]:
            for tool, sentence in zip(tools, sentences, strict=True):
                if sentence:
                    tool["description"] = summary(sentence, length)
        if count(canonical(response)) <= max_tokens:
            return
    while (more or features) and count(canonical(response)) > max_tokens:
        if len(features) > 1 or not more:
            del features[-1]
        else:
            del more[-1]
    if "features" in response and not features:
        del response["features"], response["features_message"]


def tool_object(
    name: str,
    description: str,
    schema: object,
    *,
    source: str,
    server: str = "",
    examples: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return a tool in the format of loads, the tools array and tool details."""
    tool: dict[str, Any] = {"name": name, "description": description, "parameters": schema}
    tool["source"] = source
    if examples:
        tool["input_examples"] = list(examples)
    return tool | {"mcpServer": server} if server else tool


def described_with_examples(tool: Mapping[str, Any]) -> str:
    """Return a tool's description with its examples, for formats without a field for them."""
    description: str = tool["description"]
    if not (examples := tool.get("input_examples")):
        return description
    return f"{description}\n\nExamples of arguments:\n{chr(10).join(map(canonical, examples))}"


def _object(properties: dict[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return schema | {"required": list(required)} if required else schema


def check_call(*, has_scripts: bool = False) -> dict[str, Any]:
    """Return the tool that gives the result of a call that waited for a person, or of a script."""
    text, wait = {"type": "string"}, {"type": "number", "description": "0 to 20"}
    if not has_scripts:
        schema = _object({"call_id": text, "wait_seconds": wait}, ["call_id"])
        description = "Get the result of a held call, or how it stands."
    else:
        schema = _object({"call_id": text, "run_id": text, "wait_seconds": wait})
        description = (
            "Get the result of a held call by its call_id, or of a script by its run_id, or how "
            "it stands."
        )
    return tool_object("check_call", description, schema, source="builtin")


def run_script() -> dict[str, Any]:
    """Return the tool that runs a script of calls."""
    source = {"type": "string", "description": "The last expression is the result"}
    language = {
        "type": "string",
        "enum": ["python", "typescript"],
        "description": TYPESCRIPT_DESCRIPTION,
    }
    schema = _object(
        {
            "code": source,
            "language": language,
            "input": {"description": "Any JSON value, which the script has as `input`"},
            "timeout": {"type": "number", "description": "Seconds, 1 to 60; default 60"},
        },
        ["code"],
    )
    return tool_object("run_script", SCRIPT_DESCRIPTION, schema, source="builtin")


def meta_tools(strategy: str, *, has_scripts: bool = False) -> list[dict[str, Any]]:
    """Return the tools that give access to all others."""
    text = {"type": "string"}
    languages = ["python", "typescript"]
    for_scripts = {
        "signatures": {**text, "enum": languages, "description": "As functions for scripts"}
    }
    detail = {**text, "enum": ["name", "summary", "full"]}
    tools = [
        (
            "search_tools",
            "Find tools by verb, object and product, as in 'create issue github'; one query for "
            "each need, several at once in queries.",
            _object(
                {
                    "query": text,
                    "queries": {"type": "array", "items": text, "maxItems": 4},
                    "pattern": {**text, "description": "RE2"},
                    "name": {**text, "description": "Exact name: loads the tool"},
                    "server": text,
                    "limit": {"type": "integer"},
                    "detail": detail,
                }
            ),
        ),
        (
            "load_tools",
            "Read schemas of a group's tools, all or those named."
            if strategy == "dispatch"
            else "Add a group's tools to yours, all or those named.",
            _object(
                {
                    "group_id": text,
                    "tool_names": {"type": "array", "items": text},
                    "confirm": {"type": "boolean"},
                    **(for_scripts if has_scripts else {}),
                },
                ["group_id"],
            ),
        ),
        (
            "get_tool_details",
            "Read one tool's definition, with its output.",
            _object({"name": text, "detail": detail}, ["name"]),
        ),
        (
            "call_read_only_tool",
            "Run a tool that only reads and is not in your tools.",
            _object({"name": text, "arguments": {"type": "object"}}, ["name"]),
        ),
        (
            "deferred_tool_call",
            "Run any tool that is not in your tools.",
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
