"""The pages of search: try a query, the golden queries, what agents could not find."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from catalog.models import GoldenQuery, GoldenRun, Group
from catalog.search import golden_queries as golden
from catalog.search.engine import WORD_STRATEGIES
from servers.models import Server
from sessions_app.agents import actions as agent_actions
from sessions_app.models import Agent
from sessions_app.playground import golden_runs
from sessions_app.playground import search as playground_search
from sessions_app.playground.search import PlaygroundQuery
from sessions_app.usage import searches
from sessions_app.usage.filters import RANGES, UsageFilter
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.request import clean_address, is_htmx_fragment
from toolcrib.lib.roles import actor_of, admin_required, operator_required

CHOICES = 500
LIMITS = (5, 10, 20, 50)


def _tabs(current: str, broke: int) -> list[dict[str, Any]]:
    names = (
        ("playground", "Try a query", None),
        ("golden", "Golden queries", f"{broke:,} broke" if broke else None),
        ("missed", "What agents could not find", None),
    )
    return [
        {"label": label, "url": reverse(name), "current": name == current, "count": count}
        for name, label, count in names
    ]


# --- Try a query --------------------------------------------------------------------------------


@require_safe
@operator_required
def search(request: HttpRequest) -> HttpResponse:
    asked = PlaygroundQuery.read(request.GET)
    tried = playground_search.run_query(asked) if asked.query else None
    context: dict[str, Any] = {
        "asked": asked,
        "tried": tried,
        "address": request.GET.urlencode(),
        "golden": _golden_of(asked),
    }
    if is_htmx_fragment(request):
        response = render(request, "sessions_app/playground/_found.html", context | _idle(asked))
        response["HX-Replace-Url"] = clean_address(request)
        response["HX-Trigger"] = json.dumps({"announce": _announced(tried)})
        return response
    broken = golden.broken()
    context |= {
        **_idle(asked),
        "tabs": _tabs("playground", len(broken)),
        "broken": broken,
        "agents": _choices(Agent.objects.values_list("name", flat=True), asked.agent),
        "servers": _choices(Server.objects.values_list("slug", flat=True), asked.server),
        "strategies": WORD_STRATEGIES,
        "limits": sorted({*LIMITS, asked.limit}),
        "lately": searches.recent_queries(),
        "progress": playground_search.progress(),
    }
    return render(request, "sessions_app/playground/search.html", context)


@require_safe
@operator_required
def progress(request: HttpRequest) -> HttpResponse:
    """The line that says how far the vectors are, which the page asks for again."""
    return render(
        request,
        "sessions_app/playground/_progress.html",
        {"progress": playground_search.progress()},
    )


def _idle(asked: PlaygroundQuery) -> dict[str, Any]:
    """What to begin with, where nothing is asked yet."""
    return {} if asked.query else {"examples": playground_search.examples()}


def _golden_of(asked: PlaygroundQuery) -> GoldenQuery | None:
    line = " ".join(asked.query.split())
    return golden.queries().filter(query=line).first() if line else None


def _announced(tried: playground_search.PlaygroundResult | None) -> str:
    if tried is None:
        return ""
    if tried.refused:
        return tried.refused.sentence
    return f"{tried.total:,} tool{'' if tried.total == 1 else 's'} found"


def _choices(names: Iterable[str], chosen: str) -> list[str]:
    listed = list(names)[:CHOICES]
    return [*listed, chosen] if chosen and chosen not in listed else listed


def _back(request: HttpRequest) -> str:
    # Only the query is taken from the form: the address stays ours.
    query = QueryDict(request.POST.get("address", "")).urlencode()
    return f"{reverse('playground')}{'?' if query else ''}{query}"


def _told(request: HttpRequest, act: Callable[[], str]) -> bool:
    """Do it and say what was done, or why not."""
    try:
        messages.success(request, act())
    except ToolcribError as error:
        messages.error(request, error.sentence)
        return False
    return True


@require_POST
@admin_required
def mark(request: HttpRequest) -> HttpResponse:
    """Add a tool to the right answers of a query, or take it out."""
    query, name = request.POST.get("q", ""), request.POST.get("tool", "").strip()
    held = golden.queries().filter(query=" ".join(query.replace("\0", "").split())).first()
    right = set(held.right if held else ())
    wanted = right - {name} if request.POST.get("right") == "0" else right | {name}
    actor = actor_of(request)

    def act() -> str:
        if held and not wanted:
            golden.remove(held, actor=actor)
            return f"“{held.query}” is no golden query any more."
        origin = "agents" if request.POST.get("origin") == "agents" else "playground"
        marked = golden.mark(query, wanted, origin=origin, actor=actor)
        golden_runs.run_one(marked)
        return (
            f"{', '.join(marked.right)} is the right answer to “{marked.query}”. It is checked "
            "whenever the catalog changes."
        )

    _told(request, act)
    return redirect(_back(request))


@require_POST
@admin_required
def load(request: HttpRequest) -> HttpResponse:
    """Load a tool into a test session of the agent, and show what its model is given."""
    try:
        agent = agent_actions.find_agent(request.POST.get("agent", ""))
        session = playground_search.open_trial_session(
            agent, request.POST.get("tool", ""), actor=actor_of(request)
        )
    except ToolcribError as error:
        messages.error(request, error.sentence)
        return redirect(_back(request))
    return redirect("session", session.session_id)


# --- Golden queries -----------------------------------------------------------------------------


@require_safe
@operator_required
def golden_queries(request: HttpRequest) -> HttpResponse:
    rows = list(golden.queries())
    broken = [row for row in rows if any(result.broke for result in row.results.all())]
    runs = list(GoldenRun.objects.exclude(finished_at=None)[:20])
    context = {
        "tabs": _tabs("golden", len(broken)),
        "broken": broken,
        "total": len(rows),
        "rows": [_ranks(row) for row in rows if row not in broken],
        "strategies": golden.STRATEGIES,
        "run": runs[0] if runs else None,
        "scores": _scores(runs),
        "behind": bool(rows) and golden_runs.is_due(),
    }
    return render(request, "sessions_app/playground/golden.html", context)


def _ranks(row: GoldenQuery) -> dict[str, Any]:
    ranks = {result.strategy: result.rank for result in row.results.all()}
    return {"golden": row, "ranks": [ranks.get(strategy) for strategy in golden.STRATEGIES]}


def _scores(runs: list[GoldenRun]) -> list[dict[str, Any]]:
    """The newest score of each strategy, with how it came there."""
    if not runs:
        return []
    return [
        {
            "strategy": strategy,
            **score,
            "spark": [
                run.scores[strategy]["mrr"] for run in reversed(runs) if strategy in run.scores
            ],
        }
        for strategy, score in runs[0].scores.items()
    ]


@require_POST
@admin_required
def golden_accept(request: HttpRequest, golden_id: int) -> HttpResponse:
    def act() -> str:
        held = golden.accept(golden.find(golden_id), actor=actor_of(request))
        return f"“{held.query}” counts from where it stands now."

    _told(request, act)
    return redirect("golden")


@require_POST
@admin_required
def golden_remove(request: HttpRequest, golden_id: int) -> HttpResponse:
    def act() -> str:
        held = golden.find(golden_id)
        golden.remove(held, actor=actor_of(request))
        return f"“{held.query}” is no golden query any more."

    _told(request, act)
    return redirect("golden")


@require_POST
@admin_required
def golden_run(request: HttpRequest) -> HttpResponse:
    def act() -> str:
        golden_runs.run_now()
        return "The golden queries were run."

    _told(request, act)
    return redirect("golden")


# --- What agents could not find -----------------------------------------------------------------


@require_safe
@operator_required
def not_found(request: HttpRequest) -> HttpResponse:
    wanted = UsageFilter.read(request.GET)
    context = {
        "tabs": _tabs("missed", golden.broken_count()),
        "wanted": wanted,
        "ranges": [(key, one.label, key == wanted.within) for key, one in RANGES.items()],
        "agents": _choices(Agent.objects.values_list("name", flat=True), wanted.agent),
        "groups": _choices(Group.objects.values_list("group_id", flat=True), wanted.group),
        "report": searches.report(wanted),
        "limits": searches,
    }
    response = render(request, "sessions_app/playground/not_found.html", context)
    if is_htmx_fragment(request):
        response["HX-Push-Url"] = clean_address(request)
    return response
