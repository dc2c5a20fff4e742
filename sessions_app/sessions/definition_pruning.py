"""Deletes definitions that nothing refers to, and rows that would keep them for ever.

Foreign keys refer to definitions (tools, their newest changes, calls, shown definitions), and so do
the pins of snapshots and loads, in JSON. Sessions that still exist therefore keep their bytes.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from django.db import connection, transaction
from django.db.models import Exists, F, OuterRef, QuerySet, Window
from django.db.models.functions import RowNumber
from django.utils import timezone

from catalog.models import (
    CatalogSnapshot,
    Definition,
    DefinitionChange,
    Membership,
    Revision,
    Tool,
)
from sessions_app.models import AgentSession, Expansion, ShownDefinition

logger = logging.getLogger(__name__)

KEPT_CHANGES = 20  # newest of each tool; decisions of people are in the audit log
MISSING_RETENTION = timedelta(days=30)  # of tools that their server no longer lists
GRACE = timedelta(hours=1)  # a sync stores definitions before tools refer to them
SNAPSHOT_GRACE = timedelta(days=1)
MAX_DEFINITIONS = 20_000  # examined in one pass
BATCH = 500
_unreferenced: frozenset[int] = frozenset()  # in the previous pass


def prune() -> Mapping[str, int]:
    """Delete what is no longer referred to, and return the counts.

    Definitions are deleted if two passes in a row found them, so that a session that opens during
    a pass cannot lose one.
    """
    global _unreferenced
    counts = {
        "tools": _delete(_missing_tools()),
        "changes": _delete(_old_changes()),
        "snapshots": _delete(_unused_snapshots()),
    }
    unreferenced = frozenset(_without_references().values_list("pk", flat=True)[:MAX_DEFINITIONS])
    unused = _without_pins(unreferenced & _unreferenced)
    counts["definitions"] = sum(
        _without_references().filter(pk__in=chunk)._raw_delete(connection.alias)
        for chunk in _chunks(sorted(unused))
    )
    _unreferenced = unreferenced - unused
    if any(counts.values()):
        logger.info("Pruned %s", ", ".join(f"{count} {what}" for what, count in counts.items()))
    return counts


def _missing_tools() -> QuerySet[Tool]:
    """Select tools that their server dropped long ago and that no person has worked with."""
    curated = Membership.objects.filter(tool=OuterRef("pk")).exclude(
        group__follows=OuterRef("server")
    )
    return Tool.objects.filter(
        ~Exists(curated),
        ~Exists(ShownDefinition.objects.filter(tool=OuterRef("pk"))),
        missing_since__lt=timezone.now() - MISSING_RETENTION,
        held_at=None,
        description_override="",
        parameter_overrides={},
        former_names=None,
        hints=None,
    )


def _old_changes() -> QuerySet[DefinitionChange]:
    age = Window(RowNumber(), partition_by=F("tool"), order_by=[F("at").desc(), F("id").desc()])
    old = DefinitionChange.objects.annotate(age=age).filter(age__gt=KEPT_CHANGES)
    return old.exclude(outcome=DefinitionChange.Outcome.WAITING)


def _unused_snapshots() -> QuerySet[CatalogSnapshot]:
    used = AgentSession.objects.filter(snapshot=OuterRef("pk"))
    return CatalogSnapshot.objects.filter(
        ~Exists(used), created_at__lt=timezone.now() - SNAPSHOT_GRACE
    )


def _delete(rows: QuerySet[Any]) -> int:
    pks = list(rows.values_list("pk", flat=True)[:MAX_DEFINITIONS])
    for chunk in _chunks(pks):
        with transaction.atomic():
            rows.model._base_manager.filter(pk__in=chunk).delete()
            if rows.model is Tool:
                Revision.bump()  # every process drops its cached copies
    return len(pks)


def _without_references() -> QuerySet[Definition]:
    """Select definitions that no foreign key refers to."""
    unused = Definition.objects.filter(created_at__lt=timezone.now() - GRACE)
    for relation in Definition._meta.get_fields(include_hidden=True):
        if relation.one_to_many and relation.auto_created:
            field = relation.field.name  # type: ignore[union-attr]
            rows = relation.related_model._base_manager.filter(**{field: OuterRef("pk")})  # type: ignore[union-attr]
            unused = unused.filter(~Exists(rows))
    return unused.order_by("pk")


def _without_pins(candidates: Iterable[int]) -> set[int]:
    """Return the candidates that no snapshot and no load pins."""
    unused = set(candidates)
    for ids in _pinned():
        if not unused:
            break
        unused.difference_update(ids)
    return unused


def _pinned() -> Iterator[list[int]]:
    for text in CatalogSnapshot.objects.values_list("body", flat=True).iterator(20):
        body = json.loads(text)
        yield [pin["definition"] for pin in body.get("pins", {}).values()]
        yield [values[0] for values in body.get("deferred", {}).values()]
    for text in Expansion.objects.values_list("pins", flat=True).iterator(BATCH):
        yield [pin["definition"] for pin in json.loads(text).values()]


def _chunks(pks: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(pks), BATCH):
        yield pks[start : start + BATCH]
