"""Usage page: calls, preload advice, unmet searches, CSV export, preload changes with undo."""

import csv
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST, require_safe

from catalog import audit, model_prices, preferences
from catalog.groups import actions as group_writes
from catalog.groups import undo as group_undo
from catalog.groups.actions import GroupWrite
from sessions_app.models import AgentSession, UsageKind
from sessions_app.usage import (
    call_stats,
    funnels,
    model_costs,
    optimize,
    panels,
    preload_advice,
    searches,
    tool_usage,
)
from sessions_app.usage.filters import UsageFilter, filter_context
from sessions_app.usage.series import (
    Series,
    Uncounted,
    read_called_tools,
    read_series,
    read_uncounted,
)
from toolcrib.lib import figures
from toolcrib.lib.errors import Invalid, NotFound
from toolcrib.lib.pagination import offset_of, page_by_offset
from toolcrib.lib.request import (
    clean_url,
    errors_as_messages,
    is_htmx_fragment,
    redirect_back,
    submitted_query,
)
from toolcrib.lib.roles import actor_of, admin_required, operator_required, viewer_required
from toolcrib.lib.text import escape_formula, plural

UNDO_SESSION_KEY = "usage_undo"  # the change that the next page offers to undo
Table = tuple[Sequence[str], Iterable[Sequence[object]]]


@require_safe
@viewer_required
def usage(request: HttpRequest) -> HttpResponse:
    filters = UsageFilter.read(request.GET)
    recent = read_uncounted(filters.now)
    series = read_series(filters.within, *filters.counted_kind(), now=filters.now, uncounted=recent)
    report = tool_usage.usage_report(filters, recent, series.total)
    scripts = call_stats.scripts_by_agent(filters)
    offset = offset_of(request.GET, tool_usage.PAGE)
    page = page_by_offset(report.tools, offset, tool_usage.PAGE)
    tool_usage.add_details(filters, page.rows, recent)
    context: dict[str, Any] = {
        **filter_context(filters),
        "report": report,
        "page": page,
        "shown": page.describe("tool"),
        "durations_read": tool_usage.DURATIONS,
        "min_sessions": optimize.MIN_SESSIONS,
        "optimize_days": optimize.DAYS,
        "glance": optimize.GLANCE,
        "address": clean_url(request).partition("?")[2],
        "undo_offer": request.session.pop(UNDO_SESSION_KEY, None),
        "offer": request.session.pop(group_undo.UNDO_OFFER_KEY, None),
        "undo_next": request.get_full_path(),
        "has_sessions": bool(report.calls) or AgentSession.objects.exists(),
        "retention_days": preferences.value("keep_sessions_days"),
        "max_open_sessions": funnels.MAX_OPEN_SESSIONS,
        "searches_read": searches.MAX_SEARCHES,
        "prices": model_prices.read().rows,
        "cost_definition": figures.COST,
        "scripts": scripts,
        "script_total": call_stats.total_scripts(scripts),
        "script_given_definition": figures.SCRIPT_GIVEN,
        "spared_definition": figures.SPARED,
    }
    if context["has_sessions"]:
        context |= _chart_context(filters, request.GET.get("by", ""), series, recent)
        called = {tool.tool_name for tool in report.tools}
        context |= {
            "unused": preload_advice.unused_preloads(filters, called),
            "frequent": _preloads(filters, recent, called)[: preload_advice.PAGE],
            "searches": searches.failed_searches(filters),
            "funnels": funnels.funnels(filters),
            "outdated": funnels.outdated_sessions(filters),
        }
    response = render(request, "sessions_app/usage/usage.html", context)
    if is_htmx_fragment(request):
        response["HX-Push-Url"] = clean_url(request)
    return response


def _preloads(
    filters: UsageFilter, recent: Uncounted | None = None, called: Collection[str] = ()
) -> list[optimize.Recommendation]:
    """Return the recommended preloads; `called` are the tools called in the filtered range."""
    if recent is None or filters.is_active or filters.within != "30d":
        called = read_called_tools(recent)
    return optimize.simulate(optimize.GLANCE, called).preloads(filters.group)


def _chart_context(
    filters: UsageFilter, by: str, series: Series, recent: Uncounted
) -> dict[str, Any]:
    """Return metrics and charts of the filtered agent or group, and the breakdown of all calls."""
    kind, _ = filters.counted_kind()
    sessions = {"agent": filters.agent} if filters.agent else {}
    charts = panels.draw_panels(series, kind, sessions)
    chosen = UsageKind(by) if by in panels.BREAKDOWNS else panels.BREAKDOWNS[0]
    everything = series if kind == UsageKind.ALL else read_series(filters.within, uncounted=recent)
    models = model_costs.list_models(filters.within, recent)
    money = model_costs.add_up(models) if kind == UsageKind.ALL else None
    return {
        "models": models,
        "series": series,
        "panels": charts,
        "figures": panels.list_metrics(series, kind, sessions=sessions, money=money),
        "breakdown": panels.read_breakdown(everything, filters.within, chosen, recent),
        "breakdowns": [(kind.value, kind == chosen) for kind in panels.BREAKDOWNS],
    }


# --- CSV ----------------------------------------------------------------------------------------


@require_safe
@operator_required
def usage_csv(request: HttpRequest, table: str) -> HttpResponse:
    if table not in TABLES:
        raise NotFound("Table not found.", hint="Use a CSV link on the usage page.")
    filters = UsageFilter.read(request.GET)
    header, rows = TABLES[table](filters)
    audit.record_installation(actor_of(request), "usage.export", after={"table": table})
    response = HttpResponse(content_type="text/csv; charset=utf-8")
    name = f"toolcrib-{table}-{filters.within}.csv"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    writer = csv.writer(response)
    writer.writerow(header)
    writer.writerows([format_cell(cell) for cell in row] for row in rows)
    return response


