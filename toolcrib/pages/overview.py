"""Read what the overview shows: four numbers, servers, sessions, first steps.

Reads only, each block in a fixed number of queries, whatever there is. A block that the database
refuses says so and leaves the others standing. What needs a person is in `toolcrib.attention`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
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
from sessions_app.usage.tool_usage import answered
from toolcrib.lib.percentile import percentile
from toolcrib.lib.roles import Role, operator_required, role_of
from toolcrib.pages import attention

logger = logging.getLogger(__name__)

HOURS = 24
CELLS = 60  # servers in the strip
RECENT = 5  # sessions
SAMPLE = 10_000  # newest answered calls that p95 is read from
WORST_FIRST = (
    ServerState.FAILING,
    ServerState.CONNECTING,
    ServerState.NEW,
    ServerState.CONNECTED,
    ServerState.DISABLED,
)
SAVED = (
    "For each session: what all schemas would have cost, minus what its model was given to know "
    "its tools (catalog, searches, loaded definitions)."
)


@dataclass(frozen=True)
class Block:
    """One part of the page, or the fact that it could not be read."""

    value: Any = None
    failed: bool = False


def block(read: Callable[[], Any]) -> Block:
    try:
        return Block(read())
    except DatabaseError:
        logger.exception("The overview could not read %s.", read.__name__)
        return Block(failed=True)


# --- Four numbers -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A number of the last 24 hours with its course by the hour. None is "nothing to count"."""

    label: str
    value: str
    unit: str
    url: str
    spark: list[float | None]
    counted: str  # how


def numbers() -> dict[str, Any]:
    now = timezone.now()
    since = now - timedelta(hours=HOURS)
    calls = Call.objects.filter(accepted_at__gte=since).exclude(path=CallPath.TRY)
    sessions = AgentSession.objects.filter(created_at__gte=since)
    counted = _by_hour(
        calls, "accepted_at", now, calls=Count("pk"), errors=Count("pk", filter=FAILED)
    )
    known = F("tokens_all") - F("tokens_catalog") - F("tokens_search") - F("tokens_load")
    saved = _by_hour(sessions, "created_at", now, saved=Sum(known))["saved"]
    times = _times(calls, now)
    rates = [
        100 * errors / made if made else None
        for made, errors in zip(counted["calls"], counted["errors"], strict=True)
    ]
    p95 = [percentile(one, 0.95) for one in times]
    return {
        "figures": [
            _calls(counted["calls"]),
            _error_rate(counted["calls"], counted["errors"], rates),
            _p95(times, p95),
            _saved(saved),
        ],
        "hours": _table(now, counted["calls"], rates, p95, saved),
        "at": now,
        "quiet": not sum(counted["calls"]) and not any(saved),
    }


def _calls(calls: list[int]) -> Metric:
    return Metric(
        "Calls",
        f"{sum(calls):,}",
        "",
        reverse("sessions"),
        list(calls),
        "Calls that agents made, whatever became of them. Trying out a tool is not counted.",
    )


def _error_rate(calls: list[int], errors: list[int], rates: list[float | None]) -> Metric:
    rate = 100 * sum(errors) / sum(calls) if sum(calls) else None
    return Metric(
        "Error rate",
        "–" if rate is None else f"{rate:.1f}",
        "" if rate is None else "%",
        reverse("sessions") + "?errors=1",
        rates,
        "Calls that failed, were refused, took too long or came back as an error, of all calls.",
    )


def _p95(times: list[list[int]], by_hour: list[int | None]) -> Metric:
    value = percentile([one for hour in times for one in hour], 0.95)
    return Metric(
        "p95 latency",
        "–" if value is None else f"{value:,}",
        "" if value is None else "ms",
        "",
        list(by_hour),
        f"95 of 100 answered calls took no longer; read from the newest {SAMPLE:,}.",
    )


def _saved(saved: list[int]) -> Metric:
    total = sum(saved)
    sign = "-" if total < 0 else ""
    return Metric(
        "Tokens saved", f"{sign}≈{abs(total):,}", "", reverse("sessions"), list(saved), SAVED
    )


