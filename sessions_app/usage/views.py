"""The page of use: what earns its place, each table as CSV too, and one click to change it."""

import csv
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from catalog import preferences
from catalog.groups import actions as group_writes
from catalog.groups import undo as group_undo
from catalog.groups.actions import GroupWrite
from catalog.models import AuditEntry, Group
from sessions_app.models import Agent, AgentSession
from sessions_app.usage import funnels, preload_advice, searches, tool_usage
from sessions_app.usage.filters import RANGES, UsageFilter
from sessions_app.usage.searches import FailedSearch
from sessions_app.usage.tool_usage import Bucket, ToolUsage, UsageReport
from toolcrib.lib import charts
from toolcrib.lib.errors import NotFound, ToolcribError
from toolcrib.lib.pagination import offset_of
from toolcrib.lib.request import clean_address, is_htmx_fragment
from toolcrib.lib.roles import actor_of, admin_required, operator_required

OFFERED = "usage_undo"  # the act this session may undo next
CHOICES = 500
Table = tuple[Sequence[str], Iterable[Sequence[object]]]


@require_safe
@operator_required
def usage(request: HttpRequest) -> HttpResponse:
    wanted = UsageFilter.read(request.GET)
    used = tool_usage.usage_report(wanted)
    page = used.page(offset_of(request.GET, tool_usage.PAGE))
    tool_usage.add_trends(wanted, page.rows)
    context: dict[str, Any] = {
        "wanted": wanted,
        "ranges": [(key, one.label, key == wanted.within) for key, one in RANGES.items()],
        "agents": _choices(Agent.objects.values_list("name", flat=True), wanted.agent),
        "groups": _choices(Group.objects.values_list("group_id", flat=True), wanted.group),
        "use": used,
        "page": page,
        "shown": page.says("tool"),
        "durations_read": tool_usage.DURATIONS,
        "loads_read": preload_advice.LOADS,
        "often_sessions": preload_advice.OFTEN,
        "address": clean_address(request).partition("?")[2],
        "offer": request.session.pop(OFFERED, None),
        "ever": bool(used.calls) or AgentSession.objects.exists(),
        "kept_days": preferences.value("keep_sessions_days"),
        "live": funnels.OPEN_SESSIONS,
        "searches_read": searches.SEARCHES,
        **_days(wanted, used),
    }
    if context["ever"]:
        context |= {
            "unused": preload_advice.unused_preloads(wanted, {one.tool_name for one in used.tools}),
            "often": preload_advice.often_loaded(wanted),
            "searches": searches.failed_searches(wanted),
            "funnels": funnels.funnels(wanted),
            "holding": funnels.outdated_sessions(wanted),
        }
    response = render(request, "sessions_app/usage/usage.html", context)
    if is_htmx_fragment(request):
        response["HX-Push-Url"] = clean_address(request)
    return response


def _choices(names: Iterable[str], chosen: str) -> list[str]:
    listed = list(names)[:CHOICES]
    return [*listed, chosen] if chosen and chosen not in listed else listed


def _days(wanted: UsageFilter, used: UsageReport) -> dict[str, Any]:
    drawn = [None if day.calls is None else (day.calls, day.errors) for day in used.buckets]
    return {
        "chart": charts.day_bars(drawn),
        "finding": finding(used.buckets, wanted.range.bucket),
        "first_label": _moment(used.buckets[0], wanted),
        "last_label": _moment(used.buckets[-1], wanted),
    }


def _moment(day: Bucket, wanted: UsageFilter) -> str:
    if wanted.range.bucket == "hour":
        return f"{day.at:%H:%M} UTC"
    return f"{day.at.day} {day.at:%b}"


def finding(days: Sequence[Bucket], bucket: str) -> str:
    """Say in a sentence what the bars show: how much went wrong, and when most of it."""
    calls = sum(day.calls or 0 for day in days)
    errors = sum(day.errors for day in days)
    if not calls:
        return "No agent called a tool in this time."
    busy = [day for day in days if day.calls]
    busiest = max(busy, key=lambda day: day.calls or 0)
    most = "all of them" if len(busy) == 1 else "most of them"
    said = f"{calls:,} call{'' if calls == 1 else 's'}, {most} {_when(busiest, bucket)}"
    if not errors:
        return f"{said}; none went wrong."
    share = 100 * errors / calls
    rate = f"{share:.1f} %" if share < 10 else f"{share:.0f} %"
    worst = max(days, key=lambda day: day.errors)
    if worst is busiest:
        return f"{said}; {errors:,} went wrong ({rate})."
    return (
        f"{said}; {errors:,} went wrong ({rate}), most of these {_when(worst, bucket)} "
        f"({worst.errors:,} of {worst.calls or 0:,})."
    )


def _when(day: Bucket, bucket: str) -> str:
    if bucket == "hour":
        return f"in the hour from {day.at:%H:%M} UTC"
    return f"on {day.at:%A} {day.at.day} {day.at:%B}"


# --- CSV ----------------------------------------------------------------------------------------


