"""Weekly digest: the figures of the last seven days, on Monday."""

from datetime import datetime
from typing import Any

from django.conf import settings
from django.urls import reverse
from django.utils import timezone

from sessions_app.models import Alert, UsageKind
from sessions_app.usage.series import read_series, read_totals
from toolcrib.lib.figures import signed
from toolcrib.lib.text import plural
from toolcrib.notifications import DIGEST
from toolcrib.notifications.deliveries import enabled_webhooks, queue

HOUR = 8  # UTC, on Monday
TOP = 5


def queue_if_due(now: datetime | None = None) -> int:
    """Queue the digest of this week, once for each receiver; return for how many."""
    now = now or timezone.now()
    year, week, day = now.isocalendar()
    if day != 1 or now.hour < HOUR:
        return 0
    key = f"digest:{year}-W{week:02}"
    waiting = [
        hook
        for hook in enabled_webhooks()
        if DIGEST in hook.events and not hook.deliveries.filter(key=key).exists()
    ]
    data = build(now) if waiting else {}
    return sum(queue(DIGEST, key, data, only=hook) for hook in waiting)


def build(now: datetime) -> dict[str, Any]:
    """Return the figures of seven days, by the definitions of the usage page."""
    series = read_series("7d", now=now)
    total, tokens = series.total, series.total.token_figures
    servers = read_totals("7d", UsageKind.SERVER, now)
    worst = sorted(servers.items(), key=lambda item: (-item[1].errors, item[0]))
    failing = [(name, figures.errors) for name, figures in worst if figures.errors][:TOP]
    alerts = Alert.objects.filter(raised_at__gte=series.starts[0]).count()
    rate = f" ({total.error_rate:.1f}%)" if total.error_rate else ""
    lines = [
        f"Last 7 days: {plural(total.calls, 'call')} in {plural(total.sessions, 'session')}, "
        f"{plural(total.errors, 'error')}{rate}.",
        f"Tokens: ≈{tokens.given:,} given for tools, {signed(tokens.saved)} saved.",
        f"Alerts: {alerts:,}.",
    ]
    if failing:
        lines.append("Most errors: " + ", ".join(f"{name} {errors:,}" for name, errors in failing))
    return {
        "message": "\n".join(lines),
        "url": f"{settings.PUBLIC_URL}{reverse('usage')}?range=7d",
        "calls": total.calls,
        "errors": total.errors,
        "sessions": total.sessions,
        "tokens_given": tokens.given,
        "tokens_saved": tokens.saved,
        "alerts": alerts,
    }
