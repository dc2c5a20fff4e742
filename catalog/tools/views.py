"""Tool pages: list, detail and custom tools."""

import json
from typing import Any

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from catalog.approvals.views import ACTS
from catalog.groups.custom_tools import create_custom_tool
from catalog.groups.undo import UNDO_OFFER_KEY
from catalog.hints.views import HINT_UNDO_KEY
from catalog.models import Group, Tool
from catalog.tools import actions as tool_actions
from catalog.tools import detail, overrides
from catalog.tools import filters as tool_filters
from catalog.tools import queries as tool_queries
from catalog.tools.actions import Access
from catalog.tools.forms import (
    AccessForm,
    BulkHoldForm,
    CustomToolFields,
    CustomToolForm,
    DeleteForm,
    ExamplesForm,
    HoldForm,
    OverrideForm,
    ParametersForm,
    PolicyForm,
    ReadOnlyForm,
    StorageForm,
)
from catalog.tools.queries import ToolFilter, find_tool
from sessions_app.models import UsageKind
from sessions_app.usage import call_stats, panels
from sessions_app.usage.call_stats import ToolCalls
from toolcrib.lib.display import group_digits
from toolcrib.lib.errors import Conflict, Invalid, NotFound
from toolcrib.lib.pagination import offset_of
from toolcrib.lib.request import (
    errors_in_form,
    is_htmx_fragment,
    list_fragment,
    redirect_back,
)
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

ACCESS_MESSAGES = {
    Access.AVAILABLE: "{} is available: agents can find and call it.",
    Access.BLOCKED: "{} is visible but blocked: its calls are refused.",
    Access.HIDDEN: "{} is hidden. Agents cannot find or call it.",
}


def _find_custom(public_name: str) -> Tool:
    tool = find_tool(public_name)
    if tool.server_id is not None:
        raise NotFound("This tool belongs to a server.", hint="Only custom tools can be edited.")
    return tool


@require_safe
@viewer_required
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
        announcement = f"{group_digits(page.total)} tools"
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
@viewer_required
def tool(request: HttpRequest, public_name: str) -> HttpResponse:
    return _tool_page(request, find_tool(public_name))


def _tool_page(
    request: HttpRequest, tool: Tool, *, status: int = 200, **forms: Any
) -> HttpResponse:
    context = detail.describe(tool, change_id=request.GET.get("change", ""))
    within, sessions = read_range(request.GET, "30d"), {"tool": tool.public_name}
    kind, name, former = UsageKind.TOOL, tool.public_name, context["former_names"]
    series, charts = panels.read_panels(within, kind, name, sessions=sessions, former=former)
    context |= {
        "series": series,
        "panels": charts,
        "figures": panels.list_metrics(series, UsageKind.TOOL, sessions=sessions),
        "recent_calls": call_stats.recent_calls(tool=tool),
        "top_errors": call_stats.top_errors(tool=tool),
        **range_context(within),
        "override_form": OverrideForm(initial={"description": tool.description_override}),
        "parameters_form": ParametersForm(tool=tool),
        "storage_form": StorageForm(initial={"storage": tool.payload_storage}),
        "read_only_form": ReadOnlyForm(initial={"read_only": tool.read_only}),
        "examples_form": ExamplesForm(initial={"examples": _examples_text(tool)}),
        "access_form": _access_form(request, tool),
        "hint_offer": request.session.pop(HINT_UNDO_KEY, None),
    }
    return render(request, "catalog/tools/detail.html", context | forms, status=status)


def _examples_text(tool: Tool) -> str:
    examples = tool.input_examples
    return json.dumps(examples, indent=2, ensure_ascii=False) if examples else ""


def _access_form(request: HttpRequest, tool: Tool, data: QueryDict | None = None) -> AccessForm:
    is_admin = role_of(request.user) == Role.ADMIN
    initial = {"access": tool_actions.access_of(tool), "reason": tool.held_reason}
    return AccessForm(data, initial=initial, tool=tool, may_change_policy=is_admin)


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
def parameters(request: HttpRequest, public_name: str) -> HttpResponse:
    """Set the alias of a tool and the overrides of its parameters."""
    tool = find_tool(public_name)
    form = ParametersForm(request.POST, tool=tool)
    if form.is_valid():
        with errors_in_form(form, None), transaction.atomic():
            actor, values = actor_of(request), form.cleaned_data
            overrides.override_parameters(tool, values["parameters"], actor=actor)
            tool = overrides.set_alias(tool, values["alias"], actor=actor)
            message = f"Saved the name and parameters of {tool.public_name}."
            return _redirect_with_message(request, tool, message)
    return _tool_page(request, tool, status=422, parameters_form=form)


