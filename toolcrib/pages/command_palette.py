"""The command palette: a plain search over pages, verbs and the names of things.

Owns what can be found and how it is ordered. Each kind is one query with a limit, and nothing is
offered that the person's role may not open: the views themselves say what they need.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

from django.db.models import Case, IntegerField, Q, QuerySet, Value, When
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import NoReverseMatch, resolve, reverse
from django.views.decorators.http import require_safe

from catalog.models import Group, Tool, ToolState
from servers.models import Server
from sessions_app.models import Agent, AgentSession
from toolcrib.lib.request import is_htmx_fragment
from toolcrib.lib.roles import Role, operator_required, role_of

LONGEST = 200  # characters of a query
WORDS = 6
EACH = 6  # results of one kind


@dataclass(frozen=True)
class Choice:
    """One line of the palette. `posts`: it acts, so it is a form's button and no link."""

    label: str
    url: str
    note: str = ""
    keys: str = ""
    mono: bool = False
    posts: bool = False


@dataclass(frozen=True)
class Section:
    name: str
    choices: list[Choice]


@dataclass(frozen=True)
class Entry:
    """A page or a verb that is always there: its address by name, and other words for it."""

    label: str
    name: str
    words: str = ""
    keys: str = ""
    part: str = ""


PAGES = (
    Entry("Overview", "overview", "home start attention", "g o"),
    Entry("Servers", "servers", "mcp connections health", "g s"),
    Entry("Tools", "tools", "catalog definitions cost", "g t"),
    Entry("Groups", "groups", "preload budget board", "g g"),
    Entry("Search", "playground", "playground query find", "g p"),
    Entry("Agents", "agents", "keys callers", "g a"),
    Entry("Sessions", "sessions", "runs timeline calls", "g n"),
    Entry("Approvals", "approvals", "waiting held changes decide", "g v"),
    Entry("Usage", "usage", "figures errors latency never called", "g u"),
    Entry("Audit log", "audit", "history who changed", "g l"),
    Entry("Settings", "settings", "people retention budgets sync", "g ,"),
    Entry("About", "about", "version report health"),
    Entry("Patterns", "patterns", "components design"),
)
VERBS = (
    Entry("Add server", "server-add", "import mcp.json connect new"),
    Entry("Make a group", "groups", "create new", part="#new-group"),
    Entry("Make an agent", "agent-add", "create new key"),
    Entry("Add custom tool", "tool-add", "create new make"),
    Entry("Export mcp.json", "server-export", "download servers"),
)
# A verb may open a page that operators read; making things is for admins all the same.
MAKES = {"groups"}


@require_safe
@operator_required
def palette(request: HttpRequest) -> HttpResponse:
    """Answer as a page, or with the list alone where the dialog asks."""
    query = request.GET.get("q", "").replace("\0", "").strip()[:LONGEST]
    sections = find(query, role_of(request.user))
    fragment = is_htmx_fragment(request)
    return render(
        request,
        "toolcrib/pages/palette_options.html"
        if fragment
        else "toolcrib/pages/command_palette.html",
        {
            "query": query,
            "sections": sections,
            "found": sum(len(section.choices) for section in sections),
        },
    )


def find(query: str, role: Role) -> list[Section]:
    """Return what matches every word, by kind; for no words, the pages and the verbs."""
    words = query.lower().split()[:WORDS]
    found = [
        Section("Pages", [_choice(entry) for entry in _matching(PAGES, words, role)]),
        Section("Do", _verbs(words, role)),
    ]
    if words:
        found += [
            Section("Servers", _servers(words)),
            Section("Tools", _tools(words)),
            Section("Groups", _groups(words)),
            Section("Agents", _agents(words)),
            Section("Sessions", _sessions(words)),
        ]
    return [section for section in found if section.choices]


# --- Pages and verbs ----------------------------------------------------------------------------


