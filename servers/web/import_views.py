"""Views of the import wizard: source, check, connect.

Input is stored encrypted in the session, so that a step can be reloaded. No response contains it.
"""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from servers.models import Server
from servers.transports import sandbox
from servers.web import import_wizard, presenters, remedies, token_savings
from servers.web.forms import MORE_PAIR_ROWS, PAIR_ROWS, SOURCES, SourceForm
from toolcrib.lib.request import announce, errors_as_messages, is_htmx_fragment
from toolcrib.lib.roles import actor_of, admin_required

STEPS = ("Source", "Check", "Connect")


def _steps(current: int) -> list[dict[str, str]]:
    states = ["done"] * current + ["current"] + ["todo"] * (len(STEPS) - current - 1)
    return [{"label": label, "state": state} for label, state in zip(STEPS, states, strict=True)]


def source_context(form: SourceForm) -> dict[str, Any]:
    return {
        "form": form,
        "source": form.source,
        "sources": [
            {
                "label": form_class.label,
                "url": f"{reverse('server-add')}?source={name}",
                "current": name == form.source,
            }
            for name, form_class in SOURCES.items()
        ],
        "pair_rows": range(PAIR_ROWS),
        "more_pair_rows": range(MORE_PAIR_ROWS),
        "steps": _steps(0),
    }


@require_safe
@admin_required
def source(request: HttpRequest) -> HttpResponse:
    form_class = SOURCES.get(request.GET.get("source", ""), SOURCES["paste"])
    return render(request, "servers/web/add.html", source_context(form_class()))


@sensitive_post_parameters()
@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@admin_required
def check(request: HttpRequest) -> HttpResponse:
    """Store a source or variable values (POST), or show the parsed servers (GET)."""
    if request.method == "POST" and "again" not in request.POST:
        return _save_source(request)
    state = import_wizard.load(request.session)
    if state is None:
        return redirect("server-add")
    if request.method == "POST":
        import_wizard.save(request.session, import_wizard.with_values(state, request.POST))
        return redirect("server-add-check")
    if state.text == import_wizard.EMPTY:
        return redirect("server-add-progress")
    context = {
        "checked": import_wizard.check(state),
        "steps": _steps(1),
        "sandbox": sandbox.current(),
    }
    return render(request, "servers/web/add_check.html", context)


def _save_source(request: HttpRequest) -> HttpResponse:
    form_class = SOURCES.get(request.POST.get("source", ""), SOURCES["paste"])
    form = form_class(request.POST)
    problem: dict[str, str] = {}
    if form.is_valid():
        state = import_wizard.WizardState(form.to_mcp_json())
        checked = import_wizard.check(state)
        if not checked.is_invalid:
            import_wizard.save(request.session, state)
            # A form that shows the command beside its button also sends the confirmation.
            if request.POST.getlist("confirm"):
                return connect(request)
            if is_htmx_fragment(request):
                headers = {"HX-Redirect": reverse("server-add-check")}
                return HttpResponse(status=204, headers=headers)
            return redirect("server-add-check")
        first = checked.check.problems[0]
        problem = {"message": first.message, "hint": first.hint}
    else:
        problem = {"message": " ".join(presenters.form_errors(form)), "hint": ""}
    if is_htmx_fragment(request):
        return render(request, "servers/web/_problem.html", {"problem": problem}, status=422)
    context = source_context(form_class()) | {"problem": problem}
    return render(request, "servers/web/add.html", context, status=422)


@sensitive_post_parameters()
@require_POST
@admin_required
def connect(request: HttpRequest) -> HttpResponse:
    state = import_wizard.load(request.session)
    if state is None:
        return redirect("server-add")
    state = import_wizard.with_values(state, request.POST)
    import_wizard.save(request.session, state)
    with errors_as_messages(request):
        state = import_wizard.connect(state, request.POST, actor=actor_of(request))
        import_wizard.save(request.session, state)
        return redirect("server-add-progress")
    return redirect("server-add-check")


@never_cache
@require_safe
@admin_required
def progress(request: HttpRequest) -> HttpResponse:
    """Show the progress of each saved server; polling gets the rows. Ends are announced once."""
    state = import_wizard.load(request.session)
    if state is None:
        return redirect("server-add")
    context = _progress_context(state)
    if not is_htmx_fragment(request):
        return render(request, "servers/web/add_progress.html", context | {"steps": _steps(2)})
    announced = set(request.GET.get("ended", "").split(","))
    response = render(request, "servers/web/_progress_rows.html", context)
    ended = [row for row in context["rows"] if row["ended"] and row["server"].slug not in announced]
    if ended:
        announcement = " ".join(presenters.describe_progress(row) for row in ended)
        announce(response, announcement)
    return response


def _progress_context(state: import_wizard.WizardState) -> dict[str, Any]:
    servers = list(presenters.with_costs(Server.objects.filter(pk__in=state.saved)))
    runs = presenters.newest_runs(state.saved)
    rows = [presenters.progress_row(server, runs.get(server.pk)) for server in servers]
    found = remedies.find_remedies(row["server"] for row in rows if row["ended"] == "failed")
    for row in rows:
        row["remedy"] = found.get(row["server"].pk)
    ended = [row["server"].slug for row in rows if row["ended"]]
    connected = [row["server"] for row in rows if row["ended"] == "done"]
    running = len(rows) - len(ended)
    progress_url = reverse("server-add-progress")
    return {
        "rows": rows,
        "rejected": state.rejected,
        "running": running,
        "connected": connected,
        "poll_url": f"{progress_url}?ended={','.join(ended)}",
        "progress_url": progress_url,
        "savings": token_savings.compute_savings(state.saved)
        if connected and not running
        else None,
    }
