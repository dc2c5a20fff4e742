"""Actions of the group board: add, move, remove, preload, order and undo tools.

htmx requests get the board re-rendered; plain forms are redirected back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST

from catalog.groups import actions, board, preview
from catalog.groups import state as group_state
from catalog.groups import undo as group_undo
from catalog.groups.actions import GroupWrite, check_unchanged, find_group
from catalog.groups.board import BoardQuery
from catalog.groups.forms import PRELOADS
from catalog.groups.views import board_context
from catalog.models import AuditEntry, Group, Tool
from toolcrib.lib.display import group_digits
from toolcrib.lib.errors import Invalid, ToolcribError
from toolcrib.lib.request import (
    announce,
    errors_as_messages,
    redirect_back,
    redirect_next,
    submitted_query,
)
from toolcrib.lib.roles import actor_of, admin_required

MAX_UNDONE_ENTRIES = 500  # one action may change many groups
STEPS = {"up": -1, "down": 1}
PRELOAD_MESSAGES = {
    "default": "{} uses the default of {}",
    "always": "{} is preloaded in {}",
    "demand": "{} is on demand in {}",
}


@dataclass(frozen=True)
class BoardSelection:
    """A submitted form: the pressed button, the selected tools and the last edit it is based on."""

    button: str
    names: Sequence[str]
    last_edit_id: int | None

    @classmethod
    def parse(cls, request: HttpRequest, buttons: Sequence[str]) -> "BoardSelection":
        """Parse a form; a button without a tool of its own applies to the checked tools."""
        data = request.POST
        button = next((name for name in buttons if name in data), buttons[0])
        names = [name for name in data.getlist(button) if name] or data.getlist("tool")
        seen = data.get("seen", "")
        last_edit_id = int(seen) if seen.isdecimal() and len(seen) < 19 else None
        return cls(button, list(dict.fromkeys(names)), last_edit_id)

    @property
    def only_name(self) -> str:
        """The name of the tool if exactly one is selected."""
        return self.names[0] if len(self.names) == 1 else ""

    def tools(self) -> list[Tool]:
        if not self.names:
            raise Invalid("No tool is selected.", hint="Select at least one.")
        return actions.find_tools(self.names)


Action = Callable[[Group, list[Tool]], Sequence[GroupWrite]]


def _perform(
    request: HttpRequest,
    group_id: str,
    selection: BoardSelection,
    action: Action,
    message: str,
    *,
    destination: str = "",
) -> HttpResponse:
    """Run an action on the selected tools, unless another user changed them in the meantime.

    `message` describes the action, with {} for the tools. `destination` is the id of the group
    they were added to, if it is another one.
    """
    group, actor, since = find_group(group_id), actor_of(request), selection.last_edit_id
    is_htmx, name = "HX-Request" in request.headers, selection.only_name
    others = [] if since is None else board.edits_by_others(group, since, actor)
    edits = board.describe_edits(others)
    try:
        with transaction.atomic():
            tools = selection.tools()
            if since is not None:
                check_unchanged(group, {tool.public_name for tool in tools}, since, actor=actor)
            writes = action(group, tools)
    except ToolcribError as error:
        if is_htmx:
            at_row = {"failed": name, "failure": error.sentence, "concurrent_edits": edits}
            return _render_board(request, group, error.sentence, 422, **at_row)
        messages.error(request, error.sentence)
        return redirect_back(request, "group", group_id)
    sentence = message.format(name or f"{len(selection.names)} tools")
    if not is_htmx:
        group_undo.offer_undo(request, f"{sentence}.", *writes)
        for edit in edits.sentences:
            messages.info(request, edit)
        stays = name and selection.button != "remove_tool" and not destination
        tool = Tool.objects.filter(public_name=name).first() if stays else None
        anchor = f"row-{tool.pk}" if tool else ""
        return redirect_back(request, "group", group.group_id, anchor=anchor)
    offer = group_undo.make_offer(f"{sentence}.", *writes)
    changed = preview.cached_group(find_group(destination or group.group_id))
    announcement = (
        f"{sentence}, now about {group_digits(board.group_cost(changed).at_start)} tokens."
    )
    after: dict[str, Any] = {"offer": offer, "concurrent_edits": edits, "focus": name}
    return _render_board(request, group, announcement if offer else group_undo.NO_CHANGES, **after)


def _render_board(
    request: HttpRequest, group: Group, announcement: str, status: int = 200, **extra: Any
) -> HttpResponse:
    """Render the board for the query parameters of the page it is shown on."""
    query = BoardQuery.parse(submitted_query(request))
    context = board_context(request, group, query, swapped=True, **extra)
    response = render(request, "catalog/groups/_board.html", context, status=status)
    return announce(response, announcement)


@require_POST
@admin_required
def assign(request: HttpRequest, group_id: str) -> HttpResponse:
    """Add tools to this group, or to the group in the field `to`."""
    selection = BoardSelection.parse(request, ["tool"])
    to = request.POST.get("to", "").strip() or group_id
    preload = PRELOADS.get(request.POST.get("given", ""))

    def action(group: Group, tools: list[Tool]) -> list[GroupWrite]:
        target = group if to == group_id else find_group(to)
        return [actions.assign(target, tools, actor=actor_of(request), preload=preload)]

    message = f"Added {{}} to {_escape_braces(to)}"
    return _perform(request, group_id, selection, action, message, destination=to)


def _escape_braces(text: str) -> str:
    return text[:80].replace("{", "{{").replace("}", "}}")


@require_POST
@admin_required
def move(request: HttpRequest, group_id: str) -> HttpResponse:
    selection = BoardSelection.parse(request, ["move"])
    to = request.POST.get("to", "").strip()

    def action(group: Group, tools: list[Tool]) -> list[GroupWrite]:
        if not to or to == group_id:
            raise Invalid(
                "Choose another group.", hint="Type its id; the field suggests existing groups."
            )
        target, actor = find_group(to), actor_of(request)
        return [
            actions.assign(target, tools, actor=actor),
            actions.remove(group, tools, actor=actor),
        ]

    message = f"Moved {{}} to {_escape_braces(to)}"
    return _perform(request, group_id, selection, action, message, destination=to)


@require_POST
@admin_required
def remove(request: HttpRequest, group_id: str) -> HttpResponse:
    selection = BoardSelection.parse(request, ["remove_tool"])

    def action(group: Group, tools: list[Tool]) -> list[GroupWrite]:
        return [actions.remove(group, tools, actor=actor_of(request))]

    return _perform(request, group_id, selection, action, f"Removed {{}} from {group_id}")


@require_POST
@admin_required
def preload(request: HttpRequest, group_id: str) -> HttpResponse:
    selection = BoardSelection.parse(request, [*PRELOADS, "set"])
    setting = selection.button
    if setting == "set":  # a checkbox: checked is preloaded
        setting = "always" if "on" in request.POST else "demand"

    def action(group: Group, tools: list[Tool]) -> list[GroupWrite]:
        return [actions.set_preload(group, tools, PRELOADS[setting], actor=actor_of(request))]

    message = PRELOAD_MESSAGES[setting].format("{}", group_id)
    return _perform(request, group_id, selection, action, message)


@require_POST
@admin_required
def order_members(request: HttpRequest, group_id: str) -> HttpResponse:
    selection = BoardSelection.parse(request, list(STEPS))

    def action(group: Group, tools: list[Tool]) -> list[GroupWrite]:
        among = set(board.section_names(group, tools[0].public_name))
        step = STEPS[selection.button]
        return [actions.shift_member(group, tools[0], step, actor=actor_of(request), among=among)]

    return _perform(request, group_id, selection, action, f"Moved {{}} {selection.button}")


@require_POST
@admin_required
def assign_any(request: HttpRequest) -> HttpResponse:
    """Add the tools selected in the list of tools to the group in the field `to`."""
    return _perform_from_list(request, actions.assign, "Added {} to {}.")


@require_POST
@admin_required
def remove_any(request: HttpRequest) -> HttpResponse:
    """Remove the tools selected in the list of tools from the group in the field `to`."""
    return _perform_from_list(request, actions.remove, "Removed {} from {}.")


def _perform_from_list(
    request: HttpRequest, action: Callable[..., GroupWrite], message: str
) -> HttpResponse:
    selection = BoardSelection.parse(request, ["tool"])
    with errors_as_messages(request):
        tools = selection.tools()
        if not request.POST.get("to"):
            raise Invalid("No group is selected.", hint="Choose a group.")
        group = find_group(request.POST["to"])
        write = action(group, tools, actor=actor_of(request))
        subject = tools[0].public_name if len(tools) == 1 else f"{len(tools)} tools"
        group_undo.offer_undo(request, message.format(subject, group.group_id), write)
    return redirect_back(request, "tools")


@require_POST
@admin_required
def undo(request: HttpRequest, entry_id: int) -> HttpResponse:
    """Undo an action; if it consists of several writes, `also` has the ids of the older ones."""
    also = request.POST.getlist("also")[:MAX_UNDONE_ENTRIES]
    entry_ids = [entry_id, *(int(text) for text in also if text.isdecimal())]
    try:
        with transaction.atomic():
            entries = [group_undo.find_entry(pk) for pk in entry_ids]
            writes = [group_undo.undo(entry, actor=actor_of(request)) for entry in entries]
    except ToolcribError as error:
        return _undo_response(request, entry_id, error=error.sentence)
    redone = entries[0].verb == "group.undo"
    sentence = group_undo.REDONE if redone else group_undo.UNDONE
    offer = group_undo.make_offer(sentence, *writes, redo=not redone)
    return _undo_response(request, entry_id, offer=offer, announcement=sentence)


def _undo_response(
    request: HttpRequest,
    entry_id: int,
    *,
    offer: group_undo.Offer | None = None,
    announcement: str = "",
    error: str = "",
) -> HttpResponse:
    """Return to the page of the action: its group, or the list if groups were moved."""
    entry = AuditEntry.objects.filter(pk=min(entry_id, group_undo.MAX_ID)).first()
    on_group = entry and entry.target_kind == "group" and "groups" not in entry.after
    group = Group.objects.filter(pk=entry.target_id or 0).first() if entry and on_group else None
    groups = Group.objects.select_related("follows")
    board_group = groups.filter(group_id=request.POST.get("board", "")).first()
    if "HX-Request" in request.headers and board_group and group and entry:
        [name] = sorted(group_state.affected_tools(entry.after))[:1] or [""]
        after = {"failure": error, "focus": name, "offer": offer}
        status = 422 if error else 200
        return _render_board(request, board_group, error or announcement, status, **after)
    if error:
        messages.error(request, error)
    elif offer:
        request.session[group_undo.UNDO_OFFER_KEY] = offer
    url = reverse("group", args=[group.group_id]) if group else reverse("groups")
    if "HX-Request" in request.headers:
        return HttpResponse(status=204, headers={"HX-Redirect": url})
    return redirect_next(request, url)
