"""Search pages: test a query, golden queries, unmet searches."""

import re
from collections import Counter
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from catalog.models import GoldenQuery, GoldenRun
from catalog.search import golden_queries as golden
from catalog.search.rankers import RANKED_STRATEGIES
from servers.models import Server
from sessions_app.agents.queries import find_agent
from sessions_app.models import Agent
from sessions_app.playground import golden_exchange, golden_runs
from sessions_app.playground import search as playground_search
from sessions_app.playground.search import PlaygroundQuery
from sessions_app.usage import searches
from sessions_app.usage.filters import UsageFilter, choices, filter_context
from toolcrib.lib.request import (
    announce,
    clean_url,
    errors_as_messages,
    is_htmx_fragment,
    page_tabs,
    redirect_back,
    text,
)
from toolcrib.lib.roles import actor_of, admin_required, operator_required, viewer_required
from toolcrib.lib.text import plural

LIMITS = (5, 10, 20, 50)
TABS = {
    "playground": "Test a query",
    "golden": "Golden queries",
    "hints": "Hints",
    "missed": "Unmet searches",
}
GOLDEN_ORIGINS = {"agents", "hint"}  # that a form may name, besides the playground


def search_tabs(current: str, regressions: int | None = None) -> list[dict[str, object]]:
    if regressions is None:
        regressions = golden.count_regressions()
    counts = {"golden": plural(regressions, "regression") if regressions else None}
    return page_tabs(TABS, current, counts=counts)


@require_safe
@viewer_required
def search(request: HttpRequest) -> HttpResponse:
    params = PlaygroundQuery.read(request.GET)
    result = playground_search.run_query(params) if params.query else None
    context: dict[str, Any] = {
        "params": params,
        "result": result,
        "address": request.GET.urlencode(),
        "golden": _find_golden(params.query),
        "examples": () if params.query else playground_search.example_queries(),
    }
    if is_htmx_fragment(request):
        response = render(request, "sessions_app/playground/_found.html", context)
        response["HX-Replace-Url"] = clean_url(request)
        return announce(response, _announcement(result))
    regressions = golden.list_regressions()
    context |= {
        "tabs": search_tabs("playground", len(regressions)),
        "regressions": regressions,
        "agents": choices(Agent.objects.values_list("name", flat=True), params.agent),
        "servers": choices(Server.objects.values_list("slug", flat=True), params.server),
        "strategies": RANKED_STRATEGIES,
        "limits": sorted({*LIMITS, params.limit} - {0}),
        "recent_queries": searches.recent_queries(),
        "progress": playground_search.embedding_progress(),
    }
    return render(request, "sessions_app/playground/search.html", context)


@require_safe
@viewer_required
def progress(request: HttpRequest) -> HttpResponse:
    """Render the embedding progress, which the page polls."""
    context = {"progress": playground_search.embedding_progress()}
    return render(request, "sessions_app/playground/_progress.html", context)


def _find_golden(query: str) -> GoldenQuery | None:
    line = " ".join(query.replace("\0", "").split())
    return golden.queries().filter(query=line).first() if line else None


def _announcement(result: playground_search.PlaygroundResult | None) -> str:
    if result is None:
        return ""
    if result.error:
        return result.error.sentence
    return f"{plural(result.total, 'tool')} found"


@require_POST
@admin_required
def mark(request: HttpRequest) -> HttpResponse:
    """Add a tool to the expected tools of a query, or remove it."""
    query, name = request.POST.get("q", ""), request.POST.get("tool", "").strip()
    existing = _find_golden(query)
    current = set(existing.right if existing else ())
    expected = current - {name} if request.POST.get("right") == "0" else current | {name}
    actor = actor_of(request)
    with errors_as_messages(request):
        if existing and not expected:
            golden.remove(existing, actor=actor)
            message = f"Removed golden query “{existing.query}”."
        else:
            origin = request.POST.get("origin", "")
            origin = origin if origin in GOLDEN_ORIGINS else "playground"
            row = golden.set_expected_tools(query, expected, origin=origin, actor=actor)
            golden_runs.run_one(row)
            message = f"Expected tool for “{row.query}”: {', '.join(row.right)}. "
            message += "Checked on every catalog change."
        messages.success(request, message)
    return redirect_back(request, "playground")


@require_POST
@admin_required
def load(request: HttpRequest) -> HttpResponse:
    """Load a tool into a test session of the agent and show that session."""
    with errors_as_messages(request):
        agent = find_agent(request.POST.get("agent", ""), with_counts=False)
        session = playground_search.open_test_session(
            agent, request.POST.get("tool", ""), actor=actor_of(request)
        )
        return redirect("session", session.session_id)
    return redirect_back(request, "playground")