def _by_hour(
    rows: QuerySet[Any], field: str, now: datetime, **sums: Count | Sum
) -> dict[str, list[int]]:
    """Sum rows into the last 24 hours, oldest first, each ending at this minute of the clock.

    The database groups by minute: cutting its own text of a time costs less than any function on
    times, and there are never more than 1,441 minutes.
    """
    minute = Substr(Cast(field, CharField()), 1, 16)
    found = rows.order_by().annotate(minute=minute).values("minute").annotate(**sums)
    totals = {name: [0] * HOURS for name in sums}
    for row in found:
        at = datetime.fromisoformat(row["minute"]).replace(tzinfo=now.tzinfo)
        for name in sums:
            totals[name][_hour(at, now)] += row[name] or 0
    return totals


def _hour(at: datetime, now: datetime) -> int:
    ago = int((now - at).total_seconds() // 3600)
    return HOURS - 1 - max(0, min(ago, HOURS - 1))


def _times(calls: QuerySet[Call], now: datetime) -> list[list[int]]:
    """Milliseconds of what reached a server and came back, by the hour."""
    times: list[list[int]] = [[] for _ in range(HOURS)]
    for _, start, took in answered(calls, SAMPLE):
        times[_hour(start, now)].append(took)
    return times


def _table(now: datetime, *columns: Iterable[Any]) -> list[dict[str, Any]]:
    """The hours as rows, newest first, for those who read rather than look."""
    starts = [now - timedelta(hours=HOURS - at) for at in range(HOURS)]
    names = ("calls", "rate", "p95", "saved")
    rows = [
        {"from": start, **dict(zip(names, values, strict=True))}
        for start, *values in zip(starts, *columns, strict=True)
    ]
    return rows[::-1]


# --- Servers and sessions -----------------------------------------------------------------------


def servers() -> dict[str, Any]:
    """Every server, worst first, and when one last answered."""
    ranks = [When(state=state, then=Value(at)) for at, state in enumerate(WORST_FIRST)]
    worst = Case(*ranks, default=Value(len(ranks)), output_field=IntegerField())
    shown = list(Server.objects.annotate(worst=worst).order_by("worst", "name", "slug")[:CELLS])
    states = Counter(dict(Server.objects.order_by().values_list("state").annotate(Count("pk"))))
    newest = Server.objects.aggregate(at=Max("last_synced_at"))["at"]
    return {
        "shown": shown,
        "more": max(states.total() - len(shown), 0),
        "connected": states[ServerState.CONNECTED],
        "total": states.total(),
        "last_sync": newest,
    }


def recent_sessions() -> list[review_queries.SessionRow]:
    return list(review_queries.list_sessions(review_queries.SessionFilter(), size=RECENT).rows)


# --- First steps --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    label: str
    done: bool
    url: str = ""


def first_steps(looked: bool) -> list[Step]:
    """What makes an installation useful, in order, with what is done of it."""
    acted = looked or AuditEntry.objects.filter(target_kind="group", actor_kind="user").exists()
    agent, session = Agent.objects.exists(), AgentSession.objects.exists()
    people = User.objects.filter(is_active=True)[:2].count()
    return [
        Step("Connect a server", Server.objects.exists(), reverse("server-add")),
        Step("Look at a group", acted, reverse("welcome-group")),
        Step("Connect an agent", agent, reverse("welcome-agent")),
        Step("See a first session", session, reverse("welcome-agent") if agent else ""),
        Step("Add a second person", people > 1, reverse("people")),
    ]


@require_safe
@operator_required
def overview(request: HttpRequest) -> HttpResponse:
    """Show every block that can be read; before the first server, the setup card alone."""
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
    """The demo server as the check step would show it: its program, and the consent to it."""
    return import_wizard.check(import_wizard.WizardState(DemoForm().text())).rows[0]


def _checklist(request: HttpRequest) -> dict[str, Any]:
    """First steps for admins, until all are done or they are dismissed."""
    if role_of(request.user) < Role.ADMIN or onboarding_views.DISMISSED in request.COOKIES:
        return {}
    looked = onboarding_views.LOOKED in request.COOKIES
    found = block(lambda: first_steps(looked))
    if found.failed or all(step.done for step in found.value):
        return {}
    return {"steps": found.value, "steps_done": sum(step.done for step in found.value)}
