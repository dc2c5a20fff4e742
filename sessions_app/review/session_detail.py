"""Detail queries of one session: context meter, waterfall, forks, neighbours, selected step."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import accumulate
from operator import itemgetter

from django.db import connection
from django.db.models import Case, F, Q, TextField, Value, When

from sessions_app.ledger.event_details import read_object
from sessions_app.ledger.writer import token_column
from sessions_app.models import AgentSession, EventKind, RunState, ScriptRun
from sessions_app.review.queries import TimelineRow, inherited_tokens
from sessions_app.usage.filters import FAILED_STATES
from toolcrib.lib import charts
from toolcrib.lib.display import group_digits

METER_STEPS = 5_000  # steps read for the meter
METER_POINTS = 320  # steps drawn
MAX_FORK_DEPTH = 6  # generations, up and down
MAX_FORKS = 100
FAILED_STATUSES = ("error", "rejected", "changed")  # pills of steps that did not succeed


CONTEXT_PARTS = {
    "catalog": "Catalog",
    "searches": "Searches",
    "definitions": "Definitions",
    "results": "Results",
}
PART_OF_COLUMN = {
    "tokens_catalog": "catalog",
    "tokens_search": "searches",
    "tokens_load": "definitions",
    "tokens_call": "results",
}


@dataclass(frozen=True)
class ContextMeter:
    """Tokens in context after each step, by what they are, against the model's window."""

    chart: charts.StackedArea
    steps: int
    parts: list[tuple[str, str, int]]  # kind, label, tokens at the end
    window: int | None
    summary: str


