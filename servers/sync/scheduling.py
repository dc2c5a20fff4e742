"""Sync scheduling: when the next sync of a server is due.

`Server.sync_due_at` is authoritative; notifications, users, the schedule and failures change it.
Celery messages are only hints: the schedule sends lost ones again.
"""

import logging
import random
from datetime import datetime, timedelta
from functools import partial

import kombu.exceptions
from celery import current_app
from django.conf import settings
from django.db import transaction
from django.db.models import Count, Min, Q
from django.utils import timezone

from catalog import audit
from catalog.audit import Actor
from catalog.models import DefinitionChange
from servers.connections import pool
from servers.models import Server, Trigger
from toolcrib.lib import process_identity
from toolcrib.lib.errors import Invalid

logger = logging.getLogger(__name__)

SYNC_TASK = "servers.tasks.sync_server"  # by name, since the task's module imports this one

MAX_CHANGES = 3  # of one tool within FLAP_WINDOW; more are flapping
FLAP_WINDOW = timedelta(hours=1)


@transaction.atomic
def request_manual_sync(server: Server, *, actor: Actor) -> None:
    """Request an immediate sync on behalf of a user, with an audit entry."""
    if not server.enabled:
        raise Invalid("This server is disabled.", hint="Enable it first.")
    audit.record(actor, "server.sync", server)
    request_sync(server.pk, Trigger.MANUAL)


def request_sync(server_id: int, trigger: str) -> None:
    """Make a sync due as soon as the minimum gap allows, and queue a task. Cheap to repeat."""
    while True:
        server = Server.objects.filter(pk=server_id, enabled=True).first()
        if server is None:
            return
        if trigger == Trigger.LIST_CHANGED and flapping_tools(server):
            return  # scheduled syncs continue
        due = earliest_sync(server, trigger)
        rows = Server.objects.filter(Q(sync_due_at=None) | Q(sync_due_at__gt=due), pk=server_id)
        # If a sync started since the read above, the gap counts from its start: read again.
        newer_sync = Server.objects.filter(pk=server_id).exclude(sync_fence=server.sync_fence)
        if rows.filter(sync_fence=server.sync_fence).update(sync_due_at=due, sync_trigger=trigger):
            transaction.on_commit(partial(queue_sync, server_id, due))
            return
        if not newer_sync.exists():
            return  # already due at that time or earlier


def earliest_sync(server: Server, trigger: str) -> datetime:
    """Return when a sync may start: now for a user, after the gap for a notification."""
    now = timezone.now()
    if trigger in (Trigger.LIST_CHANGED, Trigger.SCHEDULE) and server.last_sync_started_at:
        return max(now, server.last_sync_started_at + minimum_gap(server))
    return now


def minimum_gap(server: Server) -> timedelta:
    """Return the minimum time between two syncs of a server that keeps notifying.

    It doubles while notifications bring no changes, so that a server that notifies whenever it is
    listed does not loop, and resets after two minutes without a sync.
    """
    started = server.last_sync_started_at
    is_reset = started is None or timezone.now() - started > timedelta(minutes=2)
    doublings = 0 if is_reset else max(0, server.quiet_syncs - 1)
    return timedelta(seconds=min(settings.SYNC_GAP * 2 ** min(doublings, 6), 60))


def flapping_tools(server: Server) -> list[str]:
    """Return the tools that changed too often in the last hour; notifications are then ignored."""
    recent = DefinitionChange.objects.filter(
        tool__server=server, at__gt=timezone.now() - FLAP_WINDOW
    )
    often = recent.values("tool__name").annotate(times=Count("pk")).filter(times__gt=MAX_CHANGES)
    return sorted(often.values_list("tool__name", flat=True))


def queue_due_syncs() -> None:
    now = timezone.now()
    # Registered without a sync request: the command was killed in between.
    forgotten = Q(
        sync_due_at=None, last_sync_started_at=None, created_at__lt=now - timedelta(minutes=1)
    )
    Server.objects.filter(forgotten, enabled=True).update(
        sync_due_at=now, sync_trigger=Trigger.ADDED
    )
    # An expired lease, or one of a dead holder, belongs to a process that was killed.
    held = Server.objects.filter(enabled=True, sync_due_at=None).exclude(sync_lease_until=None)
    for server_id, until, holder in held.values_list("pk", "sync_lease_until", "sync_holder"):
        if (until is not None and until < now) or process_identity.is_dead(holder):
            held.filter(pk=server_id).update(sync_due_at=now, sync_sent_at=None)
    rows = Server.objects.filter(enabled=True, sync_due_at__lte=now).filter(
        Q(sync_sent_at=None) | Q(sync_sent_at__lt=now - timedelta(seconds=30))
    )
    for server_id in list(rows.values_list("pk", flat=True)):
        queue_sync(server_id, now)


def seconds_to_next_sync() -> float:
    """Return the time until a sync is due that is not queued yet; infinite if there is none."""
    rows = Server.objects.filter(enabled=True, sync_due_at__gt=timezone.now())
    due = rows.aggregate(due=Min("sync_due_at"))["due"]
    return float("inf") if due is None else (due - timezone.now()).total_seconds()


def queue_sync(server_id: int, due: datetime) -> None:
    if settings.EMBEDDED and pool.process_pool() is None:
        return  # a command next to the server, whose schedule queues due syncs
    wait = max(0.0, (due - timezone.now()).total_seconds())
    Server.objects.filter(pk=server_id).update(sync_sent_at=due)
    try:
        current_app.send_task(SYNC_TASK, (server_id,), countdown=wait or None)
    except (kombu.exceptions.OperationalError, OSError) as error:
        # The due time is in the database; the schedule queues the sync again.
        Server.objects.filter(pk=server_id).update(sync_sent_at=None)
        logger.warning("Sync of server %s could not be queued: %s", server_id, error)


def next_poll(server: Server, ttl_ms: int | None) -> timedelta:
    """Return the time to the next scheduled sync, ±20%: the server's ttl, else the setting."""
    seconds = float(server.poll_seconds)
    if ttl_ms is not None and ttl_ms > 0:
        seconds = max(min(ttl_ms, 3_000_000) / 1000, 6.25)  # 5 s to 1 h with jitter
    jittered = seconds * random.uniform(0.8, 1.2)  # noqa: S311
    return timedelta(seconds=max(jittered, settings.SYNC_GAP))
