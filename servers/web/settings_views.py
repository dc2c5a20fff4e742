"""The settings tab of one server: what it is called, how it is reached, with what, and its end.

Everyone who may look sees the values; only admins get forms. What is typed as a connection or a
credential is never sent back.
"""

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from servers.mcp_json import importer
from servers.models import Server, Trigger
from servers.registration import actions as server_actions
from servers.registration import validation
from servers.secret import Secret
from servers.sync.scheduling import request_sync
from servers.web import forms, import_wizard, presenters
from servers.web.views import find_server, page_context, redirect_to
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.roles import Role, actor_of, admin_required, operator_required, require, role_of


def settings_page(request: HttpRequest, server: Server, **changed: Any) -> HttpResponse:
    """Draw the tab; `changed` holds a refused form, which makes the answer a 422."""
    context = page_context(request, server, "server-settings") | {
        "credentials": list(server.credentials.all()),
        "kinds": forms.KIND_WORDS,
        "settings_rows": presenters.settings_rows(server, forms.SettingsForm.of(server)),
    }
    if role_of(request.user) >= Role.ADMIN:
        waiting = import_wizard.recall_edit(request.session, server)
        context |= {
            "settings_form": forms.SettingsForm.of(server),
            "connection_form": forms.connection_form(server),
            "credential_form": forms.CredentialForm(server=server),
            "waiting": _waiting(server, waiting) if waiting else None,
        }
    return render(
        request, "servers/web/settings.html", context | changed, status=422 if changed else 200
    )


def _waiting(server: Server, text: Secret) -> dict[str, str] | None:
    """Show the program that waits for a confirmation."""
    try:
        draft = import_wizard.edited_draft(server, text)
    except ToolcribError:
        return None
    argv = validation.format_argv(draft.argv)
    return {"argv": argv, "cwd": draft.cwd, "digest": importer.draft_digest(draft)}


@require_http_methods(["GET", "HEAD", "POST"])
@operator_required
def settings(request: HttpRequest, slug: str) -> HttpResponse:
    server = find_server(slug)
    if request.method != "POST":
        return settings_page(request, server)
    require(Role.ADMIN, request.user)
    form = forms.SettingsForm(request.POST)
    if not form.is_valid():
        return settings_page(request, server, settings_form=form)
    try:
        server_actions.change_settings(server, form.cleaned_data, actor=actor_of(request))
    except ToolcribError as error:
        return settings_page(request, server, settings_form=refused(form, error))
    messages.success(request, f"The settings of {server.name} are saved.")
    return redirect_to("server-settings", server)


@sensitive_post_parameters()
@require_POST
@admin_required
def connection(request: HttpRequest, slug: str) -> HttpResponse:
    """Save how a server is reached. A new program waits in the session for its confirmation."""
    server = find_server(slug)
    if "cancel" in request.POST:
        import_wizard.forget_edit(request.session)
        return redirect_to("server-settings", server, "connection")
    waiting = (
        import_wizard.recall_edit(request.session, server) if "confirm" in request.POST else None
    )
    form = forms.connection_form(server, request.POST if waiting is None else None)
    if waiting is None and not form.is_valid():
        return settings_page(
            request, server, connection_problem=" ".join(presenters.form_errors(form))
        )
    text = waiting or form.text(server)
    try:
        draft = import_wizard.edited_draft(server, text)
        confirmed = request.POST.get("confirm", "")
        if import_wizard.needs_confirmation(server, draft) and confirmed != importer.draft_digest(
            draft
        ):
            import_wizard.remember_edit(request.session, server, text)
            return redirect_to("server-settings", server, "connection")
        server_actions.edit_connection(server, draft, actor=actor_of(request), confirmed=confirmed)
    except ToolcribError as error:
        return settings_page(request, server, connection_problem=error.sentence)
    import_wizard.forget_edit(request.session)
    request_sync(server.pk, Trigger.MANUAL)
    messages.success(request, f"The connection of {server.name} is saved. A sync was asked for.")
    return redirect_to("server-settings", server, "connection")


@sensitive_post_parameters()
@require_POST
@admin_required
def credentials(request: HttpRequest, slug: str) -> HttpResponse:
    """Set or remove one credential."""
    server = find_server(slug)
    removing = "remove_credential" in request.POST
    form = forms.CredentialForm(request.POST, server=server)
    if not form.is_valid() and not removing:
        return settings_page(request, server, credential_form=form)
    name = str(request.POST.get("name", ""))
    value = None if removing else Secret(form.cleaned_data["value"])
    try:
        kind = str(request.POST.get("kind", ""))
        server_actions.set_credentials(server, kind, {name: value}, actor=actor_of(request))
    except ToolcribError as error:
        return settings_page(request, server, credential_form=refused(form, error))
    request_sync(server.pk, Trigger.MANUAL)
    done = "removed" if removing else "set"
    messages.success(request, f"{name} is {done}. A sync was asked for.")
    return redirect_to("server-settings", server, "credentials")


@require_POST
@admin_required
def delete(request: HttpRequest, slug: str) -> HttpResponse:
    server = find_server(slug)
    if request.POST.get("typed_name") != server.slug:
        error = "This is not its name, so nothing was deleted."
        return settings_page(request, server, delete_error=error)
    server_actions.delete_server(server, actor=actor_of(request))
    messages.success(request, f"{server.name} is deleted, with its tools and credentials.")
    return redirect("servers")


def refused(form: Any, error: ToolcribError) -> Any:
    form.is_valid()  # add_error needs a cleaned form
    form.add_error(None, error.sentence)
    return form
