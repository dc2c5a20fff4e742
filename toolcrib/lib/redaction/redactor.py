"""Redaction of secrets in JSON values and texts, by name and by form.

Most payloads contain nothing that looks like a secret: one search over their JSON tells, without
parsing. The rest is walked value by value.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import re2

from toolcrib.lib.redaction.names import is_header_name, is_secret_name, is_secret_value
from toolcrib.lib.redaction.patterns import MASK, RULES, SUSPICIOUS, compile_patterns

MASKED = MASK.decode()
UNLIMITED = 1 << 60
# A name and what separates it from its value: of a pair of name and value in JSON or XML, of a
# member of an object, of an assignment, of a command-line option, of an element of XML.
ASSIGNMENT = re2.compile(
    rb"[\"'](?:name|key|header)\\*[\"'][ \t]*:[ \t]*\\*[\"']([\w.\-]+)\\*[\"'][ \t]*,[ \t]*"
    rb"\\*[\"']value\\*[\"'][ \t]*:[ \t]*"
    rb"|(?:name|key)=\\*[\"']([\w.\-]+)\\*[\"'][ \t]+value="
    rb"|\\*[\"']([^\"'\\]{1,200})\\*[\"'][ \t]*(?:=>|:)[ \t]*"
    rb"|((?:(?i:api|access|private|secret|encryption|session|connection|card|credit) )?"
    rb"[A-Za-z_][\w.\-]*)"
    rb"\\*[\"']?[ \t]*(?:=>|:=|[:=])[ \t]*"
    rb"|--([A-Za-z][\w\-]*)(?:\\*[\"'][ \t]*,[ \t]*|[ \t]+)"
    rb"|<([A-Za-z_][\w.\-]*)(?:[ \t][^<>]*)?>"
)
ELEMENT = 6  # the group of its name
QUOTE = re2.compile(rb"\\*[\"']")
BRACKET = re2.compile(rb"[\[\]{}]")
# Without quotes a value ends at whitespace or at a delimiter; a comma or bracket may be part of it.
UNQUOTED = re2.compile(rb"(?:[^\s;&\"'<>,()\[\]{}]|[,()\[\]{}][^\s;&\"'<>,()\[\]{}])+")
CONTENT = re2.compile(rb"[^<]+")  # of an element of XML
LINE = re2.compile(rb"[^\r\n\"'\\]+")
NUMBER = re2.compile(rb"[\d.,]+")
NOT_SECRET = {b"null", b"none", b"true", b"false", b"undefined", MASK}
PAIR_NAMES = ("name", "key", "header")  # beside `value`, in lists of pairs
_operator_patterns: Any = None


def set_operator_patterns(patterns: Sequence[str]) -> None:
    """Redact what these RE2 patterns match, in this process. Raises Invalid."""
    global _operator_patterns
    _operator_patterns = compile_patterns(patterns)
    _redact_key.cache_clear()


def may_contain_secret(json_text: bytes) -> bool:
    """Return whether JSON may contain a secret; if not, redaction would not change it."""
    # Operators write patterns for texts, not for the escapes of JSON.
    return _operator_patterns is not None or SUSPICIOUS.search(json_text) is not None


def redact(value: Any, limit: int = UNLIMITED) -> Any:
    """Return a copy of a JSON value with its secrets masked.

    With a limit, about that many characters are copied, in the order of canonical JSON.
    """
    return _Walk(limit).copy(value)


def redact_text(text: str) -> str:
    """Return a text with its secrets masked. JSON inside it is understood at any nesting."""
    data = before = text.encode("utf-8", "surrogatepass")
    if SUSPICIOUS.search(data) is not None:
        for pattern, replace in RULES:
            data = _substitute(pattern, replace, data)
        data = _redact_assignments(data)
    if _operator_patterns is not None:
        data = _substitute(_operator_patterns, lambda match: MASK, data)
    return text if data is before else data.decode("utf-8", "surrogatepass")


@lru_cache(maxsize=4096)
def _redact_key(key: str) -> str:
    return redact_text(key)


class _Walk:
    def __init__(self, limit: int) -> None:
        self.left = limit

    def copy(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._copy_text(value)
        if isinstance(value, dict):
            return self._copy_object(value)
        if isinstance(value, list):
            return self._copy_list(value)
        self.left -= 2
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**11:
            return MASKED if redact_text(str(value)) != str(value) else value
        return value

    def _copy_text(self, text: str) -> str:
        if len(text) > self.left:  # what follows the last delimiter may be half of a secret
            text = redact_text(text[: max(self.left, 0)])
            text = text[: max(text.rfind(char) for char in " \n,;") + 1]
        else:
            text = redact_text(text)
        self.left -= len(text) + 3
        return text

    def _copy_object(self, value: dict[str, Any]) -> dict[str, Any]:
        copied: dict[str, Any] = {}
        pair = next((value[name] for name in PAIR_NAMES if isinstance(value.get(name), str)), "")
        for key in sorted(value) if self.left < UNLIMITED // 2 else value:
            if self.left <= 0:
                break
            item, name = value[key], pair if key == "value" and pair else key
            if is_secret_name(name) and is_secret_value(name, item):
                copied[_redact_key(key)] = MASKED
            else:
                copied[_redact_key(key)] = self.copy(item)
            self.left -= len(key) + 3
        return copied

    def _copy_list(self, value: list[Any]) -> list[Any]:
        copied: list[Any] = []
        option = ""  # the option before a value in a list of arguments
        for item in value:
            if self.left <= 0:
                break
            is_masked = option and is_secret_name(option) and is_secret_value(option, item)
            copied.append(MASKED if is_masked else self._copy_pair(item) or self.copy(item))
            is_option = isinstance(item, str) and item.startswith("-") and "=" not in item
            option = item if is_option else ""
        return copied

    def _copy_pair(self, item: Any) -> list[str] | None:
        """Return a masked copy of a pair in a list of pairs, such as headers; None for others."""
        if not (isinstance(item, list) and len(item) == 2):
            return None
        name, value = item
        if not (isinstance(name, str) and isinstance(value, str) and value):
            return None
        if not is_secret_name(name):
            return None
        self.left -= len(name) + 9
        return [self.copy(name), MASKED]


def _substitute(pattern: Any, replace: Any, data: bytes) -> bytes:
    parts, position = [], 0
    for match in pattern.finditer(data):
        parts += [data[position : match.start()], replace(match)]
        position = match.end()
    return b"".join((*parts, data[position:])) if parts else data


def _redact_assignments(data: bytes) -> bytes:
    """Mask the values of secret names in `name: value`, `"name": "value"` and `--name value`."""
    parts, copied, position = [], 0, 0
    while (match := ASSIGNMENT.search(data, position)) is not None:
        name = match[match.lastindex].decode("utf-8", "surrogatepass")
        position = match.end()
        if not is_secret_name(name):
            if match.lastindex == ELEMENT:  # its attributes may be pairs
                position = match.end(ELEMENT)
            continue
        if match.lastindex == ELEMENT:
            content = CONTENT.match(data, position)
            start, end = position, content.end() if content is not None else position
        else:
            start, end = _value_span(data, position, name)
        if end > start:
            parts += [data[copied:start], MASK]
            copied = position = end
    return b"".join((*parts, data[copied:])) if parts else data


def _value_span(data: bytes, start: int, name: str) -> tuple[int, int]:
    """Return where the value of a secret name starts and ends; empty if it is not secret."""
    quote = QUOTE.match(data, start)
    if quote is not None:
        return quote.end(), _closing_quote(data, quote)
    if data[start : start + 1] in (b"{", b"["):
        return start, _closing_bracket(data, start)
    value = (LINE if is_header_name(name) else UNQUOTED).match(data, start)
    if value is None or value[0].lower() in NOT_SECRET:
        return start, start
    if NUMBER.fullmatch(value[0]) and not is_secret_value(name, 0):
        return start, start
    return start, value.end()


def _closing_quote(data: bytes, opening: Any) -> int:
    """Return the end of a quoted value; inside nested JSON its quotes have backslashes."""
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


def _closing_bracket(data: bytes, start: int) -> int:
    depth = 0
    for match in BRACKET.finditer(data, start):
        depth += 1 if match[0] in b"[{" else -1
        if depth == 0:
            return int(match.end())
    return len(data)
