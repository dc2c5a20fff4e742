"""Stores definitions, which are immutable and addressed by their content."""

from collections.abc import Callable, Sequence

from django.conf import settings

from catalog.definitions.parsing import RemoteTool, search_text, without_hidden
from catalog.models import Definition, Revision, Tool
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.token_counter import count_definition

BATCH_SIZE = 500  # rows per statement, within SQLite's limit of variables


def store_definitions(
    remote: Sequence[RemoteTool], charge: Callable[[int], None] | None = None
) -> dict[str, int]:
    """Store new definitions and return the ids of all by digest.

    `charge` gets the bytes of the new ones before they are stored, and may raise.
    Definitions are immutable and nothing refers to a new one before `apply_listing`, so rows left
    behind by a crash are harmless.
    """
    ids = _stored_ids([tool.sha256 for tool in remote])
    new = {tool.sha256: tool for tool in remote if tool.sha256 not in ids}
    if new and charge is not None:
        charge(sum(len(tool.body.encode()) for tool in new.values()))
    rows = [
        Definition(
            sha256=tool.sha256,
            name=tool.name,
            body=tool.body,
            tokens=count_definition(tool.tool),
            search_text=search_text(tool.tool).replace("\0", " "),
        )
        for tool in new.values()
    ]
    if rows:
        Definition.objects.bulk_create(rows, batch_size=BATCH_SIZE, ignore_conflicts=True)
        ids |= _stored_ids(list(new))
    if settings.REMOVE_HIDDEN_CHARACTERS:
        _store_readable(remote)
    return ids


def _store_readable(remote: Sequence[RemoteTool]) -> None:
    """Store copies without hidden characters, which the catalog gives to agents instead.

    A copy is a definition of its own, so sessions that were shown the original keep its bytes.
    """
    cleaned = {tool.sha256: without_hidden(tool.tool, tool.body) for tool in remote}
    digests = [sha256 for sha256, tool in cleaned.items() if tool is not None]
    linked = []
    for start in range(0, len(digests), BATCH_SIZE):
        chunk = Definition.objects.filter(sha256__in=digests[start : start + BATCH_SIZE])
        for row in chunk.filter(readable=None):
            tool = cleaned[row.sha256] or {}
            body = canonical(tool)
            copy = RemoteTool(row.name, body, digest(body), tool)
            row.readable_id = store_definitions([copy])[copy.sha256]
            row.save(update_fields=["readable"])
            linked.append(row.pk)
    if linked and Tool.objects.filter(approved__in=linked).exists():
        Revision.bump()


def _stored_ids(digests: Sequence[str]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for start in range(0, len(digests), BATCH_SIZE):
        rows = Definition.objects.filter(sha256__in=digests[start : start + BATCH_SIZE])
        ids.update(rows.values_list("sha256", "id"))
    return ids
