"""Agent pages: the list, and one agent's activity, groups, keys, connection snippets and settings.

A key's text is only in the response to the request that created it: it is never put in a
redirect, a session or a message, and browsers must not cache it.
"""

from typing import Any

from django.contrib import messages
from django.forms import model_to_dict
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from catalog.tools.forms import DeleteForm
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys
from sessions_app.agents import queries as agent_queries
from sessions_app.agents.forms import AgentForm, KeyForm, SettingsForm
from sessions_app.agents.queries import find_agent
from sessions_app.models import Agent, ApiKey, KeyScope, UsageKind
from sessions_app.review import queries as review_queries
from sessions_app.review.queries import SessionFilter
from sessions_app.usage import call_stats, panels
from toolcrib.lib.errors import NotFound, ToolcribError
from toolcrib.lib.pagination import Page, offset_of, page_by_offset
from toolcrib.lib.request import errors_in_form, page_tabs, settings_rows, time
from toolcrib.lib.roles import (
    Role,
    actor_of,
    admin_required,
    operator_required,
    role_of,
    role_required,
    viewer_required,
)
from toolcrib.lib.time_ranges import range_context, read_range

TABS = {
    "agent-activity": "Activity",
    "agent": "Groups",
    "agent-keys": "Keys",
    "agent-connect": "Connect",
    "agent-settings": "Settings",
}


def page_context(agent: Agent, tab: str) -> dict[str, Any]:
    counts = {
        "agent": None if agent.all_groups else len(agent.group_links.all()),
        "agent-keys": agent.key_count,  # type: ignore[attr-defined]
    }
    return {"agent": agent, "tabs": page_tabs(TABS, tab, agent.name, counts=counts)}


@require_safe
@viewer_required
def agents(request: HttpRequest) -> HttpResponse:
    rows, total = agent_queries.agents_with_counts(), Agent.objects.count()
    page: Page[Agent] = page_by_offset(rows, offset_of(request.GET), total=total)
    context = {"page": page, "agents": page.rows, "shown": page.describe("agent")}
    context["deleted"] = agent_queries.deleted_agents()
    if not page.total and role_of(request.user) >= Role.ADMIN:
        context["form"] = AgentForm()
    return render(request, "sessions_app/agents/list.html", context)


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@admin_required
def add(request: HttpRequest) -> HttpResponse:
    form = AgentForm(request.POST if request.method == "POST" else None)
    if form.is_bound and form.is_valid():
        try:
            actor = actor_of(request)
            agent, text = agent_actions.create_with_key(**form.cleaned_data, actor=actor)
        except ToolcribError as error:
            form.add_error("name" if error.code != "not_found" else None, error.sentence)
        else:
            return _show_key(request, find_agent(agent.name), text, new=True)
    status = 422 if form.is_bound else 200
    return render(request, "sessions_app/agents/add.html", {"form": form}, status=status)


def _show_key(
    request: HttpRequest, agent: Agent, text: str, *, new: bool = False, old: ApiKey | None = None
) -> HttpResponse:
    """Render a new key once, with snippets that contain it."""
    context = page_context(agent, "agent-keys") | agent_queries.connection_snippets(agent, text)
    context |= {"text": text, "new": new, "old": old}
    return render(request, "sessions_app/agents/key.html", context, status=201)


# --- Activity -----------------------------------------------------------------------------------


@require_safe
@viewer_required
def activity(request: HttpRequest, name: str) -> HttpResponse:
    agent = find_agent(name)
    within, sessions = read_range(request.GET), {"agent": agent.name}
    series, charts = panels.read_panels(within, UsageKind.AGENT, str(agent.pk), sessions=sessions)
    context = page_context(agent, "agent-activity") | range_context(within)
    context |= {
        "figures": panels.list_metrics(series, UsageKind.AGENT, sessions=sessions),
        "series": series,
        "panels": charts,
        "recent_failures": call_stats.recent_failures(agent=agent),
        "sessions": review_queries.list_sessions(SessionFilter(agent=agent.name), size=10).rows,
    }
    return render(request, "sessions_app/agents/activity.html", context)


# --- Groups -------------------------------------------------------------------------------------


@require_safe
@viewer_required
def groups(request: HttpRequest, name: str) -> HttpResponse:
    agent = find_agent(name)
    context = page_context(agent, "agent") | agent_queries.groups_of(agent)
    on = time(request.GET, "on")
    context |= {"on": on, "seen": agent_queries.find_session_at(agent, on) if on else None}
    return render(request, "sessions_app/agents/groups.html", context)


