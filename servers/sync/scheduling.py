"""When a sync is due.

One column says it (`Server.sync_due_at`); a notification, a person, a schedule and a failure all
just move it. The queue only carries hints: what it loses, the schedule sends again.
"""

import logging
import random
from datetime import datetime, timedelta
from functools import partial

import kombu.exceptions
from celery import current_app
from django.conf import settings
from django.db import transaction
from django.db.models import Count, Q
from django.utils import timezone

from catalog import audit
from catalog.audit import Actor
from catalog.models import DefinitionChange
from servers.connections import pool
from servers.models import Server, Trigger
from toolcrib.lib import process_identity

logger = logging.getLogger(__name__)

SYNC_TASK = "servers.tasks.sync_server"  # by name: the module of the task imports this one

FLAPS = 3  # changes of one tool within FLAP_TIME that are still believed
FLAP_TIME = timedelta(hours=1)


@transaction.atomic
def request_manual_sync(server: Server, *, actor: Actor) -> None:
    """Sync because somebody says so: at once, and on the record."""
    audit.record(actor, "server.sync", server)
    request_sync(server.pk, Trigger.MANUAL)


def request_sync(server_id: int, trigger: str) -> None:
    """Make a sync due, as soon as the gap allows, and send a task for it. Cheap to repeat."""
    while True:
        server = Server.objects.filter(pk=server_id, enabled=True).first()
        if server is None:
            return
        if trigger == Trigger.LIST_CHANGED and flapping_tools(server):
            return  # the schedule still looks
        due = earliest_sync(server, trigger)
        rows = Server.objects.filter(Q(sync_due_at=None) | Q(sync_due_at__gt=due), pk=server_id)
        # If a sync began since we looked, the gap counts from that one: look again.
        begun = Server.objects.filter(pk=server_id).exclude(sync_fence=server.sync_fence)
        if rows.filter(sync_fence=server.sync_fence).update(sync_due_at=due, sync_trigger=trigger):
            transaction.on_commit(partial(queue_sync, server_id, due))
            return
        if not begun.exists():
            return  # due already, and no later


def earliest_sync(server: Server, trigger: str) -> datetime:
    """When a sync may begin: at once for a person, after the gap for a notification."""
    now = timezone.now()
    if trigger in (Trigger.LIST_CHANGED, Trigger.SCHEDULE) and server.last_sync_started_at:
        return max(now, server.last_sync_started_at + minimum_gap(server))
    return now


def minimum_gap(server: Server) -> timedelta:
    """The least time between two syncs of a server that keeps notifying.

    It grows while notifications bring nothing new, so a server that notifies because it was
    listed does not loop, and falls back once the server has been quiet for a while.
    """
    started = server.last_sync_started_at
    calm = started is None or timezone.now() - started > timedelta(minutes=2)
    doublings = 0 if calm else max(0, server.quiet_syncs - 1)
    return timedelta(seconds=min(settings.SYNC_GAP * 2 ** min(doublings, 6), 60))


def flapping_tools(server: Server) -> list[str]:
    """Names of tools that changed too often in the last hour: notifications are not heard then."""
    recent = DefinitionChange.objects.filter(tool__server=server, at__gt=timezone.now() - FLAP_TIME)
    often = recent.values("tool__name").annotate(times=Count("pk")).filter(times__gt=FLAPS)
    return sorted(often.values_list("tool__name", flat=True))


def queue_due_syncs() -> None:
    """Send a task for each server whose sync is due and not on its way."""
    now = timezone.now()
    # One that was registered and never asked for was left by a command that was killed.
    forgotten = Q(
        sync_due_at=None, last_sync_started_at=None, created_at__lt=now - timedelta(minutes=1)
    )
    Server.objects.filter(forgotten, enabled=True).update(
        sync_due_at=now, sync_trigger=Trigger.ADDED
    )
    # A lease with nothing planned that ran out, or whose holder is gone, was a killed process's.
    held = Server.objects.filter(enabled=True, sync_due_at=None).exclude(sync_lease_until=None)
    for server_id, until, by in held.values_list("pk", "sync_lease_until", "sync_holder"):
        if (until is not None and until < now) or process_identity.is_dead(by):
            held.filter(pk=server_id).update(sync_due_at=now, sync_sent_at=None)
    rows = Server.objects.filter(enabled=True, sync_due_at__lte=now).filter(
        Q(sync_sent_at=None) | Q(sync_sent_at__lt=now - timedelta(seconds=30)),
    )
    for server_id in list(rows.values_list("pk", flat=True)):
        queue_sync(server_id, now)


def queue_sync(server_id: int, due: datetime) -> None:
    if settings.EMBEDDED and pool.process_pool() is None:
        return  # a command beside the server: its schedule sends what is due
    wait = max(0.0, (due - timezone.now()).total_seconds())
    Server.objects.filter(pk=server_id).update(sync_sent_at=due)
    try:
        current_app.send_task(SYNC_TASK, (server_id,), countdown=wait or None)
    except (kombu.exceptions.OperationalError, OSError) as error:
        # The due time stands in the database; the schedule sends it again.
        Server.objects.filter(pk=server_id).update(sync_sent_at=None)
        logger.warning("The sync of server %s could not be queued: %s", server_id, error)


def next_poll(server: Server, ttl_ms: int | None) -> timedelta:
    """When to look again: what the server says, within reason, else the setting; ±20 %."""
    seconds = float(server.poll_seconds)
    if ttl_ms is not None and ttl_ms > 0:
        seconds = max(min(ttl_ms, 3_000_000) / 1000, 6.25)  # with jitter from 5 s to an hour
    jittered = seconds * random.uniform(0.8, 1.2)  # noqa: S311
    return timedelta(seconds=max(jittered, settings.SYNC_GAP))
