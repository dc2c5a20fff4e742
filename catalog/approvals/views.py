"""Approvals page: single and bulk decisions on the definitions that the reviewer saw."""

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST, require_safe

from catalog.approvals import actions as approval_actions
from catalog.approvals import queries as approval_queries
from catalog.models import Tool, ToolState
from catalog.tools.queries import find_tool
from sessions_app.models import Call
from toolcrib.lib.errors import Conflict, Invalid, NotFound, ToolcribError
from toolcrib.lib.pagination import offset_of
from toolcrib.lib.request import errors_as_messages, is_htmx_fragment, page_tabs, redirect_back
from toolcrib.lib.roles import actor_of, operator_required, viewer_required
from toolcrib.lib.text import plural

ACTS: dict[str, tuple[Callable[..., Tool], str]] = {
    "approve": (approval_actions.approve, "Approved {}. Agents now get the new definition."),
    "keep-old": (
        approval_actions.keep_old,
        "Rejected the change of {}. Agents keep the approved definition.",
    ),
    "hold": (approval_actions.hold, "{} is hidden. Agents cannot find or call it."),
}
BULK_MESSAGES = {
    "approve": "Approved {}. Agents now get the new definitions.",
    "keep-old": "Rejected the changes of {}. Agents keep the approved definitions.",
    "hold": "Hid {}. Agents cannot find or call them.",
}
DECISIONS_HINT = "Approve, reject the change, or hide the tool."


@require_safe
@viewer_required
def approval_list(request: HttpRequest) -> HttpResponse:
    server = request.GET.get("server", "").replace("\0", "")
    offset = offset_of(request.GET, approval_queries.REVIEWS_PER_PAGE)
    page = approval_queries.list_pending(server, offset=offset)
    context: dict[str, Any] = {
        "page": page,
        "items": approval_queries.pending_reviews(page.rows),
        "shown": page.describe("definition"),
        "server": server,
        "servers": approval_queries.servers_with_pending(),
        "address": request.GET.urlencode(),
        "decisions": approval_queries.recent_decisions(),
        "undoable": approval_queries.undoable_names(),
    }
    held = Call.objects.held().count()
    total = sum(count for _, count in context["servers"])
    context["tabs"] = page_tabs(
        {"approvals": "Definitions", "held-calls": "Calls"},
        "approvals",
        counts={"approvals": total, "held-calls": held},
    )
    context |= {"total": total, "live": "approvals catalog"}
    return render(request, "catalog/approvals/list.html", context)


@require_POST
@operator_required
def decide(request: HttpRequest, public_name: str, act: str) -> HttpResponse:
    if act not in ACTS:
        raise NotFound("Unknown decision.", hint=DECISIONS_HINT)
    tool = find_tool(public_name)
    decide_on, message = ACTS[act]
    digest = request.POST.get("seen", "")
    if not digest:
        raise Conflict(
            "The digest of the reviewed definition is missing.",
            hint="Reload the page and try again.",
        )
    try:
        decide_on(tool, actor=actor_of(request), sha256=digest)
    except Conflict as error:
        return _conflict(request, tool, error)
    if is_htmx_fragment(request):
        return _decided(request, tool)
    messages.success(request, message.format(tool.public_name))
    return redirect_back(request, "approvals")


@require_POST
@operator_required
def undo(request: HttpRequest, public_name: str) -> HttpResponse:
    """Withdraw an approval under which no call was made yet."""
    tool = find_tool(public_name)
    with errors_as_messages(request):
        approval_actions.undo_approval(tool, actor=actor_of(request))
        messages.success(request, f"{tool.public_name} is pending review again.")
    return redirect_back(request, "approvals")


@require_POST
@operator_required
def decide_many(request: HttpRequest) -> HttpResponse:
    """Decide on all selected tools; each `tool` field has the digest seen and the name."""
    act = request.POST.get("act", "")
    if act not in ACTS:
        raise Invalid("Unknown decision.", hint=DECISIONS_HINT)
    selected = request.POST.getlist("tool")[: approval_queries.REVIEWS_PER_PAGE]
    pairs = [value.partition(" ")[::2] for value in selected]
    digests = {name: digest for digest, name in pairs if digest and name}
    if not digests:
        raise Invalid("No tool is selected.", hint="Go back and select at least one.")
    tools = Tool.objects.with_definitions().filter(public_name__in=digests)
    missing = sorted(digests.keys() - {tool.public_name for tool in tools})
    done, skipped = 0, [f"{name} no longer exists." for name in missing]
    for item in approval_queries.pending_reviews(tools):
        try:
            _decide_one(request, item, act, digests[item.tool.public_name])
            done += 1
        except ToolcribError as error:
            skipped.append(error.message)
    if done:
        messages.success(request, BULK_MESSAGES[act].format(plural(done, "tool")))
    for reason in skipped:
        messages.error(request, f"Skipped: {reason}")
    return redirect_back(request, "approvals")


def _decide_one(
    request: HttpRequest, item: approval_queries.PendingReview, act: str, digest: str
) -> None:
    name = item.tool.public_name
    if act == "approve" and item.destructive:
        raise Invalid(f"{name} is annotated as destructive. Approve it separately.")
    if act == "keep-old" and item.is_new:
        raise Invalid(f"{name} is new: there is no approved definition to keep.")
    ACTS[act][0](item.tool, actor=actor_of(request), sha256=digest)


def _conflict(request: HttpRequest, tool: Tool, error: Conflict) -> HttpResponse:
    """Show the decision made by someone else, or the definition that is now the latest."""
    if not is_htmx_fragment(request):
        context = {"tool": tool, "error": error, "decision": approval_queries.last_decision(tool)}
        template = "catalog/approvals/already_decided.html"
        return render(request, template, context, status=error.status)
    tool = Tool.objects.with_definitions().get(pk=tool.pk)
    if tool.state == ToolState.WAITING:
        context = {
            "item": approval_queries.pending_reviews([tool])[0],
            "conflict": error,
            "address": request.POST.get("address", ""),
        }
        return render(request, "catalog/approvals/_item.html", context)
    return _decided(request, tool, conflict=True)


def _decided(request: HttpRequest, tool: Tool, *, conflict: bool = False) -> HttpResponse:
    context = {
        "tool": tool,
        "decision": approval_queries.last_decision(tool),
        "can_undo": not conflict and approval_actions.find_undoable(tool) is not None,
        "conflict": conflict,
        "remaining": approval_queries.pending_count(),
        "held": Call.objects.held().count(),
    }
    return render(request, "catalog/approvals/_settled.html", context)
