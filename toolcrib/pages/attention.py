"""Find what waits on a person, each as a sentence with one thing to do about it.

Reads only, in a fixed number of queries. What is deliberate is not listed: a key that was
replaced and is no longer used, a server or an agent that is disabled.
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

SOON = timedelta(days=7)
NAMED = 5  # of a kind, before the rest is counted in one line


@dataclass(frozen=True)
class AttentionItem:
    """A sentence with one thing to do about it."""

    sentence: str
    verb: str
    url: str
    glyph: str = "diamond"


def items() -> list[AttentionItem]:
    """List what waits on a person, the most urgent kind first."""
    now = timezone.now()
    return [
        *_failing(),
        *_removals_held(),
        *_waiting(),
        *_broken_queries(),
        *_full_agents(),
        *_over_budget(),
        *_expiring(now),
        *_drifted(),
    ]


def _some(
    rows: Sequence[Any], item: Callable[[Any], AttentionItem], rest: Callable[[int], AttentionItem]
) -> Any:
    """Name the first few, and count the others in one line."""
    shown = [item(row) for row in rows[:NAMED]]
    return [*shown, rest(len(rows) - NAMED)] if len(rows) > NAMED else shown


def _failing() -> list[AttentionItem]:
    found: list[AttentionItem] = _some(
        list(Server.objects.filter(state=ServerState.FAILING, enabled=True).order_by("name")),
        lambda server: AttentionItem(
            f"{server.name} is failing: {server.state_reason or 'no reason was given.'}",
            "Look at server",
            reverse("server", args=[server.slug]),
            "triangle",
        ),
        lambda more: AttentionItem(
            f"{more} more server{_s(more)} {_are(more)} failing.",
            "Show failing servers",
            reverse("servers") + "?state=failing",
            "triangle",
        ),
    )
    return found


def _removals_held() -> list[AttentionItem]:
    found: list[AttentionItem] = _some(
        list(Server.objects.filter(removals_held=True, enabled=True).order_by("name")),
        lambda server: AttentionItem(
            f"{server.name} no longer offers over half its tools; they stay until a second sync "
            "finds the same.",
            "Look at server",
            reverse("server", args=[server.slug]),
        ),
        lambda more: AttentionItem(
            f"{more} more server{_s(more)} lost over half {'its' if more == 1 else 'their'} tools.",
            "Show servers",
            reverse("servers"),
        ),
    )
    return found


def _waiting() -> list[AttentionItem]:
    waiting = Tool.objects.filter(state=ToolState.WAITING).count()
    if not waiting:
        return []
    said = f"{waiting:,} definition{_s(waiting)} wait{'s' if waiting == 1 else ''} for a decision."
    return [AttentionItem(said, "Review changes", reverse("approvals"), "pencil")]


def _broken_queries() -> list[AttentionItem]:
    """Golden queries whose right tool stands lower than it did."""
    found: list[AttentionItem] = _some(
        golden_queries.broken(),
        lambda query: AttentionItem(
            f"A search broke: “{query.query}” {_fallen(query)}.",
            "Look at queries",
            reverse("golden"),
            "triangle",
        ),
        lambda more: AttentionItem(
            f"{more} more golden quer{'y' if more == 1 else 'ies'} broke.",
            "Look at queries",
            reverse("golden"),
            "triangle",
        ),
    )
    return found


def _fallen(query: GoldenQuery) -> str:
    worst = next(result for result in query.results.all() if result.broke)
    right = query.right[0] if len(query.right) == 1 else "a right tool"
    was = f"found {right} at rank {worst.good_rank}"
    now = f"finds it at rank {worst.rank}" if worst.rank else "no longer finds it"
    return f"{was} and now {now}"


def _full_agents() -> list[AttentionItem]:
    is_open = Q(sessions__state=SessionState.OPEN)
    rows = Agent.objects.filter(enabled=True).annotate(open_count=Count("sessions", filter=is_open))
    found: list[AttentionItem] = _some(
        list(rows.filter(open_count__gte=F("max_sessions"))),
        lambda agent: AttentionItem(
            f"{agent.name} has {agent.open_count:,} open sessions, as many as it may: new ones are "
            "refused.",
            "Show sessions",
            f"{reverse('sessions')}?{urlencode({'agent': agent.name, 'state': 'open'})}",
            "clock",
        ),
        lambda more: AttentionItem(
            f"{more} more agent{_s(more)} {_are(more)} at {'its' if more == 1 else 'their'} limit "
            "of open sessions.",
            "Show agents",
            reverse("agents"),
            "clock",
        ),
    )
    return found


def _over_budget() -> list[AttentionItem]:
    """Groups whose preloads alone cost more than the board warns of, the costliest first."""
    costs = [(board.definitions_cost(group).preload, group) for group in cache.current().groups]
    dear = [pair for pair in costs if pair[0] > board.BUDGET]
    found: list[AttentionItem] = _some(
        sorted(dear, key=lambda pair: (-pair[0], pair[1].group_id)),
        lambda pair: AttentionItem(
            f"{pair[1].display_name} preloads ≈{pair[0]:,} tokens into each session, "
            f"over {board.BUDGET:,}.",
            "Look at group",
            reverse("group", args=[pair[1].group_id]),
            "triangle",
        ),
        lambda more: AttentionItem(
            f"{more} more group{_s(more)} preload{'s' if more == 1 else ''} over "
            f"{board.BUDGET:,} tokens.",
            "Show groups",
            reverse("groups"),
            "triangle",
        ),
    )
    return found


def _expiring(now: datetime) -> list[AttentionItem]:
    """Keys that end soon and whose agent has nothing in their place, or still uses them."""
    good = ApiKey.objects.filter(revoked_at=None, agent__enabled=True).select_related("agent")
    ending = good.filter(expires_at__gt=now, expires_at__lte=now + SOON).order_by("expires_at")
    lasting = dict(
        good.filter(Q(expires_at=None) | Q(expires_at__gt=now + SOON))
        .order_by()
        .values_list("agent")
        .annotate(Max("created_at"))
    )
    found: list[AttentionItem] = _some(
        [key for key in ending if not _replaced(key, lasting.get(key.agent_id))],
        lambda key: AttentionItem(
            f"The key {key.name} ({key.prefix}…) of {key.agent.name} expires {_within(key, now)}.",
            "Rotate key",
            reverse("agent-keys", args=[key.agent.name]),
            "clock",
        ),
        lambda more: AttentionItem(
            f"{more} more key{_s(more)} expire{'s' if more == 1 else ''} within 7 days.",
            "Show agents",
            reverse("agents"),
            "clock",
        ),
    )
    return found


def _replaced(key: ApiKey, newer: datetime | None) -> bool:
    if newer is None or newer < key.created_at:
        return False
    return key.last_used_at is None or key.last_used_at < newer


def _within(key: ApiKey, now: datetime) -> str:
    hours = int((key.expires_at - now).total_seconds() // 3600) if key.expires_at else 0
    if hours < 1:
        return "within the hour"
    days = hours // 24
    return f"in {days} day{_s(days)}" if days else f"in {hours} hour{_s(hours)}"


def _drifted() -> list[AttentionItem]:
    """Groups whose members somebody chose, and whose servers have other tools now."""
    chosen = list(Group.objects.filter(follows=None))
    drifts = group_health.drifts(chosen)
    found: list[AttentionItem] = _some(
        [(group, drifts[group.pk]) for group in chosen if drifts[group.pk]],
        lambda row: AttentionItem(
            f"{row[0].display_name} has drifted: {_drift_words(row[1])}.",
            "Look at group",
            reverse("group", args=[row[0].group_id]),
            "pencil",
        ),
        lambda more: AttentionItem(
            f"{more} more group{_s(more)} drifted.", "Show groups", reverse("groups"), "pencil"
        ),
    )
    return found


def _drift_words(drift: group_health.Drift) -> str:
    gone, new = len(drift.missing), len(drift.new)
    words = []
    if gone:
        words.append(f"agents do not get {gone:,} of its tools")
    if new:
        words.append(f"{new:,} tool{_s(new)} came to its servers")
    return " and ".join(words)


def _s(number: int) -> str:
    return "" if number == 1 else "s"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
