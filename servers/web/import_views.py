"""Adding servers: one page with three steps, source, check and connect.

What was entered stays sealed in the session, so a step can be reloaded and no answer holds it.
"""

import json
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from servers.models import Server
from servers.web import import_wizard, presenters, token_savings
from servers.web.forms import MORE_PAIR_ROWS, PAIR_ROWS, SOURCES, SourceForm
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.request import is_htmx_fragment
from toolcrib.lib.roles import actor_of, admin_required

STEPS = ("Source", "Check", "Connect")


def _steps(current: int) -> list[dict[str, str]]:
    states = ["done" if at < current else "current" if at == current else "todo" for at in range(3)]
    return [{"label": label, "state": state} for label, state in zip(STEPS, states, strict=True)]


def source_context(form: SourceForm) -> dict[str, Any]:
    return {
        "form": form,
        "source": form.source,
        "sources": [
            {
                "label": one.label,
                "url": f"{reverse('server-add')}?source={name}",
                "current": name == form.source,
            }
            for name, one in SOURCES.items()
        ],
        "pair_rows": range(PAIR_ROWS),
        "more_pair_rows": range(MORE_PAIR_ROWS),
        "steps": _steps(0),
    }


@require_safe
@admin_required
def source(request: HttpRequest) -> HttpResponse:
    kind = SOURCES.get(request.GET.get("source", ""), SOURCES["paste"])
    return render(request, "servers/web/add.html", source_context(kind()))


@sensitive_post_parameters()
@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@admin_required
def check(request: HttpRequest) -> HttpResponse:
    """Take a source or typed values and keep them (POST), or show what they hold (GET)."""
    if request.method == "POST":
        return _take_values(request) if "again" in request.POST else _take_source(request)
    memory = import_wizard.recall(request.session)
    if memory is None:
        return redirect("server-add")
    if memory.text == import_wizard.NOTHING:
        return redirect("server-add-progress")
    context = {"checked": import_wizard.check(memory), "memory": memory, "steps": _steps(1)}
    return render(request, "servers/web/add_check.html", context)


def _take_source(request: HttpRequest) -> HttpResponse:
    kind = SOURCES.get(request.POST.get("source", ""), SOURCES["paste"])
    form = kind(request.POST)
    problem: dict[str, str] = {}
    if form.is_valid():
        memory = import_wizard.WizardState(form.text())
        checked = import_wizard.check(memory)
        if not checked.unreadable:
            import_wizard.remember(request.session, memory)
            # Where the program was shown beside the button, pressing it was the consent to it.
            if request.POST.getlist("confirm"):
                return connect(request)
            return _go(request, "server-add-check")
        found = checked.check.problems[0]
        problem = {"message": found.message, "hint": found.hint}
    else:
        problem = {"message": " ".join(presenters.form_errors(form)), "hint": ""}
    if is_htmx_fragment(request):
        return render(request, "servers/web/_problem.html", {"problem": problem}, status=422)
    context = source_context(kind()) | {"problem": problem}
    return render(request, "servers/web/add.html", context, status=422)


def _take_values(request: HttpRequest) -> HttpResponse:
    memory = import_wizard.recall(request.session)
    if memory is None:
        return redirect("server-add")
    import_wizard.remember(request.session, import_wizard.with_values(memory, request.POST))
    return redirect("server-add-check")


@sensitive_post_parameters()
@require_POST
@admin_required
def connect(request: HttpRequest) -> HttpResponse:
    """Save what was picked and go on to watch the syncs."""
    memory = import_wizard.recall(request.session)
    if memory is None:
        return redirect("server-add")
    memory = import_wizard.with_values(memory, request.POST)
    import_wizard.remember(request.session, memory)
    try:
        memory = import_wizard.connect(memory, request.POST, actor=actor_of(request))
    except ToolcribError as error:
        messages.error(request, error.sentence)
        return redirect("server-add-check")
    import_wizard.remember(request.session, memory)
    return redirect("server-add-progress")


@never_cache
@require_safe
@admin_required
def progress(request: HttpRequest) -> HttpResponse:
    """Show how far each saved server is; the poll gets the rows alone and hears of ends once."""
    memory = import_wizard.recall(request.session)
    if memory is None:
        return redirect("server-add")
    context = _progress(memory)
    if not is_htmx_fragment(request):
        return render(request, "servers/web/add_progress.html", context | {"steps": _steps(2)})
    known = set(request.GET.get("ended", "").split(","))
    response = render(request, "servers/web/_progress_rows.html", context)
    news = [row for row in context["rows"] if row["ended"] and row["server"].slug not in known]
    if news:
        said = " ".join(presenters.describe_seconds(row) for row in news)
        response["HX-Trigger"] = json.dumps({"announce": said})
    return response


def _progress(memory: import_wizard.WizardState) -> dict[str, Any]:
    servers = list(presenters.with_costs(Server.objects.filter(pk__in=memory.saved)))
    runs = presenters.newest_runs(memory.saved)
    rows = [presenters.progress_of(server, runs.get(server.pk)) for server in servers]
    ended = [row["server"].slug for row in rows if row["ended"]]
    connected = [row["server"] for row in rows if row["ended"] == "done"]
    running = len(rows) - len(ended)
    here = reverse("server-add-progress")
    return {
        "rows": rows,
        "refused": memory.refused,
        "running": running,
        "connected": connected,
        "poll_url": f"{here}?ended={','.join(ended)}",
        "here": here,
        "saving": token_savings.token_savings(memory.saved) if connected and not running else None,
    }


def _go(request: HttpRequest, name: str) -> HttpResponse:
    """Redirect a page, and a page that asked for a fragment."""
    if is_htmx_fragment(request):
        return HttpResponse(status=204, headers={"HX-Redirect": reverse(name)})
    return redirect(name)
