"""Pages of sessions: the list, one session's story, its export, use of a tool. Reads only."""

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import Count, Exists, OuterRef, Q
from django.http import HttpRequest, HttpResponse, JsonResponse, QueryDict
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from catalog.browsing import offset_of
from catalog.models import Tool
from catalog.people import operator_required
from sessions_app import contents, figures, payloads, timeline, usage
from sessions_app.models import AgentSession, Call, SessionState
from sessions_app.usage import SessionFilter
from toolcrib.errors import NotFound

USE_DAYS = 30
FIRST = """curl -X POST {address}/api/v1/sessions \\
  -H "Authorization: Bearer $TOOLCRIB_KEY" \\
  -H "Content-Type: application/json" -d '{{}}'"""


@require_safe
@operator_required
def sessions(request: HttpRequest) -> HttpResponse:
    wanted = SessionFilter.read(request.GET)
    page = usage.list_sessions(wanted)
    context: dict[str, Any] = {"page": page, "wanted": wanted, "shown": page.says("session")}
    if request.headers.get("HX-Request") and not request.headers.get("HX-Boosted"):
        response = render(request, "sessions_app/_session_rows.html", context)
        response["HX-Push-Url"] = _clean_address(request)
        response["HX-Trigger"] = json.dumps({"announce": page.says("session")})
        return response
    context |= {"facets": _facets(wanted), "counts": _counts()}
    if not page.total and not wanted.narrows:
        context["snippet"] = FIRST.format(address=settings.PUBLIC_URL)
    return render(request, "sessions_app/sessions.html", context)


def _clean_address(request: HttpRequest) -> str:
    """Return this address without the fields that were left empty."""
    kept = QueryDict(mutable=True)
    for name, values in request.GET.lists():
        if filled := [value for value in values if value]:
            kept.setlist(name, filled)
    return f"{request.path}?{kept.urlencode()}" if kept else request.path


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
    rows = AgentSession.objects.select_related("agent", "parent", "snapshot")
    session = rows.filter(session_id=session_id.replace("\0", "")).first()
    if session is None:
        raise NotFound("There is no session of this id.", hint="It may have been pruned.")
    return session


@require_safe
@operator_required
def session(request: HttpRequest, session_id: str) -> HttpResponse:
    found = _find(session_id)
    page, rows = usage.session_timeline(found, offset=offset_of(request.GET, usage.STEPS))
    metadata = usage.read_value(found.metadata)
    context = {
        "session": found,
        "page": page,
        "rows": rows,
        "shown": page.says("step"),
        "numbers": _numbers(found),
        "seconds": usage.run_of(found).total_seconds(),
        "policy": _policy(),
        "spent": usage.spent_on_tools(found),
        "saved": usage.saved_percent(found),
        "decided": timeline.DECIDED_BY.get(found.decided_by, ""),
        "expansions": found.expansions.all(),
        "forks": found.forks.order_by("pk")[:50],
        "metadata": metadata if metadata != {} else None,
    }
    return render(request, "sessions_app/session.html", context)


def _policy() -> str:
    """Say how long what is kept."""
    return (
        f"Arguments and results are kept for {settings.KEEP_PAYLOADS_DAYS} days, each cut at "
        f"{contents.size(payloads.KEPT_BYTES)}; values under names like password or token are "
        f"masked. Sessions are kept for {settings.KEEP_SESSIONS_DAYS} days after their end."
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
        usage.session_export(found),
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
    if not Tool.objects.filter(public_name=public_name.replace("\0", "")).exists():
        raise NotFound("There is no tool of this name.", hint="It may have been deleted.")
    since = timezone.now() - timedelta(days=USE_DAYS)
    found = figures.tool_usage(since, tool=public_name)
    use = found[0] if found else figures.ToolUse(public_name)
    context = {"use": use, "days": USE_DAYS, "name": public_name}
    return render(request, "sessions_app/_session_tool_use.html", context)
