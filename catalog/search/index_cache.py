"""Search indexes of this installation, shared by every scope that sees the same tools.

An index is built from what was counted for each tool before, so after one change all tools but
one cost nothing. The newest are kept, up to a number of tools in all; whoever still holds another
keeps it alive.
"""

import threading
from collections.abc import Sequence

from catalog.search.embeddings.store import installed
from catalog.search.index import Index, Searchable

MOST_TOOLS = 300_000  # over all kept indexes; a tool takes about a kilobyte in each

_kept: dict[tuple[Searchable, ...], Index] = {}
_lock = threading.Lock()


def get_index(tools: Sequence[Searchable]) -> Index:
    """Return the index over these tools: kept, or built now. One is built at a time."""
    key = tuple(sorted(tools, key=lambda tool: tool.name))
    with _lock:
        index = _kept.pop(key, None)
        if index is None:
            index = Index(key, installed)
        _kept[key] = index  # the last is the newest
        _drop()
    return index


def _drop() -> None:
    total = sum(map(len, _kept))
    while total > MOST_TOOLS and len(_kept) > 1:
        total -= len(_kept.pop(next(iter(_kept))))
