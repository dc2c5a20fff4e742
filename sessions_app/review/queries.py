"""Read what sessions did: the list, one session's timeline, its export.

Reads only, each in a fixed number of queries. How a timeline reads is decided in `timeline`.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from django.db.models import Q, QuerySet, Sum
from django.http import QueryDict

from sessions_app.ledger.event_details import read_object, read_value
from sessions_app.models import (
    AgentSession,
    Call,
    CallState,
    Event,
    Expansion,
    SessionState,
)
from sessions_app.review import content, timeline
from sessions_app.review.content import ContentPart
from sessions_app.review.timeline import CallFacts, Gap, Step, TimelineEvent
from toolcrib.lib import charts
from toolcrib.lib.pagination import PAGE, Page, page_by_id
from toolcrib.lib.request import number, text

STEPS = 100
SERVERS_WORDS = ("tool_error", "output_invalid")  # errors beside which the server's answer is kept


# --- The list -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SessionFilter:
    """What a person asked for in the address. Unknown words ask for nothing that exists."""

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
            states=tuple(one for one in query.getlist("state") if one in SessionState.values),
            errors=bool(query.get("errors")),
            tool=text(query, "tool"),
            before=number(query, "before"),
            after=number(query, "after"),
        )

    @property
    def narrows(self) -> bool:
        return bool(self.agent or self.states or self.errors or self.tool)

    def apply(self, rows: QuerySet[AgentSession]) -> QuerySet[AgentSession]:
        if self.agent:
            rows = rows.filter(agent__name=self.agent)
        if self.states:
            rows = rows.filter(state__in=self.states)
        if self.errors:
            rows = rows.filter(errors__gt=0)
        if self.tool:
            # By the tool, which has an index; by the name where no tool has it any more.
            called = Call.objects.filter(tool__public_name=self.tool).order_by()
            nameless = Call.objects.filter(tool=None, tool_name=self.tool).order_by()
            of_it = Q(pk__in=called.values("session")) | Q(pk__in=nameless.values("session"))
            rows = rows.filter(of_it)
        return rows


@dataclass(frozen=True)
class SessionRow:
    """A session in a list, with what is counted beside it."""

    session: AgentSession
    loaded: int  # tools

    @property
    def seconds(self) -> float:
        return run_of(self.session).total_seconds()

    @property
    def spent(self) -> int:
        return spent_on_tools(self.session)

    @property
    def bar(self) -> charts.Bar:
        rest = max(self.session.tokens_all - self.spent, 0)
        return charts.token_bar(self.spent, 0, rest, 0, width=80)


def count_newer(wanted: SessionFilter, newest: int, most: int = 100) -> int:
    """Count the sessions that came after this id, up to a number nobody needs to know better."""
    rows = wanted.apply(AgentSession.objects.filter(pk__gt=newest)).order_by("-pk")
    return len(rows.values_list("pk", flat=True)[:most])


def list_sessions(wanted: SessionFilter, size: int = PAGE) -> Page[SessionRow]:
    """Return a page of sessions, newest first. Its cursors are ids: new sessions shift nothing."""
    rows = wanted.apply(AgentSession.objects.select_related("agent"))
    page = page_by_id(rows, before=wanted.before, after=wanted.after, size=size)
    loaded = _loaded_counts(page.rows)
    return page.with_rows([SessionRow(session, loaded[session.pk]) for session in page.rows])


def _loaded_counts(sessions: Iterable[AgentSession]) -> Counter[int]:
    counts: Counter[int] = Counter()
    rows = Expansion.objects.filter(session__in=list(sessions))
    for session_id, names, listed in rows.values_list("session_id", "names", "listed"):
        counts[session_id] += len(names if names is not None else listed or [])
    return counts


def run_of(session: AgentSession) -> timedelta:
    """How long a session ran, to its last act."""
    return max((session.ended_at or session.last_used_at) - session.created_at, timedelta(0))


def spent_on_tools(session: AgentSession) -> int:
    """Tokens a session paid to know its tools. Results of calls cost the same without us."""
    return session.tokens_catalog + session.tokens_search + session.tokens_load


def saved_percent(session: AgentSession) -> int | None:
    """The share of what all schemas would have cost; negative where it paid more."""
    if not session.tokens_all:
        return None
    return round(100 * (1 - spent_on_tools(session) / session.tokens_all))


# --- One session --------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimelineRow:
    """A step with its call, or a gap. `offset` counts seconds from the session's start."""

    gap: Gap | None = None
    step: Step | None = None
    call: Call | None = None
    offset: float = 0
    lane: charts.Lane | None = None

    def placed(self, lane: charts.Lane) -> "TimelineRow":
        return replace(self, lane=lane)

    @property
    def pill(self) -> str:
        return timeline.pill(self.step.happening) if self.step else ""

    @property
    def arguments(self) -> ContentPart | None:
        kept = self.call.arguments if self.call else ""
        return content.payload(kept) if kept else None

    @property
    def result(self) -> list[ContentPart]:
        copy = self.call.result_copy if self.call else ""
        return content.kept_parts(copy) if copy else []

    @property
    def said_by(self) -> str:
        """Whose words the result is in: the server's, or ours about what became of the call."""
        return "From the server" if self.call and is_servers(self.call) else "Told to the agent"