def context_meter(session: AgentSession) -> ContextMeter | None:
    """Return the chart of the tokens in context after each step; None if no step added any."""
    events = session.events.order_by("pk")
    opened = Case(
        When(kind=EventKind.OPENED, then=F("details")),
        default=Value(""),
        output_field=TextField(),
    )
    columns = events.values_list("kind", "tokens", "call__error_code", opened)
    rows = list(columns[:METER_STEPS])
    inherited = inherited_tokens(session, rows[0][3] if rows else "")
    tokens_added = [tokens for _, tokens, _, _ in rows]
    if not any(tokens_added) and not any(inherited.values()):
        return None
    added: dict[str, list[int]] = {part: [0] * len(rows) for part in CONTEXT_PARTS}
    for index, (kind, tokens, code, _) in enumerate(rows):
        if column := token_column(kind, code):
            added[PART_OF_COLUMN[column]][index] = tokens
    for column, tokens in inherited.items():
        added[PART_OF_COLUMN[column]][0] += tokens
    stride = -(-len(rows) // METER_POINTS)
    ends = [min(start + stride, len(rows)) - 1 for start in range(0, len(rows), stride)]
    context = {part: list(accumulate(values)) for part, values in added.items()}
    points = {part: [values[end] for end in ends] for part, values in context.items()}
    window = session.context_window
    return ContextMeter(
        chart=charts.stacked_area(points, limit=window),
        steps=len(rows),
        parts=[(part, label, context[part][-1]) for part, label in CONTEXT_PARTS.items()],
        window=window,
        summary=_summarize(session, tokens_added, sum(inherited.values())),
    )


def _summarize(session: AgentSession, added: Sequence[int], inherited: int) -> str:
    largest, total = max(added), inherited + sum(added)
    summary = f"≈{group_digits(total)} tokens in context at the end"
    if session.context_window:
        summary += f", {100 * total / session.context_window:.1f}% of the window"
    if inherited:
        summary += f"; ≈{group_digits(inherited)} from the session that it was forked from"
    if largest:
        summary += f"; step {added.index(largest) + 1} added the most (≈{group_digits(largest)})"
    summary += "."
    budget, loaded = session.agent.budget, session.tokens_loaded
    if budget is None:
        return summary
    used, limit = group_digits(loaded), group_digits(budget)
    if loaded > budget:
        return f"{summary} Loaded definitions use ≈{used}, over the budget of ≈{limit}."
    return f"{summary} Loaded definitions use ≈{used} of the ≈{limit} budget."


@dataclass(frozen=True)
class Branch:
    """A session in the fork tree."""

    session: AgentSession
    is_current: bool
    forks: list["Branch"] = field(default_factory=list)


# The ancestors of a session, then the descendants of the oldest, level by level.
FORK_TREE_SQL = """
    WITH RECURSIVE up(id, parent_id, level) AS (
        SELECT id, parent_id, 0 FROM sessions_app_agentsession WHERE id = %s
        UNION ALL
        SELECT parent.id, parent.parent_id, up.level + 1
        FROM sessions_app_agentsession parent JOIN up ON parent.id = up.parent_id
        WHERE up.level < %s
    ),
    down(id, level) AS (
        SELECT id, 0 FROM up WHERE level = (SELECT MAX(level) FROM up)
        UNION ALL
        SELECT fork.id, down.level + 1
        FROM sessions_app_agentsession fork JOIN down ON fork.parent_id = down.id
        WHERE down.level < %s
    )
    SELECT id FROM down ORDER BY level, id LIMIT %s
"""


def fork_tree(session: AgentSession) -> Branch | None:
    """Return the fork tree from a session's oldest ancestor; None if it has no forks."""
    with connection.cursor() as cursor:
        cursor.execute(FORK_TREE_SQL, [session.pk, MAX_FORK_DEPTH, 2 * MAX_FORK_DEPTH, MAX_FORKS])
        keys = [pk for (pk,) in cursor.fetchall()]
    rows = AgentSession.objects.filter(pk__in=keys).select_related("agent").order_by("pk")
    branches = {row.pk: Branch(row, is_current=row.pk == session.pk) for row in rows}
    for pk, branch in branches.items():
        if pk != keys[0] and branch.session.parent_id in branches:
            branches[branch.session.parent_id].forks.append(branch)
    return branches[keys[0]] if len(branches) > 1 else None


def adjacent_sessions(session: AgentSession) -> tuple[AgentSession | None, AgentSession | None]:
    """Return the sessions opened before and after this one."""
    rows = AgentSession.objects.only("session_id")
    previous = rows.filter(pk__lt=session.pk).order_by("-pk").first()
    return previous, rows.filter(pk__gt=session.pk).order_by("pk").first()


def select_step(rows: Sequence[TimelineRow], number: int) -> TimelineRow | None:
    """Return the step with this number, else the first failed step, else the first step."""
    steps = [row for row in rows if row.step]
    requested = (row for row in steps if row.step and row.step.number == number)
    failed = (row for row in steps if row.status in FAILED_STATUSES)
    return next(requested, None) or next(failed, None) or next(iter(steps), None)


def step_of_call(session: AgentSession, call_id: str) -> int:
    """Return the number of the first step of a call; 0 if it has none."""
    steps = session.events.filter(call__call_id=call_id.replace("\0", "")).order_by("pk")
    event = steps.values_list("pk", flat=True).first()
    return 0 if event is None else session.events.filter(pk__lte=event).count()


def next_failed_step(
    session: AgentSession, rows: Sequence[TimelineRow], after: TimelineRow | None
) -> int | None:
    """Return the number of the next failed step, on this page or a later one."""
    number = after.step.number if after and after.step else 0
    steps = [row.step for row in rows if row.step and row.status in FAILED_STATUSES]
    on_page = next((step.number for step in steps if step.number > number), None)
    last = next((row.step for row in reversed(rows) if row.step), None)
    if on_page is not None or last is None:
        return on_page
    failed = Q(call__is_error=True) | Q(call__state__in=FAILED_STATES)
    calls = session.events.filter(kind__in=[EventKind.CALLED, EventKind.REFUSED])
    later = calls.filter(failed, pk__gt=last.event.id).order_by("pk").first()
    return session.events.filter(pk__lte=later.pk).count() if later else None


@dataclass(frozen=True)
class WaterfallRow:
    """A bar of the waterfall: a step, a script with its calls below, or a fork as a whole."""

    span: charts.Span
    name: str
    duration: float  # seconds
    status: str = ""
    kind: str = "step"
    step: int = 0
    fork: AgentSession | None = None
    run: ScriptRun | None = None
    depth: int = 0

    @property
    def tone(self) -> str:
        if self.status:
            return "bad"
        if self.fork or self.run:
            return "fork" if self.fork else "script"
        return "call" if self.kind == "called" else "other"


@dataclass(frozen=True)
class Waterfall:
    scale: charts.TimeScale
    rows: list[WaterfallRow]
    skipped: float  # idle seconds left out of the scale

    @property
    def ticks(self) -> tuple[str, ...]:
        return self.scale.ticks


def waterfall(
    session: AgentSession, rows: Sequence[TimelineRow], tree: Branch | None
) -> Waterfall | None:
    """Return the steps of a page as bars to scale, without idle gaps, with forks where they start.

    A fork is drawn from its start for as long as it ran; its own forks are nested below it. A
    script is drawn as one bar, with its calls nested below it.
    """
    steps = [row for row in rows if row.step]
    if not steps:
        return None
    gaps = [row.gap for row in rows if row.gap]
    start = min(row.step.event.at for row in steps if row.step)
    end = max(row.step.event.until for row in steps if row.step)

    def position(at: datetime) -> float:
        idle = sum(
            (min(at, gap.until) - gap.since).total_seconds() for gap in gaps if at > gap.since
        )
        return (at - start).total_seconds() - idle

    found: list[tuple[datetime, datetime, WaterfallRow]] = []
    unplaced = charts.Span(0, 0)
    runs: dict[int, ScriptRun] = {}
    inside: defaultdict[int, list[tuple[datetime, datetime, WaterfallRow]]] = defaultdict(list)
    for row in steps:
        if row.step is None:
            continue
        event = row.step.event
        name = event.tool_name or event.kind.replace("_", " ")
        took = (event.until - event.at).total_seconds()
        bar = WaterfallRow(unplaced, name, took, row.status, event.kind, row.step.number)
        if row.run is None:
            found.append((event.at, event.until, bar))
            continue
        runs[row.run.pk] = row.run
        if event.kind != EventKind.SCRIPT:  # the end of the script, which has a bar of its own
            inside[row.run.pk].append((event.at, event.until, replace(bar, depth=2)))
    for run in runs.values():
        began, ended = max(run.started_at, start), max(run.finished_at or end, start)
        took = (ended - began).total_seconds()
        status = "error" if run.state == RunState.FAILED else ""
        bar = WaterfallRow(unplaced, run.run_id[:12], took, status, "script", run=run)
        found.append((began, ended, bar))
    for fork, depth in _forks_below(tree, session):
        if start <= fork.created_at <= end:
            took = fork.duration.total_seconds()
            name, status = fork.session_id[:12], "error" if fork.errors else ""
            bar = WaterfallRow(unplaced, name, took, status, "fork", fork=fork, depth=depth)
            found.append((fork.created_at, fork.created_at + fork.duration, bar))
    found.sort(key=lambda item: item[0])
    found = [
        row
        for item in found
        for row in (
            item,
            *(sorted(inside[item[2].run.pk], key=itemgetter(0)) if item[2].run else ()),
        )
    ]
    scale = charts.time_scale(max(position(until) for _, until, _ in found))
    placed = [
        replace(bar, span=charts.place_span(scale, position(at), position(until)))
        for at, until, bar in found
    ]
    return Waterfall(scale, placed, sum(gap.seconds for gap in gaps))


def _forks_below(tree: Branch | None, session: AgentSession) -> Iterator[tuple[AgentSession, int]]:
    """Yield the forks of a session with their depth, from the tree that contains it."""

    def walk(branch: Branch, depth: int | None) -> Iterator[tuple[AgentSession, int]]:
        if branch.session.pk == session.pk:
            depth = 0
        elif depth is not None:
            yield branch.session, depth
        for fork in branch.forks:
            yield from walk(fork, None if depth is None else depth + 1)

    if tree is not None:
        yield from walk(tree, None)


def last_query(session: AgentSession, row: TimelineRow | None) -> str:
    """Return the last query before a call, which it may have answered; empty without one."""
    if row is None or row.call is None or row.step is None:
        return ""
    searched = session.events.filter(kind=EventKind.SEARCHED, pk__lt=row.step.event.id)
    details = searched.order_by("-pk").values_list("details", flat=True).first()
    return str(read_object(details or "").get("query") or "")
