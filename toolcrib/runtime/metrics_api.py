"""The endpoint /metrics for Prometheus, summed over the processes of this installation."""

import ipaddress
from collections import Counter
from secrets import compare_digest

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from catalog.models import Tool, ToolState
from servers.models import Server, ServerState
from sessions_app.models import (
    AgentSession,
    Alert,
    Call,
    RunState,
    ScriptRun,
    SessionState,
)
from toolcrib.lib.figures import TokenFigures
from toolcrib.lib.telemetry import exchange, metrics
from toolcrib.lib.telemetry.metrics import Series, Values
from toolcrib.runtime.lifespan import runtime

FORWARDED = ("X-Forwarded-For", "Forwarded", "X-Real-Ip")


@require_safe
@login_not_required
def metrics_page(request: HttpRequest) -> HttpResponse:
    """Return all metrics to holders of the token, or without one to this machine."""
    if not metrics.enabled:
        return _refuse(404, "Metrics are disabled. Set TOOLCRIB_METRICS=1.")
    if not _may_read(request):
        return _refuse(401 if settings.METRICS_TOKEN else 403, "Not allowed.")
    totals, gauges = exchange.collect(runtime.gauges())
    body = metrics.render(totals, {**gauges, **_stored_gauges(), **_saved(totals)})
    return HttpResponse(body, content_type=metrics.CONTENT_TYPE)


def _refuse(status: int, text: str) -> HttpResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return HttpResponse(f"{text}\n", status=status, content_type="text/plain", headers=headers)


def _may_read(request: HttpRequest) -> bool:
    if settings.METRICS_TOKEN:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        expected = settings.METRICS_TOKEN.encode()
        return scheme.lower() == "bearer" and compare_digest(token.strip().encode(), expected)
    # A proxy on this machine forwards requests of others: its headers tell.
    if any(name in request.headers for name in FORWARDED):
        return False
    try:
        return ipaddress.ip_address(request.META.get("REMOTE_ADDR", "")).is_loopback
    except ValueError:
        return False


def _stored_gauges() -> dict[Series, float]:
    """Return what the database knows, the same in every process."""
    states = Server.objects.order_by().values_list("state").annotate(Count("pk"))
    by_state = Counter(dict.fromkeys(ServerState.values, 0)) + Counter(dict(states))
    return {
        ("toolcrib_sessions_open",): AgentSession.objects.filter(state=SessionState.OPEN).count(),
        ("toolcrib_alerts_firing",): Alert.objects.filter(resolved_at=None).count(),
        ("toolcrib_calls_held",): Call.objects.held().count(),
        ("toolcrib_scripts_held",): ScriptRun.objects.filter(state=RunState.HELD).count(),
        ("toolcrib_tools_pending_review",): Tool.objects.filter(state=ToolState.WAITING).count(),
        **{("toolcrib_servers", state): by_state[state] for state in ServerState.values},
    }


def _saved(totals: Values) -> dict[Series, float]:
    parts = metrics.TOKEN_PARTS.values()
    tokens = TokenFigures(**{part: int(totals.get(("toolcrib_tokens", part), 0)) for part in parts})
    return {("toolcrib_tokens_saved",): tokens.saved}
