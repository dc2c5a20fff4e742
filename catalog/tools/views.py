"""Tool pages: list, detail, custom tools and search hints."""

import json
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from catalog.approvals.views import ACTS
from catalog.groups.undo import UNDO_OFFER_KEY
from catalog.models import Group, Tool
from catalog.tools import actions as tool_actions
from catalog.tools import detail, hints
from catalog.tools import filters as tool_filters
from catalog.tools import queries as tool_queries
from catalog.tools.forms import (
    BulkHoldForm,
    CustomToolForm,
    DeleteForm,
    HoldForm,
    OverrideForm,
    PolicyForm,
)
from catalog.tools.queries import ToolFilter, find_tool
from sessions_app.usage import call_stats
from sessions_app.usage.call_stats import ToolCalls
from toolcrib.lib.errors import Conflict, NotFound
from toolcrib.lib.pagination import offset_of
from toolcrib.lib.request import (
    errors_as_messages,
    errors_in_form,
    is_htmx_fragment,
    list_fragment,
    redirect_back,
)
from toolcrib.lib.roles import actor_of, admin_required, operator_required
from toolcrib.lib.text import plural

EXAMPLE = """{
  "name": "open_ticket",
  "description": "Open a ticket in the internal help desk.",
  "inputSchema": {
    "type": "object",
    "required": ["title"],
    "properties": {
      "title": {"type": "string", "description": "One line."}
    }
  }
}"""


def _find_custom(public_name: str) -> Tool:
    tool = find_tool(public_name)
    if tool.server_id is not None:
        raise NotFound("This tool belongs to a server.", hint="Only custom tools can be edited.")
    return tool


@require_safe
@operator_required
def tools(request: HttpRequest) -> HttpResponse:
    filters = ToolFilter.read(request.GET)
    page = tool_queries.list_tools(filters, offset=offset_of(request.GET))
    calls = call_stats.count_tool_calls([tool.pk for tool in page.rows])
    context: dict[str, Any] = {
        "page": page,
        "rows": [(tool, calls.get(tool.pk, ToolCalls())) for tool in page.rows],
        "maximum": max((tool.cost or 0 for tool in page.rows), default=0),  # type: ignore[attr-defined]
        "shown": page.describe("tool"),
        "filters": filters,
        "address": request.GET.urlencode(),
        "group_names": list(Group.objects.values_list("group_id", flat=True)[:300]),
    }
    if is_htmx_fragment(request):
        announcement = f"{page.total:,} tools"
        return list_fragment(request, "catalog/tools/_rows.html", context, announcement)
    counts = tool_queries.count_tools()
    context |= {
        "counts": counts,
        "facets": tool_filters.tool_facets(filters, counts),
        "offer": request.session.pop(UNDO_OFFER_KEY, None),
    }
    return render(request, "catalog/tools/list.html", context)


@require_POST
@operator_required
def bulk(request: HttpRequest) -> HttpResponse:
    form = BulkHoldForm(request.POST)
    if form.is_valid():
        selected = [tool for tool in form.cleaned_data["tool"] if not tool.held_at]
        for tool in selected:
            tool_actions.hold(tool, form.cleaned_data["reason"], actor=actor_of(request))
        messages.success(request, f"Hid {plural(len(selected), 'tool')}.")
    else:
        messages.error(request, " ".join(str(errors[0]) for errors in form.errors.values()))
    return redirect_back(request, "tools")


@require_safe
@operator_required
def tool(request: HttpRequest, public_name: str) -> HttpResponse:
    return _tool_page(request, find_tool(public_name))


def _tool_page(
    request: HttpRequest, tool: Tool, *, status: int = 200, **forms: Any
) -> HttpResponse:
    context = detail.describe(tool, change_id=request.GET.get("change", ""))
    context |= {
        "override_form": OverrideForm(initial={"description": tool.description_override}),
        "policy_form": PolicyForm(initial={"policy": tool.call_policy}),
        "hold_form": HoldForm(),
        "hint_offer": request.session.pop(HINT_UNDO_KEY, None),
    }
    return render(request, "catalog/tools/detail.html", context | forms, status=status)


def _redirect_with_message(request: HttpRequest, tool: Tool, message: str) -> HttpResponse:
    messages.success(request, message)
    return redirect("tool", tool.public_name)


@require_POST
@admin_required
def override(request: HttpRequest, public_name: str) -> HttpResponse:
    tool, form = find_tool(public_name), OverrideForm(request.POST)
    if form.is_valid():
        with errors_in_form(form, "description"):
            tool = tool_actions.override_description(
                tool, form.cleaned_data["description"], actor=actor_of(request)
            )
            which = "description override" if tool.description_override else "original description"
            return _redirect_with_message(request, tool, f"Agents now get the {which}.")
    return _tool_page(request, tool, status=422, override_form=form)


