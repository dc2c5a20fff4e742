"""What the page of a tool does with its hints: add one, remove one, offer to undo that."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_POST

from catalog.models import Tool
from catalog.tools import hints
from toolcrib.lib.errors import NotFound, ToolcribError
from toolcrib.lib.roles import actor_of, admin_required

OFFERED = "hint_undo"  # the hint this session may put back


def _find(public_name: str) -> Tool:
    tool = Tool.objects.filter(public_name=public_name.replace("\0", "")).first()
    if tool is None:
        raise NotFound("There is no tool of this name.", hint="It may have been deleted.")
    return tool


def _back(tool: Tool) -> HttpResponse:
    return redirect(reverse("tool", args=[tool.public_name]) + "#hints")


@require_POST
@admin_required
def add(request: HttpRequest, public_name: str) -> HttpResponse:
    tool, sent = _find(public_name), request.POST
    try:
        hint = hints.add(tool, sent.get("kind", ""), sent.get("text", ""), actor=actor_of(request))
    except ToolcribError as error:
        messages.error(request, error.sentence)
    else:
        messages.success(request, f"Search finds {tool.public_name} by “{hint.text}” too.")
    return _back(tool)


@require_POST
@admin_required
def remove(request: HttpRequest, public_name: str, hint_id: int) -> HttpResponse:
    tool = _find(public_name)
    try:
        hint = hints.find(tool, hint_id)
        hints.remove(hint, actor=actor_of(request))
    except ToolcribError as error:
        messages.error(request, error.sentence)
    else:
        request.session[OFFERED] = {
            "tool": tool.public_name,
            "kind": hint.kind,
            "text": hint.text,
        }
    return _back(tool)
