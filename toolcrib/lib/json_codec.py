"""Canonical JSON, its digest, and strict parsing that rejects duplicate keys.

Canonical text is hashed, pinned and served: equal values give equal bytes.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from toolcrib.lib.errors import Invalid

# json.dumps would build a new encoder on every call with these options.
_encoder = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)


def canonical(value: object) -> str:
    """Return JSON with sorted keys, no spaces and no ASCII escapes. Raises ValueError for NaN."""
    return _encoder.encode(value)


_quoted = json.encoder.encode_basestring  # `canonical` of a text, without its detours


def join_items(items: Iterable[str]) -> str:
    """Return an array's canonical text from the canonical texts of its items.

    A long array is encoded item by item: one call of the encoder would block all other threads.
    """
    return "[" + ",".join(items) + "]"


def join_members(members: Mapping[str, str]) -> str:
    """Return an object's canonical text from the canonical texts of its values."""
    return "{" + ",".join([f"{_quoted(name)}:{members[name]}" for name in sorted(members)]) + "}"


def canonical_in_pieces(value: object, depth: int = 2) -> str:
    """Return `canonical(value)`, with a call of the encoder for each item, for megabytes of JSON.

    One call of the encoder, or of the decoder, would block all other threads until it ends.
    """
    if depth and isinstance(value, dict):
        return join_members(
            {name: canonical_in_pieces(item, depth - 1) for name, item in value.items()}
        )
    if depth and isinstance(value, list | tuple):
        return join_items(canonical_in_pieces(item, depth - 1) for item in value)
    return canonical(value)


def parse_in_pieces(text: str) -> Any:
    """Parse text that `canonical` wrote, with a call of the decoder for each item."""
    return _scan(text, 0, 2)[0]


_scan_value = json.JSONDecoder().raw_decode


def _scan(text: str, start: int, depth: int) -> tuple[Any, int]:
    """Return the value that starts here, and where it ends."""
    opening = text[start]
    if not depth or opening not in "{[" or text[start + 1] in "}]":
        return _scan_value(text, start)
    members: dict[str, Any] = {}
    items: list[Any] = []
    end = start
    while end == start or text[end] == ",":
        name = ""
        if opening == "{":
            name, end = _scan_value(text, end + 1)
        item, end = _scan(text, end + 1, depth - 1)
        if opening == "{":
            members[name] = item
        else:
            items.append(item)
    return members if opening == "{" else items, end + 1


def digest(text: str) -> str:
    """Return the SHA-256 of a text. Raises UnicodeEncodeError for lone surrogates."""
    return hashlib.sha256(text.encode()).hexdigest()


class DuplicateKey(ValueError):
    """An object contains a key twice; parsers differ in which value they keep."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from its pairs: an `object_pairs_hook` that raises DuplicateKey."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise DuplicateKey(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return members


_strict_decoder = json.JSONDecoder(object_pairs_hook=reject_duplicate_keys)


def _decode(body: bytes) -> str:
    """Return the text of JSON in any of its encodings, as `json.loads` does."""
    return body.decode(json.detect_encoding(body), "surrogatepass")


def parse_strict(body: bytes | str) -> Any:
    """Parse JSON.

    Raises Invalid for a duplicate key, ValueError for invalid JSON, RecursionError if too deep.
    """
    try:
        return _strict_decoder.decode(_decode(body) if isinstance(body, bytes) else body)
    except DuplicateKey as error:
        raise Invalid(
            f"Duplicate key {error.key[:80]!r} in a JSON object.", hint="Send every key once."
        ) from None
