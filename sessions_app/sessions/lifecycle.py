"""Session lifecycle: open, resume, fork, close and expire; choice of the catalog mode.

Opening a session stores the catalog and the initial tools in an immutable snapshot.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Max, QuerySet
from django.utils import timezone

from catalog import audit, preferences
from catalog.audit import Actor
from catalog.cache import cached_definition
from catalog.models import CatalogSnapshot
from sessions_app.held_calls.ending import expire_session_calls
from sessions_app.ledger import events
from sessions_app.models import (
    IN_FLIGHT,
    Agent,
    AgentSession,
    EventKind,
    Mode,
    SessionRead,
    SessionState,
)
from sessions_app.rules.agent_rules import AGENT_FLOW
from sessions_app.sessions import loading
from sessions_app.sessions.loading import SessionLoads
from sessions_app.sessions.schemas import OpenIn
from sessions_app.sessions.scope import ScopeFilter, SessionScope, scope_of_agent
from sessions_app.sessions.snapshots import surface_of
from sessions_app.sessions.surface import context_of, take_snapshot
from toolcrib.lib.errors import Conflict, Invalid, NotFound, ToolcribError
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.telemetry import metrics

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


@dataclass(frozen=True)
class Thresholds:
    """From which number of tools on, and above which size, a session is deferred."""

    tools: int
    tokens: int
    percent: float

    @classmethod
    def of(cls, agent: Agent, request: OpenIn | None = None) -> "Thresholds":
        """Return the agent's thresholds, or those that a session requests instead."""
        names = ("tool_threshold", "threshold_tokens", "threshold_percent")
        requested = [getattr(request, name, None) for name in names]
        return cls(
            *(
                getattr(agent, name) if value is None else value
                for name, value in zip(names, requested, strict=True)
            )
        )


def choose_mode(
    thresholds: Thresholds, requested: str, tools: int, tokens: int, context_window: int | None
) -> ModeDecision:
    """Choose between full and deferred mode. In auto mode, any of three thresholds defers."""
    if requested != Mode.AUTO:
        return ModeDecision(requested, False, "forced")
    if tools >= thresholds.tools:
        return ModeDecision(Mode.DEFERRED, True, "count")
    if tokens > thresholds.tokens:
        return ModeDecision(Mode.DEFERRED, True, "tokens")
    if context_window and tokens > context_window * thresholds.percent / 100:
        return ModeDecision(Mode.DEFERRED, True, "percent")
    return ModeDecision(Mode.FULL, False, "below")


def decide_mode(agent: Agent, scope: SessionScope, request: OpenIn) -> ModeDecision:
    """Choose the mode of a session with this scope."""
    return choose_mode(
        Thresholds.of(agent, request),
        request.mode or agent.mode,
        len(scope.offered),
        scope.tokens_all,
        request.context_window,
    )


def check_mode(agent: Agent, mode: str) -> None:
    """Raise Invalid unless a client may choose this mode in its URL, or chooses none."""
    if mode and mode not in Mode.values:
        raise Invalid(f"mode must be one of: {', '.join(Mode.values)}.", code="unknown_mode")
    if mode and agent.mode not in (Mode.AUTO, mode):
        raise Invalid(
            f"{agent.name} is set to the mode {agent.mode}; its clients cannot choose {mode}.",
            hint="Remove mode from the URL, or set the agent's mode to auto.",
            code="mode_not_allowed",
        )


def open_session(
    agent: Agent, request: OpenIn, *, over_mcp: bool = False, elicits: bool = False
) -> tuple[AgentSession, list[str]]:
    """Open a session; also return the names to preload or resume that are not available.

    May expire idle sessions of the agent. `over_mcp`: it has custom tools only if the agent runs
    them. `elicits`: its client can ask its user.
    """
    client = ScopeFilter(without_custom=over_mcp and not agent.runs_custom_tools, elicits=elicits)
    try:
        return _open(agent, request, client)
    except IntegrityError:  # its snapshot existed without sessions, and was pruned meanwhile
        return _open(agent, request, client)


