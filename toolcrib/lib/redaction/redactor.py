"""Redaction of secrets in JSON values and texts, by name and by form.

Most payloads contain nothing that looks like a secret: one search over their JSON tells, without
parsing. The rest is walked value by value.
"""

import base64
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote_from_bytes, unquote_to_bytes

import re2

from toolcrib.lib.redaction.commands import COMMAND, find_passwords, find_program, split_argument
from toolcrib.lib.redaction.names import is_header_name, is_secret_name, is_secret_value
from toolcrib.lib.redaction.patterns import (
    BASE64_ENCODED,
    MASK,
    PERCENT_ENCODED,
    RULES,
    SUSPICIOUS,
    compile_patterns,
    redact_ibans,
)
from toolcrib.lib.redaction.spans import (
    AFTER_ENTRY,
    BLOCK,
    LINE_END,
    QUOTE,
    UNQUOTED,
    block_end,
    bracket_end,
    entries,
    indentation,
    quoted_end,
)
from toolcrib.lib.redaction.tables import JSON_TABLE, ROW_NAMES, redact_tables, secret_columns
from toolcrib.lib.redaction.words import ALWAYS, QUOTED_ONLY, WORD, looks_secret

MASKED = MASK.decode()
UNLIMITED = 1 << 60
# A name and what separates it from its value: of a pair of name and value in JSON or XML, of a
# member of an object, of an assignment, of a command-line option, of an element of XML.
ASSIGNMENT = re2.compile(
    rb"[\"'](?:name|key|header)\\*[\"'][ \t]*:[ \t]*\\*[\"']([\w.\-]+)\\*[\"'][ \t]*,[ \t]*"
    rb"\\*[\"']value\\*[\"'][ \t]*:[ \t]*"
    rb"|(?:name|key)=\\*[\"']([\w.\-]+)\\*[\"'][ \t]+value="
    rb"|(?:name|key|id)=\\*[\"']([\w.\-]+)\\*[\"'](?:[ \t][^<>]*)?>\s*(?:<value>)?"
    rb"|\\*[\"']([^\"'\\]{1,200})\\*[\"'][ \t]*(?:=>|:)[ \t]*"
    rb"|((?:(?i:api|access|private|secret|encryption|session|connection|card|credit) )?"
    rb"[A-Za-z_][\w.\-]*)"
    rb"(?:\\*[\"']|\*{1,2}|&[\w#]{2,5};)?[ \t]*(?:=>|:=|[:=])[ \t]*"
    rb"|(?:--|[\s\"'(]-)([A-Za-z][\w\-]*)(?:\\*[\"'][ \t]*,\s*|[ \t]+)"
    rb"|<([A-Za-z_][\w.\-]*)(?:[ \t][^<>]*)?>"
)
NAMED_ELEMENT, OPTION, ELEMENT = 3, 6, 7  # the groups of their names
# In prose an option is followed by a word such as these, not by its value.
PROSE = re2.compile(
    rb"(?i:options?|flags?|arguments?|parameters?|switch(?:es)?|settings?|values?|variables?|fields?"
    rb"|is|are|was|were|has|have|to|or|and|for|in|on|with|without|must|may|can|should|will|if|when"
    rb"|as|of|from|by|the|an?|not|only|instead|takes?|accepts?|reads?|sets?|polic(?:y|ies))[.,:;!?)]*"
)
BOLD = re2.compile(rb"(?:\*\*|__)[ \t]+")
MAX_DECODINGS = 3  # of a text inside a text
NOT_BASE64 = re2.compile(rb"[^\w+/\-]")
URL_SAFE = bytes.maketrans(b"-_", b"+/")
MAX_WORD_LENGTH = 500
PROGRAM_NAMES = ("command", "cmd", "program", "executable")  # beside a list of arguments
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
    before = text.encode("utf-8", "surrogatepass")
    if not may_contain_secret(before):
        return text
    if JSON_TABLE.search(before) is not None:
        text, before = _redact_json_tables(text, before)
    data = _redact_data(before)
    return text if data is before else data.decode("utf-8", "surrogatepass")


