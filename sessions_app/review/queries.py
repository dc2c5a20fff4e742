"""Session queries: the filtered list, one session's timeline, its JSON export."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.db.models import Q, QuerySet, Sum
from django.http import QueryDict

from sessions_app.ledger.event_details import read_object, read_value
from sessions_app.models import AgentSession, Call, CallState, Event, Expansion, SessionState
from sessions_app.review import content, timeline
from sessions_app.review.content import ContentPart
from sessions_app.review.timeline import Gap, Step, TimelineEvent
from sessions_app.sessions.loading import token_ledger
from toolcrib.lib import charts
from toolcrib.lib.pagination import PAGE_SIZE, Page, page_by_id
from toolcrib.lib.request import number, text

STEPS_PER_PAGE = 100
# Errors for which the stored result is the server's response rather than Toolcrib's.
SERVER_RESPONSE_ERRORS = ("tool_error", "output_invalid")


@dataclass(frozen=True)
class SessionFilter:
    """Filters of the session list, from the query string. Unknown states are ignored."""

    agent: str = ""
    states: tuple[str, ...] = ()
    errors: bool = False
    tool: str = ""
    before: int = 0
    after: int = 0

    @classmethod
    def read(cls, query: QueryDict) -> "SessionFilter":
        return cls(
            agent=text(query, "agent"),
            states=tuple(name for name in query.getlist("state") if name in SessionState.values),
            errors=bool(query.get("errors")),
            tool=text(query, "tool"),
            before=number(query, "before"),
            after=number(query, "after"),
        )

    @property
    def is_active(self) -> bool:
        return bool(self.agent or self.states or self.errors or self.tool)

    def apply(self, rows: QuerySet[AgentSession]) -> QuerySet[AgentSession]:
        if self.agent:
            rows = rows.filter(agent__name=self.agent)
        if self.states:
            rows = rows.filter(state__in=self.states)
        if self.errors:
            rows = rows.filter(errors__gt=0)
        if self.tool:
            # By the indexed foreign key; by name for calls whose tool has been deleted.
            by_tool = Call.objects.filter(tool__public_name=self.tool).order_by()
            by_name = Call.objects.filter(tool=None, tool_name=self.tool).order_by()
            called_in = Q(pk__in=by_tool.values("session")) | Q(pk__in=by_name.values("session"))
            rows = rows.filter(called_in)
        return rows


@dataclass(frozen=True)
class SessionRow:
    """A session in a list, with its derived figures."""

    session: AgentSession
    loaded: int  # number of tools

    @property
    def bar(self) -> charts.Bar:
        spent = self.session.tokens_discovery
        return charts.token_bar(spent, 0, max(self.session.tokens_all - spent, 0), 0, width=80)


def count_newer(filters: SessionFilter, newest: int, limit: int = 100) -> int:
    """Count the sessions opened after this id, up to `limit`."""
    rows = filters.apply(AgentSession.objects.filter(pk__gt=newest)).order_by("-pk")
    return len(rows.values_list("pk", flat=True)[:limit])


def list_sessions(filters: SessionFilter, size: int = PAGE_SIZE) -> Page[SessionRow]:
    """Return a page of sessions, newest first. Cursors are ids, so new sessions shift nothing."""
    rows = filters.apply(AgentSession.objects.select_related("agent"))
    page = page_by_id(rows, before=filters.before, after=filters.after, size=size)
    loaded = _loaded_counts(page.rows)
    return page.with_rows([SessionRow(session, loaded[session.pk]) for session in page.rows])


def _loaded_counts(sessions: Iterable[AgentSession]) -> Counter[int]:
    counts: Counter[int] = Counter()
    rows = Expansion.objects.filter(session__in=list(sessions))
    for session_id, names, listed in rows.values_list("session_id", "names", "listed"):
        counts[session_id] += len(names if names is not None else listed or [])
    return counts


def saved_percent(session: AgentSession) -> int | None:
    """Return the percentage saved against sending all schemas; negative if more was spent."""
    if not session.tokens_all:
        return None
    return round(100 * (1 - session.tokens_discovery / session.tokens_all))


@dataclass(frozen=True)
class TimelineRow:
    """A step with its call, or an idle gap. `offset` is in seconds from the session's start."""

    gap: Gap | None = None
    step: Step | None = None
    offset: float = 0
    lane: charts.Lane | None = None

    @property
    def call(self) -> Call | None:
        return self.step.event.call if self.step else None

    @property
    def status(self) -> str:
        return timeline.problem_status(self.step.event) if self.step else ""

    @property
    def arguments(self) -> ContentPart | None:
        text = self.call.arguments if self.call else ""
        return content.describe_stored_arguments(text) if text else None

    @property
    def result(self) -> list[ContentPart]:
        text = self.call.result_copy if self.call else ""
        return content.describe_stored_result(text) if text else []

    @property
    def result_source(self) -> str:
        """Return who wrote the stored result: the server, or Toolcrib in its response."""
        from_server = self.call is not None and (
            self.call.state == CallState.SUCCEEDED or self.call.error_code in SERVER_RESPONSE_ERRORS
        )
        return "Server response" if from_server else "Response to agent"


