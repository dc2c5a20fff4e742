"""Pages of agents: the list, and one agent's groups, keys, snippets and settings.

A key's text stands in the answer to the request that made it, and nowhere else: no redirect, no
session, no message, and no copy kept by a browser.
"""

from typing import Any

from django.conf import settings as installation
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from catalog.tools.forms import DeleteForm
from sessions_app.agents import actions as writes
from sessions_app.agents import api_keys as key_writes
from sessions_app.agents import queries as shown
from sessions_app.agents import snippets
from sessions_app.agents.forms import AgentForm, KeyForm, SettingsForm
from sessions_app.models import Agent, ApiKey, KeyScope
from toolcrib.lib.errors import NotFound, ToolcribError
from toolcrib.lib.pagination import offset_of
from toolcrib.lib.roles import Role, actor_of, admin_required, operator_required, require, role_of

TABS = {
    "agent": "Groups",
    "agent-keys": "Keys",
    "agent-connect": "Connect",
    "agent-settings": "Settings",
}


def find(name: str) -> Agent:
    agent = shown.rows().filter(name=name).first() if name.isprintable() else None
    if agent is None:
        raise NotFound("There is no agent of this name.", hint="Look in the list of agents.")
    return agent


def page_context(agent: Agent, tab: str) -> dict[str, Any]:
    counts = {
        "agent": None if agent.all_groups else len(agent.group_links.all()),
        "agent-keys": agent.key_count,  # type: ignore[attr-defined]
    }
    return {
        "agent": agent,
        "tabs": [
            {
                "label": label,
                "url": reverse(name, args=[agent.name]),
                "current": name == tab,
                "count": counts.get(name),
            }
            for name, label in TABS.items()
        ],
    }


# --- The list, and a new one --------------------------------------------------------------------


@require_safe
@operator_required
def agents(request: HttpRequest) -> HttpResponse:
    page = shown.page(offset_of(request.GET))
    context = {"page": page, "agents": page.rows, "shown": page.says("agent")}
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
            agent, text = writes.create_with_key(
                form.cleaned_data["name"], **form.wanted, actor=actor_of(request)
            )
        except ToolcribError as error:
            form.add_error("name" if error.code != "not_found" else None, error.sentence)
        else:
            return _show_key(request, find(agent.name), text, new=True)
    return render(
        request,
        "sessions_app/agents/add.html",
        {"form": form},
        status=422 if form.is_bound else 200,
    )


def _show_key(
    request: HttpRequest, agent: Agent, text: str, *, new: bool = False, old: ApiKey | None = None
) -> HttpResponse:
    """Show a key this once, with snippets that hold it."""
    context = page_context(agent, "agent-keys") | _ways(agent, text)
    context |= {"text": text, "new": new, "old": old}
    return render(request, "sessions_app/agents/key.html", context, status=201)


def _ways(agent: Agent, text: str = snippets.NO_KEY) -> dict[str, Any]:
    """Return the snippets to connect with, and whether the tool in them only stands for one."""
    example = shown.example_of(agent)
    ways = snippets.for_agent(installation.PUBLIC_URL, text, example=example)
    return {"snippets": ways, "stand_in": example is None}


# --- Groups -------------------------------------------------------------------------------------


@require_safe
@operator_required
def groups(request: HttpRequest, name: str) -> HttpResponse:
    agent = find(name)
    context = page_context(agent, "agent") | shown.groups_of(agent)
    return render(request, "sessions_app/agents/groups.html", context)


@require_POST
@admin_required
def set_groups(request: HttpRequest, name: str) -> HttpResponse:
    """Do one thing to the groups: add, remove, up or down with a group; or all, or chosen."""
    agent, act = find(name), request.POST.get("act", "")
    group_id = request.POST.get("group", "")
    if act in ("all", "chosen"):
        writes.set_groups(agent, all_groups=act == "all", actor=actor_of(request))
        said = "all groups, and those to come" if act == "all" else "no groups until you add some"
        messages.success(request, f"{agent.name} has {said}.")
    else:
        writes.reorder_groups(agent, act, group_id, actor=actor_of(request))
        done = {"add": "now has", "remove": "no longer has"}.get(act)
        if done:
            messages.success(request, f"{agent.name} {done} {group_id}.")
    return redirect("agent", agent.name)


