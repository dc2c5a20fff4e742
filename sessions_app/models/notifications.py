"""Models for notifications: where they are sent, what is to be delivered, and alerts."""

import secrets

from django.db import models
from django.db.models import Q
from django.utils import timezone

from sessions_app.models.encryption import EncryptedTextField


class WebhookKind(models.TextChoices):
    JSON = "json"  # signed
    SLACK = "slack"  # the format of Slack's incoming webhooks
    EMAIL = "email"


class DeliveryState(models.TextChoices):
    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"  # for 24 hours


class AlertKind(models.TextChoices):
    SERVER_FAILING = "server_failing"
    APPROVAL_WAITING = "approval_waiting"
    GOLDEN_REGRESSION = "golden_regression"
    KEY_EXPIRING = "key_expiring"
    ERROR_RATE = "error_rate"


class Webhook(models.Model):
    """A receiver of notifications. Its address may contain a secret, so it is write-only."""

    name = models.CharField(max_length=80, unique=True)
    kind = models.CharField(max_length=5, choices=WebhookKind.choices, default=WebhookKind.JSON)
    address = EncryptedTextField()  # a URL, or e-mail addresses separated by commas
    secret = EncryptedTextField(blank=True)  # signs; only of kind json
    events = models.JSONField(default=list)  # names of toolcrib.notifications.EVENTS
    enabled = models.BooleanField(default=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    read_until = models.DateTimeField(default=timezone.now)  # of the events of sessions
    delivered_at = models.DateTimeField(null=True, blank=True)  # last success
    failing_since = models.DateTimeField(null=True, blank=True)
    last_error = models.CharField(max_length=300, blank=True)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.CheckConstraint(
                condition=Q(kind__in=WebhookKind.values), name="webhook_kind_known"
            )
        ]

    def __str__(self) -> str:
        return self.name


def new_delivery_id() -> str:
    return f"ntf_{secrets.token_hex(16)}"


class Delivery(models.Model):
    """One notification for one receiver, kept until it was delivered, and a week after."""

    delivery_id = models.CharField(max_length=40, unique=True, default=new_delivery_id)
    webhook = models.ForeignKey(Webhook, on_delete=models.CASCADE, related_name="deliveries")
    event = models.CharField(max_length=40)
    key = models.CharField(max_length=120)  # of what it reports, once per receiver
    data = models.TextField()  # JSON
    state = models.CharField(
        max_length=9, choices=DeliveryState.choices, default=DeliveryState.PENDING
    )
    attempts = models.PositiveIntegerField(default=0)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    due_at = models.DateTimeField(default=timezone.now)
    finished_at = models.DateTimeField(null=True, blank=True)
    error = models.CharField(max_length=300, blank=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(fields=["webhook", "key"], name="delivery_once"),
            models.CheckConstraint(
                condition=Q(state__in=DeliveryState.values), name="delivery_state_known"
            ),
        ]
        indexes = [models.Index(fields=["state", "due_at"], name="delivery_by_due")]

    def __str__(self) -> str:
        return self.delivery_id


class Alert(models.Model):
    """A condition that needs a person, from when it was first seen until it ended."""

    kind = models.CharField(max_length=20, choices=AlertKind.choices)
    key = models.CharField(max_length=80)  # what it is about, such as a server's slug
    message = models.TextField()
    path = models.CharField(max_length=300)  # of the page that shows it
    raised_at = models.DateTimeField(default=timezone.now, editable=False)
    resolved_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["kind", "key"],
                condition=Q(resolved_at=None),
                name="alert_once_until_resolved",
            ),
            models.CheckConstraint(condition=Q(kind__in=AlertKind.values), name="alert_kind_known"),
        ]
        indexes = [models.Index(fields=["-raised_at"], name="alert_by_time")]

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"
