"""Scheduling of golden query runs: once per catalog revision, one process at a time.

The schedule checks for a new revision every few seconds, so a burst of changes causes one run, and
none is lost while the broker or a worker is down. Runs use the scope of an agent with all groups:
they measure ranking and texts, not permissions. A run waits until all embeddings are computed.
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

RUN_TIMEOUT = timedelta(minutes=5)  # older unfinished runs died with their process
MAX_STORED_RUNS = 200


def any_agent() -> Agent:
    """Return an unsaved agent with all groups, which stands in for any agent."""
    return Agent(all_groups=True)


def is_due() -> bool:
    """Return whether the newest revision has no finished run, or a query has no result."""
    if not GoldenQuery.objects.exists():
        return False
    newest = GoldenRun.objects.first()
    if newest is None or not newest.finished_at or newest.revision < Revision.current():
        return True
    return _has_pending_queries()


def _has_pending_queries() -> bool:
    """Return whether a query added during embedding still has no result."""
    return GoldenQuery.objects.filter(results=None).exists()


def run_if_due() -> GoldenRun | None:
    """Run all golden queries if the catalog has changed; return None if no run is due."""
    if not is_due() or not _embeddings_ready():
        return None
    run = _claim(Revision.current(), repeat=_has_pending_queries())
    return _execute(run) if run else None


def _embeddings_ready(*, wait: bool = True) -> bool:
    """Return whether all tools are embedded, or none will be.

    A partial index would look like a regression. `wait=False` does not wait for the model to
    load, which is too slow for a request.
    """
    if not wait and settings.EMBEDDINGS and not vector_store.model.load_attempted:
        vector_store.model.load_in_background()
        return False
    return (
        vector_store.model.load() is None
        or not scope.scope_of_agent(any_agent()).index.pending_vectors
    )


def run_now() -> GoldenRun:
    """Run all golden queries even if the catalog has not changed. For requests."""
    if not _embeddings_ready(wait=False):
        raise Conflict(
            "Embeddings are being computed.", hint="The queries run when all embeddings are ready."
        )
    run = _claim(Revision.current(), repeat=True)
    if run is None:
        raise Conflict("A golden query run is in progress.", hint="Retry in a moment.")
    return _execute(run)


def run_one(query: GoldenQuery) -> None:
    """Run a newly added query, or leave it to the schedule until embeddings are ready."""
    if not _embeddings_ready(wait=False):
        return
    full_scope = scope.scope_of_agent(any_agent())
    golden_queries.run_queries(full_scope.index, [query], full_scope.revision)


def _execute(run: GoldenRun) -> GoldenRun:
    scores = golden_queries.run_queries(
        scope.scope_of_agent(any_agent()).index, list(GoldenQuery.objects.all()), run.revision
    )
    run.scores = {strategy: asdict(score) for strategy, score in scores.items()}
    run.finished_at = timezone.now()
    run.save(update_fields=["scores", "finished_at"])
    newest = GoldenRun.objects.values_list("revision", flat=True)
    expired = newest[MAX_STORED_RUNS : MAX_STORED_RUNS + 1]
    GoldenRun.objects.filter(revision__lte=max(expired, default=-1)).delete()
    regressions = sum(score.broke for score in scores.values())
    logger.info("Golden query run at revision %d: %d regressions", run.revision, regressions)
    return run


def _claim(revision: int, *, repeat: bool = False) -> GoldenRun | None:
    """Create the run of a revision; return None if it exists or another run is in progress."""
    now = timezone.now()
    try:
        with transaction.atomic():
            newest = GoldenRun.objects.select_for_update().first()
            if newest is not None:
                if not newest.finished_at and newest.started_at > now - RUN_TIMEOUT:
                    return None
                if newest.finished_at and newest.revision >= revision and not repeat:
                    return None
                GoldenRun.objects.filter(revision__gte=revision).delete()
                GoldenRun.objects.filter(finished_at=None).delete()
            return GoldenRun.objects.create(revision=revision, started_at=now)
    except IntegrityError:  # another process claimed it first
        return None
