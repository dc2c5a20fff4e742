"""Items that need attention on the overview: a message with one action each.

Reads only, in a fixed number of queries. Deliberate states are not listed: replaced keys that are
no longer used, disabled servers and agents.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar
from urllib.parse import urlencode

from django.db.models import Count, F, Q
from django.urls import reverse
from django.utils import timezone

from catalog import cache
from catalog.groups import board
from catalog.groups import health as group_health
from catalog.models import GoldenQuery, Group, Tool, ToolState
from catalog.search import golden_queries
from servers.models import Server, ServerState
from servers.web import remedies
from sessions_app.agents.api_keys import expiring_keys
from sessions_app.models import Agent, ApiKey, Call, SessionState
from toolcrib.lib.display import group_digits
from toolcrib.lib.roles import Role
from toolcrib.lib.text import plural

T = TypeVar("T")
EXPIRY_WARNING = timedelta(days=7)
MAX_ITEMS_PER_KIND = 5  # the rest is counted in one line


@dataclass(frozen=True)
class AttentionItem:
    message: str
    action: str
    url: str
    glyph: str = "diamond"
    post: bool = False  # the action is a form, not a link
    view: tuple[str, str] | None = None  # label and URL of a link beside the action


def items(role: Role = Role.ADMIN) -> list[AttentionItem]:
    """Return everything that needs attention, the most urgent kind first.

    The actions are those that a person with this role may take.
    """
    now = timezone.now()
    return [
        *_failing_servers(role),
        *_pending_removals(),
        *_held_calls(),
        *_pending_reviews(),
        *_search_regressions(),
        *_session_limits(),
        *_over_budget_groups(),
        *_expiring_keys(now, role),
        *_changed_groups(),
    ]


def _list(
    rows: Iterable[T],
    message: Callable[[T], str],
    link: Callable[[T], tuple[str, str]],
    more: Callable[[int], str],
    more_link: tuple[str, str],
    glyph: str = "diamond",
) -> list[AttentionItem]:
    """List the first few rows with their links (action and URL); count the others in one line."""
    rows = list(rows)
    first = rows[:MAX_ITEMS_PER_KIND]
    items = [AttentionItem(message(row), *link(row), glyph) for row in first]
    if rest := len(rows) - len(first):
        items.append(AttentionItem(more(rest), *more_link, glyph))
    return items


def _server_link(server: Server) -> tuple[str, str]:
    return "View server", reverse("server", args=[server.slug])


def _group_link(group_id: str) -> tuple[str, str]:
    return "View group", reverse("group", args=[group_id])


def _failing_servers(role: Role) -> list[AttentionItem]:
    """Return failing servers with their cause and, for admins, the action that may fix it."""
    failing = list(Server.objects.filter(state=ServerState.FAILING, enabled=True).order_by("name"))
    first = failing[:MAX_ITEMS_PER_KIND]
    found = remedies.find_remedies(first) if role >= Role.ADMIN else {}
    items = []
    for server in first:
        label = remedies.failing_label(server)
        message = f"{server.name}: {label[:1].lower()}{label[1:]}. {server.state_cause}".strip()
        link = _server_link(server)
        remedy = found.get(server.pk)
        if remedy is None:
            items.append(AttentionItem(message, *link, "triangle"))
        else:
            items.append(
                AttentionItem(message, remedy.label, remedy.url, "triangle", remedy.post, link)
            )
    if more := len(failing) - len(first):
        url = reverse("servers") + "?state=failing"
        message = f"{plural(more, 'more server')} {_are(more)} failing."
        items.append(AttentionItem(message, "Show failing servers", url, "triangle"))
    return items


def _pending_removals() -> list[AttentionItem]:
    return _list(
        Server.objects.filter(removals_held=True, enabled=True).order_by("name"),
        lambda server: (
            f"{server.name} no longer lists over half of its tools. They stay available until a "
            "second sync confirms it."
        ),
        _server_link,
        lambda more: f"{plural(more, 'more server')} lost over half of the tools.",
        ("Show servers", reverse("servers")),
    )


def _held_calls() -> list[AttentionItem]:
    held = Call.objects.held().count()
    if not held:
        return []
    message = f"{plural(held, 'call')} {'waits' if held == 1 else 'wait'} for a decision."
    return [AttentionItem(message, "Decide", reverse("held-calls"), "clock")]


def _pending_reviews() -> list[AttentionItem]:
    pending = Tool.objects.filter(state=ToolState.WAITING).count()
    if not pending:
        return []
    message = f"{plural(pending, 'definition')} {_are(pending)} pending review."
    return [AttentionItem(message, "Review changes", reverse("approvals"), "pencil")]


def _search_regressions() -> list[AttentionItem]:
    """Return golden queries whose expected tool ranks lower than before."""
    link = ("View golden queries", reverse("golden"))
    return _list(
        golden_queries.list_regressions(),
        lambda query: f"Search regression: “{query.query}” {_rank_change(query)}.",
        lambda query: link,
        lambda more: f"{plural(more, 'more search regression')}.",
        link,
        "triangle",
    )


def _rank_change(query: GoldenQuery) -> str:
    worst = next(result for result in query.results.all() if result.broke)
    expected = query.right[0] if len(query.right) == 1 else "an expected tool"
    before = f"found {expected} at rank {worst.good_rank}"
    after = f"finds it at rank {worst.rank}" if worst.rank else "no longer finds it"
    return f"{before} and now {after}"


def _session_limits() -> list[AttentionItem]:
    is_open = Q(sessions__state=SessionState.OPEN)
    rows = Agent.objects.filter(enabled=True).annotate(open_count=Count("sessions", filter=is_open))
    return _list(
        rows.filter(open_count__gte=F("max_sessions")),
        lambda agent: (
            f"{agent.name} is at its limit of {plural(agent.max_sessions, 'open session')}: new "
            "sessions may be rejected."
        ),
        lambda agent: (
            "Show sessions",
            f"{reverse('sessions')}?{urlencode({'agent': agent.name, 'state': 'open'})}",
        ),
        lambda more: f"{plural(more, 'more agent')} {_are(more)} at the limit of open sessions.",
        ("Show agents", reverse("agents")),
        "clock",
    )


def _over_budget_groups() -> list[AttentionItem]:
    """Return the groups that cost more than the budget, the costliest first."""
    costs = [(board.group_cost(group), group) for group in cache.current().groups]
    over = [pair for pair in costs if pair[0].over_budget]
    return _list(
        sorted(over, key=lambda pair: (-pair[0].at_start, pair[1].group_id)),
        lambda pair: (
            f"{pair[1].display_name} costs ≈{group_digits(pair[0].at_start)} tokens in each "
            f"session, above the budget of {group_digits(pair[0].budget)}."
        ),
        lambda pair: _group_link(pair[1].group_id),
        lambda more: f"{plural(more, 'more group')} {_are(more)} above the budget.",
        ("Show groups", reverse("groups")),
        "triangle",
    )


def _expiring_keys(now: datetime, role: Role) -> list[AttentionItem]:
    """Return keys that expire soon and were not replaced, or are still used."""
    return _list(
        expiring_keys(now, EXPIRY_WARNING),
        lambda key: f"Key {key.name} ({key.prefix}…) of {key.agent} expires {_expiry(key, now)}.",
        lambda key: (
            "Rotate key" if role >= Role.ADMIN else "View keys",
            reverse("agent-keys", args=[key.agent]),
        ),
        lambda more: (
            f"{plural(more, 'more key')} {'expires' if more == 1 else 'expire'} within 7 days."
        ),
        ("Show agents", reverse("agents")),
        "clock",
    )


def _expiry(key: ApiKey, now: datetime) -> str:
    hours = int((key.expires_at - now).total_seconds() // 3600) if key.expires_at else 0
    if hours < 1:
        return "within an hour"
    days = hours // 24
    return f"in {plural(days, 'day') if days else plural(hours, 'hour')}"


def _changed_groups() -> list[AttentionItem]:
    """Return groups with manually chosen members whose servers now offer other tools."""
    chosen = list(Group.objects.filter(follows=None))
    drifts = group_health.drifts(chosen)
    return _list(
        [group for group in chosen if drifts[group.pk]],
        lambda group: _drift_message(group, drifts[group.pk]),
        lambda group: _group_link(group.group_id),
        lambda more: f"{plural(more, 'more group')} {_are(more)} affected by changed tools.",
        ("Show groups", reverse("groups")),
        "pencil",
    )


def _drift_message(group: Group, drift: group_health.Drift) -> str:
    missing, new = len(drift.missing), len(drift.new)
    added = f"{plural(new, 'new tool')} on its servers"
    if not missing:
        return f"{group.display_name}: {added}."
    message = f"{plural(missing, 'tool')} in “{group.display_name}” {_are(missing)} unavailable"
    return f"{message}; {added}." if new else f"{message}."


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
