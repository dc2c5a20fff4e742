"""Session pages: the list, one session's timeline, its export and deletion, usage of a tool."""

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import Count, Exists, OuterRef, Q
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from catalog import audit, preferences
from catalog.models import Tool
from catalog.tools.queries import find_tool
from servers.models import Server
from sessions_app.ledger import event_details
from sessions_app.models import AgentSession, Call, Event, SessionState
from sessions_app.review import (
    content,
    saved_views,
    script_runs,
    session_detail,
    session_search,
    timeline,
)
from sessions_app.review import queries as review_queries
from sessions_app.review.queries import SessionFilter, TimelineRow
from sessions_app.sessions import lifecycle
from sessions_app.usage.filters import UsageFilter
from sessions_app.usage.tool_usage import ToolUsage, tool_usage
from toolcrib.lib import figures, payloads
from toolcrib.lib import request as query_params
from toolcrib.lib.errors import Conflict, NotFound
from toolcrib.lib.pagination import Page, offset_of
from toolcrib.lib.redaction.redactor import redact
from toolcrib.lib.request import (
    announce,
    errors_as_messages,
    facet,
    is_htmx_fragment,
    list_fragment,
    redirect_back,
)
from toolcrib.lib.roles import (
    Role,
    actor_of,
    admin_required,
    operator_required,
    role_of,
    viewer_required,
)
from toolcrib.lib.time_ranges import range_choices

USAGE_DAYS = 30
CONFIRMED_LENGTH = 12  # characters of the id to type before a session is deleted
OPEN_SESSION_SNIPPET = """curl -X POST {address}/api/v1/sessions \\
  -H "Authorization: Bearer $TOOLCRIB_KEY" \\
  -H "Content-Type: application/json" -d '{{}}'"""


@require_safe
@viewer_required
def sessions(request: HttpRequest) -> HttpResponse:
    filters = SessionFilter.read(request.GET)
    page = review_queries.list_sessions(filters)
    context: dict[str, Any] = {
        "page": page,
        "filters": filters,
        "ranges": range_choices(filters.within),
        "shown": page.describe("session"),
    }
    if not (filters.before or filters.after):
        context["newest"] = page.rows[0].session.pk if page.rows else 0
    if is_htmx_fragment(request):
        template = "sessions_app/review/_list_fragment.html"
        return list_fragment(request, template, context, context["shown"])
    context |= {
        "facets": _facets(filters),
        "counts": _counts(),
        "views": saved_views.list_views(request),
        "current_view": saved_views.clean_query(request.GET),
        "searched_rows": session_search.SEARCHED_ROWS,
    }
    if not page.total and not filters.is_active:
        context["snippet"] = OPEN_SESSION_SNIPPET.format(address=settings.PUBLIC_URL)
    return render(request, "sessions_app/review/list.html", context)


@require_safe
@viewer_required
def newer(request: HttpRequest) -> HttpResponse:
    """Render the fragment the list polls: how many sessions were opened since it was rendered."""
    filters = SessionFilter.read(request.GET)
    newest = query_params.number(request.GET, "newest")
    count = review_queries.count_newer(filters, newest)
    context = {"newest": newest, "count": count, "first": not newest and not filters.is_active}
    return render(request, "sessions_app/review/_new.html", context)


@require_safe
@operator_required
def export_sessions(request: HttpRequest) -> StreamingHttpResponse:
    """Download the sessions of the filtered list as JSON lines, the newest first."""
    filters = SessionFilter.read(request.GET)
    rows = filters.apply(AgentSession.objects.with_catalog().select_related("parent"))
    sessions = list(rows.order_by("-pk")[: review_queries.MAX_EXPORTED])
    after = {"sessions": len(sessions), "filters": saved_views.clean_query(request.GET)}
    audit.record_installation(actor_of(request), "sessions.export", after=after)

    def lines() -> Iterator[str]:
        for session in sessions:
            body = review_queries.export_session(session)
            yield json.dumps(body, ensure_ascii=False, cls=DjangoJSONEncoder) + "\n"

    response = StreamingHttpResponse(lines(), content_type="application/jsonl; charset=utf-8")
    name = f"toolcrib-sessions-{timezone.now():%Y-%m-%d}.jsonl"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


