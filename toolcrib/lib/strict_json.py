"""Read JSON in which no object names a key twice. Pure."""

import json
from collections import Counter
from typing import Any

from toolcrib.lib.errors import Invalid


def parsed(body: bytes | str) -> Any:
    """Raises Invalid for a key named twice, ValueError for what is not JSON, RecursionError."""
    return json.loads(body, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise Invalid(f"An object names the key {twice[:80]!r} twice.", hint="Name it once.")
    return found