@require_safe
@viewer_required
def golden_queries(request: HttpRequest) -> HttpResponse:
    rows = list(golden.queries())
    regressions = [row for row in rows if any(result.broke for result in row.results.all())]
    runs = list(GoldenRun.objects.exclude(finished_at=None)[:20])
    context = {
        "tabs": search_tabs("golden", len(regressions)),
        "regressions": regressions,
        "total": len(rows),
        "rows": [_ranks(row) for row in rows if row not in regressions],
        "strategies": golden.STRATEGIES,
        "run": runs[0] if runs else None,
        "scores": _scores(runs, rows),
        "run_due": bool(rows) and golden_runs.is_due(),
        "runs": [_run_row(run) for run in runs[:10]],
        "new_query": text(request.GET, "query"),
        "new_tools": text(request.GET, "tools"),
    }
    return render(request, "sessions_app/playground/golden.html", context)


@require_POST
@admin_required
def golden_add(request: HttpRequest) -> HttpResponse:
    """Add one query, or import lines of CSV."""
    with errors_as_messages(request):
        if lines := request.POST.get("lines", ""):
            rows = golden_exchange.read_csv(lines)
        else:
            tools = re.split(r"[\s,]+", request.POST.get("tools", "").strip())
            rows = [[request.POST.get("query", ""), *tools]]
        added = golden.import_rows(rows, origin="playground", actor=actor_of(request))
        if len(added) == 1:
            golden_runs.run_one(added[0])
        messages.success(request, f"Saved {plural(len(added), 'golden query', 'golden queries')}.")
    return redirect("golden")


@require_safe
@operator_required
def golden_export(request: HttpRequest) -> HttpResponse:
    """Download all golden queries as CSV, in the form that the page imports."""
    body = golden_exchange.write_csv(golden.queries())
    response = HttpResponse(body, content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = 'attachment; filename="golden-queries.csv"'
    return response


def _run_row(run: GoldenRun) -> dict[str, Any]:
    ordered = [run.scores.get(strategy) for strategy in golden.STRATEGIES]
    return {
        "finished_at": run.finished_at,
        "revision": run.revision,
        "ordered": ordered,
        "broke": sum(score["broke"] for score in ordered if score),
    }


def _ranks(row: GoldenQuery) -> dict[str, Any]:
    ranks = {result.strategy: result.rank for result in row.results.all()}
    return {"golden": row, "ranks": [ranks.get(strategy) for strategy in golden.STRATEGIES]}


def _scores(runs: list[GoldenRun], rows: list[GoldenQuery]) -> list[dict[str, Any]]:
    """Return the newest scores of each strategy, with the trend of its MRR.

    Regressions are the current ones: some may have been accepted since the run.
    """
    if not runs:
        return []
    regressions = Counter(
        result.strategy for row in rows for result in row.results.all() if result.broke
    )
    return [
        {
            "strategy": strategy,
            **score,
            "broke": regressions[strategy],
            "mrr_trend": [
                run.scores[strategy]["mrr"] for run in reversed(runs) if strategy in run.scores
            ],
        }
        for strategy, score in runs[0].scores.items()
    ]


@require_POST
@admin_required
def golden_accept(request: HttpRequest, golden_id: int) -> HttpResponse:
    with errors_as_messages(request):
        row = golden.accept(golden.find_golden_query(golden_id), actor=actor_of(request))
        messages.success(request, f"Accepted the current rank of “{row.query}”.")
    return redirect("golden")


@require_POST
@admin_required
def golden_remove(request: HttpRequest, golden_id: int) -> HttpResponse:
    with errors_as_messages(request):
        row = golden.find_golden_query(golden_id)
        golden.remove(row, actor=actor_of(request))
        messages.success(request, f"Removed golden query “{row.query}”.")
    return redirect("golden")


@require_POST
@admin_required
def golden_run(request: HttpRequest) -> HttpResponse:
    with errors_as_messages(request):
        golden_runs.run_now()
        messages.success(request, "Golden query run finished.")
    return redirect("golden")


@require_safe
@viewer_required
def not_found(request: HttpRequest) -> HttpResponse:
    filters = UsageFilter.read(request.GET)
    context = {
        "tabs": search_tabs("missed"),
        **filter_context(filters),
        "report": searches.report(filters),
        "searches_read": searches.MAX_SEARCHES,
        "loads_read": searches.MAX_LOADS,
    }
    response = render(request, "sessions_app/playground/not_found.html", context)
    if is_htmx_fragment(request):
        response["HX-Push-Url"] = clean_url(request)
    return response
