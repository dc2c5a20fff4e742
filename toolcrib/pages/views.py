"""The overview: is everything all right, and what needs me?"""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from servers.models import Server
from servers.web import import_wizard
from servers.web.forms import DemoForm
from sessions_app.agents import onboarding_views
from toolcrib.lib.roles import Role, operator_required, role_of
from toolcrib.pages import attention
from toolcrib.pages import overview as reads


@require_safe
@operator_required
def overview(request: HttpRequest) -> HttpResponse:
    """Show every block that can be read; before the first server, the setup card alone."""
    if not Server.objects.exists():
        return render(request, "toolcrib/overview.html", {"first_run": True, "demo": _demo()})
    blocks = {
        "attention": reads.block(attention.items),
        "numbers": reads.block(reads.numbers),
        "servers": reads.block(reads.servers),
        "sessions": reads.block(reads.recent_sessions),
    }
    return render(request, "toolcrib/overview.html", {**blocks, **_checklist(request)})


def _demo() -> import_wizard.CheckedRow:
    """The demo server as the check step would show it: its program, and the consent to it."""
    return import_wizard.check(import_wizard.Memory(DemoForm().text())).rows[0]


def _checklist(request: HttpRequest) -> dict[str, Any]:
    """First steps for admins, until all are done or they are dismissed."""
    if role_of(request.user) < Role.ADMIN or onboarding_views.DISMISSED in request.COOKIES:
        return {}
    looked = onboarding_views.LOOKED in request.COOKIES
    found = reads.block(lambda: reads.first_steps(looked))
    if found.failed or all(step.done for step in found.value):
        return {}
    return {"steps": found.value, "steps_done": sum(step.done for step in found.value)}
