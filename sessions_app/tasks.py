"""Celery tasks of sessions: expiry, call recovery, retention, golden queries.

Without Celery beat, the web process calls `tidy` and `queue_golden` itself.
"""

import logging
import time

from celery import shared_task

from sessions_app.ledger import calls as call_ledger
from sessions_app.mcp import sessions as mcp_sessions
from sessions_app.playground import golden_runs
from sessions_app.sessions import lifecycle

logger = logging.getLogger(__name__)

PRUNE_INTERVAL = 600.0  # seconds
_next_prune = 0.0


@shared_task(name="sessions_app.tasks.tidy_sessions")  # type: ignore[untyped-decorator]
def tidy() -> None:
    """Expire idle sessions, recover calls of dead processes, apply data retention."""
    expired, recovered = lifecycle.expire_idle(), call_ledger.recover_lost_calls()
    mcp_sessions.prune_connections()
    if expired or recovered:
        logger.info("Expired %d sessions; marked %d calls as unknown", expired, recovered)
    global _next_prune
    if time.monotonic() >= _next_prune:
        _next_prune = time.monotonic() + PRUNE_INTERVAL
        call_ledger.prune()


@shared_task(name="sessions_app.tasks.run_golden")  # type: ignore[untyped-decorator]
def run_golden() -> None:
    golden_runs.run_if_due()


def queue_golden() -> None:
    """Queue a run of the golden queries if one is due. For installations without Celery beat."""
    if golden_runs.is_due():
        run_golden.apply_async(expires=5)
