"""Read JSON as people keep it in files: comments, trailing commas, a byte order mark.

Pure. Says where a text is wrong by line and column, never what stood there: the text may hold
secrets. Keeps repeated keys apart instead of letting the last one win in silence.
"""

import json
import math
import re
from bisect import bisect_left
from typing import NoReturn

MAX_DEPTH = 32

_BLANK = re.compile(r"(?:[ \t\r\n]+|//[^\r\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*"')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,99})(\.[0-9]{1,99})?([eE][+-]?[0-9]{1,9})?(?![0-9.\w])")
_WORD = re.compile(r"\w+")
_WORDS = {"true": True, "false": False, "null": None}
_SURROGATE = re.compile("[\ud800-\udfff]")


class JsonMap(dict[str, object]):
    """An object whose first value of each key counts; later ones are in `repeated`."""

    def __init__(self) -> None:
        super().__init__()
        self.repeated: list[tuple[str, int]] = []  # key, line


class NotJson(Exception):
    """The text is not JSON, from this line and column on."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(f"Line {line}, column {column}: {message}")
        self.line = line
        self.column = column


def read(text: str) -> object:
    """Return the document as plain values, objects as `JsonMap`. Raises `NotJson` only."""
    return _Reader(text.removeprefix("\ufeff")).document()


def repeated_keys(value: object) -> list[tuple[str, int]]:
    """List each key that an object within this value names twice, with the line."""
    if isinstance(value, JsonMap):
        inner = [found for item in value.values() for found in repeated_keys(item)]
        return value.repeated + inner
    if isinstance(value, list):
        return [found for item in value for found in repeated_keys(item)]
    return []


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line_ends = [found.start() for found in re.finditer("\n", text)]

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        at = self.at if at is None else at
        line_start = self.text.rfind("\n", 0, at) + 1
        raise NotJson(message, self.line(at), at - line_start + 1)

    def line(self, at: int) -> int:
        return bisect_left(self.line_ends, at) + 1

    def document(self) -> object:
        if found := _SURROGATE.search(self.text):
            self.fail("half a character (a lone surrogate).", found.start())
        self.skip()
        if self.at == len(self.text):
            self.fail("nothing here to read.")
        value = self.value(0)
        self.skip()
        if self.at < len(self.text):
            self.fail("the document is complete before this, yet more text follows.")
        return value

    def skip(self) -> None:
        found = _BLANK.match(self.text, self.at)
        self.at = found.end() if found else self.at
        if self.text.startswith("/*", self.at):
            self.fail("a comment begins here and never ends.")

    def value(self, depth: int) -> object:
        if depth > MAX_DEPTH:
            self.fail(f"nested more than {MAX_DEPTH} levels deep.")
        first = self.text[self.at : self.at + 1]
        if first == "{":
            return self.map(depth)
        if first == "[":
            return self.list(depth)
        if first == '"':
            return self.string()
        return self.scalar()

    def scalar(self) -> object:
        if found := _NUMBER.match(self.text, self.at):
            number = float(found[0]) if found[1] or found[2] else int(found[0])
            if not math.isfinite(number):
                self.fail("a number too large to keep.")
            self.at = found.end()
            return number
        found = _WORD.match(self.text, self.at)
        if found and found[0] in _WORDS:
            self.at = found.end()
            return _WORDS[found[0]]
        if self.text.startswith("'", self.at):
            self.fail("text stands in double quotes, not single ones.")
        if self.at == len(self.text):
            self.fail("the text ends here, but a value is still missing.")
        return self.fail("expected a value: text in double quotes, a number, { or [.")

    def string(self) -> str:
        found = _STRING.match(self.text, self.at)
        if not found:
            self.fail("this text has no closing quote on its line.")
        try:
            text = str(json.loads(found[0]))
        except json.JSONDecodeError as error:
            self.fail("a backslash that starts no known escape; write \\\\.", self.at + error.pos)
        if _SURROGATE.search(text):
            self.fail("this text holds half a character (a lone surrogate).")
        self.at = found.end()
        return text

    def map(self, depth: int) -> JsonMap:
        result = JsonMap()
        start = self.at
        self.at += 1
        while not self.closes("}", start):
            key_at = self.at
            if not self.text.startswith('"', self.at):
                self.fail("expected a name in double quotes, or }.")
            key = self.string()
            self.skip()
            if not self.text.startswith(":", self.at):
                self.fail("expected : after the name.")
            self.at += 1
            self.skip()
            value = self.value(depth + 1)
            if key in result:
                result.repeated.append((key, self.line(key_at)))
            else:
                result[key] = value
            self.comma("}")
        return result

    def list(self, depth: int) -> list[object]:
        result: list[object] = []
        start = self.at
        self.at += 1
        while not self.closes("]", start):
            result.append(self.value(depth + 1))
            self.comma("]")
        return result

    def closes(self, bracket: str, start: int) -> bool:
        self.skip()
        if self.at == len(self.text):
            self.fail(f"the text ends, but the bracket of line {self.line(start)} is still open.")
        if self.text.startswith(bracket, self.at):
            self.at += 1
            return True
        return False

    def comma(self, bracket: str) -> None:
        """Pass the comma. It may stand before the closing bracket too, as VS Code allows."""
        self.skip()
        if self.text.startswith(",", self.at):
            self.at += 1
        elif self.at < len(self.text) and not self.text.startswith(bracket, self.at):
            self.fail(f"expected a comma or {bracket}.")
