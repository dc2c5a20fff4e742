"""Simulate preloads on recent sessions and recommend those with a net gain.

Reads only. Replays the searches and loads of the deferred sessions of 30 days: a preloaded
tool costs its definition in every session that has the group, and spares the loads and searches
that led to nothing else. A row is recommended only if it lowers the tokens and adds no round trip.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain, groupby
from operator import itemgetter

from django.db.models import Case, Q, QuerySet, TextField, Value, When
from django.db.models.functions import Concat
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
from sessions_app.usage.series import read_called_tools
from toolcrib.lib.figures import Money, Price, TokenFigures, format_amount, money_of

DAYS = 30
MAX_SESSIONS = 20_000  # newest sessions replayed
GLANCE = 500  # the same on pages that only list the best rows
MIN_SESSIONS = 3  # that have the group, and for a preload, that found the tool
GIVEN_COLUMNS = ("tokens_catalog", "tokens_search", "tokens_load")
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


Found = tuple[frozenset[str], int]  # names of tools, tokens of the load or search


@dataclass
class _Sessions:
    """Sessions with the same groups and price, as sums: the cost of a row is that of its names.

    A pattern is what one load or one search led to; equal ones are counted, not repeated.
    """

    groups: frozenset[int]
    price: Price | None = None
    count: int = 0
    spent: int = 0
    round_trips: int = 0
    used: Counter[str] = field(default_factory=Counter)  # sessions that found a tool
    loads: Counter[Found] = field(default_factory=Counter)
    searches: Counter[Found] = field(default_factory=Counter)
    # Of one tool alone, computed once for all groups: what it spares, and loads with others.
    is_summed: bool = False
    spared_by: dict[str, tuple[int, int]] = field(default_factory=dict)
    loads_of: defaultdict[str, list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def spare(self, costs: Mapping[str, int]) -> tuple[int, int]:
        """Return the tokens and round trips that these sessions save with these preloads."""
        preloaded = costs.keys()
        tokens = trips = 0
        for (names, size), times in self.loads.items():
            if names <= preloaded:
                tokens, trips = tokens + size * times, trips + times
            elif len(names) > 1:
                tokens += min(sum(costs[name] for name in names & preloaded), size) * times
        for (names, size), times in self.searches.items():
            if names <= preloaded:
                tokens, trips = tokens + size * times, trips + times
        return tokens, trips

    def spare_one(self, name: str, cost: int) -> tuple[int, int]:
        """Return the same for one tool alone."""
        if not self.is_summed:
            self._sum_by_name()
        tokens, trips = self.spared_by.get(name, (0, 0))
        tokens += sum(min(cost, size) * times for size, times in self.loads_of.get(name, ()))
        return tokens, trips

    def _sum_by_name(self) -> None:
        self.is_summed = True
        for (names, size), times in chain(self.loads.items(), self.searches.items()):
            if len(names) == 1:
                [name] = names
                tokens, trips = self.spared_by.get(name, (0, 0))
                self.spared_by[name] = tokens + size * times, trips + times
        for (names, size), times in self.loads.items():
            for name in names if len(names) > 1 else ():
                self.loads_of[name].append((size, times))


def may_destroy(member: CachedMember) -> bool:
    """Return whether a tool may be destructive; without annotations it may, as MCP defines."""
    tool = member.tool.approved.tool if member.tool.approved else {}
    hints = tool.get("annotations")
    hints = hints if isinstance(hints, dict) else {}
    return hints.get("readOnlyHint") is not True and hints.get("destructiveHint") is not False


def simulate(limit: int = MAX_SESSIONS, called: Collection[str] | None = None) -> Simulation:
    """Replay the newest sessions and return the changes with a net gain, by group.

    Pass `called`, the tools called in these days, if they are already known.
    """
    groups = cache.current().groups
    recorded = _deferred_sessions().count()
    sessions = _read_sessions(groups, limit)
    called = read_called_tools() if called is None else called
    deferrable = set(Group.objects.filter(deferred=True).values_list("pk", flat=True))
    destructive: set[str] = set()
    results = []
    for group in groups:
        having = [same for same in sessions if group.pk in same.groups]
        if sum(same.count for same in having) < MIN_SESSIONS:
            continue
        rows = []
        counts: Counter[str] = Counter()
        for same in having:
            counts.update(same.used)
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
    count = sum(same.count for same in sessions)
    return Simulation(results, count, recorded, len(destructive))


def _recommend(
    group: CachedGroup,
    member: CachedMember,
    having: list[_Sessions],
    used: int,
    called: Collection[str],
) -> Recommendation | None:
    name, tokens, trips = member.tool.name, member.tool.tokens or 0, 0
    if member.preload:
        if used or name in called or not tokens:
            return None
        saved = [tokens * same.count for same in having]
    else:
        if used < MIN_SESSIONS:
            return None
        spared = [same.spare_one(name, tokens) for same in having]
        saved = [part - tokens * same.count for same, (part, _) in zip(having, spared, strict=True)]
        trips = sum(part for _, part in spared)
    if sum(saved) <= 0:
        return None
    return Recommendation(
        group_id=group.group_id,
        tool=name,
        preload=not member.preload,
        tokens=tokens,
        sessions=sum(same.count for same in having),
        used=used,
        saved=sum(saved),
        round_trips=trips,
        money=_money(having, saved),
    )


def _result(group: CachedGroup, having: list[_Sessions], rows: list[Recommendation]) -> GroupResult:
    costs = {row.tool: row.tokens for row in rows if row.preload}
    dropped = sum(row.tokens for row in rows if not row.preload)
    added = sum(costs.values()) - dropped
    before = sum(same.spent for same in having)
    trips = sum(same.round_trips for same in having)
    spared = [same.spare(costs) for same in having]
    saved = [part - added * same.count for same, (part, _) in zip(having, spared, strict=True)]
    return GroupResult(
        group_id=group.group_id,
        sessions=sum(same.count for same in having),
        before=before,
        after=before - sum(saved),
        trips_before=trips,
        trips_after=trips - sum(part for _, part in spared),
        rows=rows,
        money=_money(having, saved),
    )


def _money(having: Collection[_Sessions], saved: Collection[int]) -> Money | None:
    """Return what sessions whose model has a price spent, and what they would have saved."""
    amounts = [
        money_of(TokenFigures(baseline=same.spent + part, catalog=same.spent), same.price)
        for same, part in zip(having, saved, strict=True)
    ]
    known = [amount for amount in amounts if amount is not None]
    return sum(known[1:], known[0]) if known else None


def _deferred_sessions() -> QuerySet[AgentSession]:
    since = timezone.now() - timedelta(days=DAYS)
    return AgentSession.objects.filter(created_at__gte=since, mode=Mode.DEFERRED)


def _read_sessions(groups: Collection[CachedGroup], limit: int) -> list[_Sessions]:
    """Return the newest sessions, those with the same groups and price together."""
    links: defaultdict[int, set[int]] = defaultdict(set)
    for agent, group in AgentGroup.objects.values_list("agent_id", "group_id"):
        links[agent].add(group)
    everything = {group.pk for group in groups}
    unlimited = set(Agent.objects.filter(all_groups=True).values_list("pk", flat=True))
    prices, found = model_prices.read(), {}
    same: dict[tuple[frozenset[int], Price | None], _Sessions] = {}
    columns = ("pk", "agent_id", "wanted_groups", "model", *GIVEN_COLUMNS)
    rows = _deferred_sessions().order_by("-pk").values_list(*columns)[:limit]
    for pk, agent, wanted, model, catalog, searches, definitions in rows:
        own = everything if agent in unlimited else links[agent]
        key = frozenset(own if wanted is None else own & set(wanted)), prices.price_of(model)
        sessions = same.setdefault(key, _Sessions(*key))
        sessions.count += 1
        sessions.spent += TokenFigures(
            catalog=catalog, searches=searches, definitions=definitions
        ).given
        found[pk] = sessions
    _read_events(found)
    return list(same.values())


def _read_events(found: Mapping[int, _Sessions]) -> None:
    """Add searches, loads and direct uses, in order: what follows a search, it led to."""
    if not found:
        return
    # The details of a search are long and not needed.
    names = Case(
        When(kind=EventKind.LOADED, then="details"), default="tool_name", output_field=TextField()
    )
    # An expression keeps the planner off the index on kinds, which reads those of all sessions.
    events = Event.objects.alias(of=Concat("kind", Value(""))).filter(
        of__in=KINDS, session_id__gte=min(found)
    )
    rows = events.order_by("session_id", "pk").values_list("session_id", "kind", "tokens", names)
    for session, steps in groupby(rows.iterator(), key=itemgetter(0)):
        if (sessions := found.get(session)) is None:
            continue
        searched: list[tuple[int | None, set[str]]] = [(None, set())]  # tokens, what it led to
        for _, kind, tokens, text in steps:
            if kind == EventKind.SEARCHED:
                searched.append((tokens, set()))
            elif kind == EventKind.IMPLICIT_LOAD:
                searched[-1][1].update({text} - {""})
            elif loaded := frozenset(read_names(read_object(text), "names")):
                sessions.loads[loaded, tokens] += 1
                sessions.round_trips += 1
                searched[-1][1].update(loaded)
        sessions.used.update(set().union(*(led_to for _, led_to in searched)))
        for tokens, led_to in searched:
            sessions.round_trips += tokens is not None
            if tokens is not None and led_to:
                sessions.searches[frozenset(led_to), tokens] += 1


def tools_called_by(agent: Agent) -> list[str]:
    """Return the tools that an agent called with success in the last 30 days, by name."""
    since = timezone.now() - timedelta(days=DAYS)
    calls = Call.objects.filter(agent=agent, accepted_at__gte=since, tool__isnull=False)
    calls = calls.filter(Q(state="succeeded"), is_error=False).exclude(path=CallPath.TRY)
    return sorted(set(calls.order_by().values_list("tool__public_name", flat=True).distinct()))
