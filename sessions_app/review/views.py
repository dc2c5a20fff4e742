"""Pages of sessions: the list, one session's story, its export, use of a tool. Reads only."""

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import Count, Exists, OuterRef, Q
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from catalog import preferences
from catalog.models import Tool
from catalog.tools.queries import find_tool
from sessions_app.ledger import event_details, payloads
from sessions_app.models import AgentSession, Call, Event, SessionState
from sessions_app.review import content, session_detail, timeline
from sessions_app.review import queries as review_queries
from sessions_app.review.queries import SessionFilter, TimelineRow
from sessions_app.usage.filters import UsageFilter
from sessions_app.usage.tool_usage import ToolUsage, tool_usage
from toolcrib.lib import request as query_params
from toolcrib.lib.errors import NotFound
from toolcrib.lib.pagination import Page, offset_of
from toolcrib.lib.request import clean_address, is_htmx_fragment
from toolcrib.lib.roles import operator_required

USE_DAYS = 30
FIRST = """curl -X POST {address}/api/v1/sessions \\
  -H "Authorization: Bearer $TOOLCRIB_KEY" \\
  -H "Content-Type: application/json" -d '{{}}'"""


@require_safe
@operator_required
def sessions(request: HttpRequest) -> HttpResponse:
    wanted = SessionFilter.read(request.GET)
    page = review_queries.list_sessions(wanted)
    context: dict[str, Any] = {"page": page, "wanted": wanted, "shown": page.says("session")}
    if not (wanted.before or wanted.after):
        context["newest"] = page.rows[0].session.pk if page.rows else 0
    if is_htmx_fragment(request):
        response = render(request, "sessions_app/review/_list_rows.html", context)
        response["HX-Push-Url"] = clean_address(request)
        response["HX-Trigger"] = json.dumps({"announce": page.says("session")})
        return response
    context |= {"facets": _facets(wanted), "counts": _counts()}
    if not page.total and not wanted.narrows:
        context["snippet"] = FIRST.format(address=settings.PUBLIC_URL)
    return render(request, "sessions_app/review/list.html", context)


@require_safe
@operator_required
def newer(request: HttpRequest) -> HttpResponse:
    """The fragment that the list asks for: how many sessions came since it was drawn."""
    wanted = SessionFilter.read(request.GET)
    newest = query_params.number(request.GET, "since")
    count = review_queries.count_newer(wanted, newest)
    context = {"newest": newest, "count": count, "first": not newest and not wanted.narrows}
    return render(request, "sessions_app/review/_new.html", context)


def _counts() -> dict[str, int]:
    return AgentSession.objects.aggregate(
        all=Count("pk"),
        open=Count("pk", filter=Q(state=SessionState.OPEN)),
        errors=Count("pk", filter=Q(errors__gt=0)),
    )


def _facets(wanted: SessionFilter) -> list[dict[str, object]]:
    agents = AgentSession.objects.order_by("agent__name").values_list("agent__name", flat=True)
    called = Tool.objects.filter(Exists(Call.objects.filter(tool=OuterRef("pk"))))
    tools = called.values_list("public_name", flat=True)
    return [
        _pick("agent", "Agent", agents.distinct()[:200], wanted.agent),
        _pick("tool", "Tool called", tools[:500], wanted.tool),
        _chips("state", "State", SessionState.values, wanted.states),
        _chips("errors", "Calls", ["has errors"], ["has errors"] if wanted.errors else []),
    ]


def _pick(name: str, label: str, options: Iterable[str], chosen: str) -> dict[str, object]:
    listed = list(options)
    if chosen and chosen not in listed:
        listed.append(chosen)  # keep what the address asks for visible
    return {**_chips(name, label, listed, [chosen]), "pick": True}


def _chips(
    name: str, label: str, options: Iterable[str], chosen: Sequence[str]
) -> dict[str, object]:
    shown = [{"value": one, "label": one, "selected": one in chosen} for one in options]
    return {"name": name, "label": label, "options": shown}


# --- One session --------------------------------------------------------------------------------


