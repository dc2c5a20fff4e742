"""Context processor of the page layout: navigation with counts, user, theme."""

from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse

from catalog.models import Group, Tool, ToolState
from servers.models import Server, ServerState
from sessions_app.models import Agent
from toolcrib.lib.request import is_htmx_fragment
from toolcrib.lib.roles import Role, role_of


@dataclass(frozen=True)
class Entry:
    """A page or an action: its label, URL name, search keywords and shortcut after g."""

    label: str
    name: str
    keywords: str = ""
    key: str = ""
    fragment: str = ""


SECTIONS = {
    "": (Entry("Overview", "overview", "home start attention", "o"),),
    "Build": (
        Entry("Servers", "servers", "mcp connections health", "s"),
        Entry("Tools", "tools", "catalog definitions cost", "t"),
        Entry("Groups", "groups", "preload budget board", "g"),
        Entry("Search", "playground", "playground query find", "p"),
    ),
    "Run": (
        Entry("Agents", "agents", "keys callers", "a"),
        Entry("Sessions", "sessions", "runs timeline calls", "n"),
        Entry("Approvals", "approvals", "waiting pending review held changes decide", "v"),
        Entry("Usage", "usage", "statistics errors latency unused", "u"),
    ),
    "Govern": (
        Entry("Audit log", "audit", "history who changed", "l"),
        Entry("Settings", "settings", "people retention budgets sync", ","),
    ),
}


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
    if role < Role.OPERATOR or is_htmx_fragment(request):
        return []
    failing = Server.objects.filter(state=ServerState.FAILING, enabled=True).exists()
    pending = Tool.objects.filter(state=ToolState.WAITING).count()
    counts: dict[str, dict[str, Any]] = {
        "servers": {"count": Server.objects.count(), "waiting": failing},
        "tools": {"count": Tool.objects.exclude(state=ToolState.MISSING).count()},
        "groups": {"count": Group.objects.count()},
        "agents": {"count": Agent.objects.count()},
        "approvals": {"count": pending or None, "waiting": pending > 0, "live": "approvals"},
    }
    return [
        {
            "label": label,
            "items": [_item(entry, request.path) | counts.get(entry.name, {}) for entry in entries],
        }
        for label, entries in SECTIONS.items()
    ]


def _item(entry: Entry, path: str) -> dict[str, Any]:
    url = reverse(entry.name)
    current = path == url or (url != "/" and path.startswith(url + "/"))
    return {"label": entry.label, "key": entry.key, "url": url, "current": current}
