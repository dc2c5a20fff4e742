"""Celery tasks of sessions: expiry, call recovery, retention, hourly figures, golden queries.

Without Celery beat, the web process calls `tidy` and `queue_golden` itself.
"""

import logging
import time

from celery import shared_task

from servers.registration import state_history
from sessions_app.held_calls import ending
from sessions_app.ledger import calls as call_ledger
from sessions_app.mcp import conversations
from sessions_app.mcp import sessions as mcp_sessions
from sessions_app.playground import golden_runs
from sessions_app.scripts import runs as script_runs
from sessions_app.sessions import definition_pruning, lifecycle, used_queries
from sessions_app.usage import rollups
from toolcrib.notifications import alerts, deliveries, digest
from toolcrib.notifications import events as notification_events

logger = logging.getLogger(__name__)

PRUNE_INTERVAL = 600.0  # seconds
DEFINITION_PRUNE_INTERVAL = 3600.0
NOTIFY_INTERVAL = 4.0
_next_prune = _next_definition_prune = _next_notifications = 0.0


@shared_task(name="sessions_app.tasks.tidy_sessions")  # type: ignore[untyped-decorator]
def tidy() -> None:
    """Expire idle sessions, recover calls of dead processes, apply retention, learn hints."""
    expired, recovered = lifecycle.expire_idle(), call_ledger.recover_lost_calls()
    ending.expire_due()
    script_runs.recover()
    mcp_sessions.prune_connections()
    rollups.count_ended_hours()
    rollups.sum_ended_days()
    call_ledger.encrypt_clear_calls()
    if expired or recovered:
        logger.info("Expired %d sessions; marked %d calls as unknown", expired, recovered)
    global _next_prune, _next_definition_prune
    if time.monotonic() >= _next_prune:
        _next_prune = time.monotonic() + PRUNE_INTERVAL
        call_ledger.prune()
        ending.prune_payloads()
        conversations.prune()
        used_queries.learn()
        deliveries.prune()
        alerts.prune()
        state_history.prune()
    if time.monotonic() >= _next_definition_prune:
        _next_definition_prune = time.monotonic() + DEFINITION_PRUNE_INTERVAL
        definition_pruning.prune()


@shared_task(name="sessions_app.tasks.run_golden")  # type: ignore[untyped-decorator]
def run_golden() -> None:
    golden_runs.run_if_due()


@shared_task(name="sessions_app.tasks.notify")  # type: ignore[untyped-decorator]
def notify() -> None:
    """Raise and resolve alerts, queue notifications, and deliver those that are due."""
    queue_notifications()
    while deliveries.deliver_due():
        pass


def queue_notifications() -> None:
    alerts.evaluate()
    notification_events.queue_events()
    digest.queue_if_due()


def send_notifications() -> None:
    """Queue notifications and their delivery. For installations without Celery beat."""
    global _next_notifications
    if time.monotonic() < _next_notifications:
        return
    _next_notifications = time.monotonic() + NOTIFY_INTERVAL
    queue_notifications()
    if deliveries.is_due():
        notify.apply_async(expires=5)


def queue_golden() -> None:
    """Queue a run of the golden queries if one is due. For installations without Celery beat."""
    if golden_runs.is_due():
        run_golden.apply_async(expires=5)
