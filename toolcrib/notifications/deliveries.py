"""Deliveries: queue notifications, send them signed, and retry for 24 hours.

Each is sent at least once, with an id by which a receiver recognizes a repetition. A process
claims a delivery by moving its due time, so that several workers share them; a claim that dies
becomes due again.
"""

import hashlib
import hmac
import json
import logging
import smtplib
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.core.mail import send_mail
from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import F, Q, QuerySet
from django.utils import timezone

from servers.transports.json_post import PostFailed, post_guarded
from sessions_app.models import Delivery, DeliveryState, Webhook, WebhookKind
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.telemetry import metrics
from toolcrib.notifications import texts

logger = logging.getLogger(__name__)

RETRY_SECONDS = (10, 30, 60, 300, 900, 3600, 3 * 3600)  # after each attempt; then the last one
GIVE_UP = timedelta(hours=24)
CLAIM = timedelta(minutes=2)
KEPT = timedelta(days=7)
BATCH = 50


def can_send_mail() -> bool:
    return bool(settings.EMAIL_HOST)


def queue(event: str, key: str, data: Mapping[str, Any], *, only: Webhook | None = None) -> int:
    """Queue a notification for each receiver of this event; return for how many.

    Call it in the transaction of what it reports. `key` names that: it is queued only once.
    """
    webhooks = [only] if only else [hook for hook in enabled_webhooks() if event in hook.events]
    text = json.dumps(data, cls=DjangoJSONEncoder)
    rows = [Delivery(webhook=hook, event=event, key=key, data=text) for hook in webhooks]
    Delivery.objects.bulk_create(rows, ignore_conflicts=True)
    return len(rows)


def enabled_webhooks() -> list[Webhook]:
    return list(Webhook.objects.filter(enabled=True))


def is_due(now: datetime | None = None) -> bool:
    return _due(now or timezone.now()).exists()


def deliver_due(now: datetime | None = None) -> int:
    """Send what is due, and return how many arrived. A receiver that fails is asked once."""
    now, arrived = now or timezone.now(), 0
    failed: set[int] = set()
    for delivery in _due(now).select_related("webhook").order_by("id")[:BATCH]:
        if delivery.webhook_id in failed or not _claim(delivery, now):
            continue
        error = send(delivery)
        _record(delivery, error, now)
        arrived += not error
        if error:
            failed.add(delivery.webhook_id)
    return arrived


def _due(now: datetime) -> QuerySet[Delivery]:
    return Delivery.objects.filter(
        state=DeliveryState.PENDING, due_at__lte=now, webhook__enabled=True
    )


def _claim(delivery: Delivery, now: datetime) -> bool:
    """Move the due time, unless another worker has."""
    rows = Delivery.objects.filter(
        pk=delivery.pk, state=DeliveryState.PENDING, due_at=delivery.due_at
    )
    delivery.attempts += 1
    return bool(rows.update(due_at=now + CLAIM, attempts=F("attempts") + 1))


def send(delivery: Delivery) -> str:
    """Send a notification; return why it did not arrive, or an empty text."""
    webhook = delivery.webhook
    try:
        if webhook.kind == WebhookKind.EMAIL:
            _send_mail(delivery)
            return ""
        body, headers = build_request(delivery, int(time.time()))
        status = post_guarded(webhook.address, headers, body)
    except PostFailed as error:
        return str(error)
    except ToolcribError as error:  # a blocked address, a key that cannot be read
        return error.message
    except (OSError, smtplib.SMTPException) as error:
        return f"The mail server failed: {type(error).__name__}."
    return "" if 200 <= status < 300 else f"The receiver answered HTTP {status}."


def build_request(delivery: Delivery, now: int) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a delivery by HTTP, signed at a time."""
    webhook, data = delivery.webhook, json.loads(delivery.data)
    headers = {"Content-Type": "application/json", "Toolcrib-Delivery": delivery.delivery_id}
    if webhook.kind == WebhookKind.SLACK:
        body = json.dumps({"text": texts.slack_text(delivery.event, data)}).encode()
        return body, headers
    message = {
        "id": delivery.delivery_id,
        "type": delivery.event,
        "created_at": delivery.created_at,
        "data": data,
    }
    body = json.dumps(message, cls=DjangoJSONEncoder).encode()
    return body, headers | {"Toolcrib-Signature": sign(webhook.secret, body, now)}


def sign(secret: str, body: bytes, now: int) -> str:
    """Return the signature header: an HMAC over the time and the body."""
    digest = hmac.new(secret.encode(), f"{now}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={now},v1={digest}"


def _send_mail(delivery: Delivery) -> None:
    subject, text = texts.mail(delivery.event, json.loads(delivery.data))
    recipients = [part.strip() for part in delivery.webhook.address.split(",")]
    send_mail(subject, text, settings.DEFAULT_FROM_EMAIL, recipients)


def _record(delivery: Delivery, error: str, now: datetime) -> None:
    webhook = Webhook.objects.filter(pk=delivery.webhook_id)
    row = Delivery.objects.filter(pk=delivery.pk)
    if metrics.enabled:
        outcome = "failed" if error else "delivered"
        metrics.record([metrics.counted("toolcrib_webhook_deliveries", outcome)])
    if not error:
        row.update(state=DeliveryState.DELIVERED, finished_at=now, error="")
        webhook.update(delivered_at=now, failing_since=None, last_error="")
        return
    logger.warning("Notification %s did not arrive: %s", delivery.delivery_id, error)
    webhook.filter(failing_since=None).update(failing_since=now)
    webhook.update(last_error=error[:300])
    if now - delivery.created_at >= GIVE_UP:
        row.update(state=DeliveryState.FAILED, finished_at=now, error=error[:300])
        return
    wait = RETRY_SECONDS[min(delivery.attempts, len(RETRY_SECONDS)) - 1]
    due = min(now + timedelta(seconds=wait), delivery.created_at + GIVE_UP)
    row.update(due_at=due, error=error[:300])


def prune(now: datetime | None = None) -> None:
    """Delete what was delivered or given up a week ago, or waits for a disabled receiver."""
    before = (now or timezone.now()) - KEPT
    old = Q(finished_at__lt=before) | Q(created_at__lt=before, webhook__enabled=False)
    Delivery.objects.filter(old).delete()
