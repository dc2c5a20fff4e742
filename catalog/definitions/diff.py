"""Word-level diff of two whole tool definitions, for reviews. Pure.

The cost is bounded for any input: beyond `MAX_EDITS` a text counts as rewritten, and beyond
`MAX_LINES` the remaining lines of a section are counted instead of listed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolcrib.lib.json_codec import canonical

Span = tuple[str, str]  # (same | added | removed, text)
MAX_EDITS = 600
MAX_FACT_EDITS = 60  # lower, since a schema has many facts
TEXT_KEYS = ("description", "title", "type")  # plain; all others as JSON, so "1" differs from 1
MAX_LINES = 300
MAX_DEPTH = 70
WORDS = re.compile(r"\s+|\w+|[^\w\s]")
PLAIN_NAME = re.compile(r"[\w-]+")
LEADING_FACTS = ("type", "required", "description", "enum", "default")  # others follow by name
KEYS_WITH_SECTION = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")


@dataclass(frozen=True)
class Fact:
    """One changed property of a schema field, such as its type or description."""

    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Line:
    """One field of a schema that was added, removed or changed."""

    kind: str
    path: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Section:
    """One part of a definition that differs: text as spans, or a schema as lines."""

    title: str
    spans: tuple[Span, ...] = ()
    lines: tuple[Line, ...] = ()
    omitted_lines: int = 0


def compare(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> list[Section]:
    """Return the parts that differ. Without `before`, everything is new."""
    old = before or {}
    sections = [
        _text("Name", old.get("name"), after.get("name")),
        _text("Title", old.get("title"), after.get("title")),
        _text("Description", old.get("description"), after.get("description")),
        _schema("Input schema", old.get("inputSchema"), after.get("inputSchema")),
        _annotations(old.get("annotations"), after.get("annotations")),
        _schema("Output schema", old.get("outputSchema"), after.get("outputSchema")),
    ]
    for key in sorted((set(old) | set(after)) - set(KEYS_WITH_SECTION)):
        sections.append(_text(f"Field {key}", _json(old.get(key)), _json(after.get(key))))
    return [section for section in sections if section.spans or section.lines]


def diff_words(before: str, after: str, *, limit: int = MAX_EDITS) -> tuple[Span, ...]:
    """Compare two texts word by word; beyond `limit` edits the text counts as rewritten."""
    return tuple(_join_spans(_edits(WORDS.findall(before), WORDS.findall(after), limit)))


def _text(title: str, before: object, after: object) -> Section:
    old, new = _as_text(before), _as_text(after)
    return Section(title, () if old == new else diff_words(old, new))


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: object) -> str:
    return "" if value is None else canonical(value)


def _schema(title: str, before: object, after: object) -> Section:
    old, new = dict(_nodes(before)), dict(_nodes(after))
    lines: list[Line] = []
    differing = [
        path
        for path in [*old, *(path for path in new if path not in old)]
        if old.get(path) != new.get(path)
    ]
    for path in differing[:MAX_LINES]:
        before_facts, after_facts = old.get(path), new.get(path)
        kind = "changed" if before_facts is not None else "added"
        if after_facts is None:
            kind = "removed"
        lines.append(Line(kind, path, tuple(_facts(before_facts or {}, after_facts or {}))))
    omitted = max(0, len(differing) - MAX_LINES)
    return Section(title, lines=tuple(lines), omitted_lines=omitted)


def _facts(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Fact]:
    other_names = sorted({*before, *after} - set(LEADING_FACTS))
    for name in (*LEADING_FACTS, *other_names):
        old, new = before.get(name, ""), after.get(name, "")
        if old != new:
            yield Fact(name, diff_words(old, new, limit=MAX_FACT_EDITS))


def _nodes(schema: object, path: str = "", required: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield (path, facts) per schema node: fields as `place.lat`, list items as `places[]`."""
    if schema is None:
        return
    if not isinstance(schema, dict) or path.count(".") + path.count("[]") > MAX_DEPTH:
        yield path or "(root)", {"schema": _json(schema)}
        return
    properties = schema.get("properties")
    fields = properties if isinstance(properties, dict) else {}
    listed = schema.get("required")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    facts = {
        key: _as_text(value) if key in TEXT_KEYS else _json(value)
        for key, value in schema.items()
        if key not in ("properties", "items", "required", "$defs", "definitions")
    }
    if required:
        facts["required"] = "required"
    if undeclared := sorted(set(names) - set(fields)):
        facts["also required"] = ", ".join(undeclared)
    yield path or "(root)", facts
    for name, sub in sorted(fields.items()):
        segment = _path_segment(name)
        yield from _nodes(sub, f"{path}.{segment}" if path else segment, name in names)
    if "items" in schema:
        yield from _nodes(schema["items"], f"{path}[]")
    for key in ("$defs", "definitions"):
        defined = schema.get(key)
        for name, sub in sorted(defined.items()) if isinstance(defined, dict) else ():
            yield from _nodes(sub, f"{path}#{key}/{_path_segment(name)}")


