"""When golden queries are run: for the newest revision, once, by one process at a time.

The schedule asks every few seconds whether a newer revision is there, so a burst of changes is
run once, for the last of them, and nothing is lost while a broker or a worker is away. Searched
is what an agent with every group would search: a golden query tells of the ranking and the texts,
and no agent's rights move it. While vectors are being computed, a run waits for them.
"""

import logging
from dataclasses import asdict
from datetime import timedelta

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone

from catalog.models import GoldenQuery, GoldenRun, Revision
from catalog.search import golden_queries
from catalog.search.embeddings import store as vector_store
from sessions_app.models import Agent
from sessions_app.sessions import scope
from toolcrib.lib.errors import Conflict

logger = logging.getLogger(__name__)

GIVEN_UP = timedelta(minutes=5)  # a run that takes longer died with its process
KEPT = 200  # runs


def everyone() -> Agent:
    """An agent that stands in for all: it has every group, and is in no table."""
    return Agent(all_groups=True)


def is_due() -> bool:
    if not GoldenQuery.objects.exists():
        return False
    newest = GoldenRun.objects.first()
    if newest is None or not newest.finished_at or newest.revision < Revision.current():
        return True
    return _unmeasured()


def _unmeasured() -> bool:
    """Whether a query was marked while vectors were still to come, and has nothing to hold yet."""
    return GoldenQuery.objects.filter(results=None).exists()


def run_if_due() -> GoldenRun | None:
    """Run all golden queries if the catalog changed since; None where there is nothing to do."""
    if not is_due() or not _complete():
        return None
    claimed = _claim(Revision.current(), again=_unmeasured())
    return _run(claimed) if claimed else None


def _complete(*, wait: bool = True) -> bool:
    """Whether every tool has its vector, or none will: half an index would look like a drop.

    Loading the model can take a while, which a request does not wait for.
    """
    if not wait and settings.EMBEDDINGS and not vector_store.model.tried:
        vector_store.model.load_soon()
        return False
    return vector_store.model.load() is None or not scope.scope_of_agent(everyone()).index.waiting


def run_now() -> GoldenRun:
    """Run them again although nothing changed. For a request."""
    if not _complete(wait=False):
        raise Conflict(
            "The tools' vectors are being computed.",
            hint="The queries are run when they are there.",
        )
    claimed = _claim(Revision.current(), again=True)
    if claimed is None:
        raise Conflict("The golden queries are being run.", hint="Look again in a moment.")
    return _run(claimed)


def run_one(query: GoldenQuery) -> None:
    """Measure a query that was just marked, or leave it to the schedule until vectors are there."""
    if not _complete(wait=False):
        return
    seen = scope.scope_of_agent(everyone())
    golden_queries.measure(seen.index, [query], seen.revision)


def _run(run: GoldenRun) -> GoldenRun:
    scores = golden_queries.measure(
        scope.scope_of_agent(everyone()).index, list(GoldenQuery.objects.all()), run.revision
    )
    run.scores = {strategy: asdict(score) for strategy, score in scores.items()}
    run.finished_at = timezone.now()
    run.save(update_fields=["scores", "finished_at"])
    old = GoldenRun.objects.values_list("revision", flat=True)[KEPT : KEPT + 1]
    GoldenRun.objects.filter(revision__lte=max(old, default=-1)).delete()
    broke = sum(score.broke for score in scores.values())
    logger.info("Ran the golden queries at revision %d: %d broke", run.revision, broke)
    return run


def _claim(revision: int, *, again: bool = False) -> GoldenRun | None:
    """Take the run of a revision, unless somebody has it, or is busy with another one."""
    now = timezone.now()
    try:
        with transaction.atomic():
            newest = GoldenRun.objects.select_for_update().first()
            if newest is not None:
                if not newest.finished_at and newest.started_at > now - GIVEN_UP:
                    return None
                if newest.finished_at and newest.revision >= revision and not again:
                    return None
                GoldenRun.objects.filter(revision__gte=revision).delete()
                GoldenRun.objects.filter(finished_at=None).delete()
            return GoldenRun.objects.create(revision=revision, started_at=now)
    except IntegrityError:  # another process was faster
        return None