@require_safe
@operator_required
def usage_csv(request: HttpRequest, table: str) -> HttpResponse:
    if table not in TABLES:
        raise NotFound("There is no table of this name.", hint="The page of use links them all.")
    wanted = UsageFilter.read(request.GET)
    head, rows = TABLES[table](wanted)
    response = HttpResponse(content_type="text/csv; charset=utf-8")
    name = f"toolcrib-{table}-{wanted.within}.csv"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    writer = csv.writer(response)
    writer.writerow(head)
    writer.writerows([harmless(cell) for cell in row] for row in rows)
    return response


def harmless(cell: object) -> object:
    """Return a cell that no spreadsheet takes for a formula."""
    if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{cell}"
    return "" if cell is None else cell


def _days_table(wanted: UsageFilter) -> Table:
    rows = (
        (day.at.isoformat(), day.calls, day.errors)
        for day in tool_usage.usage_report(wanted).buckets
    )
    return (wanted.range.bucket, "calls", "errors"), rows


def _tools_table(wanted: UsageFilter) -> Table:
    head = ("tool", "calls", "errors", "error_percent", "p50_ms", "p95_ms", "tokens", "each")
    return head, map(_tool_cells, tool_usage.usage_report(wanted).tools)


def _tool_cells(one: ToolUsage) -> Sequence[object]:
    counted = (one.tool_name, one.calls, one.errors, round(one.error_rate, 2))
    return (*counted, one.p50_ms, one.p95_ms, one.tokens, one.tokens_per_call)


def _unused_table(wanted: UsageFilter) -> Table:
    rows = preload_advice.unused_preloads(wanted, most=None).places
    return ("tool", "group", "tokens"), (
        (one.tool.public_name, one.group.group_id, one.tokens) for one in rows
    )


def _often_table(wanted: UsageFilter) -> Table:
    rows = preload_advice.often_loaded(wanted, most=None)
    return ("tool", "group", "sessions", "share_percent", "tokens"), (
        (one.tool.public_name, one.group.group_id, one.sessions, one.share, one.tokens)
        for one in rows
    )


def _asked_table(rows: Iterable[FailedSearch]) -> Table:
    return ("asked", "strategy", "times", "last_at"), (
        (one.asked, one.strategy, one.times, one.last_at.isoformat()) for one in rows
    )


def _funnel_table(wanted: UsageFilter) -> Table:
    rows = funnels.funnels(wanted, most=None)
    return ("agent", "sessions", "searched", "then_loaded", "then_called", "called_unsearched"), (
        (one.agent, one.sessions, one.searched, one.loaded, one.called, one.unsearched)
        for one in rows
    )


def _old_table(wanted: UsageFilter) -> Table:
    return ("session", "agent", "last_used", "tool"), (
        (one.session.session_id, one.session.agent.name, one.session.last_used_at.isoformat(), name)
        for one in funnels.outdated_sessions(wanted, most=None)
        for name in one.names
    )


TABLES: dict[str, Callable[[UsageFilter], Table]] = {
    "days": _days_table,
    "tools": _tools_table,
    "unused": _unused_table,
    "often": _often_table,
    "lost": lambda wanted: _asked_table(
        searches.failed_searches(wanted, most=None).without_results
    ),
    "astray": lambda wanted: _asked_table(searches.failed_searches(wanted, most=None).abandoned),
    "funnel": _funnel_table,
    "old": _old_table,
}


# --- Changing what does not earn its place ------------------------------------------------------


def _back(request: HttpRequest, anchor: str) -> str:
    # Only the query is taken from the form: the address stays ours.
    query = QueryDict(request.POST.get("address", "")).urlencode()
    return f"{reverse('usage')}{'?' if query else ''}{query}#{anchor}"


def _act(request: HttpRequest, act: Callable[[], GroupWrite], words: str) -> None:
    try:
        done = act()
    except ToolcribError as error:
        messages.error(request, error.sentence)
        return
    if done.entry is None:
        messages.info(request, "Nothing changed: it stood so already.")
        return
    request.session[OFFERED] = {
        "entry": done.entry.pk,
        "sentence": words,
        "address": request.POST.get("address", "")[:2000],
    }


@require_POST
@admin_required
def set_preload(request: HttpRequest) -> HttpResponse:
    """Give a tool of a group on demand, or from the start."""
    on = request.POST.get("on") == "1"
    group_id, name = request.POST.get("group", ""), request.POST.get("tool", "")

    def act() -> GroupWrite:
        group, tools = group_writes.find_group(group_id), group_writes.find_tools([name])
        return group_writes.set_preload(group, tools, on, actor=actor_of(request))

    given = "preloaded" if on else "given on demand"
    _act(request, act, f"{name} in {group_id} is {given} in new sessions.")
    return redirect(_back(request, "often" if on else "unused"))


@require_POST
@admin_required
def undo(request: HttpRequest, entry_id: int) -> HttpResponse:
    def act() -> GroupWrite:
        entry = AuditEntry.objects.filter(pk=entry_id).first()
        if entry is None:
            raise NotFound("There is no such act to undo.", hint="The audit log has them all.")
        return group_undo.undo(entry, actor=actor_of(request))

    _act(request, act, "Undone.")
    return redirect(_back(request, "unused"))