def _matching(entries: Iterable[Entry], words: list[str], role: Role) -> list[Entry]:
    found = [entry for entry in entries if _says(entry, words) and _allowed(entry, role)]
    return sorted(found, key=lambda entry: not entry.label.lower().startswith(" ".join(words)))


def _says(entry: Entry, words: list[str]) -> bool:
    text = f"{entry.label} {entry.words}".lower()
    return all(word in text for word in words)


def _allowed(entry: Entry, role: Role) -> bool:
    try:
        view = resolve(reverse(entry.name)).func
    except NoReverseMatch:
        return False
    return role >= getattr(view, "needed_role", Role.ADMIN)


def _choice(entry: Entry) -> Choice:
    return Choice(entry.label, reverse(entry.name) + entry.part, keys=entry.keys)


def _verbs(words: list[str], role: Role) -> list[Choice]:
    verbs = [
        entry
        for entry in _matching(VERBS, words, role)
        if role == Role.ADMIN or entry.name not in MAKES
    ]
    return [_choice(entry) for entry in verbs] + (
        _syncs(words[1:]) if role == Role.ADMIN and words and "sync".startswith(words[0]) else []
    )


def _syncs(words: list[str]) -> list[Choice]:
    servers = _named(Server.objects.filter(enabled=True), "name", "slug", words=words)
    return [
        Choice(
            f"Sync {server.name}",
            reverse("server-sync", args=[server.slug]),
            "fetch its tools now",
            posts=True,
        )
        for server in servers
    ]


# --- Things by name -----------------------------------------------------------------------------


def _named(rows: QuerySet[Any], *fields: str, words: list[str]) -> QuerySet[Any]:
    """Keep rows that have every word in one of the fields; names that begin with it first."""
    each = [
        reduce(lambda a, b: a | b, (Q(**{f"{f}__icontains": w}) for f in fields)) for w in words
    ]
    first = [When(**{f"{field}__istartswith": " ".join(words)}, then=Value(0)) for field in fields]
    order = Case(*first, default=Value(1), output_field=IntegerField())
    return rows.filter(reduce(and_, each, Q())).order_by(order, fields[0])[:EACH]


def _servers(words: list[str]) -> list[Choice]:
    return [
        Choice(server.name, reverse("server", args=[server.slug]), server.get_state_display())
        for server in _named(Server.objects.all(), "name", "slug", words=words)
    ]


def _tools(words: list[str]) -> list[Choice]:
    rows = Tool.objects.exclude(state=ToolState.MISSING).only("public_name", "state")
    return [
        Choice(
            tool.public_name,
            reverse("tool", args=[tool.public_name]),
            "" if tool.state == ToolState.AVAILABLE else tool.get_state_display(),
            mono=True,
        )
        for tool in _named(rows, "public_name", words=words)
    ]


def _groups(words: list[str]) -> list[Choice]:
    return [
        Choice(group.group_id, reverse("group", args=[group.group_id]), group.display_name)
        for group in _named(Group.objects.all(), "group_id", "display_name", words=words)
    ]


def _agents(words: list[str]) -> list[Choice]:
    return [
        Choice(agent.name, reverse("agent", args=[agent.name]), "" if agent.enabled else "Disabled")
        for agent in _named(Agent.objects.all(), "name", words=words)
    ]


def _sessions(words: list[str]) -> list[Choice]:
    """Find runs by the start of their id, or the newest of an agent."""
    rows = AgentSession.objects.select_related("agent").order_by("-id")
    text = words[0] if len(words) == 1 else ""
    if text.startswith("ses_"):
        rows = rows.filter(session_id__startswith=text)
    else:
        agents = Agent.objects.filter(reduce(and_, (Q(name__icontains=word) for word in words)))
        rows = rows.filter(agent__in=list(agents.values_list("pk", flat=True)[:EACH]))
    return [
        Choice(
            f"{session.session_id[:12]}…",
            reverse("session", args=[session.session_id]),
            f"{session.agent.name}, {session.created_at:%d %b %H:%M} UTC, {session.state}",
            mono=True,
        )
        for session in rows[:EACH]
    ]
