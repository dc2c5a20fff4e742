"""Onboarding, second part: from a connected server to the first agent's first request.

The browser session stores only that connecting an agent is the next step. All other progress is
derived from the database, so every step can be left, reloaded and skipped. A key's text is only in
the response to the request that created it.
"""

import shlex
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from catalog.models import Group
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys, snippets
from sessions_app.agents import queries as agent_queries
from sessions_app.models import Agent, AgentSession, KeyScope, Mode
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.request import announce
from toolcrib.lib.roles import actor_of, admin_required, operator_required

NEXT_STEP_KEY = "welcome"  # in the browser session
FIRST_AGENT_KEY = "welcome-agent"  # there too: the name that was chosen
FIRST_AGENT_NAME = "scout"
GROUP_VIEWED_COOKIE, DISMISSED_COOKIE = "welcome-group", "welcome-dismissed"
YEAR = 31_536_000  # seconds


@require_POST
@admin_required
def start_onboarding(request: HttpRequest) -> HttpResponse:
    """Redirect to the new server's group. The next step is an agent, unless one exists."""
    if not Agent.objects.exists():
        request.session[NEXT_STEP_KEY] = "agent"
    if "server" in request.POST:
        return _redirect_to_group(request.POST["server"])
    response = redirect("groups")  # of several servers
    _set_cookie(response, GROUP_VIEWED_COOKIE)
    return response


@require_safe
@operator_required
def open_group(request: HttpRequest) -> HttpResponse:
    return _redirect_to_group("")


def _redirect_to_group(server: str) -> HttpResponse:
    """Redirect to the group that mirrors this server, or to the first one, and set the cookie."""
    mirrors = Group.objects.exclude(follows=None).order_by("position", "group_id")
    group = mirrors.filter(follows__slug=server.replace("\0", "")).first() or mirrors.first()
    target = reverse("group", args=[group.group_id]) if group else reverse("groups")
    response = HttpResponseRedirect(target)
    _set_cookie(response, GROUP_VIEWED_COOKIE)
    return response


@require_POST
@operator_required
def skip(request: HttpRequest) -> HttpResponse:
    request.session.pop(NEXT_STEP_KEY, None)
    return redirect("overview")


@require_POST
@operator_required
def dismiss(request: HttpRequest) -> HttpResponse:
    """Hide the checklist permanently in this browser."""
    request.session.pop(NEXT_STEP_KEY, None)
    response = redirect("overview")
    _set_cookie(response, DISMISSED_COOKIE)
    return response


def _set_cookie(response: HttpResponse, name: str) -> None:
    secure = settings.SESSION_COOKIE_SECURE
    response.set_cookie(name, "1", max_age=YEAR, samesite="Lax", httponly=True, secure=secure)


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@admin_required
def connect_agent(request: HttpRequest) -> HttpResponse:
    """Create the first agent and show its key (POST), or wait for its first request (GET)."""
    agent, text, error = _first_agent(request), "", ""
    name = request.POST.get("name", FIRST_AGENT_NAME).strip()
    if request.method == "POST":
        request.session.pop(NEXT_STEP_KEY, None)
        actor = actor_of(request)
        if agent is None:
            try:
                agent, text = agent_actions.create_with_key(
                    name, all_groups=True, mode=Mode.DEFERRED, actor=actor
                )
                request.session[FIRST_AGENT_KEY] = agent.name
            except ToolcribError as failure:
                error = failure.sentence
        elif "key" in request.POST:
            _, text = api_keys.create_key(agent.name, KeyScope.AGENT, agent=agent, actor=actor)
    context: dict[str, Any] = {"name": name, "agent": agent, "text": text, "error": error}
    if agent is not None:
        key = text or snippets.KEY_PLACEHOLDER
        context |= agent_queries.connection_snippets(agent, key) | {
            "first_request": first_request_command(settings.PUBLIC_URL, key),
            "session": _first_session(agent),
        }
    status = 201 if text else 422 if error else 200
    return render(request, "sessions_app/agents/onboarding_agent.html", context, status=status)


def first_request_command(base_url: str, key: str) -> str:
    """Return a curl command that opens a session. The response contains the catalog."""
    address = shlex.quote(base_url.rstrip("/") + "/api/v1/sessions")
    bearer = shlex.quote(f"Authorization: Bearer {key}")
    return (
        f"curl -sS {address} \\\n  -H {bearer} \\\n  -H 'Content-Type: application/json' -d '{{}}'"
    )


@never_cache
@require_safe
@admin_required
def first_request_status(request: HttpRequest) -> HttpResponse:
    """Render the polled fragment: whether the first agent has fetched its catalog."""
    agent = _first_agent(request)
    if agent is None or not request.headers.get("HX-Request"):
        return redirect("welcome-agent")
    context = {"agent": agent, "session": _first_session(agent)}
    response = render(request, "sessions_app/agents/onboarding_waiting.html", context)
    if context["session"]:
        announce(response, f"{agent.name} fetched its catalog.")
    return response


def _first_agent(request: HttpRequest) -> Agent | None:
    """Return the agent that this browser created here, or one of the default name."""
    name = request.session.get(FIRST_AGENT_KEY, FIRST_AGENT_NAME)
    return Agent.objects.filter(name=name).first()


def _first_session(agent: Agent) -> AgentSession | None:
    return agent.sessions.order_by("pk").first()
