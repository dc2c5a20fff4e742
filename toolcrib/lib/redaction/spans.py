"""Where a value starts and ends in a text: in quotes, in brackets, on lines, or as one word."""

from typing import Any

import re2

QUOTE = re2.compile(rb"\\*[\"']|&(?:quot|apos|#0*3[49]|#x0*2[27]);")  # also in HTML
BRACKET = re2.compile(rb"[\[\]{}]")
# Without quotes a value ends at whitespace or at a delimiter; a comma or bracket may be part of it.
UNQUOTED = re2.compile(rb"(?:[^\s;&\"'<>,()\[\]{}]|[,()\[\]{}][^\s;&\"'<>,()\[\]{}])+")
# A newline, or in JSON inside a text what stands for one.
NEWLINE = rb"(?:\r?\n|\\+r\\+n|\\+n)"
# After a name: `|` or `>` and the lines of a block of YAML, or nothing and the value below.
BLOCK = re2.compile(rb"[|>][+\-\d]{0,2}[ \t]*" + NEWLINE)
LINE_END = re2.compile(rb"[ \t]*" + NEWLINE + rb"(?:[ \t]*" + NEWLINE + rb")?")
INDENTATION = re2.compile(rb"[ \t]*")
BEFORE_NAME = b" \t-\"'\\"
LINE = re2.compile(rb"[^\r\n]*")
ESCAPED_LINE = re2.compile(rb"(?:[^\r\n\\\"]|\\[^rn])*")
NEXT = re2.compile(rb"[ \t]*(" + NEWLINE + rb")")
# Below a name: one word, a quoted text or an item with a name, maybe in a list; no sentence.
ENTRY = re2.compile(
    rb"(?:- +)?(?:(?:[\w.\-]+:[ \t]+)?(\\*[\"'])"
    rb"|[\w.\-]+:(?:[ \t]+[^\s\"'\\][^\r\n\"'\\]*)?|[^\s\"'\\:]+)"
)
AFTER_ENTRY = re2.compile(rb"[ \t]*(?:" + NEWLINE + rb"|\\*[\"']|\z)")


def quoted_end(data: bytes, opening: Any) -> int:
    """Return the end of a quoted value; inside nested JSON its quotes have backslashes."""
    if opening[0].startswith(b"&"):
        end = data.find(opening[0], opening.end())
        return end if end >= 0 else len(data)
    backslashes, mark = len(opening[0]) - 1, opening[0][-1:]
    position = opening.end()
    while (position := data.find(mark, position)) >= 0:
        before = position
        while before > opening.end() and data[before - 1 : before] == b"\\":
            before -= 1
        count = position - before
        if count <= backslashes if backslashes else count % 2 == 0:
            return before if backslashes else position
        position += 1
    return len(data)


def bracket_end(data: bytes, start: int) -> int:
    depth = 0
    for match in BRACKET.finditer(data, start):
        depth += 1 if match[0] in b"[{" else -1
        if depth == 0:
            return int(match.end())
    return len(data)


def indentation(data: bytes, name_start: int) -> int | None:
    """Return the column of a name that starts its line or text; None for others."""
    if data[name_start - 1 : name_start + 1] == b"\\n":  # a newline, and not a part of the name
        return 0
    start = name_start
    while start and data[start - 1] in BEFORE_NAME:
        start -= 1
    width = len(data[start:name_start].strip(b"\"'\\"))
    is_escaped = data[start - 1 : start] == b"n" and data[start - 2 : start - 1] == b"\\"
    is_first = start == 0 or data[start - 1] in b"\r\n" or is_escaped
    is_quoted = data[start : start + 1] in (b'"', b"'", b"\\")
    return width if is_first or (is_quoted and not data[start - 1 : start].isalnum()) else None


def block_end(data: bytes, start: int, width: int) -> int:
    """Return the end of the lines that are indented deeper than `width`."""
    line = ESCAPED_LINE if data[start - 1 : start] == b"n" else LINE
    position = end = start
    while True:
        indent = INDENTATION.match(data, position)
        content = line.match(data, indent.end())
        if content[0] and len(indent[0]) <= width:
            return end
        if content[0]:
            end = content.end()
        following = NEXT.match(data, content.end())
        if following is None:
            return end
        position = following.end()


def entries(data: bytes, start: int, width: int) -> tuple[int, int]:
    """Return where entries of YAML below a name start and end; empty if there are none."""
    first, end, position = start, start, start
    while True:
        indent = INDENTATION.match(data, position)
        entry = ENTRY.match(data, indent.end())
        is_listed = entry is not None and entry[0].startswith(b"- ")
        if entry is None or len(indent[0]) < width + (not is_listed):
            break
        entry_end = entry.end()
        if entry[1] is not None:
            opening = QUOTE.match(data, entry.start(1))
            entry_end = min(quoted_end(data, opening) + len(opening[0]), len(data))
        after = AFTER_ENTRY.match(data, entry_end)
        if after is None:
            break
        if end == start:
            first = indent.end()
        end = position = entry_end
        following = NEXT.match(data, position)
        if following is None:
            break
        position = following.end()
    return first, end
