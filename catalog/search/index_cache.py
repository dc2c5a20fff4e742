"""LRU cache of search indexes, shared by all scopes that see the same tools.

It is bounded by the total number of tools; an evicted index stays alive while it is used.
"""

import threading
from collections.abc import Sequence

from catalog.search.embeddings.store import installation_vectors
from catalog.search.index import Index, Searchable

MAX_CACHED_TOOLS = 300_000  # over all cached indexes; a tool takes about a kilobyte in each

_indexes: dict[tuple[Searchable, ...], Index] = {}
_lock = threading.Lock()


def get_index(tools: Sequence[Searchable]) -> Index:
    """Return the index over these tools, cached or built now. Builds one at a time."""
    key = tuple(sorted(tools, key=lambda tool: tool.name))
    with _lock:
        index = _indexes.pop(key, None)
        if index is None:
            index = Index(key, installation_vectors)
        _indexes[key] = index  # most recently used last
        total = sum(map(len, _indexes))
        while total > MAX_CACHED_TOOLS and len(_indexes) > 1:
            total -= len(_indexes.pop(next(iter(_indexes))))
    return index