@require_POST
@admin_required
def policy(request: HttpRequest, public_name: str) -> HttpResponse:
    tool, form = find_tool(public_name), PolicyForm(request.POST)
    if not form.is_valid():
        return _tool_page(request, tool, status=422, policy_form=form)
    tool = tool_actions.set_call_policy(tool, form.cleaned_data["policy"], actor=actor_of(request))
    outcome = "allowed" if tool.call_policy == "allow" else "denied"
    return _redirect_with_message(request, tool, f"Calls to {tool.public_name} are {outcome}.")


@require_POST
@operator_required
def hold(request: HttpRequest, public_name: str) -> HttpResponse:
    tool, form = find_tool(public_name), HoldForm(request.POST)
    if not form.is_valid():
        return _tool_page(request, tool, status=422, hold_form=form)
    tool_actions.hold(tool, form.cleaned_data["reason"], actor=actor_of(request))
    message = f"{tool.public_name} is hidden. Agents cannot find or call it."
    return _redirect_with_message(request, tool, message)


@require_POST
@operator_required
def release(request: HttpRequest, public_name: str) -> HttpResponse:
    tool = tool_actions.release(find_tool(public_name), actor=actor_of(request))
    return _redirect_with_message(request, tool, f"{tool.public_name} is no longer hidden.")


@require_POST
@operator_required
def decide(request: HttpRequest, public_name: str, act: str) -> HttpResponse:
    tool = find_tool(public_name)
    decide_on, message = ACTS[act]
    try:
        decide_on(tool, actor=actor_of(request), sha256=request.POST.get("seen", ""))
    except Conflict as error:
        context = {"tool": tool, "error": error}
        return render(request, "catalog/approvals/decided.html", context, status=error.status)
    return _redirect_with_message(request, tool, message.format(tool.public_name))


@require_http_methods(["GET", "HEAD", "POST"])
@admin_required
def add(request: HttpRequest) -> HttpResponse:
    return _custom_tool_page(request, None, CustomToolForm(request.POST or None))


@require_http_methods(["GET", "HEAD", "POST"])
@admin_required
def edit(request: HttpRequest, public_name: str) -> HttpResponse:
    tool = _find_custom(public_name)
    text = json.dumps(tool.definition.tool if tool.definition else {}, indent=2, ensure_ascii=False)
    form = CustomToolForm(request.POST or None, initial={"definition": text})
    return _custom_tool_page(request, tool, form)


def _custom_tool_page(
    request: HttpRequest, tool: Tool | None, form: CustomToolForm
) -> HttpResponse:
    if form.is_bound and form.is_valid():
        raw = form.cleaned_data["definition"]
        with errors_in_form(form, "definition"):
            saved = tool_actions.save_custom_tool(raw, actor=actor_of(request), tool=tool)
            return _redirect_with_message(request, saved, f"Saved {saved.public_name}.")
    context = {"form": form, "tool": tool, "example": "" if tool else EXAMPLE}
    status = 422 if form.is_bound else 200
    return render(request, "catalog/tools/custom_tool.html", context, status=status)


@require_POST
@admin_required
def delete(request: HttpRequest, public_name: str) -> HttpResponse:
    tool = _find_custom(public_name)
    form = DeleteForm(request.POST, name=tool.public_name)
    if not form.is_valid():
        error = form.errors["typed_name"][0]
        return _tool_page(request, tool, status=422, delete_error=error)
    tool_actions.delete_custom_tool(tool, actor=actor_of(request))
    messages.success(request, f"Deleted {public_name}. Recorded sessions are kept.")
    return redirect("tools")


HINT_UNDO_KEY = "hint_undo"  # session key of the removed hint that can be restored


def _redirect_to_hints(tool: Tool) -> HttpResponse:
    return redirect(reverse("tool", args=[tool.public_name], fragment="hints"))


@require_POST
@admin_required
def add_hint(request: HttpRequest, public_name: str) -> HttpResponse:
    tool, data = find_tool(public_name), request.POST
    with errors_as_messages(request):
        hint = hints.add(tool, data.get("kind", ""), data.get("text", ""), actor=actor_of(request))
        text = f"Added “{hint.text}”. Search now finds {tool.public_name} by it."
        messages.success(request, text)
    return _redirect_to_hints(tool)


@require_POST
@admin_required
def remove_hint(request: HttpRequest, public_name: str, hint_id: int) -> HttpResponse:
    tool = find_tool(public_name)
    with errors_as_messages(request):
        hint = hints.find(tool, hint_id)
        hints.remove(hint, actor=actor_of(request))
        offer = {"tool": tool.public_name, "kind": hint.kind, "text": hint.text}
        request.session[HINT_UNDO_KEY] = offer
    return _redirect_to_hints(tool)
