"""Rankers of other distributions: search strategies named by entry points of `toolcrib.rankers`.

A ranker is called with a query and the tools that the session may see, and returns one score for
each tool, 0 for no match. It is code that an operator has installed, and runs in this process.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points

import numpy as np

from catalog.search.bm25 import Floats
from catalog.search.index import Searchable

GROUP = "toolcrib.rankers"
RANKED_STRATEGIES = ("hybrid", "bm25", "embedding")
BUILT_IN = (*RANKED_STRATEGIES, "regex")
logger = logging.getLogger(__name__)

Ranker = Callable[[str, Sequence[Searchable]], Sequence[float]]


@cache
def _installed() -> dict[str, EntryPoint]:
    """Return the entry points by name. Those named like a built-in strategy are ignored."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name in sorted(found.keys() & set(BUILT_IN)):
        logger.warning("The ranker %s of %s is ignored: the name is built in", name, found[name])
    return {name: found[name] for name in sorted(found.keys() - set(BUILT_IN))}


@cache
def _load(name: str) -> Ranker:
    ranker: Ranker = _installed()[name].load()
    return ranker


def names() -> tuple[str, ...]:
    return tuple(_installed())


def score(name: str, query: str, tools: Sequence[Searchable]) -> Floats | None:
    """Return the ranker's score of each tool; None, with a log entry, if it fails."""
    try:
        scores = np.asarray(_load(name)(query, tools), np.float64)
    except Exception:
        logger.exception("The ranker %s failed", name)
        return None
    if scores.shape != (len(tools),) or not np.isfinite(scores).all():
        logger.error("The ranker %s did not return a number for each tool", name)
        return None
    return scores.clip(min=0)


def clear() -> None:
    """Look for installed rankers again, in tests."""
    _installed.cache_clear()
    _load.cache_clear()
