"""Items that need attention on the overview: a message with one action each.

Reads only, in a fixed number of queries. Deliberate states are not listed: replaced keys that are
no longer used, disabled servers and agents.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar
from urllib.parse import urlencode

from django.db.models import Count, F, Max, Q
from django.urls import reverse
from django.utils import timezone

from catalog import cache
from catalog.groups import board
from catalog.groups import health as group_health
from catalog.models import GoldenQuery, Group, Tool, ToolState
from catalog.search import golden_queries
from servers.models import Server, ServerState
from sessions_app.models import Agent, ApiKey, SessionState
from toolcrib.lib.text import plural
from toolcrib.templatetags.toolcrib import duration

T = TypeVar("T")
EXPIRY_WARNING = timedelta(days=7)
MAX_ITEMS_PER_KIND = 5  # the rest is counted in one line


@dataclass(frozen=True)
class AttentionItem:
    message: str
    action: str
    url: str
    glyph: str = "diamond"


def items() -> list[AttentionItem]:
    """Return everything that needs attention, the most urgent kind first."""
    now = timezone.now()
    return [
        *_failing_servers(now),
        *_pending_removals(),
        *_pending_reviews(),
        *_search_regressions(),
        *_session_limits(),
        *_over_budget_groups(),
        *_expiring_keys(now),
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


def _failing_servers(now: datetime) -> list[AttentionItem]:
    return _list(
        Server.objects.filter(state=ServerState.FAILING, enabled=True).order_by("name"),
        lambda server: _failure_message(server, now),
        _server_link,
        lambda more: f"{plural(more, 'more server')} {_are(more)} failing.",
        ("Show failing servers", reverse("servers") + "?state=failing"),
        "triangle",
    )


def _failure_message(server: Server, now: datetime) -> str:
    since = ""
    if server.state_since and (minutes := int((now - server.state_since).total_seconds() // 60)):
        since = f" for {duration(minutes * 60)}"
    retries = f", {plural(server.failures, 'retry', 'retries')}" if server.failures else ""
    return f"{server.name}: failing{since}{retries}. {server.state_reason}".strip()


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
    """Return groups whose preloads alone exceed the board's budget, the costliest first."""
    costs = [(board.definitions_cost(group).preload, group) for group in cache.current().groups]
    over = [pair for pair in costs if pair[0] > board.BUDGET]
    return _list(
        sorted(over, key=lambda pair: (-pair[0], pair[1].group_id)),
        lambda pair: (
            f"{pair[1].display_name} preloads ≈{pair[0]:,} tokens into each session, above the "
            f"budget of {board.BUDGET:,}."
        ),
        lambda pair: _group_link(pair[1].group_id),
        lambda more: f"{plural(more, 'more group')} {_are(more)} above the budget.",
        ("Show groups", reverse("groups")),
        "triangle",
    )


def _expiring_keys(now: datetime) -> list[AttentionItem]:
    """Return keys that expire soon and were not replaced, or are still used."""
    valid = ApiKey.objects.filter(revoked_at=None, agent__enabled=True)
    expiring = valid.filter(expires_at__gt=now, expires_at__lte=now + EXPIRY_WARNING)
    newest_valid = dict(
        valid.filter(Q(expires_at=None) | Q(expires_at__gt=now + EXPIRY_WARNING))
        .order_by()
        .values_list("agent")
        .annotate(Max("created_at"))
    )
    keys = expiring.annotate(agent_name=F("agent__name")).order_by("expires_at")
    return _list(
        [key for key in keys if not _is_replaced(key, newest_valid.get(key.agent_id))],
        lambda key: (
            f"Key {key.name} ({key.prefix}…) of {key.agent_name} expires {_expiry(key, now)}."
        ),
        lambda key: ("Rotate key", reverse("agent-keys", args=[key.agent_name])),
        lambda more: (
            f"{plural(more, 'more key')} {'expires' if more == 1 else 'expire'} within 7 days."
        ),
        ("Show agents", reverse("agents")),
        "clock",
    )


def _is_replaced(key: ApiKey, newer: datetime | None) -> bool:
    if newer is None or newer < key.created_at:
        return False
    return key.last_used_at is None or key.last_used_at < newer


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
