"""Views of the server list and the server detail pages, and their actions."""

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe
from django.views.decorators.vary import vary_on_headers

from catalog import audit
from servers.connections import metrics
from servers.mcp_json import exporter
from servers.models import Server, Transport, Trigger
from servers.registration import actions as server_actions
from servers.registration import validation
from servers.sync import connection_test, scheduling
from servers.transports import sandbox
from servers.web import forms, presenters, remedies, uptime
from sessions_app.models import UsageKind
from sessions_app.usage import call_stats, panels
from toolcrib.lib.errors import Invalid
from toolcrib.lib.request import announce, is_htmx_fragment, page_tabs, redirect_next
from toolcrib.lib.roles import (
    Role,
    actor_of,
    admin_required,
    operator_required,
    role_of,
    viewer_required,
)
from toolcrib.lib.text import plural
from toolcrib.lib.time_ranges import range_context, read_range

TABS = {
    "server": "Overview",
    "server-tools": "Tools",
    "server-syncs": "Sync history",
    "server-settings": "Settings",
}


def find_server(slug: str) -> Server:
    return presenters.with_costs(Server.objects.all()).get_by_slug(slug)


@require_safe
@viewer_required
@vary_on_headers("HX-Request")
def servers(request: HttpRequest) -> HttpResponse:
    filters = presenters.ServerFilter.from_query(request.GET)
    context = presenters.server_list(filters)
    if is_htmx_fragment(request):
        return render(request, "servers/web/_rows.html", context)
    context |= {"health": presenters.health(), "facets": presenters.facets(filters)}
    return render(request, "servers/web/list.html", context)


@require_POST
@admin_required
def bulk(request: HttpRequest) -> HttpResponse:
    selected = list(Server.objects.filter(slug__in=request.POST.getlist("server")[:1000]))
    if not selected:
        raise Invalid("No server is selected.", hint="Go back and select at least one.")
    if request.POST.get("act") == "disable":
        for server in selected:
            server_actions.set_enabled(server, False, actor=actor_of(request))
        message = f"Disabled {plural(len(selected), 'server')}. Their tools are unavailable."
    else:
        enabled = [server for server in selected if server.enabled]
        for server in enabled:
            scheduling.request_manual_sync(server, actor=actor_of(request))
        message = f"Sync queued for {plural(len(enabled), 'server')}."
        if skipped := len(selected) - len(enabled):
            message += f" Skipped {plural(skipped, 'disabled server')}."
    messages.success(request, message)
    return redirect_next(request, reverse("servers"))


@require_safe
@operator_required
def export(request: HttpRequest) -> HttpResponse:
    """Download all servers as mcp.json, with a reference for each secret."""
    chosen = request.GET.get("shape")
    shapes: dict[str | None, exporter.Shape] = {shape: shape for shape in exporter.SHAPES}
    shape = shapes.get(chosen, "claude")
    audit.record_installation(actor_of(request), "server.export")
    return HttpResponse(
        exporter.export_servers(shape),
        content_type="application/json",
        headers={"Content-Disposition": 'attachment; filename="mcp.json"'},
    )


def page_context(request: HttpRequest, server: Server, tab: str) -> dict[str, Any]:
    counts = {"server-tools": server.tool_count}  # type: ignore[attr-defined]
    # If a requested sync ended before this page was rendered, poll once to announce its outcome.
    requested = (
        not is_htmx_fragment(request) and request.session.pop("sync_asked", "") == server.slug
    )
    return {
        "server": server,
        "tab": tab,
        "busy": requested or presenters.is_busy(server),
        "failing_label": remedies.failing_label(server),
        "remedy": remedies.find_remedies([server]).get(server.pk),
        "run": presenters.newest_runs([server.pk]).get(server.pk),
        "voided": [credential for credential in server.credentials.all() if credential.voided],
        "argv": validation.format_argv(server.argv) if server.transport == Transport.STDIO else "",
        "sandbox": sandbox.current() if server.transport == Transport.STDIO else None,
        "tabs": page_tabs(TABS, tab, server.slug, counts=counts),
    }


