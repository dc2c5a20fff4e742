"""Optimize page: apply simulated preload changes in one action, build a group from real calls."""

from collections import defaultdict

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from catalog.groups import actions as group_writes
from catalog.groups import undo as group_undo
from sessions_app.models import Agent
from sessions_app.usage import optimize
from sessions_app.usage.filters import MAX_CHOICES
from toolcrib.lib.errors import Invalid, NotFound
from toolcrib.lib.request import errors_as_messages, text
from toolcrib.lib.roles import actor_of, admin_required, viewer_required
from toolcrib.lib.text import plural


@require_safe
@viewer_required
def page(request: HttpRequest) -> HttpResponse:
    context = {
        "simulation": optimize.simulate(),
        "days": optimize.DAYS,
        "min_sessions": optimize.MIN_SESSIONS,
        "agents": list(Agent.objects.values_list("name", flat=True)[:MAX_CHOICES]),
        "offer": request.session.pop(group_undo.UNDO_OFFER_KEY, None),
        "undo_next": request.path,
    }
    return render(request, "sessions_app/usage/optimize.html", context)


@require_POST
@admin_required
def apply(request: HttpRequest) -> HttpResponse:
    """Apply the chosen rows that are still recommended, as one action with one undo."""
    chosen = set(request.POST.getlist("row"))
    rows = [row for row in optimize.simulate().rows if row.key in chosen]
    names: defaultdict[tuple[str, bool], list[str]] = defaultdict(list)
    for row in rows:
        names[row.group_id, row.preload].append(row.tool)
    with errors_as_messages(request):
        if not rows:
            raise Invalid("Nothing to apply.", hint="Select at least one recommended change.")
        with transaction.atomic():
            writes = [
                group_writes.set_preload(
                    group_writes.find_group(group_id),
                    group_writes.find_tools(tools),
                    preload,
                    actor=actor_of(request),
                )
                for (group_id, preload), tools in names.items()
            ]
        sentence = f"{plural(len(rows), 'change')} applied to new sessions."
        group_undo.offer_undo(request, sentence, *writes)
    return redirect("optimize")


@require_POST
@admin_required
def build_group(request: HttpRequest) -> HttpResponse:
    """Create a group with the tools that an agent called in the last 30 days."""
    actor = actor_of(request)
    with errors_as_messages(request):
        agent = Agent.objects.filter(name=text(request.POST, "agent")).first()
        if agent is None:
            raise NotFound("Agent not found.", hint="Choose one of the list.")
        names = optimize.tools_called_by(agent)
        if not names:
            raise Invalid(
                f"{agent.name} called no tool in the last {optimize.DAYS} days.",
                hint="Choose another agent.",
            )
        group_id = text(request.POST, "group_id")
        with transaction.atomic():
            created = group_writes.create(
                group_id,
                text(request.POST, "display_name") or group_id,
                f"Tools that {agent.name} called.",
                actor=actor,
            )
            tools = group_writes.find_tools(names)
            filled = group_writes.assign(created.group, tools, actor=actor)
        sentence = f"Created {group_id} with {plural(len(names), 'tool')}."
        group_undo.offer_undo(request, sentence, created, filled)
        return redirect("group", group_id)
    return redirect("optimize")