# --- Keys and snippets --------------------------------------------------------------------------


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@operator_required
def keys(request: HttpRequest, name: str) -> HttpResponse:
    agent = find(name)
    form = KeyForm(request.POST if request.method == "POST" else None)
    if form.is_bound:
        require(Role.ADMIN, request.user)
        if form.is_valid():
            label = form.cleaned_data["name"] or agent.name
            try:
                _, text = key_writes.create_key(
                    label,
                    KeyScope.AGENT,
                    agent=agent,
                    actor=actor_of(request),
                    expires_at=form.expires_at,
                )
            except ToolcribError as error:
                form.add_error("name", error.sentence)
            else:
                return _show_key(request, find(name), text)
    context = page_context(agent, "agent-keys") | {"keys": shown.keys_of(agent)}
    if role_of(request.user) >= Role.ADMIN:
        context["key_form"] = form
    status = 422 if form.is_bound else 200
    return render(request, "sessions_app/agents/keys.html", context, status=status)


def _key_of(agent: Agent, key_id: int) -> ApiKey:
    key = agent.keys.filter(pk=key_id).first()
    if key is None:
        raise NotFound(f"{agent.name} has no such key.", hint="Look at the list of its keys.")
    return key


@never_cache
@require_POST
@admin_required
def rotate(request: HttpRequest, name: str, key_id: int) -> HttpResponse:
    agent = find(name)
    old = _key_of(agent, key_id)
    _, text = key_writes.rotate(old, actor=actor_of(request))
    return _show_key(request, find(name), text, old=old)


@require_POST
@admin_required
def revoke(request: HttpRequest, name: str, key_id: int) -> HttpResponse:
    agent = find(name)
    key = _key_of(agent, key_id)
    key_writes.revoke(key, actor=actor_of(request))
    messages.success(request, f"{key.prefix}… is revoked. Requests with it are refused.")
    return redirect("agent-keys", agent.name)


@require_safe
@operator_required
def connect(request: HttpRequest, name: str) -> HttpResponse:
    agent = find(name)
    context = page_context(agent, "agent-connect") | _ways(agent)
    return render(request, "sessions_app/agents/connect.html", context)


# --- Settings, and the end ----------------------------------------------------------------------


@require_http_methods(["GET", "HEAD", "POST"])
@operator_required
def settings(request: HttpRequest, name: str) -> HttpResponse:
    agent = find(name)
    if request.method != "POST":
        return _settings_page(request, agent)
    require(Role.ADMIN, request.user)
    form = SettingsForm(request.POST)
    if form.is_valid():
        try:
            agent = writes.change(agent, actor=actor_of(request), **form.cleaned_data)
        except ToolcribError as error:
            form.add_error(None, error.sentence)
        else:
            messages.success(request, f"The settings of {agent.name} are saved.")
            return redirect("agent-settings", agent.name)
    return _settings_page(request, agent, form=form)


def _settings_page(request: HttpRequest, agent: Agent, **changed: Any) -> HttpResponse:
    """Draw the tab; `changed` holds what was refused, which makes the answer a 422."""
    form = SettingsForm.of(agent)
    context = page_context(agent, "agent-settings")
    context |= shown.groups_of(agent) | {"settings_rows": shown.settings_rows(agent, form)}
    if role_of(request.user) >= Role.ADMIN:
        context |= {"form": form, "session_count": agent.sessions.count()}
    status = 422 if changed else 200
    return render(request, "sessions_app/agents/settings.html", context | changed, status=status)


@require_POST
@admin_required
def enable(request: HttpRequest, name: str) -> HttpResponse:
    agent = writes.enable(find(name), actor=actor_of(request))
    messages.success(request, f"{agent.name} is enabled. Its keys work again.")
    return redirect("agent-settings", agent.name)


@require_POST
@admin_required
def disable(request: HttpRequest, name: str) -> HttpResponse:
    agent = writes.disable(find(name), actor=actor_of(request))
    messages.success(request, f"{agent.name} is disabled. Its keys are refused.")
    return redirect("agent-settings", agent.name)


@require_POST
@admin_required
def delete(request: HttpRequest, name: str) -> HttpResponse:
    agent = find(name)
    form = DeleteForm(request.POST, name=agent.name)
    if not form.is_valid():
        return _settings_page(request, agent, delete_error=form.errors["typed_name"][0])
    writes.delete(agent, actor=actor_of(request))
    messages.success(request, f"{agent.name} is deleted, with its keys and sessions.")
    return redirect("agents")
