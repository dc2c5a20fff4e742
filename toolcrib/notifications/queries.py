"""Webhook queries: one webhook, and a webhook as API and page show it, without its address."""

from typing import Any
from urllib.parse import urlsplit

from django.db.models import Count, Q

from sessions_app.models import DeliveryState, Webhook, WebhookKind
from toolcrib.lib.errors import NotFound


def find_webhook(webhook_id: int) -> Webhook:
    webhook = Webhook.objects.filter(pk=webhook_id).first()
    if webhook is None:
        raise NotFound("Webhook not found.", hint="Check the id in the list of webhooks.")
    return webhook


def list_webhooks() -> list[dict[str, Any]]:
    pending = Count("deliveries", filter=Q(deliveries__state=DeliveryState.PENDING))
    return [show_webhook(hook) for hook in Webhook.objects.annotate(pending_count=pending)]


def show_webhook(webhook: Webhook) -> dict[str, Any]:
    fields = ("id", "name", "kind", "events", "enabled", "created_at", "delivered_at")
    shown = {name: getattr(webhook, name) for name in fields}
    return shown | {
        "receiver": receiver(webhook),
        "failing_since": webhook.failing_since,
        "last_error": webhook.last_error,
        "pending": getattr(webhook, "pending_count", 0),
    }


def receiver(webhook: Webhook) -> str:
    """Return where notifications go, without the path of a URL: it may contain a secret."""
    address: str = webhook.address
    if webhook.kind == WebhookKind.EMAIL:
        return address
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc}"
