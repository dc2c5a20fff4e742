"""One text for one value: the bytes that are hashed, pinned and served. Pure."""

import hashlib
import json
from collections.abc import Mapping

# Made once: json.dumps would make one for each value that is not written as it does by itself.
_encoder = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)


def canonical(value: object) -> str:
    """Return sorted, unspaced, unescaped JSON. Raises ValueError for NaN and infinities."""
    return _encoder.encode(value)


def joined(members: Mapping[str, str]) -> str:
    """Return an object's canonical text from those of its values: what is large is written once."""
    return "{" + ",".join(f"{canonical(name)}:{members[name]}" for name in sorted(members)) + "}"


def digest(text: str) -> str:
    """Return the SHA-256 of a text. Raises UnicodeEncodeError for lone surrogates."""
    return hashlib.sha256(text.encode()).hexdigest()