@transaction.atomic
def _open(agent: Agent, request: OpenIn, client: ScopeFilter) -> tuple[AgentSession, list[str]]:
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
    scope_filter = _scope_filter(agent, request, client)
    scope = scope_of_agent(agent, scope_filter)
    decision = decide_mode(agent, scope, request)
    snapshot, unknown = take_snapshot(
        agent, scope, strategy, decision.mode, header=request.header, preload=request.preload
    )
    has_requested = len(unknown) < len(set(request.preload))
    tokens_loaded = _check_preload_budget(agent, snapshot, has_requested=has_requested)
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
        tool_threshold=request.tool_threshold,
        wanted_groups=None if scope_filter.groups is None else list(scope_filter.groups),
        wanted_servers=None if request.servers is None else list(request.servers),
        without_mcp=request.without_mcp,
        without_custom=client.without_custom,
        elicits=client.elicits,
        metadata=canonical(request.metadata),
        created_at=now,
        last_used_at=now,
        tokens_all=scope.tokens_all,
        tokens_loaded=tokens_loaded,
    )
    tokens = snapshot.tokens + surface_of(snapshot).tools_tokens
    groups = [line.group_id for line in scope.lines]
    _record_opened(session, groups=groups, tools=len(scope.offered), tokens=tokens)
    if resume is not None:
        unknown += _resume(session, resume.expanded_groups, resume.load_order)
        _copy_reads(session, resume.session_id)
    session.refresh_from_db(fields=LEDGER_FIELDS)
    return session, unknown


def _check_preload_budget(agent: Agent, snapshot: CatalogSnapshot, *, has_requested: bool) -> int:
    """Return the tokens of the preloaded definitions, which count towards the budget.

    Raises Conflict if the tools that the session itself asks for exceed it.
    """
    surface = surface_of(snapshot)
    if surface.mode == Mode.FULL:
        return 0
    tokens = sum(cached_definition(pin["definition"]).tokens for pin in surface.pins.values())
    if has_requested:
        loading.check_budget(agent.budget, 0, tokens)
    return tokens


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
    if metrics.enabled:
        baseline = metrics.counted("toolcrib_tokens", "baseline", by=session.tokens_all)
        changes = (metrics.counted("toolcrib_sessions_opened"), baseline)
        transaction.on_commit(partial(metrics.record, changes))
    at = session.last_used_at
    events.record_event(session, EventKind.OPENED, tokens=tokens, details=details, at=at)


