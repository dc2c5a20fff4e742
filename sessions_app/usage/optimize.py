"""Simulate preloads on recent sessions and recommend those with a net gain.

Reads only. Replays the searches and loads of the deferred sessions of 30 days: a preloaded
tool costs its definition in every session that has the group, and spares the loads and searches
that led to nothing else. A row is recommended only if it lowers the tokens and adds no round trip.
"""

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import timedelta

from django.db.models import Q, QuerySet
from django.utils import timezone

from catalog import cache, model_prices
from catalog.cache import CachedGroup, CachedMember
from catalog.models import Group
from sessions_app.ledger.event_details import read_names, read_object
from sessions_app.models import (
    Agent,
    AgentGroup,
    AgentSession,
    Call,
    CallPath,
    Event,
    EventKind,
    Mode,
)
from toolcrib.lib.figures import Money, Price, TokenFigures, format_amount, money_of

DAYS = 30
MAX_SESSIONS = 20_000  # newest sessions replayed
GLANCE = 1_000  # the same on pages that only list the best rows
MIN_SESSIONS = 3  # that have the group, and for a preload, that found the tool
KINDS = (EventKind.SEARCHED, EventKind.LOADED, EventKind.IMPLICIT_LOAD)


@dataclass(frozen=True)
class Recommendation:
    """One change of a group: preload a tool, or make an unused preload on demand."""

    group_id: str
    tool: str
    preload: bool
    tokens: int  # of the definition
    sessions: int  # that have the group
    used: int  # sessions that found the tool
    saved: int  # tokens over all sessions
    round_trips: int  # saved over all sessions
    money: Money | None = None  # before (cost) and saved, of sessions whose model has a price

    @property
    def key(self) -> str:
        return f"{self.group_id}|{self.tool}|{int(self.preload)}"


@dataclass(frozen=True)
class GroupResult:
    """What sessions with a group spent on tool discovery, and would with its recommendations."""

    group_id: str
    sessions: int
    before: int
    after: int
    trips_before: int
    trips_after: int
    rows: list[Recommendation]
    money: Money | None = None  # before (cost) and saved, of sessions whose model has a price

    @property
    def saved(self) -> int:
        return self.before - self.after

    @property
    def cost_after(self) -> str:
        """Return what tool discovery would cost with the recommendations."""
        if self.money is None:
            return ""
        return format_amount(self.money.cost - self.money.saving, self.money.currency)


@dataclass(frozen=True)
class Simulation:
    groups: list[GroupResult]
    sessions: int
    recorded: int  # deferred sessions of these days; more than `sessions` if that was capped
    destructive: int  # tools that would pay off and may be destructive

    @property
    def rows(self) -> list[Recommendation]:
        return [row for group in self.groups for row in group.rows]

    @property
    def saved(self) -> int:
        return sum(group.saved for group in self.groups)

    @property
    def is_sample(self) -> bool:
        return self.recorded > self.sessions

    @property
    def money(self) -> Money | None:
        amounts = [group.money for group in self.groups if group.money is not None]
        return sum(amounts[1:], amounts[0]) if amounts else None

    def preloads(self, group: str = "") -> list[Recommendation]:
        """Return the tools worth a preload, the largest gain first; optionally of one group."""
        rows = [row for row in self.rows if row.preload and group in ("", row.group_id)]
        return sorted(rows, key=lambda row: (-row.saved, row.key))


@dataclass
class _Round:
    """A search, if any, and the tools that were loaded or called until the next one."""

    tokens: int | None = None
    found: set[str] = field(default_factory=set)


@dataclass
class _Session:
    pk: int
    spent: int
    groups: set[int]
    price: Price | None = None
    rounds: list[_Round] = field(default_factory=lambda: [_Round()])
    loads: list[tuple[set[str], int]] = field(default_factory=list)

    @property
    def found(self) -> set[str]:
        return set().union(*(part.found for part in self.rounds))

    @property
    def round_trips(self) -> int:
        return len(self.loads) + sum(part.tokens is not None for part in self.rounds)

    def spare(self, preloaded: Collection[str], costs: dict[str, int]) -> tuple[int, int]:
        """Return the tokens and round trips that this session saves if these are preloaded."""
        tokens = trips = 0
        for names, size in self.loads:
            known = names & set(preloaded)
            if known == names:
                tokens, trips = tokens + size, trips + 1
            else:
                tokens += min(sum(costs[name] for name in known), size)
        for part in self.rounds:
            if part.tokens is not None and part.found and part.found <= set(preloaded):
                tokens, trips = tokens + part.tokens, trips + 1
        return tokens, trips


def may_destroy(member: CachedMember) -> bool:
    """Return whether a tool may be destructive; without annotations it may, as MCP defines."""
    tool = member.tool.approved.tool if member.tool.approved else {}
    hints = tool.get("annotations")
    hints = hints if isinstance(hints, dict) else {}
    return hints.get("readOnlyHint") is not True and hints.get("destructiveHint") is not False


def simulate(limit: int = MAX_SESSIONS) -> Simulation:
    """Replay the newest sessions and return the changes with a net gain, by group."""
    groups = cache.current().groups
    recorded = _deferred_sessions().count()
    sessions = _read_sessions(groups, limit)
    _read_events(sessions)
    called = _called_tools()
    deferrable = set(Group.objects.filter(deferred=True).values_list("pk", flat=True))
    destructive: set[str] = set()
    results = []
    for group in groups:
        having = [session for session in sessions.values() if group.pk in session.groups]
        if len(having) < MIN_SESSIONS:
            continue
        rows = []
        counts = Counter(name for session in having for name in session.found)
        for member in group.offered:
            row = _recommend(group, member, having, counts[member.tool.name], called)
            if row is None or (not row.preload and group.pk not in deferrable):
                continue
            if row.preload and may_destroy(member):
                destructive.add(row.tool)
                continue
            rows.append(row)
        if rows:
            results.append(_result(group, having, sorted(rows, key=lambda row: -row.saved)))
    results.sort(key=lambda result: (-result.saved, result.group_id))
    return Simulation(results, len(sessions), recorded, len(destructive))


