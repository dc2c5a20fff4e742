"""Context processor of the page layout: navigation with counts, user, theme."""

from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.urls import resolve, reverse

from catalog.models import Group, Tool, ToolState
from servers.models import Server, ServerState
from sessions_app.models import Agent, Call
from toolcrib.lib import display
from toolcrib.lib.request import is_htmx_fragment
from toolcrib.lib.roles import Role, required_role_of, role_of


@dataclass(frozen=True)
class Entry:
    """A page or an action: its label, URL name, search keywords and shortcut after g."""

    label: str
    name: str
    keywords: str = ""
    key: str = ""
    fragment: str = ""
    icon: str = ""


SECTIONS = {
    "": (Entry("Overview", "overview", "home start attention", "o", icon="layout-dashboard"),),
    "Build": (
        Entry("Servers", "servers", "mcp connections health", "s", icon="server"),
        Entry("Tools", "tools", "catalog definitions cost", "t", icon="wrench"),
        Entry("Groups", "groups", "preload budget board", "g", icon="layers"),
        Entry("Search", "playground", "playground query find", "p", icon="search"),
    ),
    "Run": (
        Entry("Agents", "agents", "keys callers", "a", icon="bot"),
        Entry("Sessions", "sessions", "runs timeline calls", "n", icon="activity"),
        Entry(
            "Approvals",
            "approvals",
            "waiting pending review held changes decide",
            "v",
            icon="circle-check-big",
        ),
        Entry("Usage", "usage", "statistics errors latency unused", "u", icon="chart-column"),
        Entry("Optimize", "optimize", "preload save tokens recommendations", icon="wand-sparkles"),
    ),
    "Govern": (
        Entry("Rules", "rules", "policy hold deny allow conditions flow", "r", icon="scale"),
        Entry("Audit log", "audit", "history who changed", "l", icon="scroll-text"),
        Entry("Settings", "settings", "people retention budgets sync", ",", icon="settings"),
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
            "level": int(role),
            "is_admin": role == Role.ADMIN,
            "is_operator": role >= Role.OPERATOR,
            "user_label": user.get_username() if user is not None and user.is_authenticated else "",
            "theme": theme if theme in ("light", "dark") else "auto",
            "version": settings.VERSION,
            "zone": display.zone_label(),
            "display": display.read(request.COOKIES),
            "keys_enabled": request.COOKIES.get("keys") != "off",
        }
    }


def _navigation(request: HttpRequest, role: Role) -> list[dict[str, Any]]:
    if role < Role.VIEWER or is_htmx_fragment(request):
        return []
    failing = Server.objects.filter(state=ServerState.FAILING, enabled=True).exists()
    pending = Tool.objects.filter(state=ToolState.WAITING).count()
    pending += Call.objects.held().count()
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
            "items": [
                _item(entry, request.path) | counts.get(entry.name, {})
                for entry in entries
                if role >= required_role_of(resolve(reverse(entry.name)).func)
            ],
        }
        for label, entries in SECTIONS.items()
    ]


def _item(entry: Entry, path: str) -> dict[str, Any]:
    url = reverse(entry.name)
    current = path == url or (url != "/" and path.startswith(url + "/"))
    current = current and not (entry.name == "usage" and path.startswith(reverse("optimize")))
    return {
        "label": entry.label,
        "key": entry.key,
        "icon": entry.icon,
        "url": url,
        "current": current,
    }
