"""Admin API of notifications: webhooks, their deliveries, and alerts."""

from datetime import datetime
from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema, Status
from pydantic import Field, StrictBool

from sessions_app.models import Alert, AlertKind, WebhookKind
from toolcrib.lib.api_schemas import (
    CONFLICTS,
    ERRORS,
    AgentBody,
    Cursor,
    Limit,
    choices,
    set_location,
)
from toolcrib.lib.pagination import cut_list, cut_page, parse_id
from toolcrib.lib.roles import key_actor
from toolcrib.notifications import EVENTS, actions, alerts
from toolcrib.notifications.queries import find_webhook, list_webhooks, show_webhook

router = Router(tags=["notifications"])


EventName = Annotated[str, choices(EVENTS)]


class WebhookIn(AgentBody):
    name: str = Field(max_length=80)
    kind: Literal["json", "slack", "email"] = "json"
    address: str = Field(description="A URL, or e-mail addresses separated by commas")
    events: list[EventName] = Field(
        description="Names of events, such as alert.raised or call.held", max_length=100
    )


class WebhookEdit(AgentBody):
    name: str | None = None
    address: str | None = None
    events: list[EventName] | None = None
    enabled: StrictBool | None = None


class WebhookOut(Schema):
    id: int
    name: str
    kind: Annotated[str, choices(WebhookKind)]
    receiver: str = Field(description="Without the path of the URL")
    events: list[str]
    enabled: bool
    created_at: datetime
    delivered_at: datetime | None
    failing_since: datetime | None
    last_error: str
    pending: int


class CreatedWebhook(WebhookOut):
    secret: str = Field(description="Signs what is sent; returned only here")


class WebhookList(Schema):
    items: list[WebhookOut]
    next_cursor: str | None


class DeliveryOut(Schema):
    delivery_id: str
    event: str
    state: Annotated[str, choices(("pending", "delivered", "failed"))] = Field(
        description="pending, delivered or failed"
    )
    attempts: int
    created_at: datetime
    due_at: datetime
    finished_at: datetime | None
    error: str


class DeliveryPage(Schema):
    items: list[DeliveryOut]
    next_cursor: str | None


class AlertOut(Schema):
    id: int
    kind: Annotated[str, choices(AlertKind)]
    key: str
    message: str
    url: str
    raised_at: datetime
    resolved_at: datetime | None


class AlertPage(Schema):
    items: list[AlertOut]
    next_cursor: str | None


@router.get("/webhooks", response={200: WebhookList, **ERRORS}, operation_id="list_webhooks")
def webhooks(request: HttpRequest, limit: Limit = 50, cursor: Cursor = "") -> dict[str, Any]:
    """List the receivers of notifications."""
    items, next_cursor = cut_list(list_webhooks(), limit, cursor)
    return {"items": items, "next_cursor": next_cursor}


@router.post("/webhooks", response={201: CreatedWebhook, **ERRORS, **CONFLICTS})
def create_webhook(
    request: HttpRequest, response: HttpResponse, body: WebhookIn
) -> Status[dict[str, Any]]:
    """Create a receiver of notifications."""
    values = body.name, body.kind, body.address, body.events
    webhook, secret = actions.create(*values, actor=key_actor(request))
    set_location(response, "webhooks", webhook.pk)
    return Status(201, {**show_webhook(webhook), "secret": secret})


@router.get("/webhooks/{webhook_id}", response={200: WebhookOut, **ERRORS})
def get_webhook(request: HttpRequest, webhook_id: int) -> dict[str, Any]:
    """Get a receiver of notifications."""
    return show_webhook(find_webhook(webhook_id))


@router.patch("/webhooks/{webhook_id}", response={200: WebhookOut, **ERRORS, **CONFLICTS})
def edit_webhook(request: HttpRequest, webhook_id: int, body: WebhookEdit) -> dict[str, Any]:
    """Change the fields in the request."""
    values = body.model_dump(exclude_none=True)
    webhook = actions.edit(find_webhook(webhook_id), actor=key_actor(request), **values)
    return show_webhook(webhook)


@router.delete("/webhooks/{webhook_id}", response={204: None, **ERRORS})
def delete_webhook(request: HttpRequest, webhook_id: int) -> Status[None]:
    """Delete a receiver with its pending notifications."""
    actions.delete(find_webhook(webhook_id), actor=key_actor(request))
    return Status(204, None)


@router.post("/webhooks/{webhook_id}/test", response={202: WebhookOut, **ERRORS})
def test_webhook(request: HttpRequest, webhook_id: int) -> Status[dict[str, Any]]:
    """Queue a test notification."""
    webhook = find_webhook(webhook_id)
    actions.send_test(webhook, actor=key_actor(request))
    return Status(202, show_webhook(webhook))


@router.get("/webhooks/{webhook_id}/deliveries", response={200: DeliveryPage, **ERRORS})
def list_webhook_deliveries(
    request: HttpRequest, webhook_id: int, limit: Limit = 50, cursor: Cursor = ""
) -> dict[str, Any]:
    """List the notifications of a receiver, the newest first."""
    rows = find_webhook(webhook_id).deliveries.all()
    rows = rows.filter(pk__lt=parse_id(cursor)) if cursor else rows
    items, next_cursor = cut_page(rows, limit, lambda row: str(row.pk))
    return {"items": items, "next_cursor": next_cursor}


@router.get("/alerts", response={200: AlertPage, **ERRORS})
def list_alerts(
    request: HttpRequest, firing: bool = False, limit: Limit = 50, cursor: Cursor = ""
) -> dict[str, Any]:
    """List alerts, the newest first; with `firing`, those that are not resolved."""
    rows = Alert.objects.filter(resolved_at=None) if firing else Alert.objects.all()
    rows = rows.filter(pk__lt=parse_id(cursor)) if cursor else rows
    items, next_cursor = cut_page(rows, limit, lambda row: str(row.pk))
    return {"items": [alerts.as_json(alert) for alert in items], "next_cursor": next_cursor}
