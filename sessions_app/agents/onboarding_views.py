"""The end of the first sixty seconds: from a connected server to an agent's first request.

One step remembers that it comes next, in the browser's session; the rest is read from what is
there, so that every step can be left, reloaded and skipped. A key's text stands in the answer to
the request that made it, and nowhere else.
"""

import json
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
from toolcrib.lib.roles import actor_of, admin_required, operator_required

NEXT = "welcome"  # the key in the browser's session
FIRST = "scout"
LOOKED, DISMISSED = "welcome-group", "welcome-dismissed"  # cookies
YEAR = 31_536_000


# --- From a server to its group -----------------------------------------------------------------


@require_POST
@admin_required
def start(request: HttpRequest) -> HttpResponse:
    """Open the group of a server that was just added; an agent comes next if there is none."""
    if not Agent.objects.exists():
        request.session[NEXT] = "agent"
    return _to_group(request.POST.get("server", ""))


@require_safe
@operator_required
def look(request: HttpRequest) -> HttpResponse:
    return _to_group("")


def _to_group(server: str) -> HttpResponse:
    """Lead to the group that follows this server, else to the first, and note that it was seen."""
    following = Group.objects.exclude(follows=None).order_by("position", "group_id")
    group = following.filter(follows__slug=server.replace("\0", "")).first() or following.first()
    target = reverse("group", args=[group.group_id]) if group else reverse("groups")
    response = HttpResponseRedirect(target)
    _keep(response, LOOKED)
    return response


@require_POST
@operator_required
def skip(request: HttpRequest) -> HttpResponse:
    request.session.pop(NEXT, None)
    return redirect("overview")


@require_POST
@operator_required
def dismiss(request: HttpRequest) -> HttpResponse:
    """Put the checklist away for good, in this browser."""
    request.session.pop(NEXT, None)
    response = redirect("overview")
    _keep(response, DISMISSED)
    return response


def _keep(response: HttpResponse, name: str) -> None:
    secure = settings.SESSION_COOKIE_SECURE
    response.set_cookie(name, "1", max_age=YEAR, samesite="Lax", httponly=True, secure=secure)


# --- The first agent ----------------------------------------------------------------------------


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@admin_required
def agent(request: HttpRequest) -> HttpResponse:
    """Make the first agent and show its key (POST), or go on waiting for it (GET)."""
    found = Agent.objects.filter(name=FIRST).first()
    text = ""
    if request.method == "POST":
        request.session.pop(NEXT, None)
        if found is None:
            found, text = agent_actions.create_with_key(
                FIRST, all_groups=True, mode=Mode.DEFERRED, actor=actor_of(request)
            )
        elif "key" in request.POST:
            text = api_keys.create_key(FIRST, KeyScope.AGENT, agent=found, actor=actor_of(request))[
                1
            ]
    context = {"name": FIRST, "agent": found, "text": text}
    if found is not None:
        context |= _ways(found, text) | _waiting(found)
    status = 201 if text else 200
    return render(request, "sessions_app/agents/onboarding_agent.html", context, status=status)


def _ways(agent: Agent, text: str) -> dict[str, Any]:
    key = text or snippets.NO_KEY
    example = agent_queries.example_of(agent)
    return {
        "first_request": first_request(settings.PUBLIC_URL, key),
        "snippets": snippets.for_agent(settings.PUBLIC_URL, key, example=example),
        "stand_in": example is None,
    }


def first_request(base_url: str, key: str) -> str:
    """One command that opens a session, whose answer holds the catalog."""
    address = shlex.quote(base_url.rstrip("/") + "/api/v1/sessions")
    bearer = shlex.quote(f"Authorization: Bearer {key}")
    return (
        f"curl -sS {address} \\\n  -H {bearer} \\\n  -H 'Content-Type: application/json' -d '{{}}'"
    )


@never_cache
@require_safe
@admin_required
def waiting(request: HttpRequest) -> HttpResponse:
    """The live line: whether the first agent has asked for its catalog."""
    found = Agent.objects.filter(name=FIRST).first()
    if found is None or not request.headers.get("HX-Request"):
        return redirect("welcome-agent")
    context = _waiting(found) | {"agent": found}
    response = render(request, "sessions_app/agents/onboarding_waiting.html", context)
    if context["session"]:
        said = f"{found.name} fetched its catalog."
        response["HX-Trigger"] = json.dumps({"announce": said})
    return response


def _waiting(agent: Agent) -> dict[str, Any]:
    first: AgentSession | None = agent.sessions.order_by("pk").first()
    return {"session": first}
