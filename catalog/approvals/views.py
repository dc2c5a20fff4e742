"""Approvals: what must a person decide? Every decision names the definition that was looked at.

Several may be decided at once, each as if alone: what changed meanwhile is left, and so is what may
delete or overwrite, which is approved one by one.
"""

from collections.abc import Callable, Iterable
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from catalog.approvals import actions as approval_actions
from catalog.approvals import queries as approval_queries
from catalog.models import Tool, ToolState
from catalog.tools.queries import find_tool
from toolcrib.lib.errors import Conflict, Invalid, NotFound, ToolcribError
from toolcrib.lib.pagination import offset_of
from toolcrib.lib.request import is_htmx_fragment
from toolcrib.lib.roles import actor_of, operator_required

ACTS: dict[str, tuple[Callable[..., Tool], str]] = {
    "approve": (approval_actions.approve, "Agents now get the new definition of {}."),
    "keep-old": (approval_actions.keep_old, "Agents keep the older definition of {}."),
    "hold": (approval_actions.hold, "{} is held. Calls to it are stopped."),
}
TOGETHER = {
    "approve": "Approved {}: agents now get the new definitions.",
    "keep-old": "Kept {} as approved: agents keep the older definitions.",
    "hold": "Held {}: calls to them are stopped.",
}


@require_safe
@operator_required
def approval_list(request: HttpRequest) -> HttpResponse:
    server = request.GET.get("server", "").replace("\0", "")
    page = approval_queries.page_of(server, offset=offset_of(request.GET, approval_queries.PAGE))
    context: dict[str, Any] = {
        "page": page,
        "items": approval_queries.pending_reviews(page.rows),
        "shown": page.says("definition"),
        "server": server,
        "servers": approval_queries.servers(),
        "address": request.GET.urlencode(),
        "decisions": approval_queries.last_decisions(),
    }
    context["total"] = sum(count for _, count in context["servers"])
    return render(request, "catalog/approvals/list.html", context)


@require_POST
@operator_required
def decide(request: HttpRequest, public_name: str, act: str) -> HttpResponse:
    if act not in ACTS:
        raise NotFound("There is no such decision.", hint="Approve, keep old, or hold.")
    tool = find_tool(public_name)
    choice, words = ACTS[act]
    seen = request.POST.get("seen", "")
    if not seen:
        raise Conflict(
            "This says not which definition was looked at.", hint="Reload the page and decide."
        )
    try:
        choice(tool, actor=actor_of(request), sha256=seen)
    except Conflict as error:
        return _too_late(request, tool, error)
    if is_htmx_fragment(request):
        return _settled(request, tool)
    messages.success(request, words.format(tool.public_name))
    return _back(request)


@require_POST
@operator_required
def decide_many(request: HttpRequest) -> HttpResponse:
    """Decide about every selected tool: `tool` is the digest that was looked at, and the name."""
    act = request.POST.get("act", "")
    if act not in ACTS:
        raise Invalid("There is no such decision.", hint="Approve, keep old, or hold.")
    picked = [
        text.partition(" ")[::2] for text in request.POST.getlist("tool")[: approval_queries.PAGE]
    ]
    seen = {name: digest for digest, name in picked if digest and name}
    if not seen:
        raise Invalid("No tool is selected.", hint="Go back and select at least one.")
    waiting = Tool.objects.with_definitions().filter(public_name__in=seen)
    done, left = 0, [f"{name} is gone." for name in _gone(seen, waiting)]
    for item in approval_queries.pending_reviews(waiting):
        try:
            _decide_one(request, item, act, seen[item.tool.public_name])
            done += 1
        except ToolcribError as error:
            left.append(error.message)
    if done:
        many = f"{done} tool{'' if done == 1 else 's'}"
        messages.success(request, TOGETHER[act].format(many))
    for sentence in left:
        messages.error(request, f"Left: {sentence}")
    return _back(request)


def _gone(seen: dict[str, str], found: Iterable[Tool]) -> list[str]:
    return sorted(set(seen) - {tool.public_name for tool in found})


def _decide_one(
    request: HttpRequest, item: approval_queries.PendingReview, act: str, digest: str
) -> None:
    name = item.tool.public_name
    if act == "approve" and item.destructive:
        raise Invalid(f"{name} may delete or overwrite. Approve it by itself.")
    if act == "keep-old" and item.is_new:
        raise Invalid(f"{name} is new: there is no older definition to keep.")
    ACTS[act][0](item.tool, actor=actor_of(request), sha256=digest)


def _back(request: HttpRequest) -> HttpResponse:
    # Only the query is taken from the form: the address stays ours.
    query = QueryDict(request.POST.get("address", "")).urlencode()
    return redirect(f"{reverse('approvals')}?{query}" if query else reverse("approvals"))


def _too_late(request: HttpRequest, tool: Tool, error: Conflict) -> HttpResponse:
    """Say who was faster, or show what the definition became meanwhile."""
    if not is_htmx_fragment(request):
        context = {"tool": tool, "error": error, "decision": approval_queries.decision_on(tool)}
        return render(
            request, "catalog/approvals/already_decided.html", context, status=error.status
        )
    tool = Tool.objects.with_definitions().get(pk=tool.pk)
    if tool.state == ToolState.WAITING:
        context = {
            "item": approval_queries.pending_reviews([tool])[0],
            "late": error,
            "address": request.POST.get("address", ""),
        }
        return render(request, "catalog/approvals/_item.html", context)
    return _settled(request, tool, late=True)


def _settled(request: HttpRequest, tool: Tool, *, late: bool = False) -> HttpResponse:
    context = {
        "tool": tool,
        "decision": approval_queries.decision_on(tool),
        "late": late,
        "left": approval_queries.pending_count(),
    }
    return render(request, "catalog/approvals/_settled.html", context)