def _redact_json_tables(text: str, data: bytes) -> tuple[str, bytes]:
    """Mask columns in a text that is JSON: their names are not beside their values."""
    try:
        value = json.loads(text)
        redacted = redact(value)
    except (ValueError, RecursionError):
        return text, data
    if redacted == value:
        return text, data
    text = json.dumps(redacted, ensure_ascii=False)
    return text, text.encode("utf-8", "surrogatepass")


def _redact_data(data: bytes, depth: int = 0) -> bytes:
    """Mask the secrets of a text; `depth` is how often it was decoded."""
    if SUSPICIOUS.search(data) is not None:
        for pattern, replace in RULES:
            data = _substitute(pattern, replace, data)
        data = redact_ibans(data)
        data = _substitute(COMMAND, _redact_command, data)
        data = _redact_assignments(data)
        data = _redact_words(data)
        data = redact_tables(data)
        if depth < MAX_DECODINGS:
            data = _substitute(PERCENT_ENCODED, lambda match: _redact_percent(match, depth), data)
            data = _substitute(BASE64_ENCODED, lambda match: _redact_base64(match, depth), data)
    if _operator_patterns is not None:
        data = _substitute(_operator_patterns, lambda match: MASK, data)
    return data


def _redact_percent(match: Any, depth: int) -> bytes:
    decoded = unquote_to_bytes(match[0])
    redacted = _redact_data(decoded, depth + 1)
    return match[0] if redacted == decoded else quote_from_bytes(redacted, safe="*").encode()


def _redact_base64(match: Any, depth: int) -> bytes:
    text: bytes = NOT_BASE64.sub(b"", match[0]).translate(URL_SAFE)
    text = text[:-1] if len(text) % 4 == 1 else text
    decoded = base64.b64decode(text + b"=" * (-len(text) % 4))
    return match[0] if _redact_data(decoded, depth + 1) == decoded else MASK


def _redact_command(match: Any) -> bytes:
    """Mask the passwords that options of known programs give."""
    text, parts, position = match[2], [match[1]], 0
    for start, end in find_passwords(match):
        parts += [text[position:start], MASK]
        position = end
    return b"".join((*parts, text[position:]))


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
        program = next((value[name] for name in PROGRAM_NAMES if name in value), None)
        columns = secret_columns(value)
        for key in sorted(value) if self.left < UNLIMITED // 2 else value:
            if self.left <= 0:
                break
            item, name = value[key], pair if key == "value" and pair else key
            if is_secret_name(name) and is_secret_value(name, item):
                copied[_redact_key(key)] = MASKED
            elif program is not None and isinstance(item, list):
                copied[_redact_key(key)] = self._copy_list(item, program)
            elif columns and key in ROW_NAMES and isinstance(item, list):
                copied[_redact_key(key)] = [
                    self._copy_row(row, columns) for row in item if self.left > 0
                ]
            else:
                copied[_redact_key(key)] = self.copy(item)
            self.left -= len(key) + 3
        return copied

    def _copy_list(self, value: list[Any], program: object = None) -> list[Any]:
        copied: list[Any] = []
        option = ""  # the option before a value in a list of arguments
        program = find_program(value, program)
        for item in value:
            if self.left <= 0:
                break
            if option and is_secret_name(option) and is_secret_value(option, item):
                copied.append(MASKED)
            elif (
                program
                and isinstance(item, str)
                and (secret := split_argument(program, option, item))[1]
            ):
                copied.append(self.copy(secret[0]) + MASKED)
            else:
                copied.append(self._copy_pair(item) or self.copy(item))
            is_option = isinstance(item, str) and item.startswith("-") and "=" not in item
            option = item if is_option else ""
        return copied

    def _copy_row(self, row: Any, columns: dict[int, str]) -> Any:
        """Return a masked copy of a row whose columns have names of secrets."""
        if not isinstance(row, list):
            return self.copy(row)
        return self._copy_list(
            [
                MASKED if at in columns and is_secret_value(columns[at], item) else item
                for at, item in enumerate(row)
            ]
        )

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
        kind = match.lastindex
        name = match[kind].decode("utf-8", "surrogatepass")
        position = match.end()
        if not is_secret_name(name):
            if kind == ELEMENT:  # its attributes may be pairs
                position = match.end(ELEMENT)
            continue
        if kind in (ELEMENT, NAMED_ELEMENT):
            content = CONTENT.match(data, position)
            start, end = position, content.end() if content is not None else position
            if kind == NAMED_ELEMENT and data[end : end + 2] != b"</":
                continue
        else:
            start, end = _value_span(data, position, name)
            is_below = start == end or data[start : start + 1] == b"\\"
            if kind == OPTION and not _is_argument(data, match.end(OPTION), start, end):
                continue
            if is_below and kind != OPTION:
                below = _span_below(data, position, match.start(kind))
                start, end = below if below[1] > below[0] else (start, end)
        if end > start:
            parts += [data[copied:start], MASK]
            copied = position = end
    return b"".join((*parts, data[copied:])) if parts else data


