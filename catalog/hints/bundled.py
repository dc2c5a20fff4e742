"""Applies the bundled phrasebook to the installation's tools, in a worker, after a change."""

import threading

from catalog import cache
from catalog.hints import actions, phrasebook
from catalog.hints.phrasebook import DescribedTool
from catalog.models import HintSource, Revision, ToolHint
from catalog.search.embeddings import store as vector_store

_lock = threading.Lock()
_applied_revision = -1
# What was applied last: most changes of the catalog concern no tool of the phrasebook.
_applied: dict[int, tuple[str, ...]] | None = None


def is_due() -> bool:
    return Revision.current() != _applied_revision


def apply() -> int:
    """Set the bundled hints of all tools and return how many changed. Once at a time."""
    global _applied_revision, _applied
    if not is_due() or not _lock.acquire(blocking=False):
        return 0
    try:
        catalog = cache.current()
        found = _find(catalog)
        changed = 0
        if found != _applied:
            bundled = ToolHint.objects.filter(source=HintSource.BUNDLED)
            present = bundled.values_list("tool_id", flat=True).distinct()
            outdated = dict.fromkeys((pk for pk in present if pk not in found), ())
            changed = actions.replace({**outdated, **found}, HintSource.BUNDLED)
        _applied_revision, _applied = catalog.revision, found
        return changed
    finally:
        _lock.release()


def _find(catalog: cache.CatalogCache) -> dict[int, tuple[str, ...]]:
    """Return the requests in the phrasebook, by tool id."""
    book = phrasebook.bundled()
    tools = {
        pk: DescribedTool(tool.original_name, tool.approved.description, tool.server)
        for pk, tool in catalog.tools.items()
        if tool.approved is not None
    }
    is_listed = any(tool.name in book.by_name for tool in tools.values())
    found = book.find(list(tools.values()), vector_store.text_encoder() if is_listed else None)
    return {pk: requests for pk, requests in zip(tools, found, strict=True) if requests}
