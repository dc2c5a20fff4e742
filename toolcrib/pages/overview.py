"""Overview page: metrics of the last 24 hours, servers, recent sessions, first steps.

Reads only, each block in a fixed number of queries. A block that fails with a database error shows
the failure; the others are not affected. Items that need attention are in `attention`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.models import User
from django.db import DatabaseError
from django.db.models import (
    Case,
    CharField,
    Count,
    F,
    IntegerField,
    Max,
    QuerySet,
    Sum,
    Value,
    When,
)
from django.db.models.functions import Cast, Substr
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_safe

from catalog.models import AuditEntry
from servers.models import Server, ServerState
from servers.web import import_wizard
from servers.web.forms import DemoForm
from sessions_app.agents import onboarding_views
from sessions_app.models import Agent, AgentSession, Call, CallPath
from sessions_app.review import queries as review_queries
from sessions_app.usage.filters import FAILED
from sessions_app.usage.tool_usage import answered_calls
from toolcrib.lib.percentile import percentile
from toolcrib.lib.roles import Role, operator_required, role_of
from toolcrib.pages import attention

logger = logging.getLogger(__name__)

HOURS = 24
MAX_SERVERS = 60
RECENT_SESSIONS = 5
LATENCY_SAMPLE = 10_000  # newest answered calls used for p95
WORST_FIRST = (
    ServerState.FAILING,
    ServerState.CONNECTING,
    ServerState.NEW,
    ServerState.CONNECTED,
    ServerState.DISABLED,
)
CALLS = "All calls by agents, whatever their outcome. Test calls are not counted."
ERROR_RATE = "Share of calls that failed, were rejected, timed out or returned an error."
LATENCY = f"95th percentile of answered calls, from the newest {LATENCY_SAMPLE:,}."
TOKENS_SAVED = (
    "Per session: tokens of all schemas, minus tokens sent for tool discovery (catalog, searches, "
    "loaded definitions)."
)


@dataclass(frozen=True)
class Block:
    """One block of the page, or the fact that reading it failed."""

    value: Any = None
    failed: bool = False


def block(read: Callable[[], Any]) -> Block:
    """Read a block; log a database error and mark the block as failed."""
    try:
        return Block(read())
    except DatabaseError:
        logger.exception("Overview block %s failed", read.__name__)
        return Block(failed=True)


# --- Metrics ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A metric of the last 24 hours with its hourly values. None: no data."""

    label: str
    value: str
    unit: str
    url: str
    spark: Sequence[float | None]
    definition: str


def numbers() -> dict[str, Any]:
    now = timezone.now()
    since = now - timedelta(hours=HOURS)
    call_rows = Call.objects.filter(accepted_at__gte=since).exclude(path=CallPath.TRY)
    sessions = AgentSession.objects.filter(created_at__gte=since)
    hourly = _by_hour(
        call_rows, "accepted_at", now, calls=Count("pk"), errors=Count("pk", filter=FAILED)
    )
    calls, errors = hourly["calls"], hourly["errors"]
    tokens_saved = F("tokens_all") - F("tokens_catalog") - F("tokens_search") - F("tokens_load")
    saved = _by_hour(sessions, "created_at", now, saved=Sum(tokens_saved))["saved"]
    latencies = _latencies(call_rows, now)
    rates = [_rate(*pair) for pair in zip(calls, errors, strict=True)]
    p95 = [percentile(hour, 0.95) for hour in latencies]
    total_rate = _rate(sum(calls), sum(errors))
    total_p95 = percentile([latency for hour in latencies for latency in hour], 0.95)
    sign = "−" if sum(saved) < 0 else ""
    url = reverse("sessions")
    figures = [
        Metric("Calls", f"{sum(calls):,}", "", url, calls, CALLS),
        Metric("Error rate", *_value(total_rate, ".1f", "%"), f"{url}?errors=1", rates, ERROR_RATE),
        Metric("p95 latency", *_value(total_p95, ",", "ms"), "", p95, LATENCY),
        Metric("Tokens saved", f"{sign}≈{abs(sum(saved)):,}", "", url, saved, TOKENS_SAVED),
    ]
    return {
        "figures": figures,
        "hours": _table(now, calls, rates, p95, saved),
        "quiet": not sum(calls) and not any(saved),
    }


def _rate(calls: int, errors: int) -> float | None:
    return 100 * errors / calls if calls else None


def _value(number: float | None, format_: str, unit: str) -> tuple[str, str]:
    return ("–", "") if number is None else (f"{number:{format_}}", unit)


