"""Session queries: the filtered list, one session's timeline, its JSON export."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from django.db.models import F, Min, OuterRef, Q, QuerySet, Subquery, Sum
from django.http import QueryDict
from django.utils import timezone

from catalog import model_prices
from sessions_app.ledger.event_details import describe_query, read_object, read_value
from sessions_app.ledger.writer import TOKEN_COLUMNS, token_column
from sessions_app.models import (
    AgentSession,
    Call,
    CallState,
    Event,
    EventKind,
    Expansion,
    ScriptRun,
    SessionState,
)
from sessions_app.review import content, script_runs, session_search, timeline
from sessions_app.review.content import ContentPart
from sessions_app.review.timeline import Gap, Step, TimelineEvent
from sessions_app.sessions.loading import token_ledger
from toolcrib.lib import charts
from toolcrib.lib.figures import Money, money_of
from toolcrib.lib.pagination import PAGE_SIZE, Page, page_by_id, page_by_offset
from toolcrib.lib.redaction.redactor import redact
from toolcrib.lib.request import number, text, time
from toolcrib.lib.time_ranges import RANGES, read_range

GIVEN = F("tokens_catalog") + F("tokens_search") + F("tokens_load")
STEPS_PER_PAGE = 100
MAX_TOPIC_LENGTH = 120
MAX_ERROR_LENGTH = 160
MAX_EXPORTED = 500  # sessions of one export
# Orders besides newest first; ties by id.
SORTS: dict[str, tuple[Any, ...]] = {
    "-errors": ("-errors", "-pk"),
    "errors": ("errors", "-pk"),
    "-calls": ("-calls", "-pk"),
    "calls": ("calls", "-pk"),
    "-tokens": (GIVEN.desc(), "-pk"),
    "tokens": (GIVEN.asc(), "-pk"),
    "started": ("pk",),
}
# Errors for which the stored result is the server's response rather than Toolcrib's.
SERVER_RESPONSE_ERRORS = ("tool_error", "output_invalid")


@dataclass(frozen=True)
class SessionFilter:
    """Filters of the session list, from the query string. Unknown states are ignored."""

    agent: str = ""
    states: tuple[str, ...] = ()
    errors: bool = False
    tool: str = ""
    server: str = ""
    model: str = ""
    within: str = ""  # a range that ends now, unless `since` is set
    since: datetime | None = None  # opened or used after
    until: datetime | None = None  # opened before
    query: str = ""  # of the text search
    sort: str = ""
    before: int = 0
    after: int = 0

    @classmethod
    def read(cls, query: QueryDict) -> "SessionFilter":
        return cls(
            agent=text(query, "agent"),
            states=tuple(name for name in query.getlist("state") if name in SessionState.values),
            errors=bool(query.get("errors")),
            tool=text(query, "tool"),
            server=text(query, "server"),
            model=text(query, "model"),
            within=read_range(query, ""),
            since=time(query, "since"),
            until=time(query, "until"),
            query=text(query, "q"),
            sort=query.get("sort", "") if query.get("sort") in SORTS else "",
            before=number(query, "before"),
            after=number(query, "after"),
        )

    @property
    def is_active(self) -> bool:
        texts = (self.agent, self.tool, self.server, self.model, self.query)
        times = self.within or self.since or self.until
        return any(texts) or bool(self.states or self.errors or times)

    @property
    def start(self) -> datetime | None:
        """Return the start of the time range, the same as that of charts."""
        if self.since or not self.within:
            return self.since
        return RANGES[self.within].starts(timezone.now())[0]

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
        if self.server:
            called = Call.objects.filter(server__slug=self.server).order_by()
            rows = rows.filter(pk__in=called.values("session"))
        if self.query:
            rows = rows.filter(session_search.matching(self.query))
        if self.model:
            rows = rows.filter(model=self.model)
        if start := self.start:
            rows = rows.filter(last_used_at__gte=start)
        if self.until:
            rows = rows.filter(created_at__lt=self.until)
        return rows


@dataclass(frozen=True)
class SessionRow:
    """A session in a list, with its derived figures."""

    session: AgentSession
    loaded: int  # number of tools
    topic: str = ""  # what it is about: its metadata, or its first search
    error: str = ""  # code and message of its last failed call

    @property
    def bar(self) -> charts.Bar:
        tokens = self.session.token_figures
        return charts.token_bar(
            tokens.given, 0, max(tokens.saved, 0), 0, budget=tokens.baseline, width=56
        )


def count_newer(filters: SessionFilter, newest: int, limit: int = 100) -> int:
    """Count the sessions opened after this id, up to `limit`."""
    rows = filters.apply(AgentSession.objects.filter(pk__gt=newest)).order_by("-pk")
    return len(rows.values_list("pk", flat=True)[:limit])


def list_sessions(filters: SessionFilter, size: int = PAGE_SIZE) -> Page[SessionRow]:
    """Return a page of sessions, newest first. Cursors are ids, so new sessions shift nothing."""
    rows = filters.apply(AgentSession.objects.select_related("agent"))
    if filters.sort:
        ordered = rows.order_by(*SORTS[filters.sort])
        offset = filters.after or max(filters.before - size, 0)
        page: Page[AgentSession] = page_by_offset(ordered, offset, size)
    else:
        page = page_by_id(rows, before=filters.before, after=filters.after, size=size)
    loaded, about = _loaded_counts(page.rows), _describe_sessions(page.rows)
    return page.with_rows(
        [SessionRow(session, loaded[session.pk], *about[session.pk]) for session in page.rows]
    )


def _describe_sessions(sessions: Sequence[AgentSession]) -> dict[int, tuple[str, str]]:
    """Return what each session is about and its last error. Only for the rows of one page."""
    of_session = {"session": OuterRef("pk")}
    searched = Event.objects.filter(**of_session, kind=EventKind.SEARCHED).order_by("pk")
    failed = Call.objects.filter(**of_session).exclude(error_code="").order_by("-pk")
    rows = AgentSession.objects.filter(pk__in=[session.pk for session in sessions]).annotate(
        first_search=Subquery(searched.values("details")[:1]),
        last_code=Subquery(failed.values("error_code")[:1]),
        last_message=Subquery(failed.values("error_message")[:1]),
    )
    values = rows.values_list("pk", "first_search", "last_code", "last_message")
    metadata = {session.pk: session.metadata for session in sessions}
    return {
        pk: (
            _describe_metadata(metadata[pk]) or _describe_search(search),
            ": ".join(filter(None, (code, (message or "")[:MAX_ERROR_LENGTH]))),
        )
        for pk, search, code, message in values
    }


def _describe_metadata(metadata: str) -> str:
    value = redact(read_object(metadata))
    pairs = value.items() if isinstance(value, dict) else ()
    texts = (f"{key}: {item}" for key, item in pairs if isinstance(item, str | int))
    return ", ".join(texts)[:MAX_TOPIC_LENGTH]


def _describe_search(details: str | None) -> str:
    return describe_query(read_object(details))[:MAX_TOPIC_LENGTH] if details else ""


def _loaded_counts(sessions: Iterable[AgentSession]) -> Counter[int]:
    counts: Counter[int] = Counter()
    rows = Expansion.objects.filter(session__in=list(sessions))
    for session_id, names, listed in rows.values_list("session_id", "names", "listed"):
        counts[session_id] += len(names if names is not None else listed or [])
    return counts


@dataclass(frozen=True)
class TimelineRow:
    """A step, an idle gap, or the heading of the steps of a script.

    `offset` is in seconds from the session's start. A step of a script has its run.
    """

    gap: Gap | None = None
    step: Step | None = None
    run: ScriptRun | None = None
    offset: float = 0

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
    before = session.events.order_by("pk")[:offset].aggregate(
        sum=Sum("tokens"), opened=Min("details", filter=Q(kind=EventKind.OPENED))
    )
    opened = before["opened"] if offset else next((event.details for event in on_page), "")
    inherited = inherited_tokens(session, opened or "")
    laid_out = timeline.lay_out(
        [_timeline_event(event) for event in on_page],
        run=session.duration,
        first=offset + 1,
        context=sum(inherited.values()) + (before["sum"] or 0),
        last_end=max((_timeline_event(event).until for event in previous), default=None),
    )
    page = Page(
        rows=on_page,
        total=total,
        first=offset,
        previous_cursor=str(offset) if offset else "",
        next_cursor=str(offset + size) if offset + size < total else "",
    )
    return page, _timeline_rows(session, laid_out)


def inherited_tokens(session: AgentSession, opened: str) -> dict[str, int]:
    """Return what a fork had in context when it opened, by token column of the session.

    A fork starts with the counts of its parent; its own events say what it added to them.
    `opened` are the details of its first event.
    """
    if not read_object(opened).get("forked_from"):
        return {}
    inherited = {column: int(getattr(session, column)) for column in TOKEN_COLUMNS.values()}
    rows = session.events.order_by().values_list("kind", "call__error_code")
    for kind, code, tokens in rows.annotate(Sum("tokens")):
        if column := token_column(kind, code):
            inherited[column] -= tokens
    return inherited


def _timeline_rows(
    session: AgentSession, laid_out: Sequence[timeline.Step | Gap]
) -> list[TimelineRow]:
    """Return the rows of a page; the steps of a script follow a heading."""
    steps = [entry for entry in laid_out if isinstance(entry, Step)]
    runs = script_runs.runs_of_events(session, [step.event for step in steps])
    rows: list[TimelineRow] = []
    current: ScriptRun | None = None
    for entry in laid_out:
        if isinstance(entry, Gap):
            rows.append(TimelineRow(gap=entry))
            continue
        run = runs.get(entry.event.id)
        if run is not None and (current is None or run.pk != current.pk):
            rows.append(TimelineRow(run=run))
        current = run
        offset = max((entry.event.at - session.created_at).total_seconds(), 0)
        rows.append(TimelineRow(step=entry, run=run, offset=offset))
    return rows


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
        "money": _export_money(session),
        "metadata": redact(read_value(session.metadata)),
        "catalog": {
            "text": session.snapshot.text,
            "tokens": session.snapshot.tokens,
            "sha256": session.snapshot.sha256,
        },
        "expanded_groups": {row.group_id: row.names for row in session.expansions.all()},
        "forks": list(session.forks.order_by("pk").values_list("session_id", flat=True)),
        "events": [_export_step(entry) for entry in laid_out if isinstance(entry, Step)],
    }


def money_of_session(session: AgentSession) -> Money | None:
    """Return what the tokens of a session cost; None if its model has no price."""
    return money_of(session.token_figures, model_prices.read().price_of(session.model))


def _export_money(session: AgentSession) -> dict[str, Any] | None:
    money = money_of_session(session)
    return None if money is None else asdict(money)


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
