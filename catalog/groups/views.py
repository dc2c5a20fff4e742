"""Pages of groups: the list, two of them compared, the board, the settings.

A view fetches, asks and answers. What is done on the board is in `catalog.group_acts`.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from catalog import cache
from catalog.groups import actions as writes
from catalog.groups import board as group_board
from catalog.groups import health as group_health
from catalog.groups import preview
from catalog.groups import state as group_state
from catalog.groups.board import GroupCost
from catalog.groups.forms import NewGroupForm, SettingsForm
from catalog.groups.lints import Lint
from catalog.groups.undo import UNDO_OFFER_KEY, offer_undo
from catalog.models import Group, Tool
from catalog.tools import detail
from catalog.tools import filters as tool_filters
from catalog.tools.forms import DeleteForm
from catalog.tools.queries import ToolFilter
from toolcrib.lib import token_counter
from toolcrib.lib.errors import Conflict, NotFound, ToolcribError
from toolcrib.lib.pagination import Page, offset_of, page_by_offset
from toolcrib.lib.request import clean_address, number
from toolcrib.lib.roles import actor_of, admin_required, operator_required

SHOWN = 200  # groups of a page of the list
LISTED = 30  # tools of a page of the left list
NAMED = 50  # tools a notice names
GROUPS = 300  # groups that a field completes
TABS = {"catalog": "Catalog", "json": "JSON", "curl": "curl", "change": "Change"}
ADVICE = {
    "description_missing": "No description",
    "description_short": "Described in a word or two",
    "description_verb": "Description does not start with a verb",
    "synonyms": "Description repeats the name",
}


# --- The list -----------------------------------------------------------------------------------


@require_safe
@operator_required
def groups(request: HttpRequest) -> HttpResponse:
    return _list_page(request, NewGroupForm(auto_id="new_%s"))


def _list_page(request: HttpRequest, form: NewGroupForm, status: int = 200) -> HttpResponse:
    every = Group.objects.select_related("follows").order_by("position", "group_id")
    page: Page[Group] = page_by_offset(every, offset_of(request.GET, SHOWN), SHOWN)
    found = page.rows
    drifts, lints = group_health.drifts(found), group_health.group_lints(found)
    standing = cache.current().by_pk  # once: it asks for its revision every time
    costs = {group.pk: group_board.cost(standing.get(group.pk), preview.BUDGET) for group in found}
    used, last = group_health.group_users(found), page.total - 1
    context = {
        "page": page,
        "shown": page.says("group"),
        "rows": [
            (
                *(group, costs[group.pk], used[group.pk], drifts[group.pk], lints[group.pk]),
                *(at == 0, at == last),
            )
            for at, group in enumerate(found, page.first)
        ],
        "scale": max((cost.stub + cost.all for cost in costs.values()), default=0),
        "budget": group_board.BUDGET,
        "form": form,
        "offer": request.session.pop(UNDO_OFFER_KEY, None),
    }
    return render(request, "catalog/groups/list.html", context, status=status)


def _cost(group: Group) -> GroupCost:
    return group_board.cost(group_board.cached_group(group), preview.BUDGET)


@require_safe
@operator_required
def compare(request: HttpRequest) -> HttpResponse:
    """Two groups side by side: what only one has, what both have, what each costs."""
    chosen = list(dict.fromkeys(name for name in request.GET.getlist("group") if name))
    if len(chosen) != 2:
        messages.error(request, "Choose two groups to compare.")
        return redirect("groups")
    one, other = (find(name) for name in chosen)
    context = {
        "sides": [(group, _cost(group)) for group in (one, other)],
        "parts": group_board.compare_groups(one, other),
        "scale": max(_cost(group).stub + _cost(group).all for group in (one, other)),
    }
    return render(request, "catalog/groups/compare.html", context)


@require_POST
@admin_required
def create(request: HttpRequest) -> HttpResponse:
    form = NewGroupForm(request.POST, auto_id="new_%s")
    if form.is_valid():
        given = form.cleaned_data
        slug = given.pop("follows")
        try:
            server = group_state.find_server(slug) if slug else None
            done = writes.create(**given, follows=server, actor=actor_of(request))
        except ToolcribError as error:
            form.add_error(None, error.sentence)
        else:
            offer_undo(request, f"Made {done.group.group_id}.", done)
            return redirect("group", done.group.group_id)
    return _list_page(request, form, status=422)


@require_POST
@admin_required
def order(request: HttpRequest) -> HttpResponse:
    steps = {"up": -1, "down": 1}
    word = next((word for word in steps if word in request.POST), "up")
    moved = request.POST.get(word, "")
    try:
        done = writes.shift(writes.find_group(moved), steps[word], actor=actor_of(request))
    except ToolcribError as error:
        messages.error(request, error.sentence)
    else:
        offer_undo(request, f"Moved {moved} {word}.", done)
    return redirect("groups")


# --- The board ----------------------------------------------------------------------------------


def find(group_id: str) -> Group:
    named = Group.objects.select_related("follows").filter(group_id=group_id.replace("\0", ""))
    found = named.first()
    if found is None:
        raise NotFound("There is no group of this name.", hint="The list of groups has them all.")
    return found


@require_safe
@operator_required
def group(request: HttpRequest, group_id: str) -> HttpResponse:
    """The board, or the part of it that a filter or a tab asks for."""
    group = find(group_id)
    target = request.headers.get("HX-Target", "")
    if target == "board-list":
        part = {"group": group, **_left(request, group)}
        return _part(request, "catalog/groups/_tools.html", part, part["shown"])
    if target == "board-preview":
        part = {"group": group, **_right(request, group)}
        return _part(request, "catalog/groups/_preview.html", part, TABS[part["tab"]])
    drift = group_health.drift(group)
    context = {
        "drift": drift,
        "missing": _reasons(drift.missing),
        "lints": group_health.group_lints([group])[group.pk],
        "tool_lints": _by_code(group_health.tool_lints(group)),
        "offer": request.session.pop(UNDO_OFFER_KEY, None),
        "page_tabs": _page_tabs(group, "group"),
        **board_context(request, group),
    }
    return render(request, "catalog/groups/board.html", context)


def _part(request: HttpRequest, template: str, context: dict[str, Any], said: str) -> HttpResponse:
    response = render(request, template, context)
    response["HX-Push-Url"] = clean_address(request)
    response["HX-Trigger"] = json.dumps({"announce": said})
    return response


def board_context(request: HttpRequest, group: Group, **extra: Any) -> dict[str, Any]:
    """What the three panels show, by what the address asks for."""
    board = group_board.board(
        group,
        preview.BUDGET,
        preload_from=number(request.GET, "p", digits=9),
        demand_from=number(request.GET, "d", digits=9),
    )
    return {
        "group": group,
        "board": board,
        "budget": group_board.BUDGET,
        "address": request.GET.urlencode(),
        "seen_act": group_board.last_edit_id(group),
        "group_names": list(Group.objects.values_list("group_id", flat=True)[:GROUPS]),
        **_left(request, group),
        **_right(request, group),
        **extra,
    }


def _left(request: HttpRequest, group: Group) -> dict[str, Any]:
    """List all tools by what the address asks for, those outside the group first."""
    wanted = ToolFilter.read(request.GET)
    inside = request.GET.get("in", "")
    offset = offset_of(request.GET, LISTED)
    found = group_board.board_tools(group, wanted, inside=inside, offset=offset, size=LISTED)
    slugs = Tool.objects.current().exclude(server=None).order_by("server__slug")
    return {
        "wanted": wanted,
        "inside": inside if inside in ("yes", "no") else "",
        "page": found,
        "shown": found.says("tool"),
        "tools": [(tool_filters.tool_row(tool), tool.inside) for tool in found.rows],  # type: ignore[attr-defined]
        "slugs": list(slugs.values_list("server__slug", flat=True).distinct()),
        "address": request.GET.urlencode(),
    }


def _right(request: HttpRequest, group: Group) -> dict[str, Any]:
    tab = request.GET.get("tab", "")
    tab = tab if tab in TABS else "catalog"
    now = preview.preview_group(group)
    base = request.build_absolute_uri("/")
    return {
        "tab": tab,
        "tabs": TABS,
        "preview": now,
        "curl": preview.curl(group, base) if tab == "curl" else "",
        "change": preview.change(group, now) if tab == "change" else None,
        "estimator": token_counter.estimator(),
    }


def _reasons(names: Sequence[str]) -> list[tuple[str, str]]:
    """Say of tools that agents do not get why."""
    if not names:
        return []
    found = Tool.objects.with_definitions().filter(public_name__in=names[:NAMED])
    return [(tool.public_name, detail.describe_availability(tool)) for tool in found]


def _by_code(lints: Sequence[Lint]) -> list[tuple[int, str, list[Lint]]]:
    found: dict[str, list[Lint]] = defaultdict(list)
    for lint in lints:
        found[lint.code].append(lint)
    return [(len(of_it), ADVICE[code], of_it[:NAMED]) for code, of_it in found.items()]


@require_safe
@operator_required
def changes(request: HttpRequest, group_id: str) -> HttpResponse:
    """The fragment that an open board asks for: what others did since it was drawn."""
    group = find(group_id)
    since = number(request.GET, "seen")
    told = group_board.concurrent_edits(
        group_board.edits_by_others(group, since, actor_of(request))
    )
    response = render(
        request,
        "catalog/groups/_concurrent_edits.html",
        {"group": group, "seen_act": since, "told": told},
    )
    if told:
        response["HX-Trigger"] = json.dumps({"announce": told.sentences[-1]})
    return response


# --- Settings -----------------------------------------------------------------------------------


def _page_tabs(group: Group, current: str) -> list[dict[str, Any]]:
    pages = (("group", "Board"), ("group-edit", "Settings"))
    return [
        {"label": label, "url": reverse(name, args=[group.group_id]), "current": name == current}
        for name, label in pages
    ]


def _settings_page(
    request: HttpRequest, group: Group, status: int = 200, **forms: Any
) -> HttpResponse:
    context = {
        "group": group,
        "seen_act": group_board.last_edit_id(group),
        "page_tabs": _page_tabs(group, "group-edit"),
        "settings_form": SettingsForm(group=group, initial=_fields(group)),
        "offer": request.session.pop(UNDO_OFFER_KEY, None),
    }
    return render(request, "catalog/groups/settings.html", context | forms, status=status)


def _fields(group: Group) -> group_state.State:
    return {name: group_state.field(group, name) for name in group_state.FIELDS}


@require_http_methods(["GET", "HEAD", "POST"])
@admin_required
def edit(request: HttpRequest, group_id: str) -> HttpResponse:
    group = find(group_id)
    if request.method != "POST":
        return _settings_page(request, group)
    form = SettingsForm(request.POST, group=group)
    if form.is_valid():
        given = form.cleaned_data
        given["follows"] = given["follows"] or None
        try:
            wanted = _merged(request, group, given)
            slug = wanted.pop("follows", None)
            if "follows" in given and slug != group_state.field(group, "follows"):
                wanted["follows"] = group_state.find_server(slug) if slug else None
            done = writes.edit(group, actor=actor_of(request), **wanted)
        except ToolcribError as error:
            form.add_error(None, error.sentence)
        else:
            offer_undo(request, f"Saved the settings of {done.group.group_id}.", done)
            return redirect("group-edit", done.group.group_id)
    return _settings_page(request, group, status=422, settings_form=form)


def _merged(request: HttpRequest, group: Group, given: group_state.State) -> Any:
    """Keep what another person saved meanwhile, but where both changed the same."""
    if "seen" not in request.POST:
        return dict(given)
    now = _fields(group)
    then, who = group_board.fields_as_seen(group, now, number(request.POST, "seen"))
    mine = {name for name, value in given.items() if value != then[name]}
    both = [name for name in mine if now[name] not in (then[name], given[name])]
    if both:
        words = str(SettingsForm.base_fields[both[0]].label).lower()
        raise Conflict(
            f"{who[both[0]]} changed the {words} meanwhile: it is now “{now[both[0]] or 'empty'}”.",
            hint="Save again to use yours.",
        )
    return {name: given[name] for name in mine} | {
        name: now[name] for name in given if name not in mine
    }


@require_POST
@admin_required
def delete(request: HttpRequest, group_id: str) -> HttpResponse:
    group = find(group_id)
    form = DeleteForm(request.POST, name=group.group_id)
    if not form.is_valid():
        return _settings_page(request, group, 422, delete_error=form.errors["typed_name"][0])
    try:
        done = writes.delete(group, actor=actor_of(request))
    except ToolcribError as error:
        messages.error(request, error.sentence)
    else:
        offer_undo(request, f"Deleted {group_id}.", done)
    return redirect("groups")
