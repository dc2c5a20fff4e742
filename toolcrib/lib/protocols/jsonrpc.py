"""Strict JSON-RPC message parser. Pure.

The SDK's parser is fast and lenient: it silently lets the last of two equal keys win.
"""

import json
import re
from typing import Any, NamedTuple

from toolcrib.lib.json_codec import DuplicateKey, reject_duplicate_keys

LARGE_BYTES = 256 * 1024  # larger messages are not parsed on the event loop
MAX_VALUES_PER_LINE = 100
BOM = b"\xef\xbb\xbf"
MAX_DIGITS = 4000  # Python serializes no longer integers; most parsers accept fewer
MAX_DEPTH = 190  # the SDK's parser rejects a whole message with more than 200 levels
TOO_DEEP = "toolcrib:nested-too-deeply"  # in place of what is nested deeper
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ID_AT_HEAD = re.compile(
    rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d{1,15}|"[^"\\]*")'
)


class ParsedMessage(NamedTuple):
    """A parsed message. `malformed` says what is wrong with it, as a verb phrase."""

    malformed: str = ""
    is_response: bool = True
    is_error: bool = False
    value: Any = None  # the message, where it could be parsed


class _Malformed(ValueError):
    pass


def parse_message(raw: bytes) -> ParsedMessage:
    try:
        value = _decoder.decode(raw.removeprefix(BOM).decode())
        if _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
    except DuplicateKey:
        return ParsedMessage("has an object with a duplicate key")
    except _Malformed as problem:
        return ParsedMessage(str(problem))
    except UnicodeEncodeError:
        return ParsedMessage("contains a lone surrogate (half a character)")
    except RecursionError:
        return ParsedMessage("is nested too deeply")
    except ValueError:  # of JSON, or of UTF-8
        return ParsedMessage("is not valid JSON")
    if not isinstance(value, dict):
        return ParsedMessage("is not a JSON-RPC message")
    if "method" in value:
        return ParsedMessage(is_response=False, value=value)
    if isinstance(value.get("error"), dict):
        return ParsedMessage(is_error=True, value=value)
    malformed = "" if isinstance(value.get("result"), dict) else "is not an object"
    return ParsedMessage(malformed, value=value)


def parse_leading_values(raw: bytes) -> list[Any]:
    """Return the JSON values at the start of a line that is not one message."""
    values: list[Any] = []
    position = 0
    try:
        text = raw.removeprefix(BOM).decode().strip()
        while position < len(text) and len(values) < MAX_VALUES_PER_LINE:
            value, position = _lenient.raw_decode(text, position)
            values.append(value)
            while text[position : position + 1].isspace():
                position += 1
    except (ValueError, RecursionError):
        pass
    return values


def limit_depth(raw: bytes) -> bytes:
    """Replace what is nested too deeply by TOO_DEEP, so that the rest of a message is readable."""
    parts, depth, kept_until = [], 0, 0
    for match in _TOKEN.finditer(raw):
        token = match[0]
        if token in (b"[", b"{"):
            depth += 1
            if depth == MAX_DEPTH + 1:
                parts += [raw[kept_until : match.start()], json.dumps(TOO_DEEP).encode()]
        elif token in (b"]", b"}"):
            depth -= 1
            if depth == MAX_DEPTH:
                kept_until = match.end()
    if depth > MAX_DEPTH:
        return raw  # incomplete
    return b"".join([*parts, raw[kept_until:]]) if parts else raw


def id_at_head(raw: bytes) -> int | str | None:
    """Return the id of a message that starts with its id, without parsing the rest."""
    match = _ID_AT_HEAD.match(raw)
    if match is None:
        return None
    value: int | str = json.loads(match[1])
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _Malformed(f"contains an integer of {len(digits):,} digits")
    return int(digits)


def _constant(name: str) -> float:
    raise _Malformed(f"contains {name}, which is not valid JSON")


_decoder = json.JSONDecoder(
    object_pairs_hook=reject_duplicate_keys, parse_int=_integer, parse_constant=_constant
)
_lenient = json.JSONDecoder(parse_int=lambda digits: int(digits[:MAX_DIGITS]))
