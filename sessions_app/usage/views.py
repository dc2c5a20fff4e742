"""Usage page: calls, preload advice, unmet searches, CSV export, preload changes with undo."""

import csv
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST, require_safe

from catalog import preferences
from catalog.groups import actions as group_writes
from catalog.groups import undo as group_undo
from catalog.groups.actions import GroupWrite
from sessions_app.models import AgentSession
from sessions_app.usage import funnels, preload_advice, searches, tool_usage
from sessions_app.usage.filters import UsageFilter, filter_context
from sessions_app.usage.tool_usage import Bucket, UsageReport
from toolcrib.lib import charts
from toolcrib.lib.errors import NotFound
from toolcrib.lib.pagination import offset_of, page_by_offset
from toolcrib.lib.request import clean_url, errors_as_messages, is_htmx_fragment, redirect_back
from toolcrib.lib.roles import actor_of, admin_required, operator_required
from toolcrib.lib.text import escape_formula, plural

UNDO_SESSION_KEY = "usage_undo"  # the change that the next page offers to undo
Table = tuple[Sequence[str], Iterable[Sequence[object]]]


@require_safe
@operator_required
def usage(request: HttpRequest) -> HttpResponse:
    filters = UsageFilter.read(request.GET)
    report = tool_usage.usage_report(filters)
    offset = offset_of(request.GET, tool_usage.PAGE)
    page = page_by_offset(report.tools, offset, tool_usage.PAGE)
    tool_usage.add_trends(filters, page.rows)
    context: dict[str, Any] = {
        **filter_context(filters),
        "report": report,
        "page": page,
        "shown": page.describe("tool"),
        "durations_read": tool_usage.DURATIONS,
        "loads_read": preload_advice.MAX_LOADS,
        "min_sessions": preload_advice.MIN_SESSIONS,
        "address": clean_url(request).partition("?")[2],
        "undo_offer": request.session.pop(UNDO_SESSION_KEY, None),
        "has_sessions": bool(report.calls) or AgentSession.objects.exists(),
        "retention_days": preferences.value("keep_sessions_days"),
        "max_open_sessions": funnels.MAX_OPEN_SESSIONS,
        "searches_read": searches.MAX_SEARCHES,
        **_chart_context(filters, report),
    }
    if context["has_sessions"]:
        called = {tool.tool_name for tool in report.tools}
        context |= {
            "unused": preload_advice.unused_preloads(filters, called),
            "frequent": preload_advice.frequently_loaded(filters),
            "searches": searches.failed_searches(filters),
            "funnels": funnels.funnels(filters),
            "outdated": funnels.outdated_sessions(filters),
        }
    response = render(request, "sessions_app/usage/usage.html", context)
    if is_htmx_fragment(request):
        response["HX-Push-Url"] = clean_url(request)
    return response


def _chart_context(filters: UsageFilter, report: UsageReport) -> dict[str, Any]:
    buckets = report.buckets
    bars = [None if bucket.calls is None else (bucket.calls, bucket.errors) for bucket in buckets]
    return {
        "chart": charts.day_bars(bars),
        "chart_summary": summarize_calls(buckets, filters.range.bucket),
        "first_label": _axis_label(buckets[0], filters),
        "last_label": _axis_label(buckets[-1], filters),
    }


def _axis_label(bucket: Bucket, filters: UsageFilter) -> str:
    if filters.range.bucket == "hour":
        return f"{bucket.at:%H:%M} UTC"
    return f"{bucket.at.day} {bucket.at:%b}"


def summarize_calls(buckets: Sequence[Bucket], unit: str) -> str:
    """Return one sentence on the chart: total and failed calls, and when most occurred."""
    calls = sum(bucket.calls or 0 for bucket in buckets)
    errors = sum(bucket.errors for bucket in buckets)
    if not calls:
        return "No calls in this time range."
    busy = [bucket for bucket in buckets if bucket.calls]
    busiest = max(busy, key=lambda bucket: bucket.calls or 0)
    share_of_calls = "all" if len(busy) == 1 else "most"
    summary = f"{plural(calls, 'call')}, {share_of_calls} {_describe_time(busiest, unit)}"
    if not errors:
        return f"{summary}; none failed."
    percent = 100 * errors / calls
    rate = f"{percent:.1f}%" if percent < 10 else f"{percent:.0f}%"
    worst = max(buckets, key=lambda bucket: bucket.errors)
    if worst is busiest:
        return f"{summary}; {errors:,} failed ({rate})."
    return (
        f"{summary}; {errors:,} failed ({rate}), most {_describe_time(worst, unit)} "
        f"({worst.errors:,} of {worst.calls or 0:,})."
    )


def _describe_time(bucket: Bucket, unit: str) -> str:
    if unit == "hour":
        return f"in the hour from {bucket.at:%H:%M} UTC"
    return f"on {bucket.at:%A} {bucket.at.day} {bucket.at:%B}"


# --- CSV ----------------------------------------------------------------------------------------


@require_safe
@operator_required
def usage_csv(request: HttpRequest, table: str) -> HttpResponse:
    if table not in TABLES:
        raise NotFound("Table not found.", hint="Use a CSV link on the usage page.")
    filters = UsageFilter.read(request.GET)
    header, rows = TABLES[table](filters)
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
        return round(cell, 2)
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
        tool_usage.usage_report(filters).buckets,
    ),
    "tools": lambda filters: _table(
        "tool calls errors error_percent p50_ms p95_ms tokens each",
        "tool_name calls errors error_rate p50_ms p95_ms tokens tokens_per_call",
        tool_usage.usage_report(filters).tools,
    ),
    "unused": lambda filters: _table(
        "tool group tokens",
        "tool.public_name group.group_id tokens",
        preload_advice.unused_preloads(filters, limit=None).candidates,
    ),
    "often": lambda filters: _table(
        "tool group sessions share_percent tokens",
        "tool.public_name group.group_id sessions share tokens",
        preload_advice.frequently_loaded(filters, limit=None),
    ),
    "lost": lambda filters: _table(
        SEARCH_COLUMNS,
        SEARCH_COLUMNS,
        searches.failed_searches(filters, limit=None).without_results,
    ),
    "astray": lambda filters: _table(
        SEARCH_COLUMNS, SEARCH_COLUMNS, searches.failed_searches(filters, limit=None).abandoned
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
def undo(request: HttpRequest, entry_id: int) -> HttpResponse:
    is_redo = request.POST.get("redo") == "1"  # undoes an undo
    sentence, action = ("Redone.", "Undo") if is_redo else ("Undone.", "Redo")
    with errors_as_messages(request):
        write = group_undo.undo(group_undo.find_entry(entry_id), actor=actor_of(request))
        _offer_undo(request, write, sentence, action=action)
    return redirect_back(request, "usage", anchor="unused")