@require_POST
@viewer_required
def save_view(request: HttpRequest) -> HttpResponse:
    """Save the filters of the list under a name, or remove a saved view."""
    with errors_as_messages(request):
        if name := request.POST.get("remove_view", ""):
            saved_views.remove_view(request, name)
        else:
            saved_views.save_view(request)
    return redirect_back(request, "sessions")


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
    servers = Server.objects.order_by("slug").values_list("slug", flat=True)[:200]
    models = (
        AgentSession.objects.exclude(model="").order_by("model").values_list("model", flat=True)
    )
    states = dict.fromkeys(SessionState.values)
    chosen_errors = ["has errors"] if filters.errors else []
    return [
        facet("agent", "Agent", dict.fromkeys(agents.distinct()[:200]), [filters.agent], pick=True),
        facet("tool", "Tool called", dict.fromkeys(tools[:500]), [filters.tool], pick=True),
        facet("server", "Server", dict.fromkeys(servers), [filters.server], pick=True),
        facet("model", "Model", dict.fromkeys(models.distinct()[:50]), [filters.model], pick=True),
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
@viewer_required
def session(request: HttpRequest, session_id: str) -> HttpResponse:
    agent_session = _find_session(session_id)
    number = query_params.number(request.GET, "step", digits=9)
    if call_id := query_params.text(request.GET, "call", 60):
        number = session_detail.step_of_call(agent_session, call_id)
    size = review_queries.STEPS_PER_PAGE
    offset = (number - 1) // size * size if number else offset_of(request.GET, size)
    page, rows = review_queries.session_timeline(agent_session, offset=offset)
    row = session_detail.select_step(rows, number)
    if row is not None and row.call is not None and role_of(request.user) >= Role.OPERATOR:
        audit.record_read(actor_of(request), "session.read", agent_session)
    failed_step = session_detail.next_failed_step(agent_session, rows, row)
    context = {
        "session": agent_session,
        "live": f"session:{agent_session.session_id}",
        "page": page,
        "row": row,
        "last_query": session_detail.last_query(agent_session, row),
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
    metadata = redact(event_details.read_value(session.metadata))
    previous_session, next_session = session_detail.adjacent_sessions(session)
    size = review_queries.STEPS_PER_PAGE
    tree = session_detail.fork_tree(session)
    return {
        "rows": rows,
        "waterfall": session_detail.waterfall(session, rows, tree),
        "shown": page.describe("step"),
        "previous_page": max(page.first - size + 1, 1) if page.first else None,
        "next_page": page.first + size + 1 if page.next_cursor else None,
        "numbers": _numbers(session),
        "retention": _describe_retention(),
        "tokens": session.token_figures,
        "money": review_queries.money_of_session(session),
        "cost_definition": figures.COST,
        "mode_reason": timeline.DECIDED_BY.get(session.decided_by, ""),
        "expansions": session.expansions.all(),
        "meter": session_detail.context_meter(session),
        "tree": tree,
        "runs": script_runs.list_runs(session),
        "spared_definition": figures.SPARED,
        "confirmed_id": session.session_id[:CONFIRMED_LENGTH],
        "previous_session": previous_session,
        "next_session": next_session,
        "metadata": metadata if metadata != {} else None,
        "trace_url": _trace_url(session),
    }


@require_safe
@viewer_required
def script_run(request: HttpRequest, session_id: str, run_id: str) -> HttpResponse:
    """Show one run of a script. Code, result and logs are for operators, and recorded as read."""
    detail = script_runs.find_run(session_id, run_id)
    session = detail.run.session
    if role_of(request.user) >= Role.OPERATOR:
        audit.record_read(actor_of(request), "session.read", session)
    context = {
        "detail": detail,
        "run": detail.run,
        "session": session,
        "live": f"session:{session.session_id}",
        "numbers": _run_numbers(detail.figures),
    }
    return render(request, "sessions_app/review/script_run.html", context)


def _run_numbers(tokens: figures.ScriptFigures) -> list[dict[str, object]]:
    return [
        {"label": "Calls", "value": tokens.calls},
        {
            "label": "Given to the model",
            "value": tokens.given,
            "approximate": True,
            "unit": "tokens",
            "title": figures.SCRIPT_GIVEN,
        },
        {
            "label": "Spared",
            "value": tokens.spared,
            "approximate": True,
            "unit": "tokens",
            "title": figures.SPARED,
        },
    ]


def _trace_url(session: AgentSession) -> str:
    """Return where the operator's tracing system shows this session; empty without a setting."""
    return str(settings.TRACE_URL.replace("{session_id}", session.session_id))


def _describe_retention() -> str:
    """Describe how long payloads and sessions are stored."""
    days = preferences.values("retention")
    return (
        f"Arguments and results are kept for {days['keep_payloads_days']} days, each truncated to "
        f"{content.format_bytes(payloads.MAX_STORED_BYTES)}; passwords, tokens, keys, card and "
        "identity numbers are masked, and tools and agents can store nothing or all. Sessions are "
        f"kept for {days['keep_sessions_days']} days after they end."
    )


def _numbers(session: AgentSession) -> list[dict[str, object]]:
    tokens = session.token_figures
    return [
        {"label": "Calls", "value": session.calls},
        {"label": "Errors", "value": session.errors},
        {
            "label": "Given for tools",
            "value": tokens.given,
            "approximate": True,
            "unit": "tokens",
            "title": figures.GIVEN,
        },
        {
            "label": "Baseline (all schemas)",
            "value": tokens.baseline,
            "approximate": True,
            "unit": "tokens",
            "title": figures.BASELINE,
        },
    ]


@require_safe
@operator_required
def session_json(request: HttpRequest, session_id: str) -> HttpResponse:
    session = _find_session(session_id)
    audit.record(actor_of(request), "session.export", session)
    response = JsonResponse(
        review_queries.export_session(session),
        json_dumps_params={"ensure_ascii": False, "indent": 2},
    )
    response["Content-Disposition"] = f'attachment; filename="{session.session_id}.json"'
    return response


@require_POST
@admin_required
def delete_session(request: HttpRequest, session_id: str) -> HttpResponse:
    """Delete a session; without a matching typed id or while calls are running, say so."""
    session = _find_session(session_id)
    name = session.session_id[:CONFIRMED_LENGTH]
    if request.POST.get("typed_name", "").strip() != name:
        messages.error(request, f"Type {name} to delete this session.")
        return redirect("session", session.session_id)
    try:
        lifecycle.delete_session(session, actor=actor_of(request))
    except Conflict as error:
        messages.error(request, error.sentence)
        return redirect("session", session.session_id)
    messages.success(request, f"Deleted session {name} of {session.agent.name}.")
    return redirect("sessions")


@require_safe
@viewer_required
def tool_use(request: HttpRequest, public_name: str) -> HttpResponse:
    """Render the fragment a tool's page loads: usage in the last thirty days."""
    find_tool(public_name)
    since = timezone.now() - timedelta(days=USAGE_DAYS)
    rows = tool_usage(UsageFilter(start=since), public_name)
    usage = rows[0] if rows else ToolUsage(public_name)
    context = {"usage": usage, "days": USAGE_DAYS, "name": public_name}
    return render(request, "sessions_app/review/_tool_use.html", context)