def _path_segment(name: str) -> str:
    # Quoted, so that a field called `a.b` differs from the field b of a.
    return name if PLAIN_NAME.fullmatch(name) else canonical(name)


def _annotations(before: object, after: object) -> Section:
    old = before if isinstance(before, dict) else {}
    new = after if isinstance(after, dict) else {}
    lines = [
        Line("changed", key, (Fact("", (("removed", was), ("same", " "), ("added", now))),))
        for key in sorted({*old, *new})
        if (was := _annotation(old.get(key))) != (now := _annotation(new.get(key)))
    ]
    return Section("Annotations", lines=tuple(lines[:MAX_LINES]))


def _annotation(value: object) -> str:
    return "not set" if value is None else canonical(value)


def _edits(old: Sequence[str], new: Sequence[str], limit: int) -> Iterator[Span]:
    """Trim the common prefix and suffix, and find the shortest edit of the middle."""
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    old_middle, new_middle = old[start : len(old) - end], new[start : len(new) - end]
    yield from (("same", word) for word in old[:start])
    edits = _shortest_edit(old_middle, new_middle, limit)
    if edits is None:
        yield from (("removed", word) for word in old_middle)
        yield from (("added", word) for word in new_middle)
    else:
        yield from edits
    yield from (("same", word) for word in old[len(old) - end :])


def _shortest_edit(old: Sequence[str], new: Sequence[str], limit: int) -> list[Span] | None:
    """Run Myers' greedy diff; return None beyond `limit` edits, to bound the cost."""
    furthest = {1: 0}
    trail: list[dict[int, int]] = []
    for edits in range(min(len(old) + len(new), limit) + 1):
        trail.append(dict(furthest))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (
                diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1]
            )
            x = furthest[diagonal + 1] if down else furthest[diagonal - 1] + 1
            y = x - diagonal
            while x < len(old) and y < len(new) and old[x] == new[y]:
                x, y = x + 1, y + 1
            furthest[diagonal] = x
            if x >= len(old) and y >= len(new):
                return _backtrack(old, new, trail)
    return None


def _backtrack(
    old: Sequence[str], new: Sequence[str], trail: Sequence[dict[int, int]]
) -> list[Span]:
    x, y, spans = len(old), len(new), list[Span]()
    for edits in range(len(trail) - 1, -1, -1):
        furthest, diagonal = trail[edits], x - y
        down = diagonal == -edits or (
            diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1]
        )
        previous = diagonal + 1 if down else diagonal - 1
        before_x = furthest[previous] if edits else 0
        before_y = before_x - previous if edits else 0
        while x > before_x and y > before_y:
            x, y = x - 1, y - 1
            spans.append(("same", old[x]))
        if edits:
            spans.append(("added", new[before_y]) if down else ("removed", old[before_x]))
        x, y = before_x, before_y
    return spans[::-1]


def _join_spans(steps: Iterator[Span]) -> Iterator[Span]:
    """Join words into spans. Whitespace between two changes becomes part of both."""
    removed = added = space = same = ""
    for kind, word in steps:
        if kind == "same":
            if (removed or added) and word.isspace() and not space:
                space = word
                continue
            if removed or added:
                yield from _changes(removed, added)
                removed = added = ""
            same, space = same + space + word, ""
            continue
        if same:
            yield "same", same
            same = ""
        if space:
            removed, added, space = removed + space, added + space, ""
        removed += word if kind == "removed" else ""
        added += word if kind == "added" else ""
    yield from _changes(removed, added)
    if same + space:
        yield "same", same + space


def _changes(removed: str, added: str) -> Iterator[Span]:
    if removed:
        yield "removed", removed
    if added:
        yield "added", added
