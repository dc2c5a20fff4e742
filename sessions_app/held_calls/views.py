"""Approvals page, tab Calls: calls that wait for a person, with what led to them."""

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST, require_safe

from catalog.approvals import queries as approval_queries
from sessions_app.held_calls import actions, queries
from toolcrib.lib.errors import Invalid, ToolcribError
from toolcrib.lib.json_codec import digest
from toolcrib.lib.request import is_htmx_fragment, page_tabs, redirect_back, text
from toolcrib.lib.roles import actor_of, operator_required
from toolcrib.lib.text import plural

DECISIONS = {
    "allow": "Allowed {}. The agent gets the result.",
    "allow-session": "Allowed {}, and the same tool for the rest of the session.",
    "deny": "Denied {}. The agent gets your words.",
}


@require_safe
@operator_required
def held_calls(request: HttpRequest) -> HttpResponse:
    """List held calls. As a fragment, answer only if the list differs from the one seen."""
    calls = list(queries.held_calls()[: queries.CALLS_PER_PAGE])
    total = len(calls) if len(calls) < queries.CALLS_PER_PAGE else queries.held_count()
    seen = digest(" ".join(call.call_id for call in calls))[:16]
    is_fragment = is_htmx_fragment(request)
    if is_fragment and request.GET.get("seen") == seen:
        return HttpResponse(status=204)
    queries.record_read(calls, actor_of(request))
    pending = approval_queries.pending_count()
    context: dict[str, Any] = {
        "groups": queries.group_identical(calls),
        "total": total,
        "shown": len(calls),
        "seen": seen,
        "waiting": pending + total,
        "tabs": page_tabs(
            {"approvals": "Definitions", "held-calls": "Calls"},
            "held-calls",
            counts={"approvals": pending, "held-calls": total},
        ),
        "decided": queries.decided_calls(),
        "is_fragment": is_fragment,
    }
    template = "_list" if is_fragment else "list"
    return render(request, f"sessions_app/held_calls/{template}.html", context)


@require_POST
@operator_required
def decide(request: HttpRequest) -> HttpResponse:
    """Decide about one call, or about several that are identical."""
    decision = request.POST.get("decision", "")
    if decision not in DECISIONS:
        raise Invalid("Unknown decision.", hint="Allow or deny the call.")
    call_ids = request.POST.getlist("call")[: actions.MAX_BULK]
    if not call_ids:
        raise Invalid("No call is selected.", hint="Go back and select at least one.")
    comment = text(request.POST, "comment", actions.MAX_COMMENT)
    actor, done, last = actor_of(request), 0, ""
    for call_id in call_ids:
        try:
            if decision == "deny":
                call = actions.deny(call_id, actor=actor, comment=comment)
            else:
                grant = actions.GrantTerms() if decision == "allow-session" else None
                call = actions.allow(call_id, actor=actor, comment=comment, grant=grant)
            done, last = done + 1, call.tool_name
        except ToolcribError as error:
            messages.error(request, error.sentence)
    if done:
        what = last if done == 1 else plural(done, "call")
        messages.success(request, DECISIONS[decision].format(what))
    return redirect_back(request, "held-calls")