def is_servers(call: Call) -> bool:
    return call.state == CallState.SUCCEEDED or call.error_code in SERVERS_WORDS


def session_timeline(
    session: AgentSession, *, offset: int = 0, size: int = STEPS
) -> tuple[Page[Event], list[TimelineRow]]:
    """Return a page of a session's events, and the same laid out as rows."""
    events = session.events.select_related("call", "call__definition").order_by("pk")
    total = session.events.count()
    offset = max(0, min(offset, (total - 1) // size * size if total else 0))
    # One before the page tells whether the page starts after a break.
    found = list(events[max(offset - 1, 0) : offset + size])
    before, shown = (found[:1], found[1:]) if offset else ([], found)
    spent = session.events.order_by("pk")[:offset].aggregate(sum=Sum("tokens"))["sum"] or 0
    laid = timeline.lay_out(
        [_happening(event) for event in shown],
        run=run_of(session),
        first=offset + 1,
        context=spent,
        last_end=max((_happening(event).until for event in before), default=None),
    )
    calls = {event.pk: event.call for event in shown}
    page = Page(
        rows=shown,
        total=total,
        first=offset,
        previous_cursor=str(offset) if offset else "",
        next_cursor=str(offset + size) if offset + size < total else "",
    )
    return page, [
        TimelineRow(gap=one)
        if isinstance(one, Gap)
        else TimelineRow(
            step=one,
            call=calls[one.happening.id],
            offset=max((one.happening.at - session.created_at).total_seconds(), 0),
        )
        for one in laid
    ]


def _happening(event: Event) -> TimelineEvent:
    call, start, end = event.call, event.at, event.at
    facts = None
    if call is not None:
        start, end = min(start, call.accepted_at), max(end, call.finished_at or end)
        facts = CallFacts(
            state=call.state,
            is_error=call.is_error,
            duration_ms=call.duration_ms,
            error_code=call.error_code,
            error_message=call.error_message,
        )
    return TimelineEvent(
        id=event.pk,
        kind=event.kind,
        at=start,
        until=end,
        tokens=event.tokens,
        tool_name=event.tool_name or (call.tool_name if call else ""),
        group_id=event.group_id,
        details=read_object(event.details),
        call=facts,
    )


def session_export(session: AgentSession) -> dict[str, Any]:
    """Return everything that is kept of a session, in plain values."""
    events = session.events.select_related("call", "call__definition").order_by("pk")
    laid = timeline.lay_out(map(_happening, events), run=run_of(session))
    steps = [one for one in laid if isinstance(one, Step)]
    return {
        **session_facts(session),
        "metadata": read_value(session.metadata),
        "catalog": {
            "text": session.snapshot.text,
            "tokens": session.snapshot.tokens,
            "sha256": session.snapshot.sha256,
        },
        "expanded_groups": {one.group_id: one.names for one in session.expansions.all()},
        "forks": list(session.forks.order_by("pk").values_list("session_id", flat=True)),
        "events": [_exported(step, event.call) for step, event in zip(steps, events, strict=True)],
    }


def session_facts(session: AgentSession) -> dict[str, Any]:
    """Return a session's facts without its story."""
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
        "tokens": {
            "all_schemas": session.tokens_all,
            "delivered": session.tokens_delivered,
            "by": {
                "catalog": session.tokens_catalog,
                "search": session.tokens_search,
                "load": session.tokens_load,
                "call": session.tokens_call,
            },
        },
    }


def _exported(step: Step, call: Call | None) -> dict[str, Any]:
    one = step.happening
    return {
        "step": step.number,
        "at": one.at,
        "kind": one.kind,
        "sentence": step.sentence,
        "tool_name": one.tool_name,
        "group_id": one.group_id,
        "tokens": one.tokens,
        "tokens_in_context": step.context,
        "details": dict(one.details),
        "call": _exported_call(call) if call else None,
    }


def _exported_call(call: Call) -> dict[str, Any]:
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
