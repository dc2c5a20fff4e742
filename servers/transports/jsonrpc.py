"""JSON-RPC messages as bytes: what a strict reader sees in them. Pure.

The SDK's parser is fast and lenient: of two equal keys the last one wins, without a word.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from toolcrib.lib.json_codec import DuplicateKey, reject_duplicate_keys

LARGE_BYTES = 256 * 1024  # bytes that are not worked through on the event loop
MAX_PER_LINE = 100
BOM = b"\xef\xbb\xbf"
MAX_DIGITS = 4000  # Python writes no longer integers; most readers keep fewer
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ID_AT_HEAD = re.compile(
    rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d{1,15}|"[^"\\]*")'
)


@dataclass(frozen=True)
class ParsedMessage:
    """What is in the bytes of a message. `flaw` is the end of a sentence about it."""

    flaw: str = ""
    is_answer: bool = True
    is_refusal: bool = False
    value: Any = None  # the message, where it could be read


class _Malformed(ValueError):
    pass


def parse_message(raw: bytes) -> ParsedMessage:
    """Read one message strictly."""
    try:
        value = _decoder.decode(raw.removeprefix(BOM).decode())
        if _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
    except DuplicateKey:
        return ParsedMessage("has an object that names a key twice")
    except _Malformed as flaw:
        return ParsedMessage(str(flaw))
    except UnicodeEncodeError:
        return ParsedMessage("holds half a character (a lone surrogate)")
    except RecursionError:
        return ParsedMessage("is nested too deep")
    except ValueError:  # of JSON, or of UTF-8
        return ParsedMessage("is not valid JSON")
    if not isinstance(value, dict):
        return ParsedMessage("is not a message of the protocol")
    if "method" in value:
        return ParsedMessage(is_answer=False, value=value)
    if isinstance(value.get("error"), dict):
        return ParsedMessage(is_refusal=True, value=value)
    problem = "" if isinstance(value.get("result"), dict) else "is not an object"
    return ParsedMessage(problem, value=value)


def parse_leading_values(raw: bytes) -> list[Any]:
    """Return the values at the start of a line that is not one message, as far as they go."""
    found: list[Any] = []
    at = 0
    try:
        text = raw.removeprefix(BOM).decode().strip()
        while at < len(text) and len(found) < MAX_PER_LINE:
            value, at = _lenient.raw_decode(text, at)
            found.append(value)
            while text[at : at + 1].isspace():
                at += 1
    except (ValueError, RecursionError):
        pass
    return found


def id_at_head(raw: bytes) -> int | str | None:
    """Return the id that a message starts with, where it does."""
    found = _ID_AT_HEAD.match(raw)
    if found is None:
        return None
    value: int | str = json.loads(found[1])
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _Malformed(f"holds an integer of {len(digits):,} digits")
    return int(digits)


def _constant(name: str) -> float:
    raise _Malformed(f"holds {name}, which JSON does not know")


_decoder = json.JSONDecoder(
    object_pairs_hook=reject_duplicate_keys, parse_int=_integer, parse_constant=_constant
)
_lenient = json.JSONDecoder(parse_int=lambda digits: int(digits[:MAX_DIGITS]))
