"""Session pages: the list, one session's timeline, its JSON export, usage of a tool. Reads only."""

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db.models import Count, Exists, OuterRef, Q
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from catalog import preferences
from catalog.models import Tool
from catalog.tools.queries import find_tool
from sessions_app.ledger import event_details
from sessions_app.models import AgentSession, Call, Event, SessionState
from sessions_app.review import content, session_detail, timeline
from sessions_app.review import queries as review_queries
from sessions_app.review.queries import SessionFilter, TimelineRow
from sessions_app.usage.filters import UsageFilter
from sessions_app.usage.tool_usage import ToolUsage, tool_usage
from toolcrib.lib import payloads
from toolcrib.lib import request as query_params
from toolcrib.lib.errors import NotFound
from toolcrib.lib.pagination import Page, offset_of
from toolcrib.lib.request import announce, facet, is_htmx_fragment, list_fragment
from toolcrib.lib.roles import operator_required

USAGE_DAYS = 30
OPEN_SESSION_SNIPPET = """curl -X POST {address}/api/v1/sessions \\
  -H "Authorization: Bearer $TOOLCRIB_KEY" \\
  -H "Content-Type: application/json" -d '{{}}'"""


@require_safe
@operator_required
def sessions(request: HttpRequest) -> HttpResponse:
    filters = SessionFilter.read(request.GET)
    page = review_queries.list_sessions(filters)
    context: dict[str, Any] = {"page": page, "filters": filters, "shown": page.describe("session")}
    if not (filters.before or filters.after):
        context["newest"] = page.rows[0].session.pk if page.rows else 0
    if is_htmx_fragment(request):
        template = "sessions_app/review/_list_rows.html"
        return list_fragment(request, template, context, context["shown"])
    context |= {"facets": _facets(filters), "counts": _counts()}
    if not page.total and not filters.is_active:
        context["snippet"] = OPEN_SESSION_SNIPPET.format(address=settings.PUBLIC_URL)
    return render(request, "sessions_app/review/list.html", context)


@require_safe
@operator_required
def newer(request: HttpRequest) -> HttpResponse:
    """Render the fragment the list polls: how many sessions were opened since it was rendered."""
    filters = SessionFilter.read(request.GET)
    newest = query_params.number(request.GET, "since")
    count = review_queries.count_newer(filters, newest)
    context = {"newest": newest, "count": count, "first": not newest and not filters.is_active}
    return render(request, "sessions_app/review/_new.html", context)


def _counts() -> dict[str, int]:
    return AgentSession.objects.aggregate(
        all=Count("pk"),
        open=Count("pk", filter=Q(state=SessionState.OPEN)),
        errors=Count("pk", filter=Q(errors__gt=0)),
    )


def _facets(filters: SessionFilter) -> list[dict[str, object]]:
    agents = AgentSession.objects.order_by("agent__name").values_list("agent__name", flat=True)
    called = Tool.objects.filter(Exists(Call.objects.filter(tool=OuterRef("pk"))))
    tools = called.values_list("public_name", flat=True)
    states = dict.fromkeys(SessionState.values)
    chosen_errors = ["has errors"] if filters.errors else []
    return [
        facet("agent", "Agent", dict.fromkeys(agents.distinct()[:200]), [filters.agent], pick=True),
        facet("tool", "Tool called", dict.fromkeys(tools[:500]), [filters.tool], pick=True),
        facet("state", "State", states, filters.states, label_of=str.capitalize),
        facet("errors", "Calls", {"has errors": None}, chosen_errors, label_of=str.capitalize),
    ]


def _find_session(session_id: str) -> AgentSession:
    rows = AgentSession.objects.with_catalog().select_related("parent")
    session = rows.filter(session_id=session_id.replace("\0", "")).first()
    if session is None:
        raise NotFound("Session not found or expired.", hint="Check the id in the URL.")
    return session


