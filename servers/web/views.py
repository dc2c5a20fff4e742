"""The list of servers and one server's page. Adding is in add_views, settings in settings_views."""

import json
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST, require_safe
from django.views.decorators.vary import vary_on_headers

from servers.connections import metrics
from servers.mcp_json import importer
from servers.models import Server, Transport, Trigger
from servers.registration import actions as server_actions
from servers.registration import validation
from servers.sync import connection_test, scheduling
from servers.web import forms, presenters
from toolcrib.lib.errors import Invalid, NotFound
from toolcrib.lib.request import is_htmx_fragment
from toolcrib.lib.roles import actor_of, admin_required, operator_required

TABS = {
    "server": "Overview",
    "server-tools": "Tools",
    "server-syncs": "Sync history",
    "server-settings": "Settings",
}


def find_server(slug: str) -> Server:
    server = presenters.with_costs(Server.objects.filter(slug=slug)).first()
    if server is None:
        raise NotFound(f"There is no server called {slug}.", hint="Look in the list of servers.")
    return server


def back(request: HttpRequest, otherwise: str) -> HttpResponseRedirect:
    """Return to the page the form named, if it is one of ours."""
    target = request.POST.get("next") or request.GET.get("next") or ""
    ours = url_has_allowed_host_and_scheme(target, allowed_hosts={request.get_host()})
    return HttpResponseRedirect(target if ours else otherwise)


# --- The list -----------------------------------------------------------------------------------


@require_safe
@operator_required
@vary_on_headers("HX-Request")
def servers(request: HttpRequest) -> HttpResponse:
    wanted = presenters.ServerFilter.of(request.GET)
    context = presenters.listing(wanted)
    if is_htmx_fragment(request):
        return render(request, "servers/web/_rows.html", context)
    context |= {"health": presenters.health(), "facets": presenters.facets(wanted)}
    return render(request, "servers/web/list.html", context)


@require_POST
@admin_required
def bulk(request: HttpRequest) -> HttpResponse:
    picked = Server.objects.filter(slug__in=request.POST.getlist("server")[:1000])
    chosen = list(picked)
    if not chosen:
        raise Invalid("No server is selected.", hint="Go back and select at least one.")
    many = f"{len(chosen):,} server{'' if len(chosen) == 1 else 's'}"
    if request.POST.get("act") == "disable":
        for one in chosen:
            server_actions.set_enabled(one, False, actor=actor_of(request))
        messages.success(request, f"Disabled {many}. Agents get none of their tools.")
    else:
        enabled = [one for one in chosen if one.enabled]
        for one in enabled:
            scheduling.request_manual_sync(one, actor=actor_of(request))
        left = (
            f" {len(chosen) - len(enabled)} disabled left out."
            if len(enabled) < len(chosen)
            else ""
        )
        asked = f"{len(enabled):,} server{'' if len(enabled) == 1 else 's'}"
        messages.success(request, f"Asked {asked} for a sync.{left}")
    return back(request, reverse("servers"))


@require_safe
@operator_required
def export(request: HttpRequest) -> HttpResponse:
    """Give every server as mcp.json, with ${NAME} for every secret."""
    return HttpResponse(
        importer.export_text(),
        content_type="application/json",
        headers={"Content-Disposition": 'attachment; filename="mcp.json"'},
    )


# --- One server ---------------------------------------------------------------------------------


def page_context(request: HttpRequest, server: Server, tab: str) -> dict[str, Any]:
    counts = {"server-tools": server.tool_count}  # type: ignore[attr-defined]
    # A sync that ended before this page was drawn is polled for once, so that its end is told.
    asked = not is_htmx_fragment(request) and request.session.pop("sync_asked", "") == server.slug
    return {
        "server": server,
        "tab": tab,
        "busy": asked or presenters.is_busy(server),
        "run": presenters.newest_runs([server.pk]).get(server.pk),
        "voided": [one for one in server.credentials.all() if one.voided],
        "argv": validation.format_argv(server.argv) if server.transport == Transport.STDIO else "",
        "tabs": [
            {
                "label": label,
                "url": reverse(name, args=[server.slug]),
                "current": name == tab,
                "count": counts.get(name),
            }
            for name, label in TABS.items()
        ],
    }


@require_safe
@operator_required
def server(request: HttpRequest, slug: str) -> HttpResponse:
    return render(request, "servers/web/overview.html", _overview(request, find_server(slug)))


def _overview(request: HttpRequest, found: Server) -> dict[str, Any]:
    return page_context(request, found, "server") | {
        "claims": presenters.claims(found),
        "credentials": list(found.credentials.all()),
        "trust": forms.TRUST_WORDS[found.trust],
        "policy": forms.POLICY_WORDS[found.connection_policy],
        "numbers": presenters.numbers(found),
        "gauge": metrics.server_metrics(found),
    }


@require_safe
@operator_required
def tools(request: HttpRequest, slug: str) -> HttpResponse:
    found = find_server(slug)
    context = page_context(request, found, "server-tools") | presenters.tools_of(found)
    return render(request, "servers/web/tools.html", context)


@require_safe
@operator_required
def syncs(request: HttpRequest, slug: str) -> HttpResponse:
    found = find_server(slug)
    context = page_context(request, found, "server-syncs")
    return render(
        request,
        "servers/web/syncs.html",
        context | presenters.history(found, request.GET.get("after", "")),
    )


@require_safe
@operator_required
def status(request: HttpRequest, slug: str) -> HttpResponse:
    """Answer the poll of a page whose sync runs; tell the end of it once."""
    found = find_server(slug)
    asked = request.GET.get("tab", "")
    context = page_context(request, found, asked if asked in TABS else "server")
    ended = is_htmx_fragment(request) and not context["busy"]
    response = render(request, "servers/web/_status.html", context | {"ended": ended})
    if ended:
        said = {"announce": presenters.describe_outcome(found, context["run"])}
        response["HX-Trigger"] = json.dumps(said)
    return response


@require_POST
@admin_required
def sync(request: HttpRequest, slug: str) -> HttpResponse:
    found = find_server(slug)
    if not found.enabled:
        raise Invalid("This server is disabled.", hint="Enable it first.")
    scheduling.request_manual_sync(found, actor=actor_of(request))
    request.session["sync_asked"] = slug
    return back(request, reverse("server", args=[slug]))


@require_POST
@admin_required
def test(request: HttpRequest, slug: str) -> HttpResponse:
    """Try the connection and stay on the page."""
    found = find_server(slug)
    tested = connection_test.test_server(found, actor=actor_of(request))
    if is_htmx_fragment(request):
        return render(request, "servers/web/_tested.html", {"tested": tested})
    return render(
        request,
        "servers/web/overview.html",
        _overview(request, find_server(slug)) | {"tested": tested},
    )


@require_POST
@admin_required
def enable(request: HttpRequest, slug: str) -> HttpResponse:
    found = server_actions.set_enabled(find_server(slug), True, actor=actor_of(request))
    scheduling.request_sync(found.pk, Trigger.MANUAL)
    messages.success(request, f"{found.name} is enabled. A sync has been asked for.")
    return back(request, reverse("server", args=[slug]))


@require_POST
@admin_required
def disable(request: HttpRequest, slug: str) -> HttpResponse:
    found = server_actions.set_enabled(find_server(slug), False, actor=actor_of(request))
    messages.success(request, f"{found.name} is disabled. Agents get none of its tools.")
    return back(request, reverse("server", args=[slug]))


def redirect_to(name: str, found: Server, part: str = "") -> HttpResponse:
    return redirect(reverse(name, args=[found.slug]) + (f"#{part}" if part else ""))