def _by_hour(
    rows: QuerySet[Any], field: str, now: datetime, **sums: Count | Sum
) -> dict[str, list[int]]:
    """Aggregate rows into the last 24 hours, oldest first, each ending at the current minute.

    The database groups by minute: truncating the text of a timestamp is cheaper than any date
    function, and there are at most 1,441 minutes.
    """
    minute = Substr(Cast(field, CharField()), 1, 16)
    minutes = rows.order_by().annotate(minute=minute).values("minute").annotate(**sums)
    totals = {name: [0] * HOURS for name in sums}
    for row in minutes:
        at = datetime.fromisoformat(row["minute"]).replace(tzinfo=now.tzinfo)
        for name in sums:
            totals[name][_hour(at, now)] += row[name] or 0
    return totals


def _hour(at: datetime, now: datetime) -> int:
    ago = int((now - at).total_seconds() // 3600)
    return HOURS - 1 - max(0, min(ago, HOURS - 1))


def _latencies(calls: QuerySet[Call], now: datetime) -> list[list[int]]:
    """Return the latencies of answered calls in milliseconds, by hour."""
    latencies: list[list[int]] = [[] for _ in range(HOURS)]
    for _, start, latency in answered_calls(calls, LATENCY_SAMPLE):
        latencies[_hour(start, now)].append(latency)
    return latencies


def _table(now: datetime, *columns: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the hours as table rows, newest first."""
    starts = [now - timedelta(hours=HOURS - hour) for hour in range(HOURS)]
    names = ("calls", "rate", "p95", "saved")
    rows = [
        {"from": start, **dict(zip(names, values, strict=True))}
        for start, *values in zip(starts, *columns, strict=True)
    ]
    return rows[::-1]


# --- Servers and sessions -----------------------------------------------------------------------


def servers() -> dict[str, Any]:
    """Return the servers, worst state first, and the time of the last sync."""
    ranks = [When(state=state, then=Value(rank)) for rank, state in enumerate(WORST_FIRST)]
    rank = Case(*ranks, default=Value(len(ranks)), output_field=IntegerField())
    listed = list(Server.objects.annotate(rank=rank).order_by("rank", "name", "slug")[:MAX_SERVERS])
    states = Counter(dict(Server.objects.order_by().values_list("state").annotate(Count("pk"))))
    last_sync = Server.objects.aggregate(at=Max("last_synced_at"))["at"]
    return {
        "listed": listed,
        "more": max(states.total() - len(listed), 0),
        "connected": states[ServerState.CONNECTED],
        "total": states.total(),
        "last_sync": last_sync,
    }


def recent_sessions() -> list[review_queries.SessionRow]:
    every_session = review_queries.SessionFilter()
    return list(review_queries.list_sessions(every_session, size=RECENT_SESSIONS).rows)


# --- First steps --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    label: str
    done: bool
    url: str = ""


def first_steps(group_viewed: bool) -> list[Step]:
    """Return the onboarding steps in order, with their completion."""
    group_changes = AuditEntry.objects.filter(target_kind="group", actor_kind="user")
    agent, session = Agent.objects.exists(), AgentSession.objects.exists()
    people = User.objects.filter(is_active=True)[:2].count()
    return [
        Step("Connect a server", Server.objects.exists(), reverse("server-add")),
        Step("View a group", group_viewed or group_changes.exists(), reverse("welcome-group")),
        Step("Connect an agent", agent, reverse("welcome-agent")),
        Step("Run a first session", session, reverse("welcome-agent") if agent else ""),
        Step("Invite a second person", people > 1, reverse("people")),
    ]


@require_safe
@operator_required
def overview(request: HttpRequest) -> HttpResponse:
    """Render the overview; before the first server, only the setup card."""
    if not Server.objects.exists():
        return render(request, "toolcrib/pages/overview.html", {"first_run": True, "demo": _demo()})
    blocks = {
        "attention": block(attention.items),
        "numbers": block(numbers),
        "servers": block(servers),
        "sessions": block(recent_sessions),
    }
    return render(request, "toolcrib/pages/overview.html", {**blocks, **_checklist(request)})


def _demo() -> import_wizard.CheckedRow:
    """Return the demo server as the import check shows it: its command and the confirmation."""
    return import_wizard.check(import_wizard.WizardState(DemoForm().to_mcp_json())).rows[0]


def _checklist(request: HttpRequest) -> dict[str, Any]:
    """Return the first steps, for admins until all are done or dismissed."""
    if role_of(request.user) < Role.ADMIN or onboarding_views.DISMISSED_COOKIE in request.COOKIES:
        return {}
    group_viewed = onboarding_views.GROUP_VIEWED_COOKIE in request.COOKIES
    steps = block(lambda: first_steps(group_viewed))
    if steps.failed or all(step.done for step in steps.value):
        return {}
    return {"steps": steps.value, "steps_done": sum(step.done for step in steps.value)}