def _recommend(
    group: CachedGroup,
    member: CachedMember,
    having: list[_Session],
    used: int,
    called: Collection[str],
) -> Recommendation | None:
    name, tokens = member.tool.name, member.tool.tokens or 0
    if member.preload:
        if used or name in called or not tokens:
            return None
        saved, trips = tokens * len(having), 0
        of_session = [tokens] * len(having)
    else:
        if used < MIN_SESSIONS:
            return None
        spared = [session.spare({name}, {name: tokens}) for session in having]
        of_session = [part - tokens for part, _ in spared]
        saved = sum(of_session)
        trips = sum(part for _, part in spared)
    if saved <= 0:
        return None
    money = _money(having, of_session)
    return Recommendation(
        group.group_id, name, not member.preload, tokens, len(having), used, saved, trips, money
    )


def _result(group: CachedGroup, having: list[_Session], rows: list[Recommendation]) -> GroupResult:
    costs = {row.tool: row.tokens for row in rows if row.preload}
    before = sum(session.spent for session in having)
    trips = sum(session.round_trips for session in having)
    spared = [session.spare(costs, costs) for session in having]
    dropped = sum(row.tokens for row in rows if not row.preload)
    of_session = [part - sum(costs.values()) + dropped for part, _ in spared]
    saved = sum(of_session)
    trips_after = trips - sum(part for _, part in spared)
    return GroupResult(
        group_id=group.group_id,
        sessions=len(having),
        before=before,
        after=before - saved,
        trips_before=trips,
        trips_after=trips_after,
        rows=rows,
        money=_money(having, of_session),
    )


def _money(having: Collection[_Session], spared: Collection[int]) -> Money | None:
    """Return what sessions whose model has a price spent, and what they would have saved."""
    amounts = [
        money_of(TokenFigures(baseline=session.spent + saved, catalog=session.spent), session.price)
        for session, saved in zip(having, spared, strict=True)
    ]
    known = [amount for amount in amounts if amount is not None]
    return sum(known[1:], known[0]) if known else None


def _deferred_sessions() -> QuerySet[AgentSession]:
    since = timezone.now() - timedelta(days=DAYS)
    return AgentSession.objects.filter(created_at__gte=since, mode=Mode.DEFERRED)


def _read_sessions(groups: Collection[CachedGroup], limit: int) -> dict[int, _Session]:
    links: defaultdict[int, set[int]] = defaultdict(set)
    for agent, group in AgentGroup.objects.values_list("agent_id", "group_id"):
        links[agent].add(group)
    everything = {group.pk for group in groups}
    unlimited = set(Agent.objects.filter(all_groups=True).values_list("pk", flat=True))
    rows, prices, found = _deferred_sessions().order_by("-pk"), model_prices.read(), {}
    tokens = ("tokens_all", "tokens_catalog", "tokens_search", "tokens_load", "tokens_call")
    for session in rows.only("agent_id", "wanted_groups", "model", *tokens)[:limit]:
        own = everything if session.agent_id in unlimited else links[session.agent_id]
        wanted = session.wanted_groups
        own = own if wanted is None else own & set(wanted)
        spent, price = session.token_figures.given, prices.price_of(session.model)
        found[session.pk] = _Session(session.pk, spent, own, price)
    return found


def _read_events(sessions: dict[int, _Session]) -> None:
    """Add searches, loads and direct uses to the sessions, in order."""
    if not sessions:
        return
    events = Event.objects.filter(session_id__gte=min(sessions), kind__in=KINDS)
    loads = events.filter(kind=EventKind.LOADED).values_list("pk", "details")
    names = {pk: set(read_names(read_object(text), "names")) for pk, text in loads}
    rows = events.order_by("session_id", "pk")
    for pk, key, kind, tool, tokens in rows.values_list(
        "pk", "session_id", "kind", "tool_name", "tokens"
    ):
        session = sessions.get(key)
        if session is None:
            continue
        if kind == EventKind.SEARCHED:
            session.rounds.append(_Round(tokens))
        elif kind == EventKind.LOADED:
            if names.get(pk):
                session.loads.append((names[pk], tokens))
                session.rounds[-1].found |= names[pk]
        elif tool:
            session.rounds[-1].found.add(tool)


def _called_tools() -> set[str]:
    since = timezone.now() - timedelta(days=DAYS)
    calls = Call.objects.filter(accepted_at__gte=since).exclude(path=CallPath.TRY)
    return set(calls.order_by().values_list("tool_name", flat=True).distinct())


def tools_called_by(agent: Agent) -> list[str]:
    """Return the tools that an agent called with success in the last 30 days, by name."""
    since = timezone.now() - timedelta(days=DAYS)
    calls = Call.objects.filter(agent=agent, accepted_at__gte=since, tool__isnull=False)
    calls = calls.filter(Q(state="succeeded"), is_error=False).exclude(path=CallPath.TRY)
    return sorted(set(calls.order_by().values_list("tool__public_name", flat=True).distinct()))
