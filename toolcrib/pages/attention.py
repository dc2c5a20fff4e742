"""Items that need attention on the overview: a message with one action each.

Reads only, in a fixed number of queries. Deliberate states are not listed: replaced keys that are
no longer used, disabled servers and agents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
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

EXPIRY_WARNING = timedelta(days=7)
MAX_ITEMS_PER_KIND = 5  # the rest is counted in one line


@dataclass(frozen=True)
class AttentionItem:
    """A message with one action."""

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


def _limit(
    rows: Sequence[Any], item: Callable[[Any], AttentionItem], rest: Callable[[int], AttentionItem]
) -> Any:
    """List the first few and count the others in one line."""
    listed = [item(row) for row in rows[:MAX_ITEMS_PER_KIND]]
    more = len(rows) - MAX_ITEMS_PER_KIND
    return [*listed, rest(more)] if more > 0 else listed


def _failing_servers(now: datetime) -> list[AttentionItem]:
    items: list[AttentionItem] = _limit(
        list(Server.objects.filter(state=ServerState.FAILING, enabled=True).order_by("name")),
        lambda server: AttentionItem(
            _failure_message(server, now),
            "View server",
            reverse("server", args=[server.slug]),
            "triangle",
        ),
        lambda more: AttentionItem(
            f"{plural(more, 'more server')} {_are(more)} failing.",
            "Show failing servers",
            reverse("servers") + "?state=failing",
            "triangle",
        ),
    )
    return items


def _failure_message(server: Server, now: datetime) -> str:
    since = ""
    if server.state_since and (minutes := int((now - server.state_since).total_seconds() // 60)):
        since = f" for {duration(minutes * 60)}"
    retries = f", {plural(server.failures, 'retry', 'retries')}" if server.failures else ""
    return f"{server.name}: failing{since}{retries}. {server.state_reason}".strip()


def _pending_removals() -> list[AttentionItem]:
    items: list[AttentionItem] = _limit(
        list(Server.objects.filter(removals_held=True, enabled=True).order_by("name")),
        lambda server: AttentionItem(
            f"{server.name} no longer lists over half of its tools. They stay available until a "
            "second sync confirms it.",
            "View server",
            reverse("server", args=[server.slug]),
        ),
        lambda more: AttentionItem(
            f"{plural(more, 'more server')} lost over half of the tools.",
            "Show servers",
            reverse("servers"),
        ),
    )
    return items


def _pending_reviews() -> list[AttentionItem]:
    pending = Tool.objects.filter(state=ToolState.WAITING).count()
    if not pending:
        return []
    message = f"{plural(pending, 'definition')} {_are(pending)} pending review."
    return [AttentionItem(message, "Review changes", reverse("approvals"), "pencil")]


def _search_regressions() -> list[AttentionItem]:
    """Return golden queries whose expected tool ranks lower than before."""
    items: list[AttentionItem] = _limit(
        golden_queries.list_regressions(),
        lambda query: AttentionItem(
            f"Search regression: “{query.query}” {_rank_change(query)}.",
            "View golden queries",
            reverse("golden"),
            "triangle",
        ),
        lambda more: AttentionItem(
            f"{plural(more, 'more search regression')}.",
            "View golden queries",
            reverse("golden"),
            "triangle",
        ),
    )
    return items


def _rank_change(query: GoldenQuery) -> str:
    worst = next(result for result in query.results.all() if result.broke)
    expected = query.right[0] if len(query.right) == 1 else "an expected tool"
    before = f"found {expected} at rank {worst.good_rank}"
    after = f"finds it at rank {worst.rank}" if worst.rank else "no longer finds it"
    return f"{before} and now {after}"


def _session_limits() -> list[AttentionItem]:
    is_open = Q(sessions__state=SessionState.OPEN)
    rows = Agent.objects.filter(enabled=True).annotate(open_count=Count("sessions", filter=is_open))
    items: list[AttentionItem] = _limit(
        list(rows.filter(open_count__gte=F("max_sessions"))),
        lambda agent: AttentionItem(
            f"{agent.name} is at its limit of {plural(agent.max_sessions, 'open session')}: new "
            "sessions may be rejected.",
            "Show sessions",
            f"{reverse('sessions')}?{urlencode({'agent': agent.name, 'state': 'open'})}",
            "clock",
        ),
        lambda more: AttentionItem(
            f"{plural(more, 'more agent')} {_are(more)} at the limit of open sessions.",
            "Show agents",
            reverse("agents"),
            "clock",
        ),
    )
    return items


def _over_budget_groups() -> list[AttentionItem]:
    """Return groups whose preloads alone exceed the board's budget, the costliest first."""
    costs = [(board.definitions_cost(group).preload, group) for group in cache.current().groups]
    over = [pair for pair in costs if pair[0] > board.BUDGET]
    items: list[AttentionItem] = _limit(
        sorted(over, key=lambda pair: (-pair[0], pair[1].group_id)),
        lambda pair: AttentionItem(
            f"{pair[1].display_name} preloads ≈{pair[0]:,} tokens into each session, above the "
            f"budget of {board.BUDGET:,}.",
            "View group",
            reverse("group", args=[pair[1].group_id]),
            "triangle",
        ),
        lambda more: AttentionItem(
            f"{plural(more, 'more group')} {_are(more)} above the budget.",
            "Show groups",
            reverse("groups"),
            "triangle",
        ),
    )
    return items


def _expiring_keys(now: datetime) -> list[AttentionItem]:
    """Return keys that expire soon and were not replaced, or are still used."""
    valid = ApiKey.objects.filter(revoked_at=None, agent__enabled=True).select_related("agent")
    expiring = valid.filter(expires_at__gt=now, expires_at__lte=now + EXPIRY_WARNING)
    newest_valid = dict(
        valid.filter(Q(expires_at=None) | Q(expires_at__gt=now + EXPIRY_WARNING))
        .order_by()
        .values_list("agent")
        .annotate(Max("created_at"))
    )
    items: list[AttentionItem] = _limit(
        [
            key
            for key in expiring.order_by("expires_at")
            if not _is_replaced(key, newest_valid.get(key.agent_id))
        ],
        lambda key: AttentionItem(
            f"Key {key.name} ({key.prefix}…) of {key.agent.name} expires {_expiry(key, now)}.",
            "Rotate key",
            reverse("agent-keys", args=[key.agent.name]),
            "clock",
        ),
        lambda more: AttentionItem(
            f"{plural(more, 'more key')} {'expires' if more == 1 else 'expire'} within 7 days.",
            "Show agents",
            reverse("agents"),
            "clock",
        ),
    )
    return items


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
    items: list[AttentionItem] = _limit(
        [(group, drifts[group.pk]) for group in chosen if drifts[group.pk]],
        lambda row: AttentionItem(
            _drift_message(row[0], row[1]),
            "View group",
            reverse("group", args=[row[0].group_id]),
            "pencil",
        ),
        lambda more: AttentionItem(
            f"{plural(more, 'more group')} {_are(more)} affected by changed tools.",
            "Show groups",
            reverse("groups"),
            "pencil",
        ),
    )
    return items


def _drift_message(group: Group, drift: group_health.Drift) -> str:
    missing, new = len(drift.missing), len(drift.new)
    added = f"{plural(new, 'new tool')} on its servers"
    if not missing:
        return f"{group.display_name}: {added}."
    message = f"{plural(missing, 'tool')} in “{group.display_name}” {_are(missing)} unavailable"
    return f"{message}; {added}." if new else f"{message}."


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
