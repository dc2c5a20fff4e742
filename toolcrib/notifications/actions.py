"""Webhook writes: create, edit, delete, test. Every change is audited, without the address."""

import secrets
from collections.abc import Sequence
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import transaction
from django.utils import timezone

from catalog import audit
from catalog.audit import Actor
from servers.errors import UpstreamError
from servers.transports.http import check_url
from sessions_app.models import Webhook, WebhookKind
from toolcrib.lib.errors import Conflict, Invalid
from toolcrib.notifications import EVENTS, TEST
from toolcrib.notifications.deliveries import can_send_mail, queue

MAX_WEBHOOKS = 50
MAX_ADDRESS_LENGTH = 2000
FIELDS = ("name", "kind", "events", "enabled")


@transaction.atomic
def create(
    name: str, kind: str, address: str, events: Sequence[str], *, actor: Actor
) -> tuple[Webhook, str]:
    """Create a webhook and return it with the secret of its signatures, shown only here."""
    if Webhook.objects.count() >= MAX_WEBHOOKS:
        raise Conflict(f"There are {MAX_WEBHOOKS} webhooks already.", hint="Delete one first.")
    secret = f"whs_{secrets.token_urlsafe(32)}" if kind == WebhookKind.JSON else ""
    webhook = Webhook(
        name=_check_name(name),
        kind=kind,
        address=_check_address(kind, address),
        secret=secret,
        events=_check_events(events),
    )
    webhook.save()
    audit.record(actor, "webhook.create", webhook, after=_as_audited(webhook))
    return webhook, secret


@transaction.atomic
def edit(webhook: Webhook, *, actor: Actor, **values: Any) -> Webhook:
    """Change the given fields: name, address, events, enabled."""
    webhook = Webhook.objects.select_for_update().get(pk=webhook.pk)
    before = _as_audited(webhook)
    if "name" in values and values["name"] != webhook.name:
        webhook.name = _check_name(values["name"])
    if "events" in values:
        webhook.events = _check_events(values["events"])
    if "address" in values:
        webhook.address = _check_address(webhook.kind, values["address"])
    if values.get("enabled", webhook.enabled) != webhook.enabled:
        webhook.enabled = values["enabled"]
        webhook.read_until = timezone.now()  # what happened meanwhile is not sent later
    webhook.save()
    after = _as_audited(webhook)
    changed = [name for name in FIELDS if before[name] != after[name]]
    if changed or "address" in values:
        audit.record(
            actor,
            "webhook.update",
            webhook,
            before={name: before[name] for name in changed},
            after={name: after[name] for name in changed}
            | ({"address": "changed"} if "address" in values else {}),
        )
    return webhook


@transaction.atomic
def delete(webhook: Webhook, *, actor: Actor) -> None:
    audit.record(actor, "webhook.delete", webhook, before=_as_audited(webhook))
    webhook.delete()


@transaction.atomic
def send_test(webhook: Webhook, *, actor: Actor) -> None:
    """Queue a test notification."""
    audit.record(actor, "webhook.test", webhook)
    data = {"message": f"Test of the webhook {webhook.name} by {actor.label}."}
    queue(TEST, f"test:{secrets.token_hex(8)}", data, only=webhook)


def _check_name(name: str) -> str:
    name = name.strip()
    if not 0 < len(name) <= 80 or not name.isprintable():
        raise Invalid("A name must have 1 to 80 printable characters.")
    if Webhook.objects.filter(name=name).exists():
        raise Conflict(f"There is a webhook {name} already.", hint="Use another name.")
    return name


def _check_address(kind: str, address: str) -> str:
    """Return an address that notifications may be sent to. Connects to nothing."""
    address = address.strip()
    if len(address) > MAX_ADDRESS_LENGTH:
        raise Invalid("The address is too long.")
    if kind != WebhookKind.EMAIL:
        try:
            check_url(address)
        except UpstreamError as error:
            raise Invalid(error.message, hint=error.hint) from None
        return address
    if not can_send_mail():
        raise Invalid("Toolcrib cannot send e-mail.", hint="Set TOOLCRIB_EMAIL_HOST.")
    recipients = [part.strip() for part in address.split(",") if part.strip()]
    try:
        for recipient in recipients:
            validate_email(recipient)
    except ValidationError:
        recipients = []
    if not recipients:
        raise Invalid("Give e-mail addresses, separated by commas.")
    return ", ".join(recipients)


def _check_events(events: Sequence[str]) -> list[str]:
    if unknown := [name for name in events if name not in EVENTS]:
        raise Invalid(
            f"Unknown event: {unknown[0][:80]}.", hint=f"Events are: {', '.join(EVENTS)}."
        )
    if not events:
        raise Invalid("Choose at least one event.")
    return [name for name in EVENTS if name in events]


def _as_audited(webhook: Webhook) -> dict[str, object]:
    return {name: getattr(webhook, name) for name in FIELDS}
