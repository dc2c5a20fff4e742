"""Views of the settings tab of a server: settings, connection, credentials, deletion.

Operators see the values; only admins get forms. Submitted connections and credentials are never
sent back to the browser.
"""

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from servers.models import CredentialKind, Server, Trigger
from servers.registration import actions as server_actions
from servers.registration import confirmation, validation
from servers.registration.actions import CommandNotConfirmed
from servers.registration.confirmation import Program
from servers.secret import Secret
from servers.sync.scheduling import request_sync
from servers.web import forms, import_wizard, presenters, remedies
from servers.web.views import find_server, page_context, redirect_to
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.request import errors_in_form, settings_rows, text
from toolcrib.lib.roles import (
    Role,
    actor_of,
    admin_required,
    role_of,
    role_required,
)


def render_settings(request: HttpRequest, server: Server, **overrides: Any) -> HttpResponse:
    """Render the tab. `overrides` contains an invalid form, which makes the status 422."""
    context = page_context(request, server, "server-settings") | {
        "credentials": list(server.credentials.all()),
        "settings_rows": settings_rows(server, forms.SettingsForm.from_server(server)),
    }
    if role_of(request.user) >= Role.ADMIN:
        pending = import_wizard.load_edit(request.session, server)
        context |= {
            "settings_form": forms.SettingsForm.from_server(server),
            "connection_form": forms.connection_form(server),
            "credential_form": forms.CredentialForm(
                server=server, initial=_suggested_credential(request, server)
            ),
            "pending_command": _pending_command(server, pending) if pending else None,
            "pending_credential": _pending_credential(request, server),
        }
    status = 422 if overrides else 200
    return render(request, "servers/web/settings.html", context | overrides, status=status)


def _suggested_credential(request: HttpRequest, server: Server) -> dict[str, str]:
    """Return the initial form for a variable that the program lacks, from `?credential=`."""
    name = text(request.GET, "credential")
    if not name or name != remedies.missing_variable(server):
        return {}
    return {"kind": CredentialKind.ENV, "name": name}


def _pending_command(server: Server, text: Secret) -> dict[str, Any] | None:
    try:
        draft = import_wizard.parse_edit(server, text)
    except ToolcribError:
        return None
    return _describe(confirmation.draft_program(draft, server))


def _pending_credential(request: HttpRequest, server: Server) -> dict[str, Any] | None:
    pending = import_wizard.load_credential(request.session, server)
    if pending is None:
        return None
    kind, name, value = pending
    program = confirmation.stored_program(server, kind, {name: value})
    kind_label = forms.KIND_NAMES[kind]
    return _describe(program) | {"name": name, "kind": kind_label, "removed": value is None}


def _describe(program: Program) -> dict[str, Any]:
    """Return what a page shows of a program before it is confirmed: names, never values."""
    return {
        "argv": validation.format_argv(program.argv),
        "cwd": program.cwd,
        "env": sorted(program.env),
        "digest": program.digest,
    }


@require_http_methods(["GET", "HEAD", "POST"])
@role_required(Role.OPERATOR, write=Role.ADMIN)
def settings(request: HttpRequest, slug: str) -> HttpResponse:
    server = find_server(slug)
    if request.method != "POST":
        return render_settings(request, server)
    form = forms.SettingsForm(request.POST)
    if form.is_valid():
        with errors_in_form(form):
            server_actions.change_settings(server, form.cleaned_data, actor=actor_of(request))
            messages.success(request, f"Saved settings of {server.name}.")
            return redirect_to("server-settings", server)
    return render_settings(request, server, settings_form=form)


@sensitive_post_parameters()
@require_POST
@admin_required
def connection(request: HttpRequest, slug: str) -> HttpResponse:
    """Save the connection. A new command stays in the session until it is confirmed."""
    server = find_server(slug)
    if "cancel" in request.POST:
        request.session.pop(import_wizard.EDIT_KEY, None)
        return redirect_to("server-settings", server, "connection")
    pending = (
        import_wizard.load_edit(request.session, server) if "confirm" in request.POST else None
    )
    form = forms.connection_form(server, request.POST if pending is None else None)
    if pending is None and not form.is_valid():
        errors = " ".join(presenters.form_errors(form))
        return render_settings(request, server, connection_problem=errors)
    text = pending or form.to_mcp_json(server)
    try:
        draft = import_wizard.parse_edit(server, text)
        confirmed = request.POST.get("confirm", "")
        server_actions.edit_connection(server, draft, actor=actor_of(request), confirmed=confirmed)
    except CommandNotConfirmed:
        import_wizard.save_edit(request.session, server, text)
        return redirect_to("server-settings", server, "connection")
    except ToolcribError as error:
        return render_settings(request, server, connection_problem=error.sentence)
    request.session.pop(import_wizard.EDIT_KEY, None)
    request_sync(server.pk, Trigger.MANUAL)
    messages.success(request, f"Saved connection of {server.name}. Sync queued.")
    return redirect_to("server-settings", server, "connection")


@sensitive_post_parameters()
@require_POST
@admin_required
def credentials(request: HttpRequest, slug: str) -> HttpResponse:
    """Save a credential. One that changes a program stays in the session until confirmed."""
    server = find_server(slug)
    confirmed = str(request.POST.get("confirm", ""))
    pending = import_wizard.load_credential(request.session, server)
    if "cancel" in request.POST or (confirmed and pending is None):
        request.session.pop(import_wizard.CREDENTIAL_KEY, None)
        return redirect_to("server-settings", server, "credentials")
    form = forms.CredentialForm(request.POST, server=server)
    if confirmed and pending is not None:
        kind, name, value = pending
    else:
        removing = "remove_credential" in request.POST
        if not form.is_valid() and not removing:
            return render_settings(request, server, credential_form=form)
        kind, name = str(request.POST.get("kind", "")), str(request.POST.get("name", ""))
        value = None if removing else Secret(form.cleaned_data["value"])
    with errors_in_form(form):
        try:
            server_actions.set_credentials(
                server, kind, {name: value}, actor=actor_of(request), confirmed=confirmed
            )
        except CommandNotConfirmed:
            import_wizard.save_credential(request.session, server, kind, name, value)
            return redirect_to("server-settings", server, "credentials")
        request.session.pop(import_wizard.CREDENTIAL_KEY, None)
        request_sync(server.pk, Trigger.MANUAL)
        action = "Saved" if value else "Removed"
        messages.success(request, f"{action} credential {name}. Sync queued.")
        return redirect_to("server-settings", server, "credentials")
    return render_settings(request, server, credential_form=form)


@require_POST
@admin_required
def delete(request: HttpRequest, slug: str) -> HttpResponse:
    server = find_server(slug)
    if request.POST.get("typed_name") != server.slug:
        error = "The name does not match. Nothing was deleted."
        return render_settings(request, server, delete_error=error)
    server_actions.delete_server(server, actor=actor_of(request))
    messages.success(request, f"Deleted {server.name} with its tools and credentials.")
    return redirect("servers")