@require_safe
@viewer_required
def server(request: HttpRequest, slug: str) -> HttpResponse:
    return render(
        request, "servers/web/overview.html", _overview_context(request, find_server(slug))
    )


def _overview_context(request: HttpRequest, server: Server) -> dict[str, Any]:
    within = read_range(request.GET)
    sessions = {"server": server.slug}
    series, charts = panels.read_panels(within, UsageKind.SERVER, server.slug, sessions=sessions)
    return page_context(request, server, "server") | {
        "series": series,
        "panels": charts,
        "figures": panels.list_metrics(series, UsageKind.SERVER, sessions=sessions),
        "recent_failures": call_stats.recent_failures(tool__in=server.tools.values("pk")),
        **range_context(within),
        "server_info": presenters.format_server_info(server),
        "credentials": list(server.credentials.all()),
        "trust": forms.TRUST_LABELS[server.trust],
        "policy": forms.POLICY_LABELS[server.connection_policy],
        "numbers": presenters.overview_numbers(server),
        "metrics": metrics.server_metrics(server),
        "log": metrics.read_log(server) if role_of(request.user) >= Role.OPERATOR else "",
        "uptime": uptime.read_uptime(server),
    }


@require_safe
@viewer_required
def tools(request: HttpRequest, slug: str) -> HttpResponse:
    server = find_server(slug)
    context = page_context(request, server, "server-tools") | presenters.tool_list(server)
    context |= presenters.feature_list(server)
    return render(request, "servers/web/tools.html", context)


@require_safe
@viewer_required
def syncs(request: HttpRequest, slug: str) -> HttpResponse:
    server = find_server(slug)
    context = page_context(request, server, "server-syncs")
    history = presenters.sync_history(server, request.GET.get("after", ""))
    return render(request, "servers/web/syncs.html", context | history)


@require_safe
@viewer_required
def status(request: HttpRequest, slug: str) -> HttpResponse:
    """Return the status fragment for polling; announce the end of a sync once."""
    server = find_server(slug)
    tab = request.GET.get("tab", "")
    context = page_context(request, server, tab if tab in TABS else "server")
    ended = is_htmx_fragment(request) and not context["busy"]
    response = render(request, "servers/web/_status.html", context | {"ended": ended})
    if ended:
        announce(response, presenters.describe_outcome(server, context["run"]))
    return response


@require_POST
@admin_required
def sync(request: HttpRequest, slug: str) -> HttpResponse:
    scheduling.request_manual_sync(find_server(slug), actor=actor_of(request))
    request.session["sync_asked"] = slug
    return redirect_next(request, reverse("server", args=[slug]))


@require_POST
@admin_required
def test(request: HttpRequest, slug: str) -> HttpResponse:
    result = connection_test.test_server(find_server(slug), actor=actor_of(request))
    if is_htmx_fragment(request):
        return render(request, "servers/web/_tested.html", {"test_result": result})
    context = _overview_context(request, find_server(slug)) | {"test_result": result}
    return render(request, "servers/web/overview.html", context)


@require_POST
@admin_required
def enable(request: HttpRequest, slug: str) -> HttpResponse:
    server = server_actions.set_enabled(find_server(slug), True, actor=actor_of(request))
    scheduling.request_sync(server.pk, Trigger.MANUAL)
    messages.success(request, f"Enabled {server.name}. Sync queued.")
    return redirect_next(request, reverse("server", args=[slug]))


@require_POST
@admin_required
def disable(request: HttpRequest, slug: str) -> HttpResponse:
    server = server_actions.set_enabled(find_server(slug), False, actor=actor_of(request))
    messages.success(request, f"Disabled {server.name}. Its tools are unavailable.")
    return redirect_next(request, reverse("server", args=[slug]))


def redirect_to(name: str, server: Server, fragment: str = "") -> HttpResponse:
    return redirect(reverse(name, args=[server.slug], fragment=fragment or None))
