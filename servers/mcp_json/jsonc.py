"""JSONC parser: JSON with comments, trailing commas and a byte order mark.

Pure. Errors have line and column but never quote the text, which may contain secrets. Duplicate
keys are recorded instead of silently overwriting each other.
"""

import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import NoReturn

MAX_DEPTH = 32

_BLANK = re.compile(r"(?:[ \t\r\n]+|//[^\r\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*"')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,99})(\.[0-9]{1,99})?([eE][+-]?[0-9]{1,9})?(?![0-9.\w])")
_KEYWORD = re.compile(r"\w+")
_KEYWORDS = {"true": True, "false": False, "null": None}
_SURROGATE = re.compile("[\ud800-\udfff]")


class JsonMap(dict[str, object]):
    """A JSON object. The first value of a key counts; duplicates are in `repeated`."""

    def __init__(self) -> None:
        super().__init__()
        self.repeated: list[tuple[str, int]] = []  # key, line


class NotJson(Exception):
    """A syntax error, with its line and column."""


def parse(text: str) -> object:
    """Return the document as plain values, objects as `JsonMap`. Raises `NotJson` only."""
    return _Parser(text.removeprefix("\ufeff")).parse_document()


def repeated_keys(value: object) -> list[tuple[str, int]]:
    """Return the duplicate keys of this value and of all nested objects, with their lines."""
    if isinstance(value, JsonMap):
        nested = [key for item in value.values() for key in repeated_keys(item)]
        return value.repeated + nested
    if isinstance(value, list):
        return [key for item in value for key in repeated_keys(item)]
    return []


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.line_ends = [match.start() for match in re.finditer("\n", text)]

    def fail(self, message: str, position: int | None = None) -> NoReturn:
        position = self.position if position is None else position
        column = position - self.text.rfind("\n", 0, position)
        raise NotJson(f"Line {self.line_number(position)}, column {column}: {message}")

    def line_number(self, position: int) -> int:
        return bisect_left(self.line_ends, position) + 1

    def parse_document(self) -> object:
        if match := _SURROGATE.search(self.text):
            self.fail("lone surrogate.", match.start())
        self.skip_blank()
        if self.position == len(self.text):
            self.fail("the text is empty.")
        value = self.parse_value(0)
        self.skip_blank()
        if self.position < len(self.text):
            self.fail("unexpected text after the end of the document.")
        return value

    def skip_blank(self) -> None:
        match = _BLANK.match(self.text, self.position)
        self.position = match.end() if match else self.position
        if self.text.startswith("/*", self.position):
            self.fail("unterminated comment.")

    def parse_value(self, depth: int) -> object:
        if depth > MAX_DEPTH:
            self.fail(f"nested more than {MAX_DEPTH} levels deep.")
        first = self.text[self.position : self.position + 1]
        if first == "{":
            return self.parse_object(depth)
        if first == "[":
            return self.parse_array(depth)
        if first == '"':
            return self.parse_string()
        return self.parse_scalar()

    def parse_scalar(self) -> object:
        if match := _NUMBER.match(self.text, self.position):
            number = float(match[0]) if match[1] or match[2] else int(match[0])
            if not math.isfinite(number):
                self.fail("the number is too large.")
            self.position = match.end()
            return number
        match = _KEYWORD.match(self.text, self.position)
        if match and match[0] in _KEYWORDS:
            self.position = match.end()
            return _KEYWORDS[match[0]]
        if self.text.startswith("'", self.position):
            self.fail("use double quotes instead of single quotes.")
        if self.position == len(self.text):
            self.fail("unexpected end of text: expected a value.")
        return self.fail("expected a value: a string in double quotes, a number, { or [.")

    def parse_string(self) -> str:
        match = _STRING.match(self.text, self.position)
        if not match:
            self.fail("unterminated string.")
        try:
            text = str(json.loads(match[0]))
        except json.JSONDecodeError as error:
            self.fail("invalid escape; write a backslash as \\\\.", self.position + error.pos)
        if _SURROGATE.search(text):
            self.fail("the string contains a lone surrogate.")
        self.position = match.end()
        return text

    def parse_object(self, depth: int) -> JsonMap:
        result = JsonMap()
        for key_position in self.iterate_items("}"):
            if not self.text.startswith('"', self.position):
                self.fail("expected a key in double quotes, or }.")
            key = self.parse_string()
            self.skip_blank()
            if not self.text.startswith(":", self.position):
                self.fail("expected : after the key.")
            self.position += 1
            self.skip_blank()
            value = self.parse_value(depth + 1)
            if key in result:
                result.repeated.append((key, self.line_number(key_position)))
            else:
                result[key] = value
        return result

    def parse_array(self, depth: int) -> list[object]:
        return [self.parse_value(depth + 1) for _ in self.iterate_items("]")]

    def iterate_items(self, bracket: str) -> Iterator[int]:
        """Yield the position of each item, for the caller to parse. Allows a trailing comma."""
        start = self.position
        self.position += 1
        while True:
            self.skip_blank()
            if self.position == len(self.text):
                line = self.line_number(start)
                self.fail(f"unexpected end of text: the bracket on line {line} is not closed.")
            if self.text.startswith(bracket, self.position):
                self.position += 1
                return
            yield self.position
            self.skip_blank()
            if self.text.startswith(",", self.position):
                self.position += 1
            elif self.text[self.position : self.position + 1] not in (bracket, ""):
                self.fail(f"expected a comma or {bracket}.")
