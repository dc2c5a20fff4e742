"""Alerts: conditions that need a person, each raised once and resolved when it ends."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Count, Q
from django.urls import reverse
from django.utils import timezone

from catalog import preferences
from catalog.models import Tool, ToolState
from catalog.search import golden_queries
from servers.models import Server, ServerState
from sessions_app.agents.api_keys import expiring_keys
from sessions_app.models import Alert, AlertKind, Call, CallPath
from sessions_app.usage.filters import FAILED
from toolcrib.lib.text import plural
from toolcrib.notifications import RAISED, RESOLVED
from toolcrib.notifications.deliveries import queue

KEPT = timedelta(days=90)
ERROR_WINDOW = timedelta(minutes=15)


@dataclass(frozen=True)
class Condition:
    kind: AlertKind
    key: str
    message: str
    path: str


def evaluate(now: datetime | None = None) -> tuple[int, int]:
    """Raise and resolve alerts; return how many of each."""
    now = now or timezone.now()
    conditions = {(each.kind.value, each.key): each for each in current_conditions(now)}
    firing = {(alert.kind, alert.key): alert for alert in firing_alerts()}
    raised = sum(
        _raise(condition, now) for key, condition in conditions.items() if key not in firing
    )
    ended = [alert for key, alert in firing.items() if key not in conditions]
    return raised, sum(_resolve(alert, now) for alert in ended)


def firing_alerts() -> list[Alert]:
    return list(Alert.objects.filter(resolved_at=None))


def _raise(condition: Condition, now: datetime) -> bool:
    try:
        with transaction.atomic():
            alert = Alert.objects.create(
                kind=condition.kind,
                key=condition.key,
                message=condition.message,
                path=condition.path,
                raised_at=now,
            )
            queue(RAISED, f"{RAISED}:{alert.pk}", as_json(alert))
    except IntegrityError:  # another process has raised it
        return False
    return True


def _resolve(alert: Alert, now: datetime) -> bool:
    with transaction.atomic():
        if not Alert.objects.filter(pk=alert.pk, resolved_at=None).update(resolved_at=now):
            return False
        alert.resolved_at = now
        queue(RESOLVED, f"{RESOLVED}:{alert.pk}", as_json(alert))
    return True


def as_json(alert: Alert) -> dict[str, object]:
    """Return an alert as the API and webhooks show it."""
    return {
        "id": alert.pk,
        "kind": alert.kind,
        "key": alert.key,
        "message": alert.message,
        "url": f"{settings.PUBLIC_URL}{alert.path}",
        "raised_at": alert.raised_at,
        "resolved_at": alert.resolved_at,
    }


def prune(now: datetime | None = None) -> None:
    Alert.objects.filter(resolved_at__lt=(now or timezone.now()) - KEPT).delete()


# --- Conditions ---------------------------------------------------------------------------------


def current_conditions(now: datetime) -> Iterator[Condition]:
    """Yield everything that is wrong now."""
    limits = preferences.values("alerts")
    yield from _failing_servers(now, limits["alert_failing_seconds"])
    yield from _waiting_approvals()
    yield from _golden_regressions()
    yield from _expiring_keys(now, limits["alert_key_days"])
    yield from _error_rate(now, limits["alert_error_percent"], limits["alert_error_calls"])


def _failing_servers(now: datetime, seconds: int) -> Iterator[Condition]:
    since = now - timedelta(seconds=seconds)
    failing = Server.objects.filter(enabled=True, state=ServerState.FAILING)
    for server in failing.filter(Q(state_since__lte=since) | Q(state_since=None)):
        message = f"Server {server.name} is failing. {server.state_cause}".strip()
        path = reverse("server", args=[server.slug])
        yield Condition(AlertKind.SERVER_FAILING, server.slug, message, path)


def _waiting_approvals() -> Iterator[Condition]:
    kind = AlertKind.APPROVAL_WAITING
    if held := Call.objects.held().count():
        message = f"{plural(held, 'call')} {'waits' if held == 1 else 'wait'} for a decision."
        yield Condition(kind, "calls", message, reverse("held-calls"))
    if pending := Tool.objects.filter(state=ToolState.WAITING).count():
        are = "is" if pending == 1 else "are"
        message = f"{plural(pending, 'definition')} {are} pending review."
        yield Condition(kind, "definitions", message, reverse("approvals"))


def _golden_regressions() -> Iterator[Condition]:
    if broken := golden_queries.list_regressions():
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        message = f"Search regression: golden query “{broken[0].query}”{more}."
        yield Condition(AlertKind.GOLDEN_REGRESSION, "search", message, reverse("golden"))


def _expiring_keys(now: datetime, days: int) -> Iterator[Condition]:
    for key in expiring_keys(now, timedelta(days=days)):
        agent = key.agent.name if key.agent else ""
        message = f"Key {key.name} ({key.prefix}…) of {agent} expires on {key.expires_at:%Y-%m-%d}."
        path = reverse("agent-keys", args=[agent])
        yield Condition(AlertKind.KEY_EXPIRING, str(key.pk), message, path)


def _error_rate(now: datetime, percent: float, minimum: int) -> Iterator[Condition]:
    recent = Call.objects.filter(accepted_at__gte=now - ERROR_WINDOW).exclude(path=CallPath.TRY)
    counted = recent.aggregate(calls=Count("pk"), errors=Count("pk", filter=FAILED))
    calls, errors = counted["calls"], counted["errors"]
    if calls >= minimum and 100 * errors > percent * calls:
        message = f"{100 * errors / calls:.0f}% of {calls:,} calls in 15 minutes failed."
        yield Condition(AlertKind.ERROR_RATE, "calls", message, f"{reverse('usage')}?range=24h")
