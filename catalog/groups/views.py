"""Pages of groups: list, comparison, board and settings; `board_views` has the board's actions."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from django.contrib import messages
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from catalog import cache
from catalog.groups import actions, preview
from catalog.groups import board as group_board
from catalog.groups import health as group_health
from catalog.groups import state as group_state
from catalog.groups.actions import find_group
from catalog.groups.board import TABS, BoardQuery
from catalog.groups.forms import NewGroupForm, SettingsForm
from catalog.groups.lints import Lint
from catalog.groups.undo import UNDO_OFFER_KEY, offer_undo
from catalog.models import Group, Tool
from catalog.tools import detail
from catalog.tools.forms import DeleteForm
from toolcrib.lib import token_counter
from toolcrib.lib.errors import Conflict
from toolcrib.lib.figures import GROUP_BUDGET
from toolcrib.lib.pagination import Page, offset_of, page_by_offset
from toolcrib.lib.request import (
    announce,
    errors_as_messages,
    errors_in_form,
    list_fragment,
    number,
    page_tabs,
    text,
)
from toolcrib.lib.roles import actor_of, admin_required, viewer_required

GROUPS_PER_PAGE = 200
MAX_LISTED_TOOLS = 50  # tools that a notice lists
MAX_COMPLETIONS = 300  # group names that an input field completes
PAGE_TABS = {"group": "Board", "group-edit": "Settings"}
LINT_TITLES = {
    "description_missing": "No description",
    "description_short": "Description too short",
    "description_verb": "Description does not start with a verb",
    "synonyms": "Description only repeats the name",
}


@require_safe
@viewer_required
def groups(request: HttpRequest) -> HttpResponse:
    return _list_page(request, NewGroupForm(auto_id="new_%s"))


def _list_page(request: HttpRequest, form: NewGroupForm, status: int = 200) -> HttpResponse:
    rows, query = Group.objects.select_related("follows"), text(request.GET, "q")
    if query:
        rows = rows.filter(Q(group_id__icontains=query) | Q(display_name__icontains=query))
    rows = rows.order_by("position", "group_id")
    page: Page[Group] = page_by_offset(
        rows, offset_of(request.GET, GROUPS_PER_PAGE), GROUPS_PER_PAGE
    )
    drifts, lints = group_health.drifts(page.rows), group_health.group_lints(page.rows)
    catalog = cache.current()  # once: each call queries the revision
    costs = {group.pk: group_board.group_cost(catalog.group(group)) for group in page.rows}
    usage, last = group_board.count_group_usage(page.rows), page.total - 1
    context = {
        "page": page,
        "shown": page.describe("group"),
        "rows": [
            (
                *(group, costs[group.pk], usage[group.pk], drifts[group.pk], lints[group.pk]),
                *(at == 0, at == last),
            )
            for at, group in enumerate(page.rows, page.first)
        ],
        "scale": max((cost.stub + cost.definitions for cost in costs.values()), default=0),
        "budget": GROUP_BUDGET,
        "query": query,
        "form": form,
        "offer": request.session.pop(UNDO_OFFER_KEY, None),
    }
    return render(request, "catalog/groups/list.html", context, status=status)


@require_safe
@viewer_required
def compare(request: HttpRequest) -> HttpResponse:
    selected = list(dict.fromkeys(name for name in request.GET.getlist("group") if name))
    if len(selected) != 2:
        messages.error(request, "Select two groups to compare.")
        return redirect("groups")
    catalog, groups = cache.current(), [find_group(name) for name in selected]
    sides = [(group, group_board.group_cost(catalog.group(group))) for group in groups]
    context = {
        "sides": sides,
        "parts": group_board.compare_groups(*groups),
        "scale": max(cost.stub + cost.definitions for _, cost in sides),
    }
    return render(request, "catalog/groups/compare.html", context)


@require_POST
@admin_required
def create(request: HttpRequest) -> HttpResponse:
    form = NewGroupForm(request.POST, auto_id="new_%s")
    if form.is_valid():
        with errors_in_form(form):
            write = actions.create(**form.cleaned_data, actor=actor_of(request))
            offer_undo(request, f"Created {write.group.group_id}.", write)
            return redirect("group", write.group.group_id)
    return _list_page(request, form, status=422)


@require_POST
@admin_required
def order(request: HttpRequest) -> HttpResponse:
    steps = {"up": -1, "down": 1}
    direction = next((name for name in steps if name in request.POST), "up")
    group_id = request.POST.get(direction, "")
    with errors_as_messages(request):
        write = actions.move(find_group(group_id), by=steps[direction], actor=actor_of(request))
        offer_undo(request, f"Moved {group_id} {direction}.", write)
    return redirect("groups")


@require_safe
@viewer_required
def group(request: HttpRequest, group_id: str) -> HttpResponse:
    """Render the board, or for htmx the list of tools or the preview alone."""
    group = find_group(group_id)
    query = BoardQuery.parse(request.GET)
    target = request.headers.get("HX-Target", "")
    if target == "board-list":
        context = {"group": group, **_tool_list_context(group, query)}
        return list_fragment(request, "catalog/groups/_tools.html", context, context["shown"])
    if target == "board-preview":
        context = {"group": group, **_preview_context(request, group, query)}
        return list_fragment(request, "catalog/groups/_preview.html", context, TABS[query.tab])
    drift = group_health.drift(group)
    context = {
        "drift": drift,
        "missing": _availability(drift.missing),
        "lints": group_health.group_lints([group])[group.pk],
        "tool_lints": _by_code(group_health.tool_lints(group)),
        "offer": request.session.pop(UNDO_OFFER_KEY, None),
        "page_tabs": page_tabs(PAGE_TABS, "group", group.group_id),
        "agents": group_board.list_agents(group),
        "usage": group_board.count_group_usage([group])[group.pk],
        **board_context(request, group, query),
    }
    return render(request, "catalog/groups/board.html", context)


def board_context(
    request: HttpRequest, group: Group, query: BoardQuery, **extra: Any
) -> dict[str, Any]:
    return {
        "group": group,
        "board": group_board.build_board(group, query),
        "budget": GROUP_BUDGET,
        "last_edit_id": group_board.last_edit_id(group),
        "group_names": list(Group.objects.values_list("group_id", flat=True)[:MAX_COMPLETIONS]),
        **_tool_list_context(group, query),
        **_preview_context(request, group, query),
        **extra,
    }


def _tool_list_context(group: Group, query: BoardQuery) -> dict[str, Any]:
    page = group_board.list_tools(group, query)
    slugs = Tool.objects.current().exclude(server=None).order_by("server__slug")
    return {
        "query": query,
        "page_query": query.parameters,
        "page": page,
        "shown": page.describe("tool"),
        "tools": page.rows,
        "slugs": list(slugs.values_list("server__slug", flat=True).distinct()),
    }


def _preview_context(request: HttpRequest, group: Group, query: BoardQuery) -> dict[str, Any]:
    current = preview.preview_group(group)
    base_url = request.build_absolute_uri("/")
    return {
        "query": query,
        "page_query": query.parameters,
        "tabs": TABS,
        "preview": current,
        "curl": preview.curl_command(group, base_url) if query.tab == "curl" else "",
        "last_edit": preview.last_edit(group, current) if query.tab == "change" else None,
        "estimator": token_counter.estimator(),
    }


def _availability(names: Sequence[str]) -> list[tuple[str, str]]:
    if not names:
        return []
    tools = Tool.objects.with_definitions().filter(public_name__in=names[:MAX_LISTED_TOOLS])
    return [(tool.public_name, detail.describe_availability(tool)) for tool in tools]


def _by_code(lints: Sequence[Lint]) -> list[tuple[int, str, list[Lint]]]:
    """Group lints by code: their number, a title, and the first of them."""
    by_code: dict[str, list[Lint]] = defaultdict(list)
    for lint in lints:
        by_code[lint.code].append(lint)
    return [
        (len(warnings), LINT_TITLES[code], warnings[:MAX_LISTED_TOOLS])
        for code, warnings in by_code.items()
    ]


@require_safe
@viewer_required
def changes(request: HttpRequest, group_id: str) -> HttpResponse:
    """Render the edits by others since the board was rendered, for its polling."""
    group = find_group(group_id)
    since = number(request.GET, "seen")
    edits = group_board.describe_edits(group_board.edits_by_others(group, since, actor_of(request)))
    response = render(
        request,
        "catalog/groups/_concurrent_edits.html",
        {"group": group, "last_edit_id": since, "concurrent_edits": edits},
    )
    if edits.sentences:
        announce(response, edits.sentences[-1])
    return response


def _settings_page(
    request: HttpRequest, group: Group, status: int = 200, **forms: Any
) -> HttpResponse:
    context = {
        "group": group,
        "last_edit_id": group_board.last_edit_id(group),
        "page_tabs": page_tabs(PAGE_TABS, "group-edit", group.group_id),
        "settings_form": SettingsForm(group=group, initial=group_state.read_fields(group)),
        "offer": request.session.pop(UNDO_OFFER_KEY, None),
    }
    return render(request, "catalog/groups/settings.html", context | forms, status=status)


@require_http_methods(["GET", "HEAD", "POST"])
@admin_required
def edit(request: HttpRequest, group_id: str) -> HttpResponse:
    group = find_group(group_id)
    if request.method != "POST":
        return _settings_page(request, group)
    form = SettingsForm(request.POST, group=group)
    if form.is_valid():
        with errors_in_form(form):
            fields = _merge(request, group, form.cleaned_data)
            write = actions.edit(group, actor=actor_of(request), **fields)
            offer_undo(request, f"Saved settings of {write.group.group_id}.", write)
            return redirect("group-edit", write.group.group_id)
    return _settings_page(request, group, status=422, settings_form=form)


@require_POST
@admin_required
def describe(request: HttpRequest, group_id: str) -> HttpResponse:
    """Change the description alone, from the board."""
    with errors_as_messages(request):
        text = request.POST.get("description", "")
        write = actions.edit(find_group(group_id), actor=actor_of(request), description=text)
        offer_undo(request, f"Saved the description of {group_id}.", write)
    return redirect("group", group_id)


def _merge(request: HttpRequest, group: Group, submitted: group_state.State) -> Any:
    """Merge the submitted fields with concurrent edits; raise Conflict if both changed a field."""
    submitted["follows"] = submitted["follows"] or None
    if "seen" not in request.POST:
        return submitted
    current = group_state.read_fields(group)
    base, changed_by = group_board.fields_at(group, current, number(request.POST, "seen"))
    changed = {name for name, value in submitted.items() if value != base[name]}
    conflicts = [name for name in changed if current[name] not in (base[name], submitted[name])]
    if conflicts:
        name = conflicts[0]
        label = str(SettingsForm.base_fields[name].label).lower()
        raise Conflict(
            f"{changed_by[name]} changed the {label} in the meantime: "
            f"it is now “{current[name] or 'empty'}”.",
            hint="Save again to overwrite it.",
        )
    return {name: submitted[name] if name in changed else current[name] for name in submitted}


@require_POST
@admin_required
def delete(request: HttpRequest, group_id: str) -> HttpResponse:
    group = find_group(group_id)
    form = DeleteForm(request.POST, name=group.group_id)
    if not form.is_valid():
        return _settings_page(request, group, 422, delete_error=form.errors["typed_name"][0])
    with errors_as_messages(request):
        write = actions.delete(group, actor=actor_of(request))
        offer_undo(request, f"Deleted {group_id}.", write)
    return redirect("groups")
