"""Command palette: search over pages, actions and names of servers, tools, groups and agents.

Each kind is one query with a limit. Only results that the user's role can open are offered: the
views declare the role they require.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import and_, or_
from typing import Any

from django.db.models import Case, IntegerField, Q, QuerySet, Value, When
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import NoReverseMatch, resolve, reverse
from django.views.decorators.http import require_safe

from catalog.models import Group, Tool, ToolState
from servers.models import Server, ServerState
from sessions_app.models import Agent, AgentSession
from toolcrib.lib import display
from toolcrib.lib.request import is_htmx_fragment, text
from toolcrib.lib.roles import Role, required_role_of, role_of, viewer_required
from toolcrib.pages.navigation import SECTIONS, Entry
from toolcrib.pages.settings_views import SECTIONS as SETTINGS_SECTIONS

MAX_WORDS = 6
MAX_RESULTS_PER_KIND = 6


@dataclass(frozen=True)
class Choice:
    """One result. `posts`: an action, rendered as a form button instead of a link."""

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


PAGES = (
    *chain.from_iterable(SECTIONS.values()),
    Entry("About", "about", "version report health"),
    Entry("People", "people", "users roles invite viewer operator admin"),
    Entry("Your profile", "profile", "time zone number format density shortcuts settings"),
    Entry("Change password", "password", "own account"),
    Entry("Masking", "settings-masking", "redaction secrets patterns settings"),
    Entry("Notifications", "notifications", "alerts webhooks slack e-mail digest receivers"),
    Entry("Prices", "settings-prices", "money cost models currency settings"),
    Entry("Golden queries", "golden", "search regression expected"),
    Entry("Unmet searches", "missed", "not found"),
    Entry("Held calls", "held-calls", "approve deny decide waiting"),
)
# Filtered lists, found by the state that they show.
STATES = (
    Entry("Failing servers", "servers", "broken down unhealthy offline", "", "?state=failing"),
    Entry("Disabled servers", "servers", "stopped off paused", "", "?state=disabled"),
    Entry("Hidden tools", "tools", "held blocked unavailable", "", "?state=held"),
    Entry("Missing tools", "tools", "gone removed deleted", "", "?state=missing"),
    Entry("Rejected tools", "tools", "denied definitions", "", "?state=rejected"),
    Entry("Tools with lint warnings", "tools", "findings suspicious", "", "?findings=1"),
    Entry("Unused tools", "tools", "never called", "", "?unused=1"),
    Entry("Open sessions", "sessions", "running active live", "", "?state=open"),
    Entry("Sessions with errors", "sessions", "failed failing", "", "?errors=1"),
    Entry("Expired sessions", "sessions", "idle ended", "", "?state=expired"),
)
ACTIONS = (
    Entry("Add server", "server-add", "import mcp.json connect new"),
    Entry("Create group", "groups", "make new", fragment="#new-group"),
    Entry("Create agent", "agent-add", "make new key"),
    Entry("Add custom tool", "tool-add", "create new make"),
    Entry("Export mcp.json", "server-export", "download servers"),
    Entry("Export sessions", "sessions-export", "download json lines"),
    Entry("Approve changes", "approvals", "review pending definitions reject"),
    Entry("Create rule", "rule-add", "make new policy hold deny"),
    Entry("Rotate or revoke a key", "agents", "renew replace expire api token credentials"),
    Entry("Decide held calls", "held-calls", "approve deny allow reject waiting"),
    Entry("Try a script", "script-try", "run code python typescript"),
    Entry("Invite a person", "people", "add user viewer operator admin"),
)
THEMES = {"light": "Light theme", "dark": "Dark theme", "auto": "System theme"}
# Actions of admins whose page operators can open too.
ADMIN_ACTIONS = {"groups", "people", "agents"}
OPERATOR_ACTIONS = {"approvals", "held-calls"}
MIN_VERB_LENGTH = 2  # letters of a verb before things are offered with it


@dataclass(frozen=True)
class Verb:
    """An action on a server, an agent or a tool: found by a verb, then words of the name.

    It leads to the page and the place where the action is, unless it can be undone at once.
    """

    verbs: str
    label: str  # with the name
    url: str  # URL name, with the name of the thing as its argument
    role: Role = Role.ADMIN
    fragment: str = ""
    posts: bool = False
    note: str = ""
    enabled: bool | None = None  # only things that are enabled, or only disabled ones


SERVER_VERBS = (
    Verb(
        *("sync refresh update fetch", "Sync {}", "server-sync"),
        posts=True,
        note="fetch its tools now",
        enabled=True,
    ),
    Verb("enable start resume", "Enable {}", "server-enable", posts=True, enabled=False),
    Verb("disable stop pause", "Disable {}", "server", note="on its page", enabled=True),
    Verb(
        *("credentials token secret", "Enter credentials of {}", "server-settings"),
        fragment="#credentials",
    ),
    Verb("edit change configure", "Edit {}", "server-settings"),
    Verb("delete remove", "Delete {}", "server-settings", fragment="#danger-title"),
)
RECONNECT = Verb(
    *("reconnect restart retry reload", "Reconnect {}", "server-sync"),
    posts=True,
    note="connect and fetch its tools",
    enabled=True,
)
AGENT_VERBS = (
    Verb("rotate renew replace", "Rotate a key of {}", "agent-keys"),
    Verb("revoke expire", "Revoke a key of {}", "agent-keys"),
    Verb("connect configure", "Connect {}", "agent-connect", Role.OPERATOR),
    Verb("edit change limit", "Edit {}", "agent-settings"),
    Verb(
        "disable stop pause",
        "Disable {}",
        "agent-settings",
        fragment="#enabled-title",
        enabled=True,
    ),
    Verb(
        "enable start resume",
        "Enable {}",
        "agent-settings",
        fragment="#enabled-title",
        enabled=False,
    ),
    Verb("delete remove", "Delete {}", "agent-settings", fragment="#danger-title"),
)
TOOL_VERBS = (
    Verb("try call run test", "Try {}", "tool-try"),
    Verb("hide hold release show block allow", "Access of {}", "tool", fragment="#access"),
)


@require_safe
@viewer_required
def palette(request: HttpRequest) -> HttpResponse:
    """Return a page, or only the list of results for the dialog."""
    query = text(request.GET, "q")
    sections = search(query, role_of(request.user))
    template = "palette_options" if is_htmx_fragment(request) else "command_palette"
    count = sum(len(section.choices) for section in sections)
    context = {"query": query, "sections": sections, "count": count}
    return render(request, f"toolcrib/pages/{template}.html", context)


def search(query: str, role: Role) -> list[Section]:
    """Return what matches every word, by kind; for an empty query, pages and actions."""
    words = query.lower().split()[:MAX_WORDS]
    pages = (*PAGES, *STATES) if words else PAGES
    sections = [
        Section("Pages", [_choice(entry) for entry in _matching(pages, words, role)]),
        Section("Actions", _actions(words, role)),
    ]
    if words:
        sections += _objects(words)
    return [section for section in sections if section.choices]


def _matching(entries: Iterable[Entry], words: list[str], role: Role) -> list[Entry]:
    matches = [entry for entry in entries if _matches(entry, words) and _is_allowed(entry, role)]
    return sorted(matches, key=lambda entry: not entry.label.lower().startswith(" ".join(words)))


def _matches(entry: Entry, words: list[str]) -> bool:
    text = f"{entry.label} {entry.keywords}".lower()
    return all(word in text for word in words)


def _is_allowed(entry: Entry, role: Role) -> bool:
    try:
        view = resolve(reverse(entry.name)).func
    except NoReverseMatch:
        return False
    return role >= required_role_of(view)


def _choice(entry: Entry) -> Choice:
    keys = f"g {entry.key}" if entry.key else ""
    return Choice(entry.label, reverse(entry.name) + entry.fragment, keys=keys)


def _actions(words: list[str], role: Role) -> list[Choice]:
    is_admin = role == Role.ADMIN
    actions = [
        _choice(entry)
        for entry in _matching(ACTIONS, words, role)
        if is_admin or entry.name not in ADMIN_ACTIONS
        if role >= Role.OPERATOR or entry.name not in OPERATOR_ACTIONS
    ]
    if words:
        actions += _themes(words) + _settings_sections(words, role) + _on_objects(words, role)
    if words and all(word in "sign out log logout" for word in words):
        actions.append(Choice("Sign out", reverse("sign-out"), posts=True))
    return actions


def _on_objects(words: list[str], role: Role) -> list[Choice]:
    """Return the actions of a verb on servers, agents and tools that the other words name."""
    verb, names = words[0], words[1:]
    if len(verb) < MIN_VERB_LENGTH:
        return []
    failing = Server.objects.filter(state=ServerState.FAILING)
    choices = []
    for row, rows, fields in (
        *((row, Server.objects.all(), ("name", "slug")) for row in SERVER_VERBS),
        (RECONNECT, failing, ("name", "slug")),
        *((row, Agent.objects.all(), ("name",)) for row in AGENT_VERBS),
        *(
            (row, Tool.objects.exclude(state=ToolState.MISSING), ("public_name",))
            for row in TOOL_VERBS
        ),
    ):
        if role < row.role or not any(known.startswith(verb) for known in row.verbs.split()):
            continue
        if row in TOOL_VERBS and not names:
            continue  # any of thousands
        if row.enabled is not None:
            rows = rows.filter(enabled=row.enabled)
        for thing in _by_name(rows, *fields, words=names):
            name = getattr(thing, fields[0])
            url = reverse(row.url, args=[getattr(thing, fields[-1])]) + row.fragment
            choices.append(Choice(row.label.format(name), url, row.note, posts=row.posts))
    return choices


def _themes(words: list[str]) -> list[Choice]:
    """Return the themes, each as a form that switches to it."""
    return [
        Choice(label, f"{reverse('theme')}?theme={name}", "theme of this browser", posts=True)
        for name, label in THEMES.items()
        if all(word in f"{label.lower()} appearance mode" for word in words)
    ]


def _settings_sections(words: list[str], role: Role) -> list[Choice]:
    if role < Role.OPERATOR:
        return []
    return [
        Choice(f"Settings: {title}", reverse("settings-section", args=[name]), text)
        for name, (title, text) in SETTINGS_SECTIONS.items()
        if all(word in f"settings {title} {text}".lower() for word in words)
    ]


def _by_name(rows: QuerySet[Any], *fields: str, words: list[str]) -> QuerySet[Any]:
    """Filter rows that contain every word in one of the fields; prefix matches first."""
    each = [reduce(or_, (Q(**{f"{field}__icontains": w}) for field in fields)) for w in words]
    first = [When(**{f"{field}__istartswith": " ".join(words)}, then=Value(0)) for field in fields]
    order = Case(*first, default=Value(1), output_field=IntegerField())
    return rows.filter(reduce(and_, each, Q())).order_by(order, fields[0])[:MAX_RESULTS_PER_KIND]


def _objects(words: list[str]) -> list[Section]:
    servers = [
        Choice(server.name, reverse("server", args=[server.slug]), server.get_state_display())
        for server in _by_name(Server.objects.all(), "name", "slug", words=words)
    ]
    present = Tool.objects.exclude(state=ToolState.MISSING)
    tools = [
        Choice(
            tool.public_name,
            reverse("tool", args=[tool.public_name]),
            "" if tool.state == ToolState.AVAILABLE else tool.get_state_display(),
            mono=True,
        )
        for tool in _by_name(present.only("public_name", "state"), "public_name", words=words)
    ]
    groups = [
        Choice(group.group_id, reverse("group", args=[group.group_id]), group.display_name)
        for group in _by_name(Group.objects.all(), "group_id", "display_name", words=words)
    ]
    agents = [
        Choice(agent.name, reverse("agent", args=[agent.name]), "" if agent.enabled else "Disabled")
        for agent in _by_name(Agent.objects.all(), "name", words=words)
    ]
    return [
        Section("Servers", servers),
        Section("Tools", tools),
        Section("Groups", groups),
        Section("Agents", agents),
        Section("Sessions", _sessions(words)),
    ]


def _sessions(words: list[str]) -> list[Choice]:
    """Return sessions by the start of their id, or the newest of matching agents."""
    rows = AgentSession.objects.select_related("agent").order_by("-id")
    if len(words) == 1 and words[0].startswith("ses_"):
        rows = rows.filter(session_id__startswith=words[0])
    else:
        agents = Agent.objects.filter(reduce(and_, (Q(name__icontains=word) for word in words)))
        keys = list(agents.values_list("pk", flat=True)[:MAX_RESULTS_PER_KIND])
        rows = rows.filter(agent__in=keys)
    return [
        Choice(
            f"{session.session_id[:12]}…",
            reverse("session", args=[session.session_id]),
            f"{session.agent.name}, {display.local(session.created_at):%d %b %H:%M %Z}, "
            f"{session.state}",
            mono=True,
        )
        for session in rows[:MAX_RESULTS_PER_KIND]
    ]
