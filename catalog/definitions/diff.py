"""Say how two definitions of a tool differ, for a person who must decide. Pure.

Nothing of a change is left out: what has no section of its own is compared as JSON text. Cost is
bounded whatever a server sends: past `MAX_EDITS` a text counts as rewritten, past `MAX_LINES`
the rest of a section is counted instead of listed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolcrib.lib.json_codec import canonical

Span = tuple[str, str]  # (same | added | removed, text)
MAX_EDITS = 600
FACT_EDITS = 60  # a schema has many facts
TEXTS = ("description", "title", "type")  # shown as written; all else as JSON, so "1" is not 1
MAX_LINES = 300
MAX_DEPTH = 70
WORDS = re.compile(r"\s+|\w+|[^\w\s]")
PLAIN_NAME = re.compile(r"[\w-]+")
SAID = {True: "true", False: "false", None: "not said"}
# What a schema node is made of, in the order people ask for it; the rest follows by name.
FIRST_FACTS = ("type", "required", "description", "enum", "default")
OWN_SECTION = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")


@dataclass(frozen=True)
class Fact:
    """One thing a schema says about a field: its type, that it is required, its description."""

    word: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Line:
    """One field of a schema that was added, removed or changed."""

    kind: str
    path: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Section:
    """One part of a definition that differs: a text in spans, or a schema in lines."""

    title: str
    spans: tuple[Span, ...] = ()
    lines: tuple[Line, ...] = ()
    left_out: int = 0


def compare(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> list[Section]:
    """List the parts that differ. Without a `before`, everything is new."""
    old = before or {}
    sections = [
        _text("Name", old.get("name"), after.get("name")),
        _text("Title", old.get("title"), after.get("title")),
        _text("Description", old.get("description"), after.get("description")),
        _schema("Input schema", old.get("inputSchema"), after.get("inputSchema")),
        _annotations(old.get("annotations"), after.get("annotations")),
        _schema("Output schema", old.get("outputSchema"), after.get("outputSchema")),
    ]
    for key in sorted((set(old) | set(after)) - set(OWN_SECTION)):
        sections.append(_text(f"Field {key}", _json(old.get(key)), _json(after.get(key))))
    return [section for section in sections if section.spans or section.lines]


def words(before: str, after: str, *, limit: int = MAX_EDITS) -> tuple[Span, ...]:
    """Compare two texts word by word; past `limit` edits the second counts as rewritten."""
    return tuple(_joined(_edits(WORDS.findall(before), WORDS.findall(after), limit)))


def _text(title: str, before: object, after: object) -> Section:
    old, new = _as_text(before), _as_text(after)
    return Section(title, () if old == new else words(old, new))


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: object) -> str:
    return "" if value is None else canonical(value)


# --- Schemas ------------------------------------------------------------------------------------


def _schema(title: str, before: object, after: object) -> Section:
    old, new = dict(_nodes(before)), dict(_nodes(after))
    lines: list[Line] = []
    differing = [
        path
        for path in [*old, *(path for path in new if path not in old)]
        if old.get(path) != new.get(path)
    ]
    for path in differing[:MAX_LINES]:
        was, now = old.get(path), new.get(path)
        if was != now:
            kind = "changed" if was is not None and now is not None else "added"
            kind = "removed" if now is None else kind
            lines.append(Line(kind, path, tuple(_facts(was or {}, now or {}))))
    return Section(title, lines=tuple(lines), left_out=max(0, len(differing) - MAX_LINES))


def _facts(was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Fact]:
    names = sorted({*was, *now} - set(FIRST_FACTS))
    for word in (*FIRST_FACTS, *names):
        old, new = was.get(word, ""), now.get(word, "")
        if old != new:
            yield Fact(word, words(old, new, limit=FACT_EDITS))


def _nodes(schema: object, path: str = "", required: bool = False) -> Iterator[tuple[str, Any]]:
    """Walk a schema as (path, facts). Fields are `place.lat`, members of a list `places[]`."""
    if schema is None:
        return
    if not isinstance(schema, dict) or path.count(".") + path.count("[]") > MAX_DEPTH:
        yield path or "(whole)", {"schema": _json(schema)}
        return
    properties = schema.get("properties")
    fields = properties if isinstance(properties, dict) else {}
    needed = schema.get("required")
    names = [name for name in needed if isinstance(name, str)] if isinstance(needed, list) else []
    facts = {
        key: _as_text(value) if key in TEXTS else _json(value)
        for key, value in schema.items()
        if key not in ("properties", "items", "required", "$defs", "definitions")
    }
    if required:
        facts["required"] = "required"
    if strangers := sorted(set(names) - set(fields)):
        facts["also required"] = ", ".join(strangers)
    yield path or "(whole)", facts
    for name, sub in sorted(fields.items()):
        step = _step(name)
        yield from _nodes(sub, f"{path}.{step}" if path else step, name in names)
    if "items" in schema:
        yield from _nodes(schema["items"], f"{path}[]")
    for key in ("$defs", "definitions"):
        defined = schema.get(key)
        for name, sub in sorted(defined.items()) if isinstance(defined, dict) else ():
            yield from _nodes(sub, f"{path}#{key}/{_step(name)}")


def _step(name: str) -> str:
    # A field called `a.b` must not hide the field b of a.
    return name if PLAIN_NAME.fullmatch(name) else canonical(name)


def _annotations(before: object, after: object) -> Section:
    old = before if isinstance(before, dict) else {}
    new = after if isinstance(after, dict) else {}
    lines = [
        Line("changed", key, (Fact("", (("removed", was), ("same", " "), ("added", now))),))
        for key in sorted({*old, *new})
        if (was := _said(old.get(key))) != (now := _said(new.get(key)))
    ]
    return Section("What the server claims", lines=tuple(lines[:MAX_LINES]))


def _said(value: object) -> str:
    return SAID[value] if value is None or isinstance(value, bool) else _json(value)


# --- Words --------------------------------------------------------------------------------------


def _edits(old: Sequence[str], new: Sequence[str], limit: int) -> Iterator[Span]:
    """Trim what is alike at both ends, and find the shortest edit of the middle."""
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    was, now = old[start : len(old) - end], new[start : len(new) - end]
    yield from (("same", word) for word in old[:start])
    steps = _shortest(was, now, limit)
    if steps is None:
        yield from (("removed", word) for word in was)
        yield from (("added", word) for word in now)
    else:
        yield from steps
    yield from (("same", word) for word in old[len(old) - end :])


def _shortest(old: Sequence[str], new: Sequence[str], limit: int) -> list[Span] | None:
    """Myers' greedy algorithm; None past the limit, so that its cost has a bound."""
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
                return _walk_back(old, new, trail)
    return None


def _walk_back(
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


def _joined(steps: Iterator[Span]) -> Iterator[Span]:
    """Join words into spans. A mere space between two changes belongs to both of them."""
    removed, added, space = "", "", ""
    same = ""
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