@require_POST
@operator_required
def access(request: HttpRequest, public_name: str) -> HttpResponse:
    """Set whether agents find and call a tool. Operators hide it; only admins block calls."""
    tool = find_tool(public_name)
    form = _access_form(request, tool, request.POST)
    if not form.is_valid():
        return _tool_page(request, tool, status=422, access_form=form)
    chosen, reason = Access(form.cleaned_data["access"]), form.cleaned_data["reason"]
    tool_actions.set_access(tool, chosen, reason, actor=actor_of(request))
    message = ACCESS_MESSAGES[chosen].format(tool.public_name)
    return _redirect_with_message(request, tool, message)


@require_POST
@admin_required
def policy(request: HttpRequest, public_name: str) -> HttpResponse:
    tool, form = find_tool(public_name), PolicyForm(request.POST)
    if not form.is_valid():
        raise Invalid("The call policy must be allow or deny.")
    tool = tool_actions.set_call_policy(tool, form.cleaned_data["policy"], actor=actor_of(request))
    outcome = "allowed" if tool.call_policy == "allow" else "denied"
    return _redirect_with_message(request, tool, f"Calls to {tool.public_name} are {outcome}.")


@require_POST
@admin_required
def storage(request: HttpRequest, public_name: str) -> HttpResponse:
    tool, form = find_tool(public_name), StorageForm(request.POST)
    if not form.is_valid():
        return _tool_page(request, tool, status=422, storage_form=form)
    storage = form.cleaned_data["storage"]
    tool = tool_actions.set_payload_storage(tool, storage, actor=actor_of(request))
    label = tool.get_payload_storage_display().lower()
    return _redirect_with_message(request, tool, f"Future calls to {tool.public_name}: {label}.")


@require_POST
@admin_required
def read_only(request: HttpRequest, public_name: str) -> HttpResponse:
    tool, form = find_tool(public_name), ReadOnlyForm(request.POST)
    if not form.is_valid():
        return _tool_page(request, tool, status=422, read_only_form=form)
    value = form.cleaned_data["read_only"]
    tool = tool_actions.set_read_only(tool, value, actor=actor_of(request))
    label = tool.get_read_only_display().lower()
    return _redirect_with_message(request, tool, f"Calls to {tool.public_name}: {label}.")


@require_POST
@admin_required
def examples(request: HttpRequest, public_name: str) -> HttpResponse:
    tool, form = find_tool(public_name), ExamplesForm(request.POST)
    if form.is_valid():
        with errors_in_form(form, "examples"):
            given = form.cleaned_data["examples"]
            tool = tool_actions.set_input_examples(tool, given, actor=actor_of(request))
            number = plural(len(tool.input_examples), "example")
            return _redirect_with_message(request, tool, f"Saved {number} of arguments.")
    return _tool_page(request, tool, status=422, examples_form=form)


@require_POST
@operator_required
def hold(request: HttpRequest, public_name: str) -> HttpResponse:
    tool, form = find_tool(public_name), HoldForm(request.POST)
    if not form.is_valid():
        raise Invalid("The reason is longer than 500 characters.")
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
    return _custom_tool_page(request, None)


@require_http_methods(["GET", "HEAD", "POST"])
@admin_required
def edit(request: HttpRequest, public_name: str) -> HttpResponse:
    return _custom_tool_page(request, _find_custom(public_name))


def _custom_tool_form(
    request: HttpRequest, definition: dict[str, Any], *, as_json: bool
) -> CustomToolForm | CustomToolFields:
    data = request.POST or None
    if not as_json:
        return CustomToolFields(data, tool=definition, more="more" in request.POST)
    text = json.dumps(definition, indent=2, ensure_ascii=False) if definition else ""
    return CustomToolForm(data, initial={"definition": text})


def _custom_tool_page(request: HttpRequest, tool: Tool | None) -> HttpResponse:
    """Render the tool as fields, or as JSON on request and where fields cannot show all of it."""
    definition = dict(tool.definition.tool) if tool and tool.definition else {}
    has_fields = CustomToolFields.represents(definition)
    as_json = not has_fields or "definition" in request.POST or request.GET.get("as") == "json"
    form = _custom_tool_form(request, definition, as_json=as_json)
    if form.is_bound and "more" not in request.POST and form.is_valid():
        raw = form.cleaned_data["definition"]
        with errors_in_form(form, "definition" if as_json else None):
            actor = actor_of(request)
            saved = (
                tool_actions.save_custom_tool(raw, actor=actor, tool=tool)
                if tool
                else create_custom_tool(raw, actor=actor)
            )
            return _redirect_with_message(request, saved, f"Saved {saved.public_name}.")
    context = {
        "form": form,
        "tool": tool,
        "as_json": as_json,
        "has_fields": has_fields,
        "example": "" if tool or not as_json else EXAMPLE,
    }
    status = 422 if form.is_bound and "more" not in request.POST else 200
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
