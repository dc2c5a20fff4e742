"""Open, fork, close and expire sessions; decide the mode; fix what the model sees.

Everything a model is shown before its first word is put in a snapshot here and never changes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.utils import timezone

from catalog import preferences
from catalog.models import CatalogSnapshot
from sessions_app.ledger import events
from sessions_app.models import (
    Agent,
    AgentSession,
    EventKind,
    Expansion,
    Mode,
    SessionState,
    ShownDefinition,
)
from sessions_app.sessions import loading, scope
from sessions_app.sessions import surface as session_surface
from sessions_app.sessions.scope import ScopeFilter
from sessions_app.sessions.surface import take_snapshot
from toolcrib.lib.errors import Conflict, Invalid, NotFound, ToolcribError
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.prepared_query import PreparedQuery

LEDGER = [
    "tokens_catalog",
    "tokens_search",
    "tokens_load",
    "tokens_call",
    "tokens_loaded",
    "last_used_at",
]
IDLE_ENOUGH = timedelta(minutes=30)  # to make room for a new session
ITERATIONS = 3  # a deferred session needs more turns for the same work

session_by_id = PreparedQuery(
    1,
    lambda session_id: (
        AgentSession.objects.with_catalog().select_related("parent").filter(session_id=session_id)
    ),
)


class TooManySessions(ToolcribError):
    code = "too_many_sessions"
    status = 429


@dataclass(frozen=True)
class OpenSessionRequest:
    """What an agent asks for when it opens a session."""

    strategy: str | None = None
    mode: str | None = None
    context_window: int | None = None
    model: str = ""
    groups: Sequence[str] | None = None
    servers: Sequence[str] | None = None
    without_mcp: bool = False
    preload: Sequence[str] = ()
    header: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    resume_strategy: str | None = None
    resume_groups: dict[str, list[str] | None] | None = None


@dataclass(frozen=True)
class ModeDecision:
    mode: str
    auto_deferred: bool
    decided_by: str


@dataclass(frozen=True)
class OpenedSession:
    session: AgentSession
    unknown: list[str]  # names to preload and to resume that are not there


def choose_mode(
    agent: Agent, wanted: str, tools: int, tokens: int, window: int | None
) -> ModeDecision:
    """Choose between all schemas and the catalog, by the first of three rules that applies."""
    if wanted != Mode.AUTO:
        return ModeDecision(wanted, False, "forced")
    if tools >= agent.tool_threshold:
        return ModeDecision(Mode.DEFERRED, True, "count")
    if tokens > agent.threshold_tokens:
        return ModeDecision(Mode.DEFERRED, True, "tokens")
    if window and tokens > window * agent.threshold_percent / 100:
        return ModeDecision(Mode.DEFERRED, True, "percent")
    return ModeDecision(Mode.FULL, False, "below")


@transaction.atomic
def open_session(agent: Agent, opening: OpenSessionRequest) -> OpenedSession:
    strategy = opening.strategy or agent.strategy
    if opening.resume_strategy not in (None, strategy):
        raise Conflict(
            f"The state is of a session with the strategy {opening.resume_strategy}; this one "
            f"would have {strategy}.",
            hint=f'Open it with "strategy": "{opening.resume_strategy}".',
            code="strategy_mismatch",
        )
    now = timezone.now()
    _make_room(agent, now)
    wish = _scope_filter(agent, opening)
    seen = scope.scope_of_agent(agent, wish)
    decision = choose_mode(
        agent,
        opening.mode or agent.mode,
        len(seen.offered),
        seen.tokens_all,
        opening.context_window,
    )
    snapshot, unknown = take_snapshot(
        agent, seen, strategy, decision.mode, header=opening.header, preload=opening.preload
    )
    surface = session_surface.surface_of(snapshot)
    session = AgentSession.objects.create(
        agent=agent,
        strategy=strategy,
        mode=decision.mode,
        auto_deferred=decision.auto_deferred,
        decided_by=decision.decided_by,
        snapshot=snapshot,
        revision=seen.revision,
        model=opening.model,
        context_window=opening.context_window,
        wanted_groups=None if wish.groups is None else list(wish.groups),
        wanted_servers=None if opening.servers is None else list(opening.servers),
        without_mcp=opening.without_mcp,
        metadata=canonical(opening.metadata),
        last_used_at=now,
        tokens_all=seen.tokens_all,
    )
    events.record_event(
        session,
        EventKind.OPENED,
        tokens=snapshot.tokens + surface.tools_tokens,
        details={
            "mode": decision.mode,
            "decided_by": decision.decided_by,
            "strategy": strategy,
            "groups": [line.group_id for line in seen.lines],
            "tools": len(seen.offered),
            "model": opening.model,
        },
        at=now,
    )
    if opening.resume_groups is not None:
        unknown += _resume(session, opening.resume_groups)
    session.refresh_from_db(fields=LEDGER)
    return OpenedSession(session, unknown)


def _scope_filter(agent: Agent, opening: OpenSessionRequest) -> ScopeFilter:
    """Turn ids into a wish; what the agent may not see is as unknown as what is not there."""
    if opening.groups is None and opening.servers is None:
        return ScopeFilter(without_mcp=opening.without_mcp)
    whole = scope.scope_of_agent(agent)
    keys = None
    if opening.groups is not None:
        missing = scope.unknown_names(opening.groups, whole.by_id)
        if missing:
            raise Invalid(
                f"Not available to this agent: {', '.join(missing[:10])}.",
                hint=f"Its groups: {', '.join(list(whole.by_id)[:50]) or 'none'}.",
                code="unknown_group",
            )
        keys = tuple(whole.by_id[group_id].pk for group_id in opening.groups)
    if opening.servers is not None:
        missing = scope.unknown_names(opening.servers, whole.servers)
        if missing:
            raise Invalid(
                f"Not available to this agent: {', '.join(missing[:10])}.",
                hint=f"Its servers: {', '.join(whole.servers[:50]) or 'none'}.",
                code="unknown_server",
            )
    servers = None if opening.servers is None else tuple(opening.servers)
    return ScopeFilter(keys, servers, opening.without_mcp)


def _make_room(agent: Agent, now: datetime, keep: int | None = None) -> None:
    """Hold the agent to its number of open sessions; the longest idle but `keep` makes way."""
    Agent.objects.select_for_update().get(pk=agent.pk)
    mine = agent.sessions.filter(state=SessionState.OPEN)
    over = mine.count() + 1 - agent.max_sessions
    if over <= 0:
        return
    others = mine.exclude(pk=keep) if keep else mine
    idle = others.filter(last_used_at__lt=now - IDLE_ENOUGH).order_by("last_used_at")[:over]
    if len(idle) < over:
        raise TooManySessions(
            f"{agent.name} has {mine.count()} open sessions; its limit is {agent.max_sessions}.",
            hint="Close sessions that are done; one idle for 30 minutes makes way by itself.",
            details={"retry_after": 60},
        )
    for session in idle:
        end_session(session, SessionState.EXPIRED)


def preview_snapshot(agent: Agent) -> CatalogSnapshot:
    """What a session of this agent would be given now, by the same code."""
    seen = scope.scope_of_agent(agent)
    decision = choose_mode(agent, agent.mode, len(seen.offered), seen.tokens_all, None)
    return take_snapshot(agent, seen, agent.strategy, decision.mode)[0]


# --- Resuming, forking, ending --------------------------------------------------------------------


def _resume(session: AgentSession, groups: dict[str, list[str] | None]) -> list[str]:
    """Load what another session had; the model has those schemas already, so none are counted."""
    unknown: list[str] = []
    known = scope.scope_of_session(session).by_id
    for group_id, names in groups.items():
        if group_id in known:
            unknown += loading.load(session, group_id, names, how="resume").unknown
        else:
            unknown.append(group_id)
    events.record_event(session, EventKind.RESUMED, details={"groups": list(groups)})
    return unknown


@transaction.atomic
def fork_session(session: AgentSession) -> AgentSession:
    """Copy a session: same snapshot, same loaded tools. Neither affects the other after."""
    session = loading.lock_session(session)
    now = timezone.now()
    _make_room(session.agent, now, keep=session.pk)
    child = AgentSession.objects.get(pk=session.pk)
    child.pk, child.session_id, child.parent = None, AgentSession().session_id, session
    child.state, child.ended_at, child.last_used_at = SessionState.OPEN, None, now
    child.calls = child.errors = 0
    child._state.adding = True
    child.save()
    AgentSession.objects.filter(pk=child.pk).update(created_at=now)
    Expansion.objects.bulk_create(
        Expansion(
            session=child,
            group_id=row.group_id,
            names=row.names,
            listed=row.listed,
            pins=row.pins,
            sequence=row.sequence,
        )
        for row in session.expansions.all()
    )
    ShownDefinition.objects.bulk_create(
        ShownDefinition(
            session=child,
            tool_id=row.tool_id,
            definition_id=row.definition_id,
            override=row.override,
        )
        for row in session.shown_definitions.all()
    )
    events.record_event(session, EventKind.FORKED, details={"to": child.session_id}, at=now)
    events.record_event(
        child,
        EventKind.OPENED,
        details={
            "mode": child.mode,
            "decided_by": child.decided_by,
            "strategy": child.strategy,
            "groups": [],
            "tools": 0,
            "model": child.model,
            "forked_from": session.session_id,
        },
        at=now,
    )
    child.refresh_from_db()
    return child


@transaction.atomic
def close_session(session: AgentSession) -> AgentSession:
    """End a session. Closing one that has ended is no error."""
    session = AgentSession.objects.select_for_update(of=("self",)).get(pk=session.pk)
    if session.state == SessionState.OPEN:
        end_session(session, SessionState.CLOSED)
    return session


def end_session(session: AgentSession, state: SessionState) -> None:
    now = timezone.now()
    kind = EventKind.CLOSED if state == SessionState.CLOSED else EventKind.EXPIRED
    events.record_event(
        session, kind, at=session.last_used_at if state == SessionState.EXPIRED else now
    )
    session.state, session.ended_at = state, now
    session.save(update_fields=["state", "ended_at"])


def expire_idle() -> int:
    """End sessions nobody used for too long. Called by the schedule."""
    before = timezone.now() - timedelta(seconds=preferences.value("session_idle_seconds"))
    ended = 0
    rows = AgentSession.objects.filter(state=SessionState.OPEN, last_used_at__lt=before)
    for pk in list(rows.values_list("pk", flat=True)[:1000]):
        with transaction.atomic():
            row = AgentSession.objects.select_for_update(of=("self",)).filter(pk=pk).first()
            if row and row.state == SessionState.OPEN and row.last_used_at < before:
                end_session(row, SessionState.EXPIRED)
                ended += 1
    return ended


def find_session(agent: Agent | None, session_id: str) -> AgentSession:
    """Return an agent's own session; another's is as unknown as one that never was.

    Without an agent, an operator asks, who reads all.
    """
    found = None if "\0" in session_id else session_by_id.first(session_id)
    if found is None or (agent is not None and found.agent_id != agent.pk):
        raise NotFound(
            "There is no such session.", hint="POST /sessions opens one.", code="unknown_session"
        )
    if agent is not None:
        found.agent = agent
    return found


def open_sessions(session_ids: Collection[str]) -> set[str]:
    """Return those that are open, in one question; a session that is no more is not."""
    rows = AgentSession.objects.open().filter(session_id__in=session_ids)
    return set(rows.values_list("session_id", flat=True))
