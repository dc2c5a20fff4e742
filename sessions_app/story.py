"""Read around a session's timeline: its context over the run, its forks, what stands beside it.

Reads only, each in a bounded number of queries however long a session ran.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from django.db.models import Q

from sessions_app.figures import FAILED_STATES
from sessions_app.models import AgentSession, EventKind
from sessions_app.usage import Row
from toolcrib import charts

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


def tree(session: AgentSession) -> Branch | None:
    """Return the forks around a session from their oldest ancestor; None where there are none."""
    top = session
    for _ in range(LEVELS):
        if top.parent is None:
            break
        top = top.parent
    root = Branch(top, here=top.pk == session.pk)
    level, known = {top.pk: root}, 1
    for _ in range(2 * LEVELS):
        rows = AgentSession.objects.filter(parent__in=level).select_related("agent").order_by("pk")
        found = list(rows[: FORKS - known])
        if not found:
            break
        known += len(found)
        below = {}
        for one in found:
            below[one.pk] = Branch(one, here=one.pk == session.pk)
            level[one.parent_id or 0].forks.append(below[one.pk])
        level = below
    return root if known > 1 else None


def neighbours(session: AgentSession) -> tuple[AgentSession | None, AgentSession | None]:
    """Return the sessions opened before and after this one."""
    rows = AgentSession.objects.only("session_id")
    before = rows.filter(pk__lt=session.pk).order_by("-pk").first()
    return before, rows.filter(pk__gt=session.pk).order_by("pk").first()


# --- Steps --------------------------------------------------------------------------------------


def chosen(rows: Sequence[Row], number: int) -> Row | None:
    """Return the step asked for, else the first that went wrong, else the first."""
    steps = [row for row in rows if row.step]
    asked = (row for row in steps if row.step and row.step.number == number)
    wrong = (row for row in steps if row.pill in WRONG)
    return next(asked, None) or next(wrong, None) or next(iter(steps), None)


def next_wrong(session: AgentSession, rows: Sequence[Row], after: Row | None) -> int | None:
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


def lanes(rows: Sequence[Row]) -> list[Row]:
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