def session_timeline(
    session: AgentSession, *, offset: int = 0, size: int = STEPS_PER_PAGE
) -> tuple[Page[Event], list[TimelineRow]]:
    """Return a page of a session's events, and the rows of its timeline."""
    events = session.events.select_related("call", "call__definition").order_by("pk")
    total = session.events.count()
    offset = max(0, min(offset, (total - 1) // size * size if total else 0))
    # The event before the page tells whether the page starts after an idle gap.
    fetched = list(events[max(offset - 1, 0) : offset + size])
    previous, on_page = (fetched[:1], fetched[1:]) if offset else ([], fetched)
    context = session.events.order_by("pk")[:offset].aggregate(sum=Sum("tokens"))["sum"] or 0
    laid_out = timeline.lay_out(
        [_timeline_event(event) for event in on_page],
        run=session.duration,
        first=offset + 1,
        context=context,
        last_end=max((_timeline_event(event).until for event in previous), default=None),
    )
    page = Page(
        rows=on_page,
        total=total,
        first=offset,
        previous_cursor=str(offset) if offset else "",
        next_cursor=str(offset + size) if offset + size < total else "",
    )
    return page, [
        TimelineRow(gap=entry)
        if isinstance(entry, Gap)
        else TimelineRow(
            step=entry, offset=max((entry.event.at - session.created_at).total_seconds(), 0)
        )
        for entry in laid_out
    ]


def _timeline_event(event: Event) -> TimelineEvent:
    call, start, end = event.call, event.at, event.at
    if call is not None:
        start, end = min(start, call.accepted_at), max(end, call.finished_at or end)
    return TimelineEvent(
        id=event.pk,
        kind=event.kind,
        at=start,
        until=end,
        tokens=event.tokens,
        tool_name=event.tool_name or (call.tool_name if call else ""),
        group_id=event.group_id,
        details=read_object(event.details),
        call=call,
    )


def export_session(session: AgentSession) -> dict[str, Any]:
    """Return everything stored about a session, as plain values."""
    events = session.events.select_related("call", "call__definition").order_by("pk")
    laid_out = timeline.lay_out(map(_timeline_event, events), run=session.duration)
    return {
        "id": session.session_id,
        "agent": session.agent.name,
        "parent": session.parent.session_id if session.parent else None,
        "strategy": session.strategy,
        "mode": session.mode,
        "auto_deferred": session.auto_deferred,
        "decided_by": session.decided_by,
        "state": session.state,
        "model": session.model,
        "revision": session.revision,
        "created_at": session.created_at,
        "last_used_at": session.last_used_at,
        "ended_at": session.ended_at,
        "calls": session.calls,
        "errors": session.errors,
        "tokens": token_ledger(session),
        "metadata": read_value(session.metadata),
        "catalog": {
            "text": session.snapshot.text,
            "tokens": session.snapshot.tokens,
            "sha256": session.snapshot.sha256,
        },
        "expanded_groups": {row.group_id: row.names for row in session.expansions.all()},
        "forks": list(session.forks.order_by("pk").values_list("session_id", flat=True)),
        "events": [_export_step(entry) for entry in laid_out if isinstance(entry, Step)],
    }


def _export_step(step: Step) -> dict[str, Any]:
    event = step.event
    return {
        "step": step.number,
        "at": event.at,
        "kind": event.kind,
        "sentence": step.sentence,
        "tool_name": event.tool_name,
        "group_id": event.group_id,
        "tokens": event.tokens,
        "tokens_in_context": step.context,
        "details": dict(event.details),
        "call": _export_call(event.call) if event.call else None,
    }


def _export_call(call: Call) -> dict[str, Any]:
    return {
        "call_id": call.call_id,
        "tool_name": call.tool_name,
        "server": call.server_slug,
        "definition_sha256": call.definition.sha256 if call.definition else None,
        "path": call.path,
        "state": call.state,
        "is_error": call.is_error,
        "implicit_load": call.implicit_load,
        "accepted_at": call.accepted_at,
        "sent_at": call.sent_at,
        "finished_at": call.finished_at,
        "duration_ms": call.duration_ms,
        "tokens": call.tokens,
        "arguments": read_value(call.arguments),
        "result": read_value(call.result_copy) if call.result_copy else None,
        "result_bytes": call.result_bytes,
        "result_sha256": call.result_sha256,
        "error": {"code": call.error_code, "message": call.error_message}
        if call.error_code or call.error_message
        else None,
        "note": call.note,
    }
