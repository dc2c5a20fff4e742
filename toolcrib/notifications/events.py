"""Events of sessions for webhooks: read from the ledger, after their commit."""

from datetime import datetime, timedelta

from django.db import transaction
from django.utils import timezone

from sessions_app.ledger.event_messages import SECOND_NAMES, messages_of
from sessions_app.models import Event, EventKind, Webhook
from toolcrib.notifications.deliveries import enabled_webhooks, queue

# A transaction may commit after a later one: events of this time are read again, and each is queued
# once by its key.
OVERLAP = timedelta(seconds=60)
BATCH = 500


def queue_events(now: datetime | None = None) -> int:
    """Queue the new events of sessions for their receivers; return how many were queued."""
    now = now or timezone.now()
    return sum(_queue_for(hook, now) for hook in enabled_webhooks() if _kinds(hook))


def _kinds(webhook: Webhook) -> list[str]:
    """Return the kinds of events that a webhook wants, by any of their names."""
    wanted = set(webhook.events)
    return [
        kind
        for kind in EventKind.values
        if f"session.{kind}" in wanted or SECOND_NAMES.get(EventKind(kind)) in wanted
    ]


def _queue_for(webhook: Webhook, now: datetime) -> int:
    start = max(webhook.read_until - OVERLAP, webhook.created_at)
    rows = Event.objects.filter(kind__in=_kinds(webhook), at__gte=start)
    known = set(
        webhook.deliveries.filter(created_at__gte=start, key__startswith="event:").values_list(
            "key", flat=True
        )
    )
    queued, read_until = 0, now
    events = list(
        rows.select_related("call", "session__agent").order_by("at", "pk")[: BATCH + len(known)]
    )
    with transaction.atomic():
        for event in events:
            for name, body in messages_of(event):
                key = f"event:{event.pk}:{name}"
                if name in webhook.events and key not in known:
                    queued += queue(name, key, body, only=webhook)
        if len(events) == BATCH + len(known):
            read_until = events[-1].at
        Webhook.objects.filter(pk=webhook.pk).update(read_until=read_until)
    return queued
