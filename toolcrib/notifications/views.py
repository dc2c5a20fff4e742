"""Page of notifications: receivers and alerts. Operators read it, admins change it."""

from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST

from sessions_app.models import Alert, WebhookKind
from toolcrib.lib.errors import NotFound
from toolcrib.lib.request import errors_in_form
from toolcrib.lib.roles import Role, actor_of, admin_required, operator_required, require, role_of
from toolcrib.notifications import DIGEST, EVENTS, RAISED, RESOLVED, actions
from toolcrib.notifications.queries import find_webhook, list_webhooks
from toolcrib.pages.settings_views import side

MAX_ALERTS = 20
ACTS = ("enable", "disable", "test", "delete")


class WebhookForm(forms.Form):
    name = forms.CharField(max_length=80)
    kind = forms.ChoiceField(
        choices=[
            (WebhookKind.JSON, "Signed JSON"),
            (WebhookKind.SLACK, "Slack"),
            (WebhookKind.EMAIL, "E-mail"),
        ]
    )
    address = forms.CharField(
        max_length=actions.MAX_ADDRESS_LENGTH,
        help_text="A URL, or e-mail addresses separated by commas. It is not shown again.",
    )
    events = forms.MultipleChoiceField(
        choices=[(name, name) for name in EVENTS],
        initial=[RAISED, RESOLVED, DIGEST],
        widget=forms.CheckboxSelectMultiple(attrs={"class": "mono"}),
        help_text="Events of sessions and calls carry no arguments and no results.",
    )


@require_http_methods(["GET", "HEAD", "POST"])
@operator_required
def notifications(request: HttpRequest) -> HttpResponse:
    """List receivers and alerts, and add a receiver."""
    form, secret = WebhookForm(request.POST or None), ""
    if request.method == "POST":
        require(Role.ADMIN, request.user)
        if form.is_valid():
            with errors_in_form(form, "address"):
                data = form.cleaned_data
                values = data["name"], data["kind"], data["address"], data["events"]
                _, secret = actions.create(*values, actor=actor_of(request))
                messages.success(request, f"Created webhook {data['name']}.")
                if not secret:
                    return redirect("notifications")
                form = WebhookForm()
    context: dict[str, Any] = {
        "side": side("notifications"),
        "webhooks": list_webhooks(),
        "alerts": Alert.objects.all()[:MAX_ALERTS],
        "form": form if role_of(request.user) == Role.ADMIN else None,
        "secret": secret,
    }
    status = 422 if form.errors else 200
    template = "toolcrib/notifications/notifications.html"
    return render(request, template, context, status=status)


@require_POST
@admin_required
def change_webhook(request: HttpRequest, webhook_id: int, act: str) -> HttpResponse:
    webhook, actor = find_webhook(webhook_id), actor_of(request)
    match act:
        case "enable" | "disable":
            actions.edit(webhook, actor=actor, enabled=act == "enable")
        case "test":
            actions.send_test(webhook, actor=actor)
        case "delete":
            actions.delete(webhook, actor=actor)
        case _:
            raise NotFound("Unknown action.", hint=f"Actions are: {', '.join(ACTS)}.")
    done = {"enable": "Enabled", "disable": "Disabled", "test": "Test queued for"}
    messages.success(request, f"{done.get(act, 'Deleted')} {webhook.name}.")
    return redirect("notifications")
