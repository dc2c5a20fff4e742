"""What is done on the board: add, move, remove, give, order, undo.

Each act saves at once, is audited and offers its undo. htmx gets the board anew, with what others
did meanwhile; a plain form leads back to where it was.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST

from catalog.groups import actions as writes
from catalog.groups import board, preview
from catalog.groups import state as states
from catalog.groups import undo as group_offers
from catalog.groups import undo as group_undo
from catalog.groups.actions import GroupWrite, check_unchanged
from catalog.groups.forms import PRELOADS
from catalog.groups.views import board_context, find
from catalog.models import AuditEntry, Group, Tool
from toolcrib.lib.errors import Invalid, NotFound, ToolcribError
from toolcrib.lib.roles import actor_of, admin_required

STEPS = {"up": -1, "down": 1}
GIVEN = {
    "default": "{} is given as the default of {} says",
    "always": "{} is preloaded in {}",
    "demand": "{} is given on demand in {}",
}


@dataclass(frozen=True)
class BoardSelection:
    """What a form asks for: the pressed button's word, its tools, and what its page had seen."""

    word: str
    names: Sequence[str]
    seen: int | None

    @classmethod
    def read(cls, request: HttpRequest, words: Sequence[str]) -> "BoardSelection":
        """A button without a tool of its own is about the checked ones."""
        sent = request.POST
        word = next((word for word in words if word in sent), words[0])
        names = [name for name in sent.getlist(word) if name] or sent.getlist("tool")
        seen = sent.get("seen", "")
        known = seen.isascii() and seen.isdecimal() and len(seen) < 19
        return cls(word, list(dict.fromkeys(names)), int(seen) if known else None)

    def tools(self) -> list[Tool]:
        if not self.names:
            raise Invalid("No tool is selected.", hint="Select at least one.")
        return writes.find_tools(self.names)


Act = Callable[[Group, list[Tool]], Sequence[GroupWrite]]


def _perform(
    request: HttpRequest,
    group_id: str,
    picked: BoardSelection,
    act: Act,
    words: str,
    *,
    leaves: str = "",
) -> HttpResponse:
    """Do an act on the picked tools, unless another person has decided about them meanwhile.

    `words` says what was done: {} is the tools. `leaves` names where they went, if not here.
    """
    group = find(group_id)
    what = picked.names[0] if len(picked.names) == 1 else f"{len(picked.names)} tools"
    others: Sequence[AuditEntry] = ()
    if picked.seen is not None:
        others = board.edits_by_others(group, picked.seen, actor_of(request))
    try:
        with transaction.atomic():
            tools = picked.tools()
            if picked.seen is not None:
                names = {tool.public_name for tool in tools}
                check_unchanged(group, names, picked.seen, actor=actor_of(request))
            done = act(group, tools)
    except ToolcribError as error:
        return _refused(request, group, picked, error, others)
    return _done(request, group, picked, done, words.format(what), others, leaves)


def _address(request: HttpRequest) -> Any:
    # Only the query is taken from the form: the address stays ours.
    return QueryDict(request.POST.get("address", "")[:2_000])


def _back(request: HttpRequest, group_id: str, anchor: str = "") -> str:
    query = _address(request).urlencode()
    address = reverse("group", args=[group_id])
    return f"{address}{'?' if query else ''}{query}{'#' if anchor else ''}{anchor}"


def _board(request: HttpRequest, group: Group, status: int = 200, **extra: Any) -> HttpResponse:
    request.GET = _address(request)  # the board is drawn for the address that it stands at
    context = board_context(request, group, swapped=True, **extra)
    return render(request, "catalog/groups/_board.html", context, status=status)


def _refused(
    request: HttpRequest,
    group: Group,
    picked: BoardSelection,
    error: ToolcribError,
    others: Sequence[AuditEntry],
) -> HttpResponse:
    """Show what stands, with the sentence at the row that was acted on."""
    if "HX-Request" not in request.headers:
        messages.error(request, error.sentence)
        return redirect(_back(request, group.group_id))
    name = picked.names[0] if len(picked.names) == 1 else ""
    extra = {"failed": name, "failure": error.sentence, "told": board.concurrent_edits(others)}
    response = _board(request, group, 422, **extra)
    response["HX-Trigger"] = json.dumps({"announce": error.sentence})
    return response


