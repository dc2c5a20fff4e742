"""Pages of groups: the list and the editor. A view fetches, asks and answers.

Every act is a plain form that leads back to where it was, with an offer to undo it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from catalog import browsing, detail, facets, group_reads, group_states
from catalog import groups as writes
from catalog.browsing import Page, ToolFilter
from catalog.facets import ToolRow
from catalog.forms import DeleteForm
from catalog.group_forms import PRELOADS, NewGroupForm, SettingsForm
from catalog.group_reads import is_preloaded
from catalog.group_writing import Done
from catalog.lints import Lint
from catalog.models import AuditEntry, Group, Membership, Tool
from catalog.people import actor_of, admin_required, operator_required
from toolcrib.errors import NotFound, ToolcribError

OFFERED = "group_undo"  # the act this session may undo next
CANDIDATES = 20
NAMED = 50  # tools a notice names
ADVICE = {
    "description_missing": "No description",
    "description_short": "Described in a word or two",
    "description_verb": "Description does not start with a verb",
    "synonyms": "Description repeats the name",
}
GIVEN = {
    "default": "as the group's default says",
    "always": "preloaded",
    "demand": "given on demand",
}


@dataclass(frozen=True)
class MemberRow:
    """One member in the list: its tool, how it is given, where it can go."""

    row: ToolRow
    preload: bool | None
    preloaded: bool
    first: bool
    last: bool
    followed: bool  # it belongs to the group as long as that follows its server


def _rows(group: Group, page: Page[Membership]) -> list[MemberRow]:
    return [
        MemberRow(
            row=facets.row(member.tool),
            preload=member.preload,
            preloaded=is_preloaded(group, member.preload),
            first=page.first + at == 0,
            last=page.first + at == page.total - 1,
            followed=member.tool.server_id is not None
            and member.tool.server_id == group.follows_id,
        )
        for at, member in enumerate(page.rows)
    ]


# --- Reading ------------------------------------------------------------------------------------


@require_safe
@operator_required
def groups(request: HttpRequest) -> HttpResponse:
    return _list_page(request, NewGroupForm(auto_id="new_%s"))


def _list_page(request: HttpRequest, form: NewGroupForm, status: int = 200) -> HttpResponse:
    found: list[Any] = list(browsing.groups())
    drifts, lints = group_reads.drifts(found), group_reads.group_lints(found)
    context = {
        "rows": [(group, drifts[group.pk], lints[group.pk]) for group in found],
        "scale": max((group.all_tokens for group in found), default=0),
        "form": form,
        "offer": request.session.pop(OFFERED, None),
    }
    return render(request, "catalog/groups.html", context, status=status)


@require_safe
@operator_required
def group(request: HttpRequest, group_id: str) -> HttpResponse:
    return _page(request, _find(group_id))


def _find(group_id: str) -> Group:
    found = browsing.groups().filter(group_id=group_id.replace("\0", "")).first()
    if found is None:
        raise NotFound("There is no group of this name.", hint="The list of groups has them all.")
    return found


def _page(request: HttpRequest, group: Group, status: int = 200, **forms: Any) -> HttpResponse:
    page = browsing.members(group, offset=browsing.offset_of(request.GET))
    rows = _rows(group, page)
    drift = group_reads.drift(group)
    context = {
        "group": group,
        "rows": rows,
        "page": page,
        "shown": page.says("tool"),
        "maximum": max((one.row.tokens or 0 for one in rows), default=0),
        "drift": drift,
        "missing": _reasons(drift.missing),
        "lints": group_reads.group_lints([group])[group.pk],
        "tool_lints": _by_code(group_reads.tool_lints(group)),
        "address": request.GET.urlencode(),
        "offer": request.session.pop(OFFERED, None),
        "preview_text": group_reads.preview(group),
        "settings_form": SettingsForm(
            group=group,
            initial={name: group_states.field(group, name) for name in group_states.FIELDS},
        ),
        **_addable(request, group),
    }
    return render(request, "catalog/group.html", context | forms, status=status)


def _addable(request: HttpRequest, group: Group) -> dict[str, Any]:
    """List tools that could be added, by what the address asks for."""
    wanted = ToolFilter.read(request.GET)
    found = browsing.candidates(group, wanted, size=CANDIDATES)
    slugs = Tool.objects.current().exclude(server=None).order_by("server__slug")
    return {
        "wanted": wanted,
        "candidates": [facets.row(tool) for tool in found.rows],
        "candidates_total": found.total,
        "slugs": list(slugs.values_list("server__slug", flat=True).distinct()),
    }


def _reasons(names: Sequence[str]) -> list[tuple[str, str]]:
    """Say of tools that agents do not get why."""
    if not names:
        return []
    found = Tool.objects.with_definitions().filter(public_name__in=names[:NAMED])
    return [(tool.public_name, detail.answer(tool)) for tool in found]


def _by_code(lints: Sequence[Lint]) -> list[tuple[int, str, list[Lint]]]:
    found: dict[str, list[Lint]] = defaultdict(list)
    for lint in lints:
        found[lint.code].append(lint)
    return [(len(of_it), ADVICE[code], of_it[:NAMED]) for code, of_it in found.items()]


# --- Writing ------------------------------------------------------------------------------------


def _act(
    request: HttpRequest, act: Callable[[], Done | None], words: str, back: str
) -> HttpResponse:
    """Do one act, say what was done with an offer to undo it, and lead back."""
    try:
        done = act()
    except ToolcribError as error:
        messages.error(request, error.sentence)
    else:
        _offer(request, done, words)
    return redirect(back)


def _offer(request: HttpRequest, done: Done | None, words: str) -> None:
    if done and done.entry:
        request.session[OFFERED] = {"entry": done.entry.pk, "sentence": words}
    else:
        messages.info(request, "Nothing changed: it stood so already.")


def _back(request: HttpRequest, group_id: str, anchor: str = "") -> str:
    # Only the query is taken from the form: the address stays ours.
    query = QueryDict(request.POST.get("address", "")).urlencode()
    address = reverse("group", args=[group_id])
    return f"{address}{'?' if query else ''}{query}{'#' if anchor else ''}{anchor}"


def _picked(request: HttpRequest, words: Sequence[str]) -> tuple[str, list[Tool]]:
    """Read the pressed button, and its tool; one without a tool is about the checked ones."""
    word = next((word for word in words if word in request.POST), words[0])
    names = [name for name in request.POST.getlist(word) if name] or request.POST.getlist("tool")
    if not names:
        raise ToolcribError("No tool is selected.", hint="Select at least one.")
    return word, writes.find_tools(names)


def _count(tools: Sequence[Tool]) -> str:
    return tools[0].public_name if len(tools) == 1 else f"{len(tools)} tools"


def _on_tools(
    request: HttpRequest,
    group_id: str,
    words: Sequence[str],
    act: Callable[[Group, str, list[Tool]], Done],
    say: Callable[[str, str], str],
) -> HttpResponse:
    """Do an act on the tools of the pressed button."""
    group = writes.find(group_id)
    try:
        word, tools = _picked(request, words)
    except ToolcribError as error:
        messages.error(request, error.sentence)
        return redirect(_back(request, group_id))
    anchor = f"tool-{tools[0].pk}" if len(tools) == 1 and words[0] != "remove" else ""
    return _act(
        request,
        lambda: act(group, word, tools),
        say(word, _count(tools)),
        _back(request, group_id, anchor),
    )


@require_POST
@admin_required
def create(request: HttpRequest) -> HttpResponse:
    form = NewGroupForm(request.POST, auto_id="new_%s")
    if form.is_valid():
        given = form.cleaned_data
        slug = given.pop("follows")
        try:
            server = group_states.server_of(slug) if slug else None
            done = writes.create(**given, follows=server, actor=actor_of(request))
        except ToolcribError as error:
            form.add_error(None, error.sentence)
        else:
            _offer(request, done, f"Made {done.group.group_id}.")
            return redirect("group", done.group.group_id)
    return _list_page(request, form, status=422)


@require_POST
@admin_required
def edit(request: HttpRequest, group_id: str) -> HttpResponse:
    group = _find(group_id)
    form = SettingsForm(request.POST, group=group)
    if form.is_valid():
        given = form.cleaned_data
        slug = given.pop("follows")
        try:
            server = group_states.server_of(slug) if slug else None
            done = writes.edit(group, actor=actor_of(request), follows=server, **given)
        except ToolcribError as error:
            form.add_error(None, error.sentence)
        else:
            _offer(request, done, f"Saved the settings of {done.group.group_id}.")
            return redirect("group", done.group.group_id)
    return _page(request, group, status=422, settings_form=form)


@require_POST
@admin_required
def assign(request: HttpRequest, group_id: str) -> HttpResponse:
    return _on_tools(
        request,
        group_id,
        ["tool"],
        lambda group, _, tools: writes.assign(group, tools, actor=actor_of(request)),
        lambda _, what: f"Added {what} to {group_id}.",
    )


@require_POST
@admin_required
def remove(request: HttpRequest, group_id: str) -> HttpResponse:
    return _on_tools(
        request,
        group_id,
        ["remove"],
        lambda group, _, tools: writes.remove(group, tools, actor=actor_of(request)),
        lambda _, what: f"Took {what} out of {group_id}.",
    )


@require_POST
@admin_required
def preload(request: HttpRequest, group_id: str) -> HttpResponse:
    return _on_tools(
        request,
        group_id,
        list(PRELOADS),
        lambda group, word, tools: writes.set_preload(
            group, tools, PRELOADS[word], actor=actor_of(request)
        ),
        lambda word, what: f"{what}: {GIVEN[word]}.",
    )


@require_POST
@admin_required
def order_members(request: HttpRequest, group_id: str) -> HttpResponse:
    steps = {"up": -1, "down": 1}
    return _on_tools(
        request,
        group_id,
        list(steps),
        lambda group, word, tools: writes.shift_member(
            group, tools[0], steps[word], actor=actor_of(request)
        ),
        lambda word, what: f"Moved {what} {word}.",
    )


@require_POST
@admin_required
def order(request: HttpRequest) -> HttpResponse:
    steps = {"up": -1, "down": 1}
    word = next((word for word in steps if word in request.POST), "up")
    moved = request.POST.get(word, "")

    def act() -> Done:
        return writes.shift(writes.find(moved), steps[word], actor=actor_of(request))

    return _act(request, act, f"Moved {moved} {word}.", reverse("groups"))


@require_POST
@admin_required
def delete(request: HttpRequest, group_id: str) -> HttpResponse:
    group = _find(group_id)
    form = DeleteForm(request.POST, name=group.group_id)
    if not form.is_valid():
        return _page(request, group, status=422, delete_error=form.errors["typed_name"][0])
    return _act(
        request,
        lambda: writes.delete(group, actor=actor_of(request)),
        f"Deleted {group_id}.",
        reverse("groups"),
    )


@require_POST
@admin_required
def undo(request: HttpRequest, entry_id: int) -> HttpResponse:
    entry = AuditEntry.objects.filter(pk=entry_id).first()

    def act() -> Done:
        if entry is None:
            raise NotFound("There is no such act to undo.", hint="The audit log has them all.")
        return writes.undo(entry, actor=actor_of(request))

    response = _act(request, act, "Undone.", reverse("groups"))
    group = Group.objects.filter(pk=entry.target_id or 0).first() if entry else None
    # Back to where the act was: moving groups is of the list, all else of the group.
    if group and entry and entry.target_kind == "group" and "groups" not in entry.after:
        return redirect("group", group.group_id)
    return response
