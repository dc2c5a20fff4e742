"""Canonical JSON, its digest, and strict parsing that rejects duplicate keys.

Canonical text is what is hashed, pinned and served: equal values give equal bytes.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from toolcrib.lib.errors import Invalid

# Built once: json.dumps would build an encoder for every call with these options.
_encoder = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)


def canonical(value: object) -> str:
    """Return sorted, unspaced, unescaped JSON. Raises ValueError for NaN and infinities."""
    return _encoder.encode(value)


def join_members(members: Mapping[str, str]) -> str:
    """Return an object's canonical text from the canonical texts of its values."""
    return "{" + ",".join(f"{canonical(name)}:{members[name]}" for name in sorted(members)) + "}"


def digest(text: str) -> str:
    """Return the SHA-256 of a text. Raises UnicodeEncodeError for lone surrogates."""
    return hashlib.sha256(text.encode()).hexdigest()


class DuplicateKey(ValueError):
    """An object has the same key twice; which value counts depends on the parser."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` that raises DuplicateKey."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise DuplicateKey(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return found


def parse_strict(body: bytes | str) -> Any:
    """Parse JSON. Raises Invalid for a duplicate key, ValueError for no JSON, RecursionError."""
    try:
        return json.loads(body, object_pairs_hook=reject_duplicate_keys)
    except DuplicateKey as error:
        raise Invalid(
            f"An object has the key {error.key[:80]!r} twice.", hint="Send every key once."
        ) from None