def _scope_filter(agent: Agent, request: OpenIn, client: ScopeFilter) -> ScopeFilter:
    """Resolve ids to a filter. Groups and servers out of scope are reported as unknown."""
    client = replace(client, without_mcp=request.without_mcp)
    if request.groups is None and request.servers is None:
        return client
    scope, groups, servers = scope_of_agent(agent), request.groups, request.servers
    _check_known("groups", groups or (), scope.by_id, code="unknown_group")
    _check_known("servers", servers or (), scope.servers, code="unknown_server")
    return replace(
        client,
        groups=None if groups is None else tuple(scope.by_id[group_id].pk for group_id in groups),
        servers=None if servers is None else tuple(servers),
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
    decision = decide_mode(agent, scope, OpenIn.model_validate({}))
    return take_snapshot(agent, scope, agent.strategy, decision.mode)[0]


def _resume(
    session: AgentSession, groups: dict[str, list[str] | None], order: Sequence[str]
) -> list[str]:
    """Load the tools of another session. Counts no tokens: the model already has the schemas."""
    unknown: list[str] = []
    loads = SessionLoads(context_of(session))
    for group_id, names in groups.items():
        if group_id in loads.context.scope.by_id:
            resumed = loads.load(group_id, names, how="resume")
            if resumed.refusal is not None:
                raise resumed.refusal
            unknown += resumed.unknown
        else:
            unknown.append(group_id)
    loads.sort_by(order)
    loading.write_loads(loads)
    events.record_event(session, EventKind.RESUMED, details={"groups": list(groups)})
    return unknown


def _copy_reads(session: AgentSession, source: str) -> None:
    """Carry over which servers' results the model has: rules ask for it.

    If the resumed session is not named or is gone, it may be any of the agent's recent ones.
    """
    resumed = session.agent.sessions.filter(session_id=source.replace("\0", ""))
    if resumed.exists():
        rows = SessionRead.objects.filter(session__in=resumed)
    else:
        since = session.last_used_at - AGENT_FLOW
        rows = SessionRead.objects.filter(agent=session.agent, last_at__gt=since)
    latest = rows.order_by().values_list("server_slug").annotate(at=Max("last_at"))
    SessionRead.objects.bulk_create(
        SessionRead(session=session, agent=session.agent, server_slug=slug, last_at=at)
        for slug, at in latest
    )


@transaction.atomic
def fork_session(session: AgentSession) -> AgentSession:
    """Copy a session with its snapshot and loaded tools. The two are independent afterwards."""
    session = loading.lock_session(session)
    now = timezone.now()
    _enforce_session_limit(session.agent, now, keep=session.pk)
    child = AgentSession.objects.get(pk=session.pk)
    child.pk, child.session_id, child.parent = None, AgentSession().session_id, session
    child.state, child.ended_at = SessionState.OPEN, None
    child.created_at = child.last_used_at = now
    child.calls = child.errors = 0
    child._state.adding = True
    child.save()
    copied: tuple[QuerySet[Any], ...] = (
        session.expansions.all(),
        session.shown_definitions.all(),
        session.reads.all(),
    )
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


def delete_session(session: AgentSession, *, actor: Actor) -> None:
    """Delete a session with its timeline, calls and payloads. Its forks stay as they are.

    It is closed first, so that it accepts no more calls; raises Conflict while calls are running.
    """
    close_session(session)
    with transaction.atomic():
        row = AgentSession.objects.select_for_update(of=("self",)).filter(pk=session.pk).first()
        if row is None:
            return
        if row.call_rows.filter(state__in=IN_FLIGHT).exists():
            raise Conflict(
                "The session is closed, and calls of it are still running.",
                hint="Delete it when they have finished.",
                code="calls_in_flight",
            )
        before = {
            "agent": session.agent.name,
            "opened_at": row.created_at.isoformat(),
            "calls": row.calls,
            "errors": row.errors,
            "forks": row.forks.count(),
        }
        audit.record(actor, "session.delete", row, before=before)
        row.delete()


def end_session(session: AgentSession, state: SessionState) -> None:
    now = timezone.now()
    kind = EventKind.CLOSED if state == SessionState.CLOSED else EventKind.EXPIRED
    events.record_event(
        session, kind, at=session.last_used_at if state == SessionState.EXPIRED else now
    )
    expire_session_calls(session)
    session.state, session.ended_at = state, now
    session.save(update_fields=["state", "ended_at"])


def expire_idle() -> int:
    """Expire sessions past the idle timeout and return their number. Runs on a schedule."""
    limit = timedelta(seconds=preferences.value("session_idle_seconds"))
    rows = AgentSession.objects.filter(
        state=SessionState.OPEN, last_used_at__lt=timezone.now() - limit
    )
    return sum(expire_session(session, limit) for session in rows.only("pk")[:1000])


@transaction.atomic
def expire_session(session: AgentSession, idle: timedelta) -> bool:
    """Expire a session unless it was used meanwhile; return whether it has expired."""
    row = AgentSession.objects.select_for_update(of=("self",)).filter(pk=session.pk).first()
    if row is None or row.state != SessionState.OPEN or row.last_used_at > timezone.now() - idle:
        return False
    end_session(row, SessionState.EXPIRED)
    return True


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
