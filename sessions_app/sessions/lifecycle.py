"""Session lifecycle: open, resume, fork, close and expire; choice of the catalog mode.

Opening a session stores the catalog and the initial tools in an immutable snapshot.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from catalog import preferences
from catalog.models import CatalogSnapshot
from sessions_app.ledger import events
from sessions_app.models import Agent, AgentSession, EventKind, Mode, SessionState
from sessions_app.sessions import loading
from sessions_app.sessions.loading import SessionLoads
from sessions_app.sessions.schemas import OpenIn
from sessions_app.sessions.scope import ScopeFilter, scope_of_agent
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


@dataclass(frozen=True)
class ModeDecision:
    mode: str
    auto_deferred: bool
    decided_by: str


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
def open_session(agent: Agent, request: OpenIn) -> tuple[AgentSession, list[str]]:
    """Open a session; also return the names to preload or resume that are not available.

    May expire idle sessions of the agent.
    """
    strategy, resume = request.strategy or agent.strategy, request.resume
    if resume is not None and resume.strategy != strategy:
        raise Conflict(
            f"The state to resume has the strategy {resume.strategy}; this session "
            f"would have {strategy}.",
            hint=f'Open it with "strategy": "{resume.strategy}".',
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
    tokens = snapshot.tokens + surface_of(snapshot).tools_tokens
    groups = [line.group_id for line in scope.lines]
    _record_opened(session, groups=groups, tools=len(scope.offered), tokens=tokens)
    if resume is not None:
        unknown += _resume(session, resume.expanded_groups)
    session.refresh_from_db(fields=LEDGER_FIELDS)
    return session, unknown


def _record_opened(
    session: AgentSession,
    *,
    groups: Sequence[str] = (),
    tools: int = 0,
    tokens: int = 0,
    **more: str,
) -> None:
    details = {
        "mode": session.mode,
        "decided_by": session.decided_by,
        "strategy": session.strategy,
        "groups": groups,
        "tools": tools,
        "model": session.model,
        **more,
    }
    at = session.last_used_at
    events.record_event(session, EventKind.OPENED, tokens=tokens, details=details, at=at)


def _scope_filter(agent: Agent, request: OpenIn) -> ScopeFilter:
    """Resolve ids to a filter. Groups and servers out of scope are reported as unknown."""
    if request.groups is None and request.servers is None:
        return ScopeFilter(without_mcp=request.without_mcp)
    scope, groups, servers = scope_of_agent(agent), request.groups, request.servers
    _check_known("groups", groups or (), scope.by_id, code="unknown_group")
    _check_known("servers", servers or (), scope.servers, code="unknown_server")
    return ScopeFilter(
        None if groups is None else tuple(scope.by_id[group_id].pk for group_id in groups),
        None if servers is None else tuple(servers),
        request.without_mcp,
    )


def _check_known(what: str, requested: Iterable[str], known: Collection[str], code: str) -> None:
    if unknown := [name for name in requested if name not in known]:
        raise Invalid(
            f"Not available to this agent: {', '.join(unknown[:10])}.",
            hint=f"Its {what}: {', '.join(islice(known, 50)) or 'none'}.",
            code=code,
        )


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
        raise ToolcribError(
            f"{agent.name} has {open_sessions.count()} open sessions; "
            f"its limit is {agent.max_sessions}.",
            hint="Close sessions you no longer need. Sessions idle for 30 minutes expire "
            "automatically when a new one opens.",
            code="too_many_sessions",
            status=429,
            details={"retry_after": 60},
        )
    for session in idle:
        end_session(session, SessionState.EXPIRED)


def preview_snapshot(agent: Agent) -> CatalogSnapshot:
    scope = scope_of_agent(agent)
    decision = choose_mode(agent, agent.mode, len(scope.offered), scope.tokens_all, None)
    return take_snapshot(agent, scope, agent.strategy, decision.mode)[0]


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
    copied: tuple[QuerySet[Any], ...] = session.expansions.all(), session.shown_definitions.all()
    for rows in copied:
        for row in rows:
            row.pk, row.session = None, child
        rows.model.objects.bulk_create(rows)
    events.record_event(session, EventKind.FORKED, details={"to": child.session_id}, at=now)
    _record_opened(child, forked_from=session.session_id)
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