def _done(
    request: HttpRequest,
    group: Group,
    picked: BoardSelection,
    done: Sequence[GroupWrite],
    words: str,
    others: Sequence[AuditEntry],
    leaves: str,
) -> HttpResponse:
    told = board.concurrent_edits(others)
    offer = group_offers.undo_offer(f"{words}.", *done)
    if "HX-Request" not in request.headers:
        group_offers.offer_undo(request, f"{words}.", *done)
        group_offers.show_messages(request, told.sentences)
        stays = len(picked.names) == 1 and picked.word != "remove_tool" and not leaves
        tool = Tool.objects.filter(public_name=picked.names[0]).first() if stays else None
        return redirect(_back(request, group.group_id, f"row-{tool.pk}" if tool else ""))
    said = f"{words}, now about {_paid(leaves or group.group_id):,} tokens."
    focus = picked.names[0] if len(picked.names) == 1 else ""
    response = _board(request, group, offer=offer, told=told, focus=focus)
    response["HX-Trigger"] = json.dumps({"announce": said if offer else group_offers.NO_CHANGES})
    return response


def _paid(group_id: str) -> int:
    group = board.cached_group(writes.find_group(group_id))
    return board.cost(group, preview.BUDGET).paid


# --- Acts ---------------------------------------------------------------------------------------


@require_POST
@admin_required
def assign(request: HttpRequest, group_id: str) -> HttpResponse:
    """Add tools to this group, or to the one that is named."""
    picked = BoardSelection.read(request, ["tool"])
    to = request.POST.get("to", "").strip() or group_id
    own = PRELOADS.get(request.POST.get("given", ""))

    def act(group: Group, tools: list[Tool]) -> list[GroupWrite]:
        home = group if to == group_id else writes.find_group(to)
        return [writes.assign(home, tools, actor=actor_of(request), preload=own)]

    return _perform(request, group_id, picked, act, f"Added {{}} to {_safe(to)}", leaves=to)


def _safe(text: str) -> str:
    """A name that somebody typed, as part of a text with places to fill."""
    return text[:80].replace("{", "{{").replace("}", "}}")


@require_POST
@admin_required
def move(request: HttpRequest, group_id: str) -> HttpResponse:
    """Take tools out of this group and add them to another, as one act."""
    picked = BoardSelection.read(request, ["move"])
    to = request.POST.get("to", "").strip()

    def act(group: Group, tools: list[Tool]) -> list[GroupWrite]:
        if not to or to == group_id:
            raise Invalid("Name another group.", hint="The field completes the names there are.")
        home, actor = writes.find_group(to), actor_of(request)
        return [
            writes.assign(home, tools, actor=actor),
            writes.remove(group, tools, actor=actor),
        ]

    return _perform(request, group_id, picked, act, f"Moved {{}} to {_safe(to)}", leaves=to)


@require_POST
@admin_required
def remove(request: HttpRequest, group_id: str) -> HttpResponse:
    picked = BoardSelection.read(request, ["remove_tool"])
    return _perform(
        request,
        group_id,
        picked,
        lambda group, tools: [writes.remove(group, tools, actor=actor_of(request))],
        f"Took {{}} out of {group_id}",
    )


@require_POST
@admin_required
def preload(request: HttpRequest, group_id: str) -> HttpResponse:
    picked = BoardSelection.read(request, [*PRELOADS, "set"])
    word = picked.word
    if word == "set":  # a checkbox: on is preloaded
        word = "always" if "on" in request.POST else "demand"
    return _perform(
        request,
        group_id,
        picked,
        lambda group, tools: [
            writes.set_preload(group, tools, PRELOADS[word], actor=actor_of(request))
        ],
        GIVEN[word].format("{}", group_id),
    )