@require_POST
@admin_required
def set_groups(request: HttpRequest, name: str) -> HttpResponse:
    """Apply one action: add, remove, up or down for one group; all or chosen for the list."""
    agent, action = find_agent(name), request.POST.get("act", "")
    group_id = request.POST.get("group", "")
    if action in ("all", "chosen"):
        agent_actions.set_groups(agent, all_groups=action == "all", actor=actor_of(request))
    else:
        agent_actions.apply_group_action(agent, action, group_id, actor=actor_of(request))
    message = {
        "all": f"Granted all current and future groups to {agent.name}.",
        "chosen": f"Removed all groups from {agent.name}. Add the groups it needs.",
        "add": f"Added {group_id} to {agent.name}.",
        "remove": f"Removed {group_id} from {agent.name}.",
    }.get(action)
    if message:
        messages.success(request, message)
    return redirect("agent", agent.name)


# --- Keys and snippets --------------------------------------------------------------------------


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@role_required(Role.OPERATOR, write=Role.ADMIN)
def keys(request: HttpRequest, name: str) -> HttpResponse:
    agent = find_agent(name)
    form = KeyForm(request.POST if request.method == "POST" else None)
    if form.is_bound and form.is_valid():
        label = form.cleaned_data["name"] or agent.name
        with errors_in_form(form, "name"):
            _, text = api_keys.create_key(
                label,
                KeyScope.AGENT,
                agent=agent,
                actor=actor_of(request),
                expires_at=form.expires_at,
            )
            return _show_key(request, find_agent(name), text)
    context = page_context(agent, "agent-keys") | {"keys": agent_queries.keys_of(agent)}
    if role_of(request.user) >= Role.ADMIN:
        context["key_form"] = form
    status = 422 if form.is_bound else 200
    return render(request, "sessions_app/agents/keys.html", context, status=status)


def _find_key(agent: Agent, key_id: int) -> ApiKey:
    key = agent.keys.filter(pk=key_id).first()
    if key is None:
        raise NotFound("Key not found.", hint=f"See the list of {agent.name}'s keys.")
    return key


@never_cache
@require_POST
@admin_required
def rotate(request: HttpRequest, name: str, key_id: int) -> HttpResponse:
    agent = find_agent(name)
    old = _find_key(agent, key_id)
    _, text = api_keys.rotate(old, actor=actor_of(request))
    return _show_key(request, find_agent(name), text, old=old)


@require_POST
@admin_required
def revoke(request: HttpRequest, name: str, key_id: int) -> HttpResponse:
    agent = find_agent(name)
    key = _find_key(agent, key_id)
    api_keys.revoke(key, actor=actor_of(request))
    messages.success(request, f"Revoked {key.prefix}…. Requests with this key are rejected.")
    return redirect("agent-keys", agent.name)


@require_safe
@operator_required
def connect(request: HttpRequest, name: str) -> HttpResponse:
    agent = find_agent(name)
    context = page_context(agent, "agent-connect") | agent_queries.connection_snippets(agent)
    return render(request, "sessions_app/agents/connect.html", context)


# --- Settings and deletion ----------------------------------------------------------------------


@require_http_methods(["GET", "HEAD", "POST"])
@role_required(Role.OPERATOR, write=Role.ADMIN)
def settings(request: HttpRequest, name: str) -> HttpResponse:
    agent = find_agent(name)
    if request.method != "POST":
        return _settings_page(request, agent)
    form = SettingsForm(request.POST)
    if form.is_valid():
        with errors_in_form(form):
            agent = agent_actions.change(agent, actor=actor_of(request), **form.cleaned_data)
            messages.success(request, f"Saved the settings of {agent.name}.")
            return redirect("agent-settings", agent.name)
    return _settings_page(request, agent, form=form)


def _settings_page(request: HttpRequest, agent: Agent, **errors: Any) -> HttpResponse:
    """Render the tab. With `errors`, context that describes a rejected form, the status is 422."""
    form = SettingsForm(initial=model_to_dict(agent, SettingsForm.base_fields))
    context = page_context(agent, "agent-settings") | agent_queries.groups_of(agent)
    context["settings_rows"] = settings_rows(agent, form)
    if role_of(request.user) >= Role.ADMIN:
        context |= {"form": form, "session_count": agent.sessions.count()}
    status = 422 if errors else 200
    return render(request, "sessions_app/agents/settings.html", context | errors, status=status)


@require_POST
@admin_required
def set_enabled(request: HttpRequest, name: str, *, on: bool) -> HttpResponse:
    agent = agent_actions.set_enabled(find_agent(name), on, actor=actor_of(request))
    message = f"Disabled {agent.name}. Its keys are rejected."
    if on:
        message = f"Enabled {agent.name}. Its keys are accepted again."
    messages.success(request, message)
    return redirect("agent-settings", agent.name)


@require_POST
@admin_required
def delete(request: HttpRequest, name: str) -> HttpResponse:
    agent = find_agent(name)
    form = DeleteForm(request.POST, name=agent.name)
    if not form.is_valid():
        return _settings_page(request, agent, delete_error=form.errors["typed_name"][0])
    agent_actions.delete(agent, actor=actor_of(request))
    messages.success(
        request, f"Deleted {agent.name}. Its keys are revoked and its payloads erased."
    )
    return redirect("agents")
