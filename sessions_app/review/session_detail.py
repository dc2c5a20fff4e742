"""Read around a session's timeline: its context over the run, its forks, what stands beside it.

Reads only, each in a bounded number of queries however long a session ran.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from django.db import connection
from django.db.models import Q

from sessions_app.models import AgentSession, EventKind
from sessions_app.review.queries import TimelineRow
from sessions_app.usage.filters import FAILED_STATES
from toolcrib.lib import charts

METER_STEPS = 5_000  # steps that the meter reads
METER_POINTS = 320  # steps that it draws
LEVELS = 6  # generations of forks, up and down
FORKS = 100
WRONG = ("error", "rejected", "changed")  # pills of steps that did not go well


# --- The context meter --------------------------------------------------------------------------


@dataclass(frozen=True)
class Meter:
    """Tokens in context after each step, drawn, and what they show."""

    chart: charts.StepLine
    steps: int
    finding: str
    budget: int | None


def meter(session: AgentSession) -> Meter | None:
    """Draw how the context grew; nothing where no step gave the model anything."""
    given = list(session.events.order_by("pk").values_list("tokens", flat=True)[:METER_STEPS])
    if not any(given):
        return None
    context = list(accumulate(given))
    every = -(-len(context) // METER_POINTS)
    drawn = [context[min(at + every, len(context)) - 1] for at in range(0, len(context), every)]
    budget = session.agent.budget
    return Meter(
        chart=charts.step_line(drawn, limit=budget),
        steps=len(context),
        finding=_finding(session, given, budget),
        budget=budget,
    )


def _finding(session: AgentSession, given: Sequence[int], budget: int | None) -> str:
    most = max(given)
    step = given.index(most) + 1
    said = f"≈{sum(given):,} tokens in context at the end; step {step} added the most, ≈{most:,}."
    if budget is None:
        return said
    held = session.tokens_loaded
    if held > budget:
        return f"{said} Loaded definitions take ≈{held:,}, over the budget of ≈{budget:,}."
    return f"{said} Loaded definitions take ≈{held:,} of a budget of ≈{budget:,}."


# --- Beside it ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Branch:
    """A session in the tree of forks."""

    session: AgentSession
    here: bool
    forks: list["Branch"] = field(default_factory=list)


# The ancestors of a session, then all that was forked from the oldest, level by level.
FAMILY = """
    WITH RECURSIVE up(id, parent_id, level) AS (
        SELECT id, parent_id, 0 FROM sessions_app_agentsession WHERE id = %s
        UNION ALL
        SELECT one.id, one.parent_id, up.level + 1
        FROM sessions_app_agentsession one JOIN up ON one.id = up.parent_id WHERE up.level < %s
    ),
    down(id, level) AS (
        SELECT id, 0 FROM up WHERE level = (SELECT MAX(level) FROM up)
        UNION ALL
        SELECT one.id, down.level + 1
        FROM sessions_app_agentsession one JOIN down ON one.parent_id = down.id
        WHERE down.level < %s
    )
    SELECT id FROM down ORDER BY level, id LIMIT %s
"""


def tree(session: AgentSession) -> Branch | None:
    """Return the forks around a session from their oldest ancestor; None where there are none."""
    with connection.cursor() as cursor:
        cursor.execute(FAMILY, [session.pk, LEVELS, 2 * LEVELS, FORKS])
        keys = [pk for (pk,) in cursor.fetchall()]
    rows = AgentSession.objects.filter(pk__in=keys).select_related("agent").order_by("pk")
    branches = {one.pk: Branch(one, here=one.pk == session.pk) for one in rows}
    for pk, branch in branches.items():
        if pk != keys[0] and branch.session.parent_id in branches:
            branches[branch.session.parent_id].forks.append(branch)
    return branches[keys[0]] if len(branches) > 1 else None


def neighbours(session: AgentSession) -> tuple[AgentSession | None, AgentSession | None]:
    """Return the sessions opened before and after this one."""
    rows = AgentSession.objects.only("session_id")
    before = rows.filter(pk__lt=session.pk).order_by("-pk").first()
    return before, rows.filter(pk__gt=session.pk).order_by("pk").first()


# --- Steps --------------------------------------------------------------------------------------


def chosen(rows: Sequence[TimelineRow], number: int) -> TimelineRow | None:
    """Return the step asked for, else the first that went wrong, else the first."""
    steps = [row for row in rows if row.step]
    asked = (row for row in steps if row.step and row.step.number == number)
    wrong = (row for row in steps if row.pill in WRONG)
    return next(asked, None) or next(wrong, None) or next(iter(steps), None)


def next_wrong(
    session: AgentSession, rows: Sequence[TimelineRow], after: TimelineRow | None
) -> int | None:
    """Return the number of the next step that went wrong, on this page or a later one."""
    number = after.step.number if after and after.step else 0
    steps = [row.step for row in rows if row.step and row.pill in WRONG]
    here = next((step.number for step in steps if step.number > number), None)
    last = next((row.step for row in reversed(rows) if row.step), None)
    if here is not None or last is None:
        return here
    failed = Q(call__is_error=True) | Q(call__state__in=FAILED_STATES)
    acts = session.events.filter(kind__in=[EventKind.CALLED, EventKind.REFUSED])
    later = acts.filter(failed, pk__gt=last.happening.id).order_by("pk").first()
    return session.events.filter(pk__lte=later.pk).count() if later else None


def lanes(rows: Sequence[TimelineRow]) -> list[TimelineRow]:
    """Place each step on the page's time, without its idle gaps."""
    spans: list[tuple[float, float]] = []
    idle = 0.0
    for row in rows:
        if row.gap:
            idle += row.gap.seconds
        elif row.step:
            took = (row.step.happening.until - row.step.happening.at).total_seconds()
            spans.append((row.offset - idle, row.offset - idle + max(took, 0.0)))
    placed = iter(charts.lanes(spans))
    return [row if row.gap else row.placed(next(placed)) for row in rows]