def _find(session_id: str) -> AgentSession:
    rows = AgentSession.objects.with_catalog().select_related("parent")
    session = rows.filter(session_id=session_id.replace("\0", "")).first()
    if session is None:
        raise NotFound("There is no session of this id.", hint="It may have been pruned.")
    return session


@require_safe
@operator_required
def session(request: HttpRequest, session_id: str) -> HttpResponse:
    found = _find(session_id)
    number = query_params.number(request.GET, "step", digits=9)
    start = (number - 1) // review_queries.STEPS * review_queries.STEPS if number else None
    offset = offset_of(request.GET, review_queries.STEPS) if start is None else start
    page, rows = review_queries.session_timeline(found, offset=offset)
    row = session_detail.chosen(rows, number)
    wrong = session_detail.next_wrong(found, rows, row)
    context = {
        "session": found,
        "page": page,
        "row": row,
        "next_wrong": wrong,
        "wrong_is_here": wrong is not None and wrong <= page.first + len(page.rows),
    }
    if request.headers.get("HX-Target") == "step":
        response = render(request, "sessions_app/review/_chosen.html", context)
        said = f"Step {row.step.number}: {row.step.sentence}" if row and row.step else ""
        response["HX-Trigger"] = json.dumps({"announce": said})
        return response
    return render(request, "sessions_app/review/session.html", context | _about(found, page, rows))


def _about(found: AgentSession, page: Page[Event], rows: list[TimelineRow]) -> dict[str, Any]:
    metadata = event_details.read_value(found.metadata)
    before, after = session_detail.neighbours(found)
    return {
        "rows": session_detail.lanes(rows),
        "shown": page.says("step"),
        "earlier": max(page.first - review_queries.STEPS + 1, 1) if page.first else None,
        "later": page.first + review_queries.STEPS + 1 if page.next_cursor else None,
        "numbers": _numbers(found),
        "seconds": review_queries.run_of(found).total_seconds(),
        "policy": _policy(),
        "spent": review_queries.spent_on_tools(found),
        "saved": review_queries.saved_percent(found),
        "decided": timeline.DECIDED_BY.get(found.decided_by, ""),
        "expansions": found.expansions.all(),
        "meter": session_detail.meter(found),
        "tree": session_detail.tree(found),
        "before": before,
        "after": after,
        "metadata": metadata if metadata != {} else None,
    }


def _policy() -> str:
    """Say how long what is kept."""
    kept = preferences.values("retention")
    return (
        f"Arguments and results are kept for {kept['keep_payloads_days']} days, each cut at "
        f"{content.size(payloads.KEPT_BYTES)}; values under names like password or token are "
        f"masked. Sessions are kept for {kept['keep_sessions_days']} days after their end."
    )


def _numbers(session: AgentSession) -> list[dict[str, object]]:
    return [
        {"label": "Calls", "value": session.calls},
        {"label": "Errors", "value": session.errors},
        {
            "label": "Given to the model",
            "value": session.tokens_delivered,
            "approximate": True,
            "unit": "tokens",
            "title": "Catalog, searches, loaded definitions and results of calls.",
        },
        {
            "label": "All schemas would have cost",
            "value": session.tokens_all,
            "approximate": True,
            "unit": "tokens",
        },
    ]


@require_safe
@operator_required
def session_json(request: HttpRequest, session_id: str) -> HttpResponse:
    found = _find(session_id)
    response = JsonResponse(
        review_queries.session_export(found),
        encoder=DjangoJSONEncoder,
        json_dumps_params={"ensure_ascii": False, "indent": 2},
    )
    response["Content-Disposition"] = f'attachment; filename="{found.session_id}.json"'
    return response


# --- A tool in use ------------------------------------------------------------------------------


@require_safe
@operator_required
def tool_use(request: HttpRequest, public_name: str) -> HttpResponse:
    """The fragment that a tool's page loads: figures of its last thirty days."""
    find_tool(public_name)
    since = timezone.now() - timedelta(days=USE_DAYS)
    found = tool_usage(UsageFilter(start=since), public_name)
    use = found[0] if found else ToolUsage(public_name)
    context = {"use": use, "days": USE_DAYS, "name": public_name}
    return render(request, "sessions_app/review/_tool_use.html", context)
