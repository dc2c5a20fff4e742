"""Columns of tables whose header has the name of a secret: CSV, tabs, Markdown, psql, JSON rows."""

from collections.abc import Iterator
from typing import Any

import re2

from toolcrib.lib.redaction.names import is_secret_name, is_secret_value
from toolcrib.lib.redaction.patterns import MASK

# A header line: names with one delimiter, without spaces; or cells between bars over a rule.
HEADER = re2.compile(
    rb"(?m)^(?:(\"?[\w.\-]+\"?(?:[,;\t]\"?[\w.\-]+\"?)+)[ \t]*\r?$"
    rb"|([ \t]*\|?[^|\r\n]*\|[^\r\n]*)\r?\n[ \t]*[|+]?[ \t]*:?-[\-+|: \t]*\r?$)"
)
NEWLINE = re2.compile(rb"\r?\n")
CELLS = {
    mark: re2.compile(rb'[ ]*(?:"(?:[^"]|"")*"[ ]*|[^%s\r\n]*)' % mark) for mark in (b",", b";")
} | {
    b"\t": re2.compile(rb"[^\t\r\n]*"),
    b"|": re2.compile(rb"[^|\r\n]*"),
}
CELL_NAME = re2.compile(rb"\"?[\w.\-]+\"?")
COLUMN = re2.compile(rb"[\w.\-]{1,60}(?: [\w.\-]{1,60})?")
AROUND = b" \t\"'`*"
NOT_SECRET = {b"", b"null", b"none", b"true", b"false", MASK}
COLUMN_NAMES = ("columns", "fields", "headers", "header")  # beside ROW_NAMES
JSON_TABLE = re2.compile(
    rf"^\s*[{{\[](?s:.*)\\*\"(?:{'|'.join(COLUMN_NAMES)})\\*\"\s*:\s*\[".encode()
)
ROW_NAMES = ("rows", "data", "values", "records")


def redact_tables(data: bytes) -> bytes:
    """Mask the cells below the names of secrets, in every table of a text."""
    parts, copied, position = [], 0, 0
    while (header := HEADER.search(data, position)) is not None:
        position = header.end()
        text = header[1] if header[1] is not None else header[2]
        delimiter = b"|" if header[1] is None else text[len(CELL_NAME.match(text)[0]) :][:1]
        start = header.start(1 if header[1] is not None else 2)
        cells = [data[a:b].strip(AROUND) for a, b in _cells(data, start, delimiter)]
        names = {at: name.decode() for at, name in enumerate(cells) if _is_secret(name)}
        while names and (newline := NEWLINE.match(data, position)) is not None:
            row = list(_cells(data, newline.end(), delimiter))
            if len(row) != len(cells):
                break
            position = row[-1][1]
            for at, name in names.items():
                first, end = _trim(data, *row[at])
                if _is_value(name, data[first:end]):
                    parts += [data[copied:first], MASK]
                    copied = end
    return b"".join((*parts, data[copied:])) if parts else data


def _cells(data: bytes, position: int, delimiter: bytes) -> Iterator[tuple[int, int]]:
    """Yield where the cells of a line start and end."""
    while True:
        cell = CELLS[delimiter].match(data, position)
        yield cell.span()
        if data[cell.end() : cell.end() + 1] != delimiter:
            return
        position = cell.end() + 1


def _trim(data: bytes, start: int, end: int) -> tuple[int, int]:
    cell = data[start:end]
    left = len(cell) - len(cell.lstrip(AROUND))
    return start + left, max(start + left, start + len(cell.rstrip(AROUND)))


def _is_secret(name: bytes) -> bool:
    return COLUMN.fullmatch(name) is not None and is_secret_name(name.decode())


def _is_value(name: str, value: bytes) -> bool:
    is_number = value.replace(b".", b"").isdigit()
    return value.lower() not in NOT_SECRET and (not is_number or is_secret_value(name, 0))


def secret_columns(value: dict[str, Any]) -> dict[int, str]:
    """Return the secret names among the columns that an object with rows lists, by position."""
    columns = next((value[name] for name in COLUMN_NAMES if name in value), None)
    if not isinstance(columns, list):
        return {}
    names = [column.get("name") if isinstance(column, dict) else column for column in columns]
    return {
        at: name for at, name in enumerate(names) if isinstance(name, str) and is_secret_name(name)
    }