@require_POST
@admin_required
def order_members(request: HttpRequest, group_id: str) -> HttpResponse:
    picked = BoardSelection.read(request, list(STEPS))

    def act(group: Group, tools: list[Tool]) -> list[GroupWrite]:
        among = board.section_names(group, tools[0].public_name)
        step = STEPS[picked.word]
        return [
            writes.shift_member(group, tools[0], step, actor=actor_of(request), among=set(among))
        ]

    return _perform(request, group_id, picked, act, f"Moved {{}} {picked.word}")


@require_POST
@admin_required
def assign_any(request: HttpRequest) -> HttpResponse:
    """Add the tools selected on the list of tools to the group that is named."""
    return _from_list(request, writes.assign, "Added {} to {}.")


@require_POST
@admin_required
def remove_any(request: HttpRequest) -> HttpResponse:
    """Take the tools selected on the list of tools out of the group that is named."""
    return _from_list(request, writes.remove, "Took {} out of {}.")


def _from_list(request: HttpRequest, act: Callable[..., GroupWrite], words: str) -> HttpResponse:
    picked = BoardSelection.read(request, ["tool"])
    query = _address(request).urlencode()
    try:
        tools = picked.tools()
        if not request.POST.get("to"):
            raise Invalid("No group is named.", hint="Choose the group.")
        home = writes.find_group(request.POST["to"])
        done = act(home, tools, actor=actor_of(request))
    except ToolcribError as error:
        messages.error(request, error.sentence)
    else:
        what = tools[0].public_name if len(tools) == 1 else f"{len(tools)} tools"
        group_offers.offer_undo(request, words.format(what, home.group_id), done)
    return redirect(f"{reverse('tools')}?{query}" if query else reverse("tools"))


# --- Undo ---------------------------------------------------------------------------------------


@require_POST
@admin_required
def undo(request: HttpRequest, entry_id: int) -> HttpResponse:
    """Take back an act; of several that were one act, `also` has the older ones."""
    also = [int(text) for text in request.POST.getlist("also")[:5] if text.isdecimal()]
    try:
        with transaction.atomic():
            done = [_undone(request, pk) for pk in (entry_id, *also)]
    except ToolcribError as error:
        return _after_undo(request, entry_id, error=error.sentence)
    return _after_undo(request, entry_id, offer=group_offers.undo_offer("Undone.", *done))


def _undone(request: HttpRequest, pk: int) -> GroupWrite:
    entry = AuditEntry.objects.filter(pk=pk).first()
    if entry is None:
        raise NotFound("There is no such act to undo.", hint="The audit log has them all.")
    return group_undo.undo(entry, actor=actor_of(request))


def _after_undo(
    request: HttpRequest,
    entry_id: int,
    *,
    offer: group_offers.Offer | None = None,
    error: str = "",
) -> HttpResponse:
    """Lead back to where the act was: its group, or the list where groups were moved."""
    entry = AuditEntry.objects.filter(pk=entry_id).first()
    about = entry and entry.target_kind == "group" and "groups" not in entry.after
    group = Group.objects.filter(pk=entry.target_id or 0).first() if entry and about else None
    board = Group.objects.filter(group_id=request.POST.get("board", "")).first()
    if "HX-Request" in request.headers and board and group and entry:
        [name] = sorted(states.touched(entry.after))[:1] or [""]
        extra = {"failure": error, "focus": name, "offer": offer}
        response = _board(request, find(board.group_id), 422 if error else 200, **extra)
        response["HX-Trigger"] = json.dumps({"announce": error or "Undone."})
        return response
    if error:
        messages.error(request, error)
    elif offer:
        request.session[group_offers.UNDO_OFFER_KEY] = offer
    where = reverse("group", args=[group.group_id]) if group else reverse("groups")
    if "HX-Request" in request.headers:
        return HttpResponse(status=204, headers={"HX-Redirect": where})
    return redirect(where)