def format_cell(cell: object) -> object:
    """Return a CSV cell that no spreadsheet evaluates as a formula."""
    if isinstance(cell, datetime):
        return cell.isoformat()
    if isinstance(cell, float):
        return round(cell, 2 if abs(cell) >= 1 else 4)
    if isinstance(cell, str):
        return escape_formula(cell)
    return "" if cell is None else cell


def _table(header: str, attributes: str, rows: Iterable[object]) -> Table:
    """Return a table whose columns are these attributes of the rows."""
    return header.split(), map(attrgetter(*attributes.split()), rows)


SEARCH_COLUMNS = "asked strategy times last_at"
TABLES: dict[str, Callable[[UsageFilter], Table]] = {
    "days": lambda filters: _table(
        f"{filters.range.bucket} calls errors",
        "at calls errors",
        tool_usage.calls_by_bucket(filters),
    ),
    "tools": lambda filters: _table(
        "tool calls errors error_percent p50_ms p95_ms tokens each",
        "tool_name calls errors error_rate p50_ms p95_ms tokens tokens_per_call",
        tool_usage.usage_report(filters, percentiles=True).tools,
    ),
    "unused": lambda filters: _table(
        "tool group tokens",
        "tool.public_name group.group_id tokens",
        preload_advice.unused_preloads(filters, limit=None).candidates,
    ),
    "often": lambda filters: _table(
        "tool group sessions sessions_of_group tokens tokens_saved round_trips_saved",
        "tool group_id used sessions tokens saved round_trips",
        _preloads(filters),
    ),
    "lost": lambda filters: _table(
        SEARCH_COLUMNS,
        SEARCH_COLUMNS,
        searches.failed_searches(filters, limit=None).without_results,
    ),
    "astray": lambda filters: _table(
        SEARCH_COLUMNS, SEARCH_COLUMNS, searches.failed_searches(filters, limit=None).abandoned
    ),
    "models": lambda filters: _table(
        "model sessions calls baseline given saved results currency cost money_saved",
        "model sessions calls tokens.baseline tokens.given tokens.saved tokens.results "
        "currency cost saving",
        model_costs.list_models(filters.within),
    ),
    "scripts": lambda filters: _table(
        "agent runs failed held calls tokens_given tokens_spared",
        "agent figures.runs figures.failed figures.held figures.calls figures.given figures.spared",
        call_stats.scripts_by_agent(filters),
    ),
    "funnel": lambda filters: _table(
        "agent sessions searched then_loaded then_called called_unsearched",
        "agent sessions searched loaded called unsearched",
        funnels.funnels(filters, limit=None),
    ),
    "old": lambda filters: (
        ("session", "agent", "last_used", "tool"),
        (
            (session.session_id, session.agent.name, session.last_used_at, name)
            for session, names in funnels.outdated_sessions(filters, limit=None)
            for name in names
        ),
    ),
}


# --- Preload changes ----------------------------------------------------------------------------


def _offer_undo(
    request: HttpRequest, write: GroupWrite, sentence: str, *, action: str = "Undo"
) -> None:
    """Offer to reverse a change; `action` labels the button, Undo or Redo."""
    if write.entry is None:
        messages.info(request, "No changes: already set.")
        return
    request.session[UNDO_SESSION_KEY] = {
        "entry": write.entry.pk,
        "sentence": sentence,
        "action": action,
        "address": request.POST.get("address", "")[:2000],
    }


@require_POST
@admin_required
def set_preload(request: HttpRequest) -> HttpResponse:
    """Set whether a group preloads a tool."""
    on = request.POST.get("on") == "1"
    group_id, name = request.POST.get("group", ""), request.POST.get("tool", "")
    mode = "preloaded" if on else "on demand"
    with errors_as_messages(request):
        group, tools = group_writes.find_group(group_id), group_writes.find_tools([name])
        write = group_writes.set_preload(group, tools, on, actor=actor_of(request))
        _offer_undo(request, write, f"{name} in {group_id} is {mode} in new sessions.")
    return redirect_back(request, "usage", anchor="often" if on else "unused")


@require_POST
@admin_required
def unload_unused(request: HttpRequest) -> HttpResponse:
    """Make all unused preloads of the page on demand, as one action with one undo."""
    filters = UsageFilter.read(submitted_query(request))
    called = {tool.tool_name for tool in tool_usage.usage_report(filters).tools}
    names: defaultdict[str, list[str]] = defaultdict(list)
    for row in preload_advice.unused_preloads(filters, called, limit=None).candidates:
        if row.group.deferred:
            names[row.group.group_id].append(row.tool.public_name)
    with errors_as_messages(request):
        if not names:
            raise Invalid("There are no unused preloads that may be on demand.")
        with transaction.atomic():
            writes = [
                group_writes.set_preload(
                    group_writes.find_group(group_id),
                    group_writes.find_tools(tools),
                    False,
                    actor=actor_of(request),
                )
                for group_id, tools in names.items()
            ]
        count = sum(map(len, names.values()))
        sentence = f"{plural(count, 'unused preload')} on demand in new sessions."
        group_undo.offer_undo(request, sentence, *writes)
    return redirect_back(request, "usage", anchor="unused")


@require_POST
@admin_required
def undo(request: HttpRequest, entry_id: int) -> HttpResponse:
    is_redo = request.POST.get("redo") == "1"  # undoes an undo
    sentence, action = ("Redone.", "Undo") if is_redo else ("Undone.", "Redo")
    with errors_as_messages(request):
        write = group_undo.undo(group_undo.find_entry(entry_id), actor=actor_of(request))
        _offer_undo(request, write, sentence, action=action)
    return redirect_back(request, "usage", anchor="unused")
