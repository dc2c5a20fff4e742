"""Search hints on pages: of one tool, and of all tools with export, import and acceptance."""

from typing import Any

from django.conf import settings
from django.contrib import messages
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from catalog.hints import actions, exchange
from catalog.models import HintSource, Tool, ToolHint
from catalog.tools.queries import find_tool
from sessions_app.playground.views import search_tabs
from toolcrib.lib.errors import Invalid, ToolcribError
from toolcrib.lib.request import errors_as_messages, text
from toolcrib.lib.roles import actor_of, admin_required, operator_required, viewer_required
from toolcrib.lib.text import plural

HINT_UNDO_KEY = "hint_undo"  # session key of the removed hint that can be restored
MAX_PENDING = 100
SOURCES = {
    HintSource.ADMIN: "Written by people",
    HintSource.USE: "Queries of agents that led to successful calls",
    HintSource.MODEL: "Written by a language model",
    HintSource.BUNDLED: "From the phrasebook of Toolcrib",
}


# --- Of one tool ----------------------------------------------------------------------------------


def _redirect_to_hints(request: HttpRequest, tool: Tool) -> HttpResponse:
    if request.POST.get("from") == "hints":
        return redirect("hints")
    return redirect(reverse("tool", args=[tool.public_name], fragment="hints"))


@require_POST
@admin_required
def add(request: HttpRequest, public_name: str) -> HttpResponse:
    tool, data = find_tool(public_name), request.POST
    with errors_as_messages(request):
        kind, line = data.get("kind", ""), data.get("text", "")
        hint = actions.add(tool, kind, line, actor=actor_of(request))
        message = f"Added “{hint.text}”. Search now finds {tool.public_name} by it."
        messages.success(request, message)
    return _redirect_to_hints(request, tool)


@require_POST
@admin_required
def edit(request: HttpRequest, public_name: str, hint_id: int) -> HttpResponse:
    tool = find_tool(public_name)
    with errors_as_messages(request):
        hint = actions.find(tool, hint_id)
        new = actions.edit(hint, request.POST.get("text", ""), actor=actor_of(request))
        messages.success(request, f"Changed to “{new.text}”.")
    return _redirect_to_hints(request, tool)


@require_POST
@admin_required
def remove(request: HttpRequest, public_name: str, hint_id: int) -> HttpResponse:
    tool = find_tool(public_name)
    with errors_as_messages(request):
        hint = actions.find(tool, hint_id)
        actions.remove(hint, actor=actor_of(request))
        if hint.agent_id is None:
            offer = {"tool": tool.public_name, "kind": hint.kind, "text": hint.text}
            request.session[HINT_UNDO_KEY] = offer
    return _redirect_to_hints(request, tool)


@require_POST
@operator_required
def accept(request: HttpRequest, public_name: str, hint_id: int) -> HttpResponse:
    tool = find_tool(public_name)
    with errors_as_messages(request):
        hint = actions.accept(actions.find(tool, hint_id), actor=actor_of(request))
        messages.success(request, f"“{hint.text}” now counts in the searches of all agents.")
    return _redirect_to_hints(request, tool)


# --- Of all tools ---------------------------------------------------------------------------------


@require_safe
@viewer_required
def hints(request: HttpRequest) -> HttpResponse:
    """Show the hints by source, and those that await acceptance."""
    return _hints_page(request)


def _hints_page(
    request: HttpRequest, error: ToolcribError | None = None, pasted: str = ""
) -> HttpResponse:
    by_source = {
        row["source"]: row
        for row in ToolHint.objects.active()
        .values("source")
        .annotate(hints=Count("pk"), tools=Count("tool", distinct=True))
        .order_by()
    }
    pending = ToolHint.objects.pending().select_related("tool", "agent").order_by("-pk")
    context: dict[str, Any] = {
        "tabs": search_tabs("hints"),
        "sources": [
            {"name": name, "label": label, **by_source.get(name, {"hints": 0, "tools": 0})}
            for name, label in SOURCES.items()
        ],
        "pending": pending[:MAX_PENDING],
        "pending_total": pending.count(),
        "without": len(exchange.tools_to_describe()),
        "writer": settings.HINTS_MODEL if settings.HINTS_URL else "",
        "mcp_url": f"{settings.PUBLIC_URL}/mcp/admin",
        "hint_offer": request.session.pop(HINT_UNDO_KEY, None),
        "error": error,
        "pasted": pasted,
    }
    status = error.status if error else 200
    return render(request, "catalog/hints/hints.html", context, status=status)


@require_POST
@admin_required
def import_lines(request: HttpRequest) -> HttpResponse:
    """Import the hints that a model wrote, pasted as JSON lines."""
    lines = request.POST.get("lines", "")
    try:
        rows = exchange.parse_lines(lines)
        if not rows:
            raise Invalid("There is nothing to import.", hint=exchange.ROW_HINT)
        result = exchange.import_hints(rows, actor=actor_of(request))
    except ToolcribError as error:
        return _hints_page(request, error, lines)
    message = f"Changed the hints of {plural(result.changed, 'tool')}."
    if result.rejected:
        message += f" Rejected {plural(result.rejected, 'hint')}: empty, longer than 80 characters"
        message += " or more than 8 for a tool."
    if result.unknown:
        message += f" Unknown tools: {', '.join(result.unknown[:5])}."
    messages.success(request, message)
    return redirect("hints")


@require_safe
@operator_required
def export(request: HttpRequest) -> HttpResponse:
    """Download the tools without such hints as JSON lines, after a line with the prompt."""
    tools = exchange.tools_to_describe(
        server=text(request.GET, "server"), everything=request.GET.get("all") == "1"
    )
    lines = "".join(f"{line}\n" for line in exchange.export_lines(tools))
    headers = {"Content-Disposition": 'attachment; filename="toolcrib-hints.jsonl"'}
    return HttpResponse(lines, content_type="application/x-ndjson", headers=headers)