def _is_argument(data: bytes, option_end: int, start: int, end: int) -> bool:
    """Return whether what follows an option is its value, and not the next word of a sentence."""
    if b"," in data[option_end:start]:  # in a list
        return data[start - 1 : start] in (b"'", b'"') and data[start : start + 1] != b"-"
    return PROSE.fullmatch(data, start, end) is None


def _value_span(data: bytes, start: int, name: str) -> tuple[int, int]:
    """Return where the value of a secret name starts and ends; empty if it is not secret."""
    if BOLD.match(data, start) is not None:  # as in **Password:** secret
        start = BOLD.match(data, start).end()
    quote = QUOTE.match(data, start)
    if quote is not None:
        return quote.end(), quoted_end(data, quote)
    if data[start : start + 1] in (b"{", b"["):
        return start, bracket_end(data, start)
    if BLOCK.match(data, start) is not None:
        return start, start
    value = (LINE if is_header_name(name) else UNQUOTED).match(data, start)
    if value is None or value[0].lower() in NOT_SECRET:
        return start, start
    if NUMBER.fullmatch(value[0]) and not is_secret_value(name, 0):
        return start, start
    return start, value.end()


def _span_below(data: bytes, start: int, name_start: int) -> tuple[int, int]:
    """Return where the value of a name is that the lines below contain, as in YAML."""
    width = indentation(data, name_start)
    block = BLOCK.match(data, start)
    if block is not None and width is not None:
        return block.end(), block_end(data, block.end(), width)
    line_end = LINE_END.match(data, start)
    if line_end is None:
        return start, start
    below = line_end.end()
    if width is not None:
        first, end = entries(data, below, width)
        if end > first:
            return first, end
    value = UNQUOTED.match(data, below)
    is_alone = value is not None and AFTER_ENTRY.match(data, value.end()) is not None
    return (below, value.end()) if is_alone and looks_secret(value[0]) else (below, below)


def _redact_words(data: bytes) -> bytes:
    """Mask what follows a word such as password without a sign between, if it looks secret."""
    parts, copied, position = [], 0, 0
    while (match := WORD.search(data, position)) is not None:
        position = match.end()
        quote = QUOTE.match(data, position)
        if quote is not None:
            start, end = quote.end(), quoted_end(data, quote)
        else:
            value = UNQUOTED.match(data, position)
            start, end = (position, position) if value is None else value.span()
        if end - start > MAX_WORD_LENGTH:
            continue
        if match.lastindex == QUOTED_ONLY:
            is_certain = quote is not None
        else:
            is_certain = match.lastindex == ALWAYS and data[start : start + 1] != b"-"
        if end > start and (is_certain or looks_secret(data[start:end], match[1] or b"")):
            parts += [data[copied:start], MASK]
            copied = position = end
    return b"".join((*parts, data[copied:])) if parts else data
