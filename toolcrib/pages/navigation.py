"""Context processor of the page layout: navigation with counts, user, theme."""

from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse

from catalog.models import Group, Tool, ToolState
from servers.models import Server, ServerState
from sessions_app.models import Agent
from toolcrib.lib.request import is_htmx_fragment
from toolcrib.lib.roles import Role, role_of


def context(request: HttpRequest) -> dict[str, Any]:
    """Return the `shell` variable that base.html uses."""
    theme = request.COOKIES.get("theme", "auto")
    user = getattr(request, "user", None)
    role = role_of(user) if user is not None else Role.ANONYMOUS
    return {
        "shell": {
            "nav": _navigation(request, role),
            "role": role.label,
            "is_admin": role == Role.ADMIN,
            "user_label": user.get_username() if user is not None and user.is_authenticated else "",
            "theme": theme if theme in ("light", "dark") else "auto",
            "version": settings.VERSION,
            "keys_enabled": request.COOKIES.get("keys") != "off",
        }
    }


def _navigation(request: HttpRequest, role: Role) -> list[dict[str, Any]]:
    fragment = is_htmx_fragment(request)
    if role < Role.OPERATOR or fragment:
        return []
    failing = Server.objects.filter(state=ServerState.FAILING, enabled=True).exists()
    pending = Tool.objects.filter(state=ToolState.WAITING).count()
    sections: list[tuple[str, list[dict[str, Any]]]] = [
        ("", [{"label": "Overview", "name": "overview", "key": "o"}]),
        (
            "Build",
            [
                {
                    "label": "Servers",
                    "name": "servers",
                    "key": "s",
                    "count": Server.objects.count(),
                    "waiting": failing,
                },
                {
                    "label": "Tools",
                    "name": "tools",
                    "key": "t",
                    "count": Tool.objects.exclude(state=ToolState.MISSING).count(),
                },
                {
                    "label": "Groups",
                    "name": "groups",
                    "key": "g",
                    "count": Group.objects.count(),
                },
                {"label": "Search", "name": "playground", "key": "p"},
            ],
        ),
        (
            "Run",
            [
                {
                    "label": "Agents",
                    "name": "agents",
                    "key": "a",
                    "count": Agent.objects.count(),
                },
                {"label": "Sessions", "name": "sessions", "key": "n"},
                {
                    "label": "Approvals",
                    "name": "approvals",
                    "key": "v",
                    "live": "approvals",
                    "count": pending or None,
                    "waiting": pending > 0,
                },
                {"label": "Usage", "name": "usage", "key": "u"},
            ],
        ),
        (
            "Govern",
            [
                {"label": "Audit log", "name": "audit", "key": "l"},
                {"label": "Settings", "name": "settings", "key": ","},
            ],
        ),
    ]
    path = request.path
    navigation = []
    for label, items in sections:
        for item in items:
            item["url"] = reverse(item.pop("name"))
            item["current"] = path == item["url"] or (
                item["url"] != "/" and path.startswith(item["url"] + "/")
            )
        navigation.append({"label": label, "items": items})
    return navigation