@require_safe
@operator_required
def session(request: HttpRequest, session_id: str) -> HttpResponse:
    agent_session = _find_session(session_id)
    number = query_params.number(request.GET, "step", digits=9)
    size = review_queries.STEPS_PER_PAGE
    offset = (number - 1) // size * size if number else offset_of(request.GET, size)
    page, rows = review_queries.session_timeline(agent_session, offset=offset)
    row = session_detail.select_step(rows, number)
    failed_step = session_detail.next_failed_step(agent_session, rows, row)
    context = {
        "session": agent_session,
        "page": page,
        "row": row,
        "next_failed_step": failed_step,
        "failed_step_on_page": failed_step is not None
        and failed_step <= page.first + len(page.rows),
    }
    if request.headers.get("HX-Target") == "step":
        response = render(request, "sessions_app/review/_chosen.html", context)
        announcement = f"Step {row.step.number}: {row.step.sentence}" if row and row.step else ""
        return announce(response, announcement)
    context |= _session_context(agent_session, page, rows)
    return render(request, "sessions_app/review/session.html", context)


def _session_context(
    session: AgentSession, page: Page[Event], rows: list[TimelineRow]
) -> dict[str, Any]:
    metadata = event_details.read_value(session.metadata)
    previous_session, next_session = session_detail.adjacent_sessions(session)
    size = review_queries.STEPS_PER_PAGE
    return {
        "rows": session_detail.add_lanes(rows),
        "shown": page.describe("step"),
        "previous_page": max(page.first - size + 1, 1) if page.first else None,
        "next_page": page.first + size + 1 if page.next_cursor else None,
        "numbers": _numbers(session),
        "retention": _describe_retention(),
        "saved": review_queries.saved_percent(session),
        "mode_reason": timeline.DECIDED_BY.get(session.decided_by, ""),
        "expansions": session.expansions.all(),
        "meter": session_detail.context_meter(session),
        "tree": session_detail.fork_tree(session),
        "previous_session": previous_session,
        "next_session": next_session,
        "metadata": metadata if metadata != {} else None,
    }


def _describe_retention() -> str:
    """Describe how long payloads and sessions are stored."""
    days = preferences.values("retention")
    return (
        f"Arguments and results are kept for {days['keep_payloads_days']} days, each truncated to "
        f"{content.format_bytes(payloads.MAX_STORED_BYTES)}; values under names like password or "
        f"token are masked. Sessions are kept for {days['keep_sessions_days']} days after they end."
    )


def _numbers(session: AgentSession) -> list[dict[str, object]]:
    return [
        {"label": "Calls", "value": session.calls},
        {"label": "Errors", "value": session.errors},
        {
            "label": "Tokens sent",
            "value": session.tokens_delivered,
            "approximate": True,
            "unit": "tokens",
            "title": "Catalog, searches, loaded definitions and call results.",
        },
        {
            "label": "Baseline (all schemas)",
            "value": session.tokens_all,
            "approximate": True,
            "unit": "tokens",
        },
    ]


@require_safe
@operator_required
def session_json(request: HttpRequest, session_id: str) -> HttpResponse:
    session = _find_session(session_id)
    response = JsonResponse(
        review_queries.export_session(session),
        json_dumps_params={"ensure_ascii": False, "indent": 2},
    )
    response["Content-Disposition"] = f'attachment; filename="{session.session_id}.json"'
    return response


@require_safe
@operator_required
def tool_use(request: HttpRequest, public_name: str) -> HttpResponse:
    """Render the fragment a tool's page loads: usage in the last thirty days."""
    find_tool(public_name)
    since = timezone.now() - timedelta(days=USAGE_DAYS)
    rows = tool_usage(UsageFilter(start=since), public_name)
    usage = rows[0] if rows else ToolUsage(public_name)
    context = {"usage": usage, "days": USAGE_DAYS, "name": public_name}
    return render(request, "sessions_app/review/_tool_use.html", context)
