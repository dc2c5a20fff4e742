"""Session lifecycle: open, resume, fork, close and expire; choice of the catalog mode.

Opening a session stores the catalog and the initial tools in an immutable snapshot.
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
from sessions_app.sessions import loading
from sessions_app.sessions.loading import SessionLoads
from sessions_app.sessions.scope import ScopeFilter, scope_of_agent, unknown_names
from sessions_app.sessions.surface import context_of, surface_of, take_snapshot
from toolcrib.lib.errors import Conflict, Invalid, NotFound, ToolcribError
from toolcrib.lib.json_codec import canonical

LEDGER_FIELDS = [
    "tokens_catalog",
    "tokens_search",
    "tokens_load",
    "tokens_call",
    "tokens_loaded",
    "last_used_at",
]
MIN_IDLE_FOR_EVICTION = timedelta(minutes=30)
DEFERRED_ITERATION_MULTIPLIER = 3  # a deferred session needs more turns for the same work


class TooManySessions(ToolcribError):
    code = "too_many_sessions"
    status = 429


@dataclass(frozen=True)
class OpenSessionRequest:
    """Parameters of a new session."""

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
    unknown: list[str]  # names to preload or resume that are not available


def choose_mode(
    agent: Agent, requested: str, tools: int, tokens: int, context_window: int | None
) -> ModeDecision:
    """Choose between full and deferred mode. In auto mode, any of three thresholds defers."""
    if requested != Mode.AUTO:
        return ModeDecision(requested, False, "forced")
    if tools >= agent.tool_threshold:
        return ModeDecision(Mode.DEFERRED, True, "count")
    if tokens > agent.threshold_tokens:
        return ModeDecision(Mode.DEFERRED, True, "tokens")
    if context_window and tokens > context_window * agent.threshold_percent / 100:
        return ModeDecision(Mode.DEFERRED, True, "percent")
    return ModeDecision(Mode.FULL, False, "below")


@transaction.atomic
def open_session(agent: Agent, request: OpenSessionRequest) -> OpenedSession:
    """Open a session. May expire idle sessions of the agent; raises TooManySessions."""
    strategy = request.strategy or agent.strategy
    if request.resume_strategy not in (None, strategy):
        raise Conflict(
            f"The state to resume has the strategy {request.resume_strategy}; this session "
            f"would have {strategy}.",
            hint=f'Open it with "strategy": "{request.resume_strategy}".',
            code="strategy_mismatch",
        )
    now = timezone.now()
    _enforce_session_limit(agent, now)
    scope_filter = _scope_filter(agent, request)
    scope = scope_of_agent(agent, scope_filter)
    decision = choose_mode(
        agent,
        request.mode or agent.mode,
        len(scope.offered),
        scope.tokens_all,
        request.context_window,
    )
    snapshot, unknown = take_snapshot(
        agent, scope, strategy, decision.mode, header=request.header, preload=request.preload
    )
    session = AgentSession.objects.create(
        agent=agent,
        strategy=strategy,
        mode=decision.mode,
        auto_deferred=decision.auto_deferred,
        decided_by=decision.decided_by,
        snapshot=snapshot,
        revision=scope.revision,
        model=request.model,
        context_window=request.context_window,
        wanted_groups=None if scope_filter.groups is None else list(scope_filter.groups),
        wanted_servers=None if request.servers is None else list(request.servers),
        without_mcp=request.without_mcp,
        metadata=canonical(request.metadata),
        last_used_at=now,
        tokens_all=scope.tokens_all,
    )
    events.record_event(
        session,
        EventKind.OPENED,
        tokens=snapshot.tokens + surface_of(snapshot).tools_tokens,
        details={
            "mode": decision.mode,
            "decided_by": decision.decided_by,
            "strategy": strategy,
            "groups": [line.group_id for line in scope.lines],
            "tools": len(scope.offered),
            "model": request.model,
        },
        at=now,
    )
    if request.resume_groups is not None:
        unknown += _resume(session, request.resume_groups)
    session.refresh_from_db(fields=LEDGER_FIELDS)
    return OpenedSession(session, unknown)


def _scope_filter(agent: Agent, request: OpenSessionRequest) -> ScopeFilter:
    """Resolve ids to a filter. Groups and servers out of scope are reported as unknown."""
    if request.groups is None and request.servers is None:
        return ScopeFilter(without_mcp=request.without_mcp)
    scope = scope_of_agent(agent)
    keys = None
    if request.groups is not None:
        unknown = unknown_names(request.groups, scope.by_id)
        if unknown:
            raise Invalid(
                f"Not available to this agent: {', '.join(unknown[:10])}.",
                hint=f"Its groups: {', '.join(list(scope.by_id)[:50]) or 'none'}.",
                code="unknown_group",
            )
        keys = tuple(scope.by_id[group_id].pk for group_id in request.groups)
    if request.servers is not None:
        unknown = unknown_names(request.servers, scope.servers)
        if unknown:
            raise Invalid(
                f"Not available to this agent: {', '.join(unknown[:10])}.",
                hint=f"Its servers: {', '.join(scope.servers[:50]) or 'none'}.",
                code="unknown_server",
            )
    servers = None if request.servers is None else tuple(request.servers)
    return ScopeFilter(keys, servers, request.without_mcp)


def _enforce_session_limit(agent: Agent, now: datetime, keep: int | None = None) -> None:
    """Expire the longest idle sessions, except `keep`, to make room for one more."""
    Agent.objects.select_for_update().get(pk=agent.pk)
    open_sessions = agent.sessions.filter(state=SessionState.OPEN)
    excess = open_sessions.count() + 1 - agent.max_sessions
    if excess <= 0:
        return
    candidates = open_sessions.exclude(pk=keep) if keep else open_sessions
    idle_since = now - MIN_IDLE_FOR_EVICTION
    idle = candidates.filter(last_used_at__lt=idle_since).order_by("last_used_at")[:excess]
    if len(idle) < excess:
        raise TooManySessions(
            f"{agent.name} has {open_sessions.count()} open sessions; "
            f"its limit is {agent.max_sessions}.",
            hint="Close sessions you no longer need. Sessions idle for 30 minutes expire "
            "automatically when a new one opens.",
            details={"retry_after": 60},
        )
    for session in idle:
        end_session(session, SessionState.EXPIRED)


def preview_snapshot(agent: Agent) -> CatalogSnapshot:
    """Return the snapshot that a session opened now would receive."""
    scope = scope_of_agent(agent)
    decision = choose_mode(agent, agent.mode, len(scope.offered), scope.tokens_all, None)
    return take_snapshot(agent, scope, agent.strategy, decision.mode)[0]


# --- Resume, fork, end ----------------------------------------------------------------------------


def _resume(session: AgentSession, groups: dict[str, list[str] | None]) -> list[str]:
    """Load the tools of another session. Counts no tokens: the model already has the schemas."""
    unknown: list[str] = []
    loads = SessionLoads(context_of(session))
    for group_id, names in groups.items():
        if group_id in loads.context.scope.by_id:
            unknown += loads.load(group_id, names, how="resume").unknown
        else:
            unknown.append(group_id)
    loading.write_loads(loads)
    events.record_event(session, EventKind.RESUMED, details={"groups": list(groups)})
    return unknown


@transaction.atomic
def fork_session(session: AgentSession) -> AgentSession:
    """Copy a session with its snapshot and loaded tools. The two are independent afterwards."""
    session = loading.lock_session(session)
    now = timezone.now()
    _enforce_session_limit(session.agent, now, keep=session.pk)
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
    """Close a session. Does nothing if it has already ended."""
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
    """Expire sessions past the idle timeout and return their number. Runs on a schedule."""
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
    """Return a session of this agent, or of any agent if None (for operators).

    Raises NotFound, also for another agent's session.
    """
    sessions = AgentSession.objects.with_catalog().select_related("parent")
    session = None if "\0" in session_id else sessions.filter(session_id=session_id).first()
    if session is None or (agent is not None and session.agent_id != agent.pk):
        raise NotFound(
            "Session not found.", hint="POST /sessions opens one.", code="unknown_session"
        )
    if agent is not None:
        session.agent = agent
    return session


def open_sessions(session_ids: Collection[str]) -> set[str]:
    """Return the ids that belong to open sessions. One query."""
    rows = AgentSession.objects.open().filter(session_id__in=session_ids)
    return set(rows.values_list("session_id", flat=True))
