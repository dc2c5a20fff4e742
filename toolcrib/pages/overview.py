"""Overview page: metrics of a time range, servers, recent sessions, first steps.

Reads only, each block in a fixed number of queries. A block that fails with a database error shows
the failure; the others are not affected. Items that need attention are in `attention`.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import User
from django.db import DatabaseError
from django.db.models import (
    Case,
    Count,
    IntegerField,
    Max,
    Value,
    When,
)
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_safe

from catalog.models import AuditEntry
from servers.models import Server, ServerState
from servers.web import import_wizard, remedies
from servers.web.forms import DemoForm
from sessions_app.agents import onboarding_views
from sessions_app.models import Agent, AgentSession
from sessions_app.review import queries as review_queries
from sessions_app.usage import model_costs, panels
from sessions_app.usage.series import read_uncounted
from toolcrib.lib.roles import Role, role_of, viewer_required
from toolcrib.lib.time_ranges import DEFAULT_RANGE, range_context, read_range
from toolcrib.pages import attention

logger = logging.getLogger(__name__)

MAX_SERVERS = 60
RECENT_SESSIONS = 5
WORST_FIRST = (
    ServerState.FAILING,
    ServerState.CONNECTING,
    ServerState.NEW,
    ServerState.CONNECTED,
    ServerState.DISABLED,
)
METRICS = ("Calls", "Error rate", "p95 latency", "Tokens saved")


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


def numbers(within: str = DEFAULT_RANGE) -> dict[str, Any]:
    recent = read_uncounted()
    series, charts = panels.read_panels(within, uncounted=recent)
    metrics = panels.list_metrics(series, money=model_costs.total_money(within, recent))
    total = series.total
    return {
        "figures": [metric for metric in metrics if metric.label in METRICS],
        "panels": charts,
        "series": series,
        "quiet": not total.calls and not total.sessions,
        **range_context(within),
    }


# --- Servers and sessions -----------------------------------------------------------------------


def servers() -> dict[str, Any]:
    """Return the servers, worst state first, and the time of the last sync."""
    ranks = [When(state=state, then=Value(rank)) for rank, state in enumerate(WORST_FIRST)]
    rank = Case(*ranks, default=Value(len(ranks)), output_field=IntegerField())
    listed = list(Server.objects.annotate(rank=rank).order_by("rank", "name", "slug")[:MAX_SERVERS])
    states = Counter(dict(Server.objects.order_by().values_list("state").annotate(Count("pk"))))
    last_sync = Server.objects.aggregate(at=Max("last_synced_at"))["at"]
    for server in listed:
        server.failing_label = remedies.failing_label(server)  # type: ignore[attr-defined]
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
    connected = Server.objects.exclude(last_synced_at=None)  # a failed attempt does not count
    agent, session = Agent.objects.exists(), AgentSession.objects.exists()
    people = User.objects.filter(is_active=True)[:2].count()
    return [
        Step("Connect a server", connected.exists(), reverse("server-add")),
        Step("View a group", group_viewed or group_changes.exists(), reverse("welcome-group")),
        Step("Connect an agent", agent, reverse("welcome-agent")),
        Step("Run a first session", session, reverse("welcome-agent") if agent else ""),
        Step("Invite a second person", people > 1, reverse("people")),
    ]


@require_safe
@viewer_required
def overview(request: HttpRequest) -> HttpResponse:
    """Render the overview; before the first server, only the setup card."""
    if not Server.objects.exists():
        return render(request, "toolcrib/pages/overview.html", {"first_run": True, "demo": _demo()})
    blocks = {
        "attention": block(lambda: attention.items(role_of(request.user))),
        "numbers": block(lambda: numbers(read_range(request.GET))),
        "servers": block(servers),
        "sessions": block(recent_sessions),
    }
    live = "servers catalog approvals sessions"
    context = {**blocks, **_checklist(request), "live": live}
    return render(request, "toolcrib/pages/overview.html", context)


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
