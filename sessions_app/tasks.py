"""What is done for sessions now and then. Celery shells; the schedule calls `tidy` too."""

import logging
import time

from celery import shared_task

from sessions_app.ledger import calls as call_ledger
from sessions_app.playground import golden_runs
from sessions_app.sessions import lifecycle

logger = logging.getLogger(__name__)

PRUNE_EVERY = 600.0  # seconds
_next_prune = 0.0


def tidy() -> None:
    """Expire idle sessions, give up calls of dead processes, forget what is too old."""
    expired, given_up = lifecycle.expire_idle(), call_ledger.recover_lost_calls()
    if expired or given_up:
        logger.info("Expired %d sessions, gave up %d calls", expired, given_up)
    global _next_prune
    if time.monotonic() >= _next_prune:
        _next_prune = time.monotonic() + PRUNE_EVERY
        call_ledger.prune()


@shared_task(name="sessions_app.tasks.tidy_sessions")  # type: ignore[untyped-decorator]
def tidy_sessions() -> None:
    tidy()


@shared_task(name="sessions_app.tasks.run_golden")  # type: ignore[untyped-decorator]
def run_golden() -> None:
    golden_runs.run_if_due()


def send_golden() -> None:
    """Have golden queries run in a worker if the catalog changed; where there is no beat."""
    if golden_runs.is_due():
        run_golden.apply_async(expires=5)
